"""The smallest budget that works, against the floor that no plan can pass."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from benchmarks.jobs import Job, launch

_START = 1.15
_GROWTH = 1.1
_MOST = 2.0
_RESOLUTION = 0.01


def smallest_budget(job: Job, *, floor_bytes: int, report: Callable[[str], None]) -> dict[str, Any]:
    """Return the smallest budget with which `job` finishes, to a hundredth of the floor, and why the next failed."""
    reason = ""

    def works(factor: float) -> bool:
        nonlocal reason
        answer = launch(replace(job, contender="lowtide", budget_bytes=int(factor * floor_bytes)))
        report(f"{factor:.3f} x floor: {answer.failure or 'works'}")
        reason = answer.failure or reason
        return answer.failure is None

    good = _START
    while not works(good):
        good *= _GROWTH
        if good > _MOST:
            return {"floor_bytes": floor_bytes, "smallest_budget_bytes": None, "ratio_to_floor": None, "reason": reason}
    bad = 0.5 if good == _START else good / _GROWTH
    # A floor that was measured too high would show here: the search goes below it on purpose.
    while good - bad > _RESOLUTION:
        middle = max((good + bad) / 2, good - 0.08)
        if works(middle):
            good = middle
        else:
            bad = middle
    return {
        "floor_bytes": floor_bytes,
        "smallest_budget_bytes": int(good * floor_bytes),
        "ratio_to_floor": good,
        "reason": reason,
    }
