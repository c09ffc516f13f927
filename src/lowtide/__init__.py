"""Lowtide: PyTorch inside a memory budget that holds.

(model, batch) --capture--> Trace --estimate--> Costs --plan--> Plan --execute--> Timeline --report--> Report

import lowtide
with lowtide.fit(model, optimizer, budget="2GiB", spill="/fast/disk") as tide:
    for x, y in loader:
        with tide.step():
            loss = loss_fn(model(x), y)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    print(tide.stats())
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from lowtide.errors import (
    BadArgument,
    BudgetTooSmall,
    CheckpointCorrupted,
    CheckpointError,
    CheckpointMismatch,
    LowtideError,
    SpillCorrupted,
    SpillError,
    SpillFull,
)

if TYPE_CHECKING:
    from lowtide.checkpoint.in_place import load
    from lowtide.checkpoint.stock import load_checkpoint, save_checkpoint
    from lowtide.execute.sub_batches import sub_batches
    from lowtide.execute.tide.creation import init
    from lowtide.execute.tide.fit import fit
    from lowtide.execute.tide.recording import capture_model, capture_script, capture_step
    from lowtide.execute.tide.serving import serve
    from lowtide.execute.tide.tide import Tide
    from lowtide.integrations.accelerate import prepare

__version__ = "0.1.0"

__all__ = [
    "BadArgument",
    "BudgetTooSmall",
    "CheckpointCorrupted",
    "CheckpointError",
    "CheckpointMismatch",
    "LowtideError",
    "SpillCorrupted",
    "SpillError",
    "SpillFull",
    "Tide",
    "capture_model",
    "capture_script",
    "capture_step",
    "fit",
    "init",
    "load",
    "load_checkpoint",
    "prepare",
    "save_checkpoint",
    "serve",
    "sub_batches",
]

# Where each of those is that need torch, which takes a second to import: the command line and the planner do without.
_WITH_TORCH = {
    "Tide": "lowtide.execute.tide.tide",
    "capture_model": "lowtide.execute.tide.recording",
    "capture_script": "lowtide.execute.tide.recording",
    "capture_step": "lowtide.execute.tide.recording",
    "fit": "lowtide.execute.tide.fit",
    "init": "lowtide.execute.tide.creation",
    "load": "lowtide.checkpoint.in_place",
    "load_checkpoint": "lowtide.checkpoint.stock",
    "save_checkpoint": "lowtide.checkpoint.stock",
    "prepare": "lowtide.integrations.accelerate",
    "serve": "lowtide.execute.tide.serving",
    "sub_batches": "lowtide.execute.sub_batches",
}


def __getattr__(name: str) -> Any:
    if name in _WITH_TORCH:
        return getattr(import_module(_WITH_TORCH[name]), name)
    raise AttributeError(f"module 'lowtide' has no attribute {name!r}")
