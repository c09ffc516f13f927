"""Tells when memory is about to change hands without a call: lent to numpy, say, or given up by its owner."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch
import torch.utils.dlpack
from torch.multiprocessing.reductions import StorageWeakRef

from lowtide.execute.observe.operators import aside

# What lends a tensor's memory (`numpy.asarray` and its like end here too), and how FSDP gives parameters up meanwhile.
# Of memory that numpy has the storage can be asked; nothing tells later that DLPack's borrowers have it.
_WAYS: tuple[tuple[type | ModuleType, str, bool], ...] = (
    (torch.Tensor, "numpy", False),
    (torch.Tensor, "__dlpack__", True),
    (torch, "to_dlpack", True),
    (torch.utils.dlpack, "to_dlpack", True),
    (torch.UntypedStorage, "resize_", False),
)

Owned = torch.Tensor | torch.UntypedStorage
_WeakRef: Any = StorageWeakRef  # untyped in torch


class Lending:
    """Calls `before(tensor or storage, for_good)` before any of the ways is gone, in the whole process, while it is on.

    `for_good`: it cannot be seen later that it is lent. The listener is held weakly.
    """

    def __init__(self, before: Callable[[Owned, bool], None]) -> None:
        self._before = weakref.WeakMethod(before)

    def on(self) -> None:
        """Start to tell."""
        if not _told:
            _replace()
        _told.append(self._before)

    def off(self) -> None:
        """Tell no more; after the last one everything is as it was."""
        if self._before in _told:
            _told.remove(self._before)
            if not _told:
                _put_back()


class LentForGood:
    """The storages that DLPack has lent, by number."""

    def __init__(self) -> None:
        self._storages: dict[int, Any] = {}
        self._most = 1024  # beyond that, those that are gone are forgotten

    def add(self, number: int, storage: torch.UntypedStorage) -> None:
        """Take note of one."""
        if len(self._storages) >= self._most:
            self._storages = {number: weak for number, weak in self._storages.items() if not weak.expired()}
            self._most = max(self._most, 2 * len(self._storages))
        self._storages[number] = _WeakRef(storage)

    def __contains__(self, number: int) -> bool:
        found = self._storages.get(number)
        return found is not None and not found.expired()  # the number of memory that is not ours is its address


def as_tensor(owned: Owned) -> torch.Tensor | None:
    """Return what is lent as a tensor (None: it has no memory that could be lent)."""
    if isinstance(owned, torch.Tensor):
        return owned if owned.layout is torch.strided else None
    with aside():
        return torch.empty(0, dtype=torch.uint8, device=owned.device).set_(owned)


# One for each device that is watched: they come and go in any order, so the ways are replaced once for all of them.
_told: list[weakref.WeakMethod[Callable[[Owned, bool], None]]] = []
_originals: dict[tuple[type | ModuleType, str], tuple[Any, bool]] = {}


def _replace() -> None:
    for owner, name, for_good in _WAYS:
        original = getattr(owner, name)
        _originals[owner, name] = (original, name in vars(owner))
        setattr(owner, name, _telling(original, for_good))


def _put_back() -> None:
    for (owner, name), (original, own) in _originals.items():
        if own:
            setattr(owner, name, original)
        else:
            delattr(owner, name)
    _originals.clear()


def _telling(original: Callable[..., Any], for_good: bool) -> Callable[..., Any]:
    def lend(owned: Owned, *args: Any, **kwargs: Any) -> Any:
        for each in _told.copy():
            before = each()
            if before is not None:
                before(owned, for_good)
        return original(owned, *args, **kwargs)

    lend.__doc__ = original.__doc__
    return lend
