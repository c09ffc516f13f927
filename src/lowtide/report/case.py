"""One policy on one problem: its plan, settled by what it observes, and the step that follows from it."""

from __future__ import annotations

from dataclasses import dataclass, replace

from lowtide.core.machine import Machine
from lowtide.core.plan import CodecCost, Plan, Problem
from lowtide.core.timeline import Timeline
from lowtide.core.trace import Reach, Trace
from lowtide.errors import BadArgument
from lowtide.memory.budget import parse_budget
from lowtide.plan.policy import Policy, Runs, revised
from lowtide.plan.views.layers import relu_results
from lowtide.simulate import simulate

# How often a policy that learns from steps may change its mind; Capuchin's feedback settles well before.
FEEDBACK_STEPS = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Settled:
    """A plan that its policy no longer changes, and the step under it.

    `bound`: the policy is a model that ignores the budget, and so does the step.
    """

    plan: Plan
    timeline: Timeline
    bound: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Encoding:
    """A codec before the spill, by its cost: what a ReLU wrote goes through it, or `everything` that swaps."""

    codec: CodecCost
    everything: bool = False

    def through(self, plan: Plan, trace: Trace) -> Plan:
        """Return `plan` with the codec on the swaps that it is for."""
        zeros = relu_results(trace)
        swaps = (
            replace(swap, codec=self.codec.name) if self.everything or swap.gap.storage in zeros else swap
            for swap in plan.swaps
        )
        return replace(plan, swaps=tuple(swaps))


def settle(
    problem: Problem, policy: Policy, *, allocator: str | None = None, encoding: Encoding | None = None
) -> Settled:
    """Return the step of a problem under a policy; raise `BudgetTooSmall` where it does not fit.

    Only what is worth moving in the budget moves. A policy with `observe` sees each step and may change its plan, until
    it does not: those steps count as trials. No policy knows of the `encoding`: it plans for a link on which bytes
    travel as they are.
    """
    problem = replace(problem, trace=problem.trace.under(problem.budget_bytes))
    plan = policy.plan(problem)
    bound = _ignores_budget(policy, plan)
    budget_bytes = plan.prediction.peak_bytes if bound and plan.prediction is not None else problem.budget_bytes

    def run(plan: Plan) -> Timeline:
        within = replace(problem, budget_bytes=budget_bytes)
        if encoding is not None:
            within = replace(within, codecs=(*problem.codecs, encoding.codec))
            plan = encoding.through(plan, problem.trace)
        timeline = simulate(within, plan, policy=policy, allocator=allocator)
        return replace(timeline, budget_bytes=problem.budget_bytes)

    timeline = run(plan)
    trials = 0
    while trials < FEEDBACK_STEPS and (changed := revised(policy, problem, plan, timeline)) != plan:
        trials += 1
        plan = changed
        timeline = run(plan)
    return Settled(plan=plan, timeline=replace(timeline, trials=plan.trials + trials), bound=bound)


def problem_of(
    trace: Trace, machine: Machine, *, budget_bytes: int, keep_times: bool = False, can_recompute: bool = True
) -> Problem:
    """Return the problem of a trace on a machine, with operator times as they would be there.

    The trace's own times are kept on request, and where the machine does not state how fast it computes.
    """
    from lowtide.estimate.predict import retime

    known = machine.flops_per_s is not None and machine.memory_bytes_per_s is not None
    timed = trace if keep_times or not known else retime(trace, machine)
    return Problem(
        trace=timed,
        machine=machine,
        budget_bytes=budget_bytes,
        can_recompute=can_recompute,
        can_place=can_place(trace, machine),
    )


def can_place(trace: Trace, machine: Machine) -> bool:
    """Tell whether a simulated step may have storages live in slow memory: where pages move and it is read in place."""
    return trace.reach is Reach.TOUCHED and bool(machine.addressable)


def budget_of(text: str, *, static_bytes: int, peak_bytes: int) -> int:
    """Return the bytes that a budget states: "2GiB", or "60%" of what activations add to the static bytes."""
    stated = text.strip()
    if not stated.endswith("%"):
        return parse_budget(stated).fast_bytes
    try:
        share = float(stated[:-1]) / 100
    except ValueError:
        share = -1.0
    if not 0 < share < 1e6:
        raise BadArgument(f"cannot read budget {stated!r}: write a share such as '60%' or bytes such as '2GiB'")
    return static_bytes + int(share * (peak_bytes - static_bytes))


def _ignores_budget(policy: Policy, plan: Plan) -> bool:
    return (
        set(policy.about.runs) == {Runs.MODEL}
        and plan.prediction is not None
        and plan.prediction.peak_bytes > plan.budget_bytes
    )
