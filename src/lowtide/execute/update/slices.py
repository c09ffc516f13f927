"""`foreach` and `fused` optimizers in slices: the same kernels, a part of the parameters at a time.

Such an optimizer passes lists of all its tensors to a dozen operators, one after the other. If the lists are larger
than memory, every operator would read and write all of them anew. A parameter's update depends on no other's, so
PyTorch's functional form of the optimizer is called once for each slice of its lists instead, and each tensor comes
back once.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator, Sequence
from functools import wraps
from typing import Any

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


class SlicedUpdates:
    """Slices updates in the whole process while it is on; `slice_bytes`: what the tensors of one may take."""

    def __init__(self, *, slice_bytes: int) -> None:
        self._slice_bytes = slice_bytes
        self._originals: list[tuple[Any, str, Callable[..., None]]] = []

    def on(self) -> None:
        """Start to slice."""
        for module_name, name in _FUNCTIONS:
            module = importlib.import_module(f"torch.optim.{module_name}")
            original = getattr(module, name, None)
            if original is not None:
                self._originals.append((module, name, original))
                setattr(module, name, self._sliced(original))

    def off(self) -> None:
        """Leave PyTorch as it was."""
        for module, name, original in self._originals:
            setattr(module, name, original)
        self._originals.clear()

    def _sliced(self, original: Callable[..., None]) -> Callable[..., None]:
        @wraps(original)
        def update(params: list[torch.Tensor], *args: Any, **kwargs: Any) -> None:
            if not (kwargs.get("foreach") or kwargs.get("fused")):
                original(params, *args, **kwargs)  # one parameter at a time already
                return
            lists = [value for value in (params, *args, *kwargs.values()) if _is_list_of(value, len(params))]
            for begin, end in self._slices(lists, len(params)):

                def part(value: Any, begin: int = begin, end: int = end) -> Any:
                    return value[begin:end] if _is_list_of(value, len(params)) else value

                parts = [part(value) for value in (params, *args)]
                named = {name: part(value) for name, value in kwargs.items()}
                original(*parts, **named)
                # A function may put tensors into its lists: SGD's first momentum.
                for value, changed in zip((params, *args, *kwargs.values()), (*parts, *named.values()), strict=True):
                    if _is_list_of(value, len(params)):
                        value[begin:end] = changed

        return update

    def _slices(self, lists: Sequence[list[Any]], count: int) -> Iterator[tuple[int, int]]:
        """Yield the bounds of slices, each with as many parameters as fit, and one at least."""
        begin, held_bytes = 0, 0
        for index in range(count):
            nbytes = sum(one[index].nbytes for one in lists if isinstance(one[index], torch.Tensor))
            if index > begin and held_bytes + nbytes > self._slice_bytes:
                yield begin, index
                begin, held_bytes = index, 0
            held_bytes += nbytes
        if begin < count:
            yield begin, count


def _is_list_of(value: object, count: int) -> bool:
    return isinstance(value, list) and len(value) == count and count > 0
