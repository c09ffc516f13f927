"""PyTorch's loader workers handle SIGSEGV themselves from their start on: faults there must reach us before."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch.utils.data._utils.signal_handling as _signal_handling

signal_handling: Any = _signal_handling  # what it takes from torch._C, it does not export


class LoaderWorkers:
    """Lets workers that are forked while it is on be served: they read their parent's tensors, which may be away."""

    def __init__(self, catch_faults: Callable[[], object]) -> None:
        self._catch_faults = catch_faults
        self._original: Callable[[], None] | None = None

    def on(self) -> None:
        """Come before the handler that a worker sets."""
        original: Callable[[], None] = signal_handling._set_worker_signal_handlers

        def set_handlers() -> None:
            original()
            self._catch_faults()

        self._original = original
        signal_handling._set_worker_signal_handlers = set_handlers

    def off(self) -> None:
        """Let workers be as they were; those that run keep what they have."""
        if self._original is not None:
            signal_handling._set_worker_signal_handlers = self._original
            self._original = None
