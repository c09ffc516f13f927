"""Alternative implementations of operators, each with its own time and workspace.

A recorded step shows one implementation per operator, and PyTorch on a CPU offers no other: systems that choose among
a library's convolution algorithms get the alternatives from a table that the user states.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

from lowtide.core.trace import Trace
from lowtide.errors import BadArgument


@dataclass(frozen=True, slots=True, kw_only=True)
class Algorithm:
    """One way to run an operator."""

    duration_s: float
    workspace_bytes: int


Table = Mapping[int, Sequence[Algorithm]]
"""The algorithms of operators, by operator. The first one of each is the one that was recorded."""

Choice = Mapping[int, int]
"""The position in its row of the table that each operator takes; an operator not named keeps its first."""


def fastest(table: Table) -> dict[int, int]:
    """Return the choice of the fastest algorithm everywhere."""
    return {
        op: min(range(len(row)), key=lambda k: (row[k].duration_s, row[k].workspace_bytes)) for op, row in table.items()
    }


def leanest(table: Table) -> dict[int, int]:
    """Return the choice of the smallest workspace everywhere."""
    return {
        op: min(range(len(row)), key=lambda k: (row[k].workspace_bytes, row[k].duration_s)) for op, row in table.items()
    }


def fastest_within(table: Table, *, spare_bytes: Mapping[int, int]) -> dict[int, int]:
    """Return the choice of the fastest algorithm that fits beside each operator, or of the leanest where none does.

    `spare_bytes` is what the budget leaves at an operator beside the algorithm that was recorded; negative where that
    one does not fit.
    """
    choice = leanest(table)
    for op, row in table.items():
        room_bytes = spare_bytes[op] + row[0].workspace_bytes
        fitting = [k for k, one in enumerate(row) if one.workspace_bytes <= room_bytes]
        if fitting:
            choice[op] = min(fitting, key=lambda k: (row[k].duration_s, row[k].workspace_bytes))
    return choice


def with_algorithms(trace: Trace, table: Table, choice: Choice) -> Trace:
    """Return the trace as it would be with other algorithms."""
    if strangers := [op for op in table if not 0 <= op < len(trace.ops) or not table[op]]:
        raise BadArgument(
            f"algorithms are given for operator {strangers[0]}, but the trace has operators 0 to {len(trace.ops) - 1} "
            "and each needs at least one algorithm: name operators by their position in the trace"
        )
    ops = list(trace.ops)
    for op, k in choice.items():
        recorded, chosen = table[op][0], table[op][k]
        if k:
            ops[op] = replace(
                ops[op],
                duration_s=chosen.duration_s,
                peak_bytes=ops[op].peak_bytes - recorded.workspace_bytes + chosen.workspace_bytes,
            )
    starts = [0.0, *accumulate(op.duration_s for op in ops)]
    return replace(trace, ops=tuple(replace(op, start_s=start) for op, start in zip(ops, starts, strict=False)))
