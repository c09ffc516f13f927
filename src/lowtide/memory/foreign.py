"""Tensors that PyTorch's own allocator made before the budget began, as a rule parameters: the budget covers them."""

from __future__ import annotations

import gc
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef

_WeakRef: Any = StorageWeakRef  # untyped in torch


class Foreign:
    """Holds weak references, so it does not keep them alive."""

    def __init__(self, is_ours: Callable[[int], object]) -> None:
        self._is_ours = is_ours
        self._known: list[tuple[Any, int]] = []

    def find(self, take_over: Callable[[torch.Tensor], int] | None = None) -> None:
        """Look for them among all objects of the process.

        `take_over` makes as much of a tensor's memory ours as it can, and returns its bytes: they are not foreign.
        """
        gc.collect()  # what waits to be collected need not count
        seen: dict[int, tuple[Any, int]] = {}
        for thing in gc.get_objects():
            if not issubclass(type(thing), torch.Tensor):
                continue
            with suppress(RuntimeError, NotImplementedError, AttributeError, ValueError):  # fake, meta, lazy, a wrapper
                # A gradient has no Python object until the program looks at it, so its parameter leads to it.
                for tensor in (thing, thing.grad if thing.is_leaf else None):
                    if tensor is None or tensor.device.type != "cpu" or tensor.layout is not torch.strided:
                        continue
                    storage = tensor.untyped_storage()
                    if storage._cdata in seen or self._is_ours(storage._cdata):
                        continue
                    ours_bytes = 0 if take_over is None else take_over(tensor)
                    seen[storage._cdata] = (_WeakRef(storage), storage.nbytes() - ours_bytes)
        self._known = list(seen.values())

    def live_bytes(self) -> int:
        """Return how much of them is left."""
        self._known = [known for known in self._known if not known[0].expired()]
        return sum(nbytes for _, nbytes in self._known)
