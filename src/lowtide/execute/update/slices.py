"""`foreach` and `fused` optimizers in slices: the same kernels, a part of the parameters at a time.

Such an optimizer passes lists of all its tensors to a dozen operators, one after the other. If the lists are larger
than memory, every operator would read and write all of them again. A parameter's update depends on no other's, so
PyTorch's functional form of the optimizer is called once for each slice of its lists instead, and each tensor comes
back once.

Where updates are put off, that is asked for here too: PyTorch's functional optimizers compute element by element.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from functools import wraps
from typing import Any, Protocol

import torch

# PyTorch's functional optimizers: the module, and the function that its step calls with lists.
_FUNCTIONS = (
    ("adadelta", "adadelta"),
    ("adagrad", "adagrad"),
    ("adam", "adam"),
    ("adamax", "adamax"),
    ("adamw", "adamw"),
    ("asgd", "asgd"),
    ("nadam", "nadam"),
    ("radam", "radam"),
    ("rmsprop", "rmsprop"),
    ("rprop", "rprop"),
    ("sgd", "sgd"),
)


# Operators on lists that programs, and PyTorch for them, call with everything there is: to clear or clip gradients, to
# unscale them, to average weights. What such an operator does to a tensor depends on none of the others.
_OPERATORS = (
    "_amp_foreach_non_finite_check_and_unscale_",
    "_foreach_add_",
    "_foreach_copy_",
    "_foreach_lerp_",
    "_foreach_mul_",
    "_foreach_norm",
    "_foreach_zero_",
)


class PutsOff(Protocol):
    """See `put_off.PutOff`."""

    @property
    def least_bytes(self) -> int:
        """Smaller tensors are updated at once."""
        ...

    def pays(self) -> bool:
        """Tell whether an update that comes now is worth putting off."""
        ...

    def calls(self) -> AbstractContextManager[None]:
        """Put off what is called meanwhile."""
        ...


_on: list[SlicedUpdates] = []  # where a training is on several devices there are several; the smallest slices count
_originals: list[tuple[Any, str, Callable[..., Any]]] = []


class SlicedUpdates:
    """Slices updates in the whole process while it is on; `slice_bytes`: what the tensors of one may take.

    Where all of them take no more than `whole_bytes`, nothing is sliced. `operators`: operators on lists are sliced
    too, wherever they are called from Python. `made` is told of state that an update makes before its optimizer has it.
    `puts_off`: postpones updates where that pays.
    """

    def __init__(
        self,
        *,
        slice_bytes: int,
        operators: bool = False,
        whole_bytes: int = 0,
        made: Callable[[list[torch.Tensor]], None] = lambda _tensors: None,
        puts_off: PutsOff | None = None,
    ) -> None:
        self.slice_bytes = slice_bytes
        self.whole_bytes = whole_bytes
        self.made = made
        self.puts_off = puts_off
        self._operators = operators

    def on(self) -> None:
        """Start to slice."""
        if not _on:
            for module_name, name in _FUNCTIONS:
                _replace(importlib.import_module(f"torch.optim.{module_name}"), name, _sliced_update)
        if self._operators and not any(one._operators for one in _on):
            for name in _OPERATORS:
                _replace(torch, name, _sliced)
        _on.append(self)

    def off(self) -> None:
        """Leave PyTorch as it was."""
        if self in _on:
            _on.remove(self)
        while not _on and _originals:
            module, name, original = _originals.pop()
            setattr(module, name, original)


def _replace(module: Any, name: str, sliced: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    original = getattr(module, name, None)
    if original is not None:
        _originals.append((module, name, original))
        setattr(module, name, sliced(original))


def _sliced_update(original: Callable[..., None]) -> Callable[..., None]:
    @wraps(original)
    def update(params: list[torch.Tensor], *args: Any, **kwargs: Any) -> None:
        lists = bool(kwargs.get("foreach") or kwargs.get("fused") or _decides_alike(params, kwargs))
        late = _who_puts_off(params)
        if late is None:
            parts = list(_slices(_lists(params, args, kwargs), range(len(params)))) if lists else []
            _in_parts(original, parts, params, args, kwargs)
            return
        # What is too small to be put off would hold the rest of a list up.
        small = [index for index, one in enumerate(params) if one.nbytes < late.least_bytes]
        large = [index for index, one in enumerate(params) if one.nbytes >= late.least_bytes]
        parts = [small] * bool(small) + list(_slices(_lists(params, args, kwargs), large)) if lists else []
        with late.calls():
            _in_parts(original, parts, params, args, kwargs)

    return update


def _who_puts_off(params: list[torch.Tensor]) -> PutsOff | None:
    if any(one.device.type != "cpu" for one in params):
        return None
    return next((one.puts_off for one in _on if one.puts_off is not None and one.puts_off.pays()), None)


def _decides_alike(params: list[torch.Tensor], kwargs: dict[str, Any]) -> bool:
    """Tell whether a function that is left to choose its form chooses the same one for every slice as for the whole.

    PyTorch takes the `foreach` form on devices, where all tensors are on one and are plain ones.
    """
    stated = kwargs.get("foreach") is not None or kwargs.get("fused") is not None
    return not stated and len({(type(each), each.device) for each in params}) == 1 and params[0].device.type != "cpu"


def _sliced(original: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(original)
    def call(params: list[torch.Tensor], *args: Any, **kwargs: Any) -> Any:
        parts = list(_slices(_lists(params, args, kwargs), range(len(params))))
        return _in_parts(original, parts, params, args, kwargs)

    return call


def _lists(params: list[Any], args: Sequence[Any], kwargs: dict[str, Any]) -> list[list[Any]]:
    return [value for value in (params, *args, *kwargs.values()) if _is_list_of(value, len(params))]


def _in_parts(
    original: Callable[..., Any],
    parts: Sequence[Sequence[int]],
    params: list[Any],
    args: Sequence[Any],
    kwargs: dict[str, Any],
) -> Any:
    """Call a function on lists once for each part of them, which is told by its positions."""
    if len(parts) < 2:
        return original(params, *args, **kwargs)
    count = len(params)
    results: list[Any] = []
    for positions in parts:

        def part(value: Any, positions: Sequence[int] = positions) -> Any:
            return [value[at] for at in positions] if _is_list_of(value, count) else value

        given = [part(value) for value in (params, *args)]
        named = {name: part(value) for name, value in kwargs.items()}
        results += original(*given, **named) or ()
        # A function may put tensors into its lists: SGD's first momentum.
        for value, changed in zip((params, *args, *kwargs.values()), (*given, *named.values()), strict=True):
            if not _is_list_of(value, count):
                continue
            made = []
            for at, new in zip(positions, changed, strict=True):
                if new is not value[at]:
                    value[at] = new
                    made.append(new)
            for one in _on if made else ():
                one.made([tensor for tensor in made if isinstance(tensor, torch.Tensor)])
    return results or None


def _slices(lists: Sequence[list[Any]], positions: Sequence[int]) -> Iterator[Sequence[int]]:
    """Yield positions in slices, each with as many parameters as fit, and one at least."""
    sizes = [sum(one[at].nbytes for one in lists if isinstance(one[at], torch.Tensor)) for at in positions]
    is_whole = sum(sizes) <= min((one.whole_bytes for one in _on), default=sys.maxsize)
    slice_bytes = sys.maxsize if is_whole else min(one.slice_bytes for one in _on)
    begin, held_bytes = 0, 0
    for index, nbytes in enumerate(sizes):
        if index > begin and held_bytes + nbytes > slice_bytes:
            yield positions[begin:index]
            begin, held_bytes = index, 0
        held_bytes += nbytes
    if begin < len(positions):
        yield positions[begin:]


def _is_list_of(value: object, count: int) -> bool:
    return isinstance(value, list) and len(value) == count and count > 0
