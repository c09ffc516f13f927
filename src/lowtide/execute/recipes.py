"""What a step did, call by call, kept so that a storage given up without a copy can be made again.

A *call* is one operator with its arguments, as it was dispatched below autograd. A *product* is a storage that a call
allocated; later calls may have changed it in place. An operand is remembered by where it is to be had later: kept as it
is, from a record of the runtime, or made by an earlier call.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch.utils._pytree import TreeSpec

from lowtide.execute.hooks import SavedTensor

Operator = torch._ops.OpOverload


@dataclass(frozen=True, slots=True)
class Layout:
    """Which part of a storage a tensor is."""

    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int
    dtype: torch.dtype

    @staticmethod
    def of(tensor: torch.Tensor) -> Layout:
        """Return a tensor's layout."""
        return Layout(tuple(tensor.shape), tensor.stride(), int(tensor.storage_offset()), tensor.dtype)

    def over(self, base: torch.Tensor) -> torch.Tensor:
        """Return the tensor of this layout on the storage of `base`, which has the same dtype."""
        return base.as_strided(self.sizes, self.strides, self.offset)


@dataclass(frozen=True, slots=True)
class Kept:
    """An operand that stays where it is: a parameter, something small, or memory that never moves.

    `tensor` is the same memory without a graph, of which `version` was current.
    """

    tensor: torch.Tensor
    version: int

    def is_changed(self) -> bool:
        """Tell whether the memory was changed since."""
        return bool(self.tensor._version != self.version)


@dataclass(frozen=True, slots=True)
class Source:
    """An operand that is a record, which may be away meanwhile; `handle` keeps it from being let go."""

    handle: SavedTensor
    layout: Layout


@dataclass(frozen=True, slots=True)
class Made:
    """An operand that a call of the same step made, as it was after so many `changes`."""

    product: Product
    layout: Layout
    changes: int


@dataclass(slots=True, eq=False, weakref_slot=True)
class Call:
    """An operator with its arguments flattened: operands for tensors, the values themselves for the rest.

    `with_grad`: gradients were enabled, which some kernels ask for. `stale`: one of its operands was changed since, so
    it would make something else now.
    """

    number: int
    operator: Operator
    leaves: list[object]
    spec: TreeSpec
    with_grad: bool = True
    stale: bool = False

    def made(self) -> Iterator[Made]:
        """Yield the operands that other calls made."""
        for leaf in self.leaves:
            if isinstance(leaf, Made):
                yield leaf

    def is_stale(self) -> bool:
        """Tell whether it would make something else now."""
        return self.stale or any(isinstance(leaf, Kept) and leaf.is_changed() for leaf in self.leaves)


@dataclass(slots=True, eq=False)
class Product:
    """A storage by the calls that made it what it is: the first allocated it, as its output number `output`.

    `whole`: no other call changed it. `record`: what the runtime knows it by, while it does.
    """

    calls: list[Call]
    output: int
    dtype: torch.dtype
    whole: bool = True
    record: int | None = None

    @property
    def changes(self) -> int:
        """How often it was changed in place so far."""
        return len(self.calls) - 1

    def history(self) -> Iterator[Call]:
        """Yield every call that has a part in it, whether or not its operands are in memory."""
        seen: set[int] = set()
        waiting = list(self.calls)
        while waiting:
            call = waiting.pop()
            if call.number in seen:
                continue
            seen.add(call.number)
            yield call
            for operand in call.made():
                waiting += operand.product.calls[: operand.changes + 1]

    def can_be_made(self) -> bool:
        """Tell whether running its calls again gives the same bytes."""
        return self.whole and not any(call.is_stale() for call in self.history())


@dataclass(slots=True)
class Signature:
    """Which arguments an operator writes, by position and by name."""

    positions: tuple[int, ...] = ()
    names: tuple[str, ...] = ()

    def written(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[torch.Tensor]:
        """Yield the tensors among the arguments that a call writes."""
        values = [args[position] for position in self.positions if position < len(args)]
        values += [kwargs[name] for name in self.names if name in kwargs]
        for value in values:
            for item in value if isinstance(value, (list, tuple)) else (value,):
                if isinstance(item, torch.Tensor):
                    yield item


@cache
def writes_of(operator: Operator) -> Signature | None:
    """Return which arguments an operator writes (None: it writes none)."""
    arguments = operator._schema.arguments
    written = [(i, a) for i, a in enumerate(arguments) if a.alias_info is not None and a.alias_info.is_write]
    if not written:
        return None
    return Signature(
        positions=tuple(i for i, argument in written if not argument.kwarg_only),
        names=tuple(argument.name for _, argument in written),
    )


@cache
def _position(operator: Operator, name: str) -> int | None:
    names = [argument.name for argument in operator._schema.arguments]
    return names.index(name) if name in names else None


def repeats(operator: Operator, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Tell whether a call gives the same bytes when it runs again: it draws no random numbers and is PyTorch's own."""
    if operator.namespace != "aten":
        return False  # it may keep a state that no schema tells of
    if torch.Tag.nondeterministic_seeded not in operator.tags:
        return True
    # Attention kernels draw only if they drop something out.
    at = _position(operator, "dropout_p")
    if at is None:
        return False
    return bool((args[at] if at < len(args) else kwargs.get("dropout_p", 0.0)) == 0.0)


def without_side_effects(operator: Operator, args: tuple[Any, ...]) -> tuple[Any, ...] | None:
    """Return a call's arguments so that it changes nothing that its schema does not tell of (None: not possible).

    A normalisation in training moves its running statistics along, and its results do not depend on them.
    """
    if operator is not torch.ops.aten.native_batch_norm.default:
        return args
    training = args[5]
    return (*args[:3], None, None, *args[5:]) if training else args
