"""One step as one line of text."""

from __future__ import annotations

from lowtide.core.step_record import StepRecord
from lowtide.core.units import format_bytes, format_seconds

_GAP = "  "


def status_line(record: StepRecord, *, columns: int, left_s: float | None = None) -> str:
    """Return a step in at most `columns` characters; what matters least is left out where there is no room.

    `left_s`: the seconds until the data loader has given its last batch (None: not known).
    """
    waited = record.stall_s / record.step_s if record.step_s > 0 else 0.0
    slowdown = record.predicted_slowdown
    # In the order of the line, each with its rank: the highest is the first to go.
    parts = [
        (0, f"step {record.step}"),
        (1, used(record.peak_bytes, record.budget_bytes)),
        (5, f"moved {format_bytes(record.moved_out_bytes + record.moved_in_bytes)}"),
        (3, f"waited {waited:.0%}"),
        (4, "" if slowdown is None else f"{slowdown:.2f}x predicted"),
        (2, "" if left_s is None else f"{format_seconds(left_s)} left"),
    ]
    parts = [part for part in parts if part[1]]
    while len(parts) > 1 and len(_GAP.join(text for _, text in parts)) > columns:
        parts.remove(max(parts))
    return _GAP.join(text for _, text in parts)[:columns]


def used(nbytes: int, budget_bytes: int) -> str:
    """Return bytes and the budget in the budget's unit, such as '0.88/2.00 GiB'."""
    number, unit = format_bytes(budget_bytes).split()
    per_unit = {"B": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}[unit]
    digits = len(number.partition(".")[2])
    return f"{nbytes / per_unit:.{digits}f}/{number} {unit}"
