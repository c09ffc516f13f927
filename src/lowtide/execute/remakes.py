"""What a backend offers whose records can be given up without a copy and made again."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch


class Remakes(Protocol):
    """What a backend offers whose records can be given up and made again."""

    device: torch.device

    def serial(self, tensor: torch.Tensor) -> int:
        """Return a number for the memory behind a tensor, never used twice; below zero: not ours; 0: none."""
        ...

    def storage_bytes(self, tensor: torch.Tensor) -> int:
        """Return the bytes of the storage behind a tensor; -1 if others can reach that memory."""
        ...

    def discard(self, record: int) -> bool:
        """Give up a record's fast bytes without a copy; False if it cannot be moved now."""
        ...

    def adopt(self, record: int, tensor: torch.Tensor) -> bool:
        """Make a tensor's storage that of a record that was discarded; False if it does not fit."""
        ...

    def flat(self, record: int, dtype: torch.dtype) -> torch.Tensor | None:
        """Return all of a record's storage as one row, or None if it is not in fast memory."""
        ...

    def is_shared(self, tensor: torch.Tensor) -> bool:
        """Tell whether others than tensors reach the memory behind a tensor: numpy, a file, another process."""
        ...

    def is_lent(self, record: int) -> bool:
        """Tell the same of a record's memory."""
        ...

    def alias(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """Return the same memory with the same version, but without the graph (None: not possible)."""
        ...

    def lift(self) -> None:
        """Lift the budget: the end is near, and what is made again has to be held."""
        ...

    def mark_call(self, number: int) -> None:
        """Log which of the step's calls the operator is that runs."""
        ...

    def run(self, operator: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run an operator again; there is room for what it takes, or it raises."""
        ...

    def took_s(
        self, operator: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], *, host_s: float
    ) -> float:
        """Return how long an operator takes that the host was busy with for `host_s`."""
        ...
