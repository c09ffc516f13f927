"""A training step as a value: what to run, and whose tensors it uses."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True, kw_only=True)
class Training:
    """One whole training step, which can be run any number of times."""

    step: Callable[[], object]
    model: torch.nn.Module | None = None
    optimizer: torch.optim.Optimizer | None = None
