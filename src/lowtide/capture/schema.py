"""What an operator's schema says: whether it computes something, what it writes, whether it draws random numbers."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import cache
from typing import Any, NamedTuple

import torch


class Argument(NamedTuple):
    """A place in an operator's list of arguments."""

    position: int
    name: str
    kwarg_only: bool


@cache
def is_operator(name: str) -> bool:
    """Tell whether a dispatched call is an operator of a trace: it computes something, and is not made of others.

    Views compute nothing. An empty tensor is room for what another call computes.
    """
    if name == "aten::empty" or "::" not in name or name.startswith("autograd::"):
        return False
    schemas = torch._C._jit_get_schemas_for_operator(name)
    plain = [schema for schema in schemas if "out" not in schema.overload_name]
    return not plain or not all(is_view(schema) or _is_composite(schema) for schema in plain)


def looks_at_shapes(name: str) -> bool:
    """Tell whether an operator reads no bytes of its operands, but only how they are laid out."""
    return name.endswith("_like") or "::new_" in name


def is_view(schema: torch._C.FunctionSchema) -> bool:
    """Tell whether an operator returns nothing but its arguments, seen otherwise."""
    aliases = [result.alias_info for result in schema.returns]
    return bool(aliases) and all(alias is not None and not alias.is_write for alias in aliases)


def _is_composite(schema: torch._C.FunctionSchema) -> bool:
    qualified = f"{schema.name}.{schema.overload_name}" if schema.overload_name else schema.name
    try:
        return bool(torch._C._dispatch_has_kernel_for_dispatch_key(qualified, "CompositeImplicitAutograd"))
    except RuntimeError:
        return True  # known to TorchScript only: never dispatched


def arguments_of(schema: torch._C.FunctionSchema) -> tuple[Argument, ...]:
    """Return an operator's arguments."""
    return tuple(Argument(position, each.name, each.kwarg_only) for position, each in enumerate(schema.arguments))


def written_arguments(schema: torch._C.FunctionSchema) -> tuple[Argument, ...]:
    """Return the arguments that an operator says it writes."""
    if not schema.is_mutable:
        return ()
    aliases = [each.alias_info for each in schema.arguments]
    return tuple(
        place
        for place, alias in zip(arguments_of(schema), aliases, strict=True)
        if alias is not None and alias.is_write
    )


def unsaid_statistics(schema: torch._C.FunctionSchema) -> tuple[Argument, ...]:
    """Return the arguments that an operator may write without saying so, as BatchNorm does with its running mean."""
    if schema.name.endswith("_backward"):  # it only reads them
        return ()
    return tuple(
        place
        for place, each in zip(arguments_of(schema), schema.arguments, strict=True)
        if each.alias_info is None and each.name.startswith("running_")
    )


def draws_random(operator: torch._ops.OpOverload) -> bool:
    """Tell whether an operator may draw random numbers."""
    return torch.Tag.nondeterministic_seeded in operator.tags


def given(places: Iterable[Argument], args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[torch.Tensor]:
    """Return the tensors that a call gives for some of its operator's arguments."""
    found: list[torch.Tensor] = []
    for place in places:
        found += tensors_in(args[place.position] if place.position < len(args) else kwargs.get(place.name))
    return found


def tensors_in(value: object) -> Iterator[torch.Tensor]:
    """Yield the tensors of nested lists, tuples and dictionaries."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for item in value:
            yield from tensors_in(item)
    elif isinstance(value, dict):
        for item in value.values():
            yield from tensors_in(item)
