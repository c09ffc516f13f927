"""Tells when memory is about to change hands without a call: lent to numpy, say, or given up by whoever owns it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from lowtide.execute.observe.operators import aside

# What lends a tensor's memory (`numpy.asarray` and its like end here too), and how FSDP gives parameters up meanwhile.
_WAYS: tuple[tuple[type, str], ...] = (
    (torch.Tensor, "numpy"),
    (torch.Tensor, "__dlpack__"),
    (torch.UntypedStorage, "resize_"),
)


class Lending:
    """Calls `before(tensor or storage)` before any of the ways is gone, in the whole process, while it is on."""

    def __init__(self, before: Callable[[torch.Tensor | torch.UntypedStorage], None]) -> None:
        self._before = before

    def on(self) -> None:
        """Start to tell."""
        if not _told:
            _replace()
        _told.append(self._before)

    def off(self) -> None:
        """Tell no more; after the last one everything is as it was."""
        _told.remove(self._before)
        if not _told:
            _put_back()


def as_tensor(owned: torch.Tensor | torch.UntypedStorage) -> torch.Tensor | None:
    """Return what is lent as a tensor (None: it has no memory that could be lent)."""
    if isinstance(owned, torch.Tensor):
        return owned if owned.layout is torch.strided else None
    with aside():
        return torch.empty(0, dtype=torch.uint8, device=owned.device).set_(owned)


# One for each device that is watched: they come and go in any order, so the ways are replaced once for all of them.
_told: list[Callable[[torch.Tensor | torch.UntypedStorage], None]] = []
_originals: dict[tuple[type, str], tuple[Any, bool]] = {}


def _replace() -> None:
    for owner, name in _WAYS:
        original = getattr(owner, name)
        _originals[owner, name] = (original, name in vars(owner))
        setattr(owner, name, _telling(original))


def _put_back() -> None:
    for (owner, name), (original, own) in _originals.items():
        if own:
            setattr(owner, name, original)
        else:
            delattr(owner, name)
    _originals.clear()


def _telling(original: Callable[..., Any]) -> Callable[..., Any]:
    def lend(owned: torch.Tensor | torch.UntypedStorage, *args: Any, **kwargs: Any) -> Any:
        for before in _told.copy():
            before(owned)
        return original(owned, *args, **kwargs)

    lend.__doc__ = original.__doc__
    return lend
