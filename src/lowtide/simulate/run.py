"""Several steps of a training: the first without a plan, the next with one, and what a policy learns from watching."""

from __future__ import annotations

from dataclasses import dataclass, replace

from lowtide.core.plan import Plan, Problem
from lowtide.core.timeline import Timeline
from lowtide.errors import BadArgument
from lowtide.plan.policy import Policy, revised
from lowtide.simulate.resources import Resources
from lowtide.simulate.step import simulate


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """The steps of a run, and the plan each followed (None: the first, which is reactive).

    `trial_steps` are the steps run before the last plan was settled: the reactive one, those after which the policy
    changed its plan, and those the policy says it tried (`Plan.trials`). `trial_s` is their time; a trial of the
    policy's own, which was not simulated, counts as long as a settled step.
    """

    timelines: tuple[Timeline, ...]
    plans: tuple[Plan | None, ...]
    trial_steps: int
    trial_s: float

    @property
    def settled(self) -> Timeline:
        """The last step."""
        return self.timelines[-1]


def simulate_run(
    problem: Problem,
    policy: Policy,
    *,
    steps: int = 3,
    allocator: str | None = None,
    resources: Resources | None = None,
    strict: bool = False,
) -> Run:
    """Return `steps` steps under a policy: one without a plan, then with one.

    A policy with `observe(problem, plan, timeline) -> Plan` sees each planned step and may change the plan for the
    next. `Timeline.trials` counts the steps that came before the plan of that step was settled.
    """
    if steps < 1:
        raise BadArgument(f"{steps} steps are too few: simulate 1 or more")

    def run(plan: Plan | None) -> Timeline:
        return simulate(problem, plan, policy=policy, allocator=allocator, resources=resources, strict=strict)

    timelines, plans = [run(None)], list[Plan | None]([None])
    plan = policy.plan(problem) if steps > 1 else None
    unsettled = 1
    while len(timelines) < steps and plan is not None:
        timeline = run(plan)
        timelines.append(replace(timeline, trials=unsettled + plan.trials))
        plans.append(plan)
        changed = revised(policy, problem, plan, timeline)
        if changed != plan and len(timelines) < steps:
            unsettled = len(timelines)
        plan = changed
    own_trials = plans[-1].trials if plans[-1] is not None else 0
    return Run(
        timelines=tuple(timelines),
        plans=tuple(plans),
        trial_steps=unsettled + own_trials,
        trial_s=sum(step.step_s for step in timelines[:unsettled]) + own_trials * timelines[-1].step_s,
    )
