"""What a backend offers whose records can be given up without a copy and made again."""

from __future__ import annotations

import errno
from typing import Any, Protocol

import torch

from lowtide.core.units import format_bytes
from lowtide.errors import SpillCorrupted
from lowtide.execute.observe.operators import Operator


def came_out_otherwise(nbytes: int) -> SpillCorrupted:
    """Return the error for a record that has another checksum when it was made again."""
    return SpillCorrupted(
        errno.EBADMSG,
        f"{format_bytes(nbytes)} saved for backward had different bits when its operators ran again: "
        "please report the model, and use a policy that does not recompute",
    )


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

    def run(self, operator: Operator, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run an operator again; there is room for what it takes, or it raises."""
        ...

    @property
    def clock(self) -> Clock | None:
        """What knows how long operators take that the host only hands over (None: it runs them itself)."""
        ...


class Clock(Protocol):
    """How long operators take on a device that works behind the host."""

    def took_s(self, operator: Operator, args: tuple[Any, ...], kwargs: dict[str, Any]) -> float | None:
        """Return how long an operator took when it was last measured (None: it was not)."""
        ...

    def ran_s(self) -> float:
        """Return how long everything took that ran again so far."""
        ...
