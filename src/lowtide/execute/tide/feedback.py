"""What a planned step had to wait for, told to policies that change their plan by it (Capuchin).

Policies see executed steps as they see simulated ones: as a `Timeline`. This one knows the waits for bytes that were
not back in time, and nothing of what else happened when.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from lowtide.capture.builder import Recorded
from lowtide.core.plan import Plan, Problem
from lowtide.core.timeline import Lane, Span, Timeline


class Wait(NamedTuple):
    """A use that waited for its bytes: of which key, at which event, when; `demanded`: nobody had asked for them."""

    key: int
    event: int
    start_s: float
    end_s: float
    demanded: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Planned:
    """A plan with what it was made from; `lessons` counts the steps that its policy has looked at."""

    problem: Problem
    recorded: Recorded
    plan: Plan
    lessons: int = 0


def executed(
    planned: Planned, waits: Sequence[Wait], *, begun_s: float, step_s: float, recompute_s: float, stall_s: float
) -> Timeline:
    """Return a step that followed a plan to its end."""
    trace, positions = planned.problem.trace, planned.recorded.positions
    spans: list[Span] = []
    for wait in waits:
        if wait.key >= len(trace.saves) or wait.event >= len(positions):
            continue  # of an earlier step's graph, which numbers its saves otherwise
        storage = trace.saves[wait.key].storage
        start_s, end_s, op = wait.start_s - begun_s, wait.end_s - begun_s, positions[wait.event]
        nbytes, cause = trace.storages[storage].nbytes, "demand" if wait.demanded else "prefetch"
        spans.append(Span(lane=Lane.STALL, start_s=start_s, end_s=end_s, op=op, storage=storage, cause="arrival"))
        spans.append(
            Span(lane=Lane.IN, start_s=start_s, end_s=end_s, op=op, storage=storage, nbytes=nbytes, cause=cause)
        )
    return Timeline(
        policy=planned.plan.policy,
        machine=planned.problem.machine.name,
        model=trace.model,
        budget_bytes=planned.problem.budget_bytes,
        step_s=step_s,
        compute_s=max(0.0, step_s - stall_s - recompute_s),
        recompute_s=recompute_s,
        stall_s=stall_s,
        peak_bytes=0,
        reserved_peak_bytes=0,
        moved_out_bytes=0,
        moved_in_bytes=0,
        spans=tuple(spans),
        notes=("executed: waits only",),
    )
