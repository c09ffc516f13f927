"""Tells when memory is about to change hands without a call: lent to numpy, say, or given up by whoever owns it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

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
        self._originals: dict[tuple[type, str], tuple[Any, bool]] = {}

    def on(self) -> None:
        """Start to tell."""
        for owner, name in _WAYS:
            original = getattr(owner, name)
            self._originals[owner, name] = (original, name in vars(owner))
            setattr(owner, name, self._telling(original))

    def off(self) -> None:
        """Leave everything as it was."""
        for (owner, name), (original, own) in self._originals.items():
            if own:
                setattr(owner, name, original)
            else:
                delattr(owner, name)
        self._originals.clear()

    def _telling(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def lend(owned: torch.Tensor | torch.UntypedStorage, *args: Any, **kwargs: Any) -> Any:
            self._before(owned)
            return original(owned, *args, **kwargs)

        lend.__doc__ = original.__doc__
        return lend
