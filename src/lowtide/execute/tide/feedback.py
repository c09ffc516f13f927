"""What a planned step had to wait for, told to policies that change their plan by it (Capuchin).

Policies see executed steps as they see simulated ones: as a `Timeline`. This one knows the waits for bytes that were
not back in time, and nothing of what else happened when.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from lowtide.capture.builder import Recorded
from lowtide.core.plan import Plan, Problem
from lowtide.core.timeline import Lane, Span, Timeline
from lowtide.plan.policy import Policy, revised

# How often a policy may look at a step of a plan that had to wait: on a noisy machine some do for ever.
_MOST_LESSONS = 16
# For how many kinds of step what was recorded is kept for that.
_MOST_PLANNED = 16


class Wait(NamedTuple):
    """An operator that waited for a storage's bytes, and when; `demanded`: they had not been requested before."""

    storage: int
    op: int
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


class Taught:
    """The plans of the last kinds of step whose policy may look at how they went."""

    def __init__(self) -> None:
        self._planned: dict[Hashable, Planned] = {}

    def keep(self, signature: Hashable, planned: Planned) -> None:
        """Keep the plan of a kind of step, and forget the oldest where there are many."""
        self._planned.pop(signature, None)
        self._planned[signature] = planned
        if len(self._planned) > _MOST_PLANNED:
            del self._planned[next(iter(self._planned))]

    def get(self, signature: Hashable) -> Planned | None:
        """Return the plan of a kind of step that its policy may still change."""
        planned = self._planned.get(signature)
        return None if planned is None or planned.lessons >= _MOST_LESSONS else planned

    def learn(self, signature: Hashable, policy: Policy, timeline: Timeline) -> Planned | None:
        """Let the policy look at a step of a kept plan; return the plan that it changes that into."""
        planned = self._planned[signature]
        changed = revised(policy, planned.problem, planned.plan, timeline)
        taught = self._planned[signature] = replace(planned, plan=changed, lessons=planned.lessons + 1)
        return taught if changed != planned.plan else None


def executed(
    planned: Planned, waits: Sequence[Wait], *, begun_s: float, step_s: float, recompute_s: float, stall_s: float
) -> Timeline:
    """Return a step that followed a plan to its end."""
    trace = planned.problem.trace
    spans: list[Span] = []
    for wait in waits:
        start_s, end_s, op, storage = wait.start_s - begun_s, wait.end_s - begun_s, wait.op, wait.storage
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
