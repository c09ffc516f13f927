"""Makes a plan of decisions: what they are predicted to take, and a note where they do not keep the budget."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from lowtide.core.plan import Place, Plan, Problem, Recompute, Swap
from lowtide.core.units import format_bytes
from lowtide.plan.costs.sweep import Sweep

FITS = "everything fits: nothing is moved"


NOT_AGAIN = "the executor cannot run operators again: nothing is discarded"
NOTHING_SLOW = "no slow memory that operators read in place: nothing is placed"


def nothing_to_place(policy: str, problem: Problem) -> Plan | None:
    """Return the plan of a policy that places storages where there is nothing to place, or nowhere to place it."""
    if problem.trace.peak_bytes <= problem.budget_bytes:
        return compose(policy, problem, notes=(FITS,))
    return None if problem.addressable() else compose(policy, problem, notes=(NOTHING_SLOW,))


def nothing_to_discard(policy: str, problem: Problem) -> Plan | None:
    """Return the plan of a policy that only recomputes where it has nothing to do, or may not do it."""
    if problem.trace.peak_bytes <= problem.budget_bytes:
        return compose(policy, problem, notes=(FITS,))
    return None if problem.can_recompute else compose(policy, problem, notes=(NOT_AGAIN,))


def fastest_that_fits(policy: str, problem: Problem, plans: Iterable[Plan]) -> Plan:
    """Return the fastest plan that keeps the budget; where none does, nothing is discarded.

    Then the step runs as without a plan: what does not fit leaves when memory runs out, and comes back on demand.
    """

    def rank(plan: Plan) -> tuple[float, ...]:
        assert plan.prediction is not None
        over = max(0, plan.prediction.peak_bytes - problem.budget_bytes)
        return (over, plan.prediction.step_s, plan.prediction.peak_bytes)

    best = min(plans, key=rank)
    assert best.prediction is not None
    if best.prediction.peak_bytes <= problem.budget_bytes:
        return best
    needed = format_bytes(best.prediction.peak_bytes)
    return compose(policy, problem, notes=(f"its leanest plan needs {needed}: nothing is discarded",))


def compose(
    policy: str,
    problem: Problem,
    swaps: Sequence[Swap] = (),
    recomputes: Sequence[Recompute] = (),
    places: Sequence[Place] = (),
    *,
    notes: Sequence[str] = (),
    trials: int = 0,
) -> Plan:
    """Return the plan of a policy, with its decisions in the order of the gaps."""
    swaps = tuple(sorted(swaps, key=lambda swap: swap.gap))
    recomputes = tuple(sorted(recomputes, key=lambda one: one.gap))
    places = tuple(sorted(places, key=lambda place: place.gap))
    facts = Sweep(problem)
    prediction = facts.run(swaps, recomputes, places).prediction
    if prediction.peak_bytes > problem.budget_bytes:
        needed, budget = format_bytes(prediction.peak_bytes), format_bytes(problem.budget_bytes)
        notes = (*notes, f"best effort: {needed} are needed, more than the budget of {budget}")
    for tier, room_bytes in facts.room_in_tiers(swaps, places).items():
        if room_bytes < 0:
            notes = (*notes, f"best effort: tier {tier!r} lacks {format_bytes(-room_bytes)}")
    return Plan(
        policy=policy,
        budget_bytes=problem.budget_bytes,
        swaps=swaps,
        recomputes=recomputes,
        places=places,
        prediction=prediction,
        notes=tuple(notes),
        trials=trials,
    )
