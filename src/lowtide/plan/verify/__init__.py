"""The independent verifier: replays a plan on the problem's link and refuses it with numbers.

It shares no code with the policies or with the evaluator they use, so that a mistake there is found here. The rules:

V1  every decision names a storage, tier and codec the problem has, and lies inside one gap of the trace;
V2  a read is requested after the swap began and no later than it is due, and barriers lie inside the gap;
V3  two decisions about one storage neither overlap nor touch;
V4  at no instant are more bytes alive than the budget, with transfers in flight and recomputation counted;
V5  every operand of an operator, and everything autograd unpacks before it, is in memory when it begins, or in slow
    memory where the plan has it touched in place: it is reachable, not always fast;
V6  bytes are conserved: what leaves comes back once, and nothing is read before its write has landed;
V7  operators that run again can: the executor knows how, they are deterministic, and they find their operands;
V8  no tier holds more than its capacity;
V9  a codec that rounds is within the problem's error, and for activations that only backward reads from then on.

V1 to V3 are in shape.py and places.py, V7 in recipes.py, V4 to V6 in clock.py, V8 in places.py, V9 in rounding.py, for
plans that are executed: a simulated step may round what it likes. The replay is that of
docs/policies.md. Where pages move, it is that of a step which follows another of its kind, and pages.py tells which of
them are dirty. The problem states what the executor can do: `tiers`, `codecs`, `can_recompute`,
`can_place`.

Where an operator's memory is still held by writes it waits, and a prefetch that finds no room is put off: so V4 fails
only if the operator would not fit after all of that.
"""

from __future__ import annotations

from dataclasses import replace

from lowtide.core.plan import Plan, Problem
from lowtide.errors import PlanError
from lowtide.plan.verify.clock import Replay, run
from lowtide.plan.verify.recipes import burdens
from lowtide.plan.verify.rounding import check_rounding
from lowtide.plan.verify.shape import check_shape

__all__ = ["Replay", "check", "check_executable", "replay"]

# More than any step holds: V4 cannot fail.
_NO_BUDGET = 1 << 62


def check(plan: Plan, problem: Problem) -> None:
    """Raise `PlanError` unless the plan keeps every rule on this problem."""
    replay(plan, problem)


def check_executable(plan: Plan, problem: Problem) -> None:
    """Raise `PlanError` unless the executor can carry out the plan: all rules except room (V4 and V8).

    The budget is kept where memory is allocated, a tier's capacity where its bytes are. A policy that cannot meet them
    says so in its plan; what is missing then is given up when memory runs out, and what finds its tier full goes to the
    next or stays. A plan that the executor cannot follow would be followed in part.
    """
    check_shape(plan, problem)
    check_rounding(plan, problem)
    links = {name: replace(link, capacity_bytes=None) for name, link in problem.machine.links.items()}
    roomy = replace(problem, budget_bytes=_NO_BUDGET, machine=replace(problem.machine, links=links))
    run(plan, roomy, burdens(plan, problem))


def replay(plan: Plan, problem: Problem) -> Replay:
    """Return what the plan does on the problem's machine; raise `PlanError` where it breaks a rule."""
    check_shape(plan, problem)
    seen = run(plan, problem, burdens(plan, problem))
    promised = plan.prediction
    if promised is not None and (promised.moved_out_bytes, promised.moved_in_bytes) != (
        seen.moved_out_bytes,
        seen.moved_in_bytes,
    ):
        raise PlanError(
            f"V6: the plan predicts {promised.moved_out_bytes} bytes out and {promised.moved_in_bytes} in, "
            f"its swaps move {seen.moved_out_bytes} out and {seen.moved_in_bytes} in"
        )
    return seen
