"""Tells when memory is about to be lent to somebody who writes it without a call: numpy, or another framework."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

# What lends a tensor's memory: `numpy.asarray` and its like end here too.
_WAYS = ("numpy", "__dlpack__")


class Lending:
    """Calls `before(tensor)` before any of the ways is gone, in the whole process, while it is on."""

    def __init__(self, before: Callable[[torch.Tensor], None]) -> None:
        self._before = before
        self._originals: dict[str, tuple[Any, bool]] = {}

    def on(self) -> None:
        """Start to tell."""
        for name in _WAYS:
            self._originals[name] = (getattr(torch.Tensor, name), name in vars(torch.Tensor))
            setattr(torch.Tensor, name, self._telling(self._originals[name][0]))

    def off(self) -> None:
        """Leave everything as it was."""
        for name, (original, own) in self._originals.items():
            if own:
                setattr(torch.Tensor, name, original)
            else:
                delattr(torch.Tensor, name)
        self._originals.clear()

    def _telling(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def lend(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:  # whatever the original takes
            self._before(tensor)
            return original(tensor, *args, **kwargs)

        lend.__doc__ = original.__doc__
        return lend
