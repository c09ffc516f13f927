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

from typing import TYPE_CHECKING, Any

from lowtide.errors import BadArgument, BudgetTooSmall, LowtideError, SpillCorrupted, SpillError, SpillFull

if TYPE_CHECKING:
    from lowtide.execute.tide.fit import fit
    from lowtide.execute.tide.tide import Tide

__version__ = "0.1.0"

__all__ = [
    "BadArgument",
    "BudgetTooSmall",
    "LowtideError",
    "SpillCorrupted",
    "SpillError",
    "SpillFull",
    "Tide",
    "fit",
]


def __getattr__(name: str) -> Any:
    # torch takes a second to import: the command line and the planner do without it.
    if name in ("Tide", "fit"):
        from lowtide.execute.tide import fit

        return getattr(fit, name)
    raise AttributeError(f"module 'lowtide' has no attribute {name!r}")
