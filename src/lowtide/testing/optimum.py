"""The best plan for a tiny problem, by trying them all: what the regret of a policy is measured against.

The plans tried are those with at most one decision a gap: every begin, end and request of a read inside it, and every
span in which it could be dropped and made again.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from math import prod

from lowtide.core.plan import Prediction, Problem, Recompute, Swap
from lowtide.core.trace import Gap
from lowtide.errors import BadArgument
from lowtide.plan.costs.sweep import Sweep
from lowtide.plan.views.lineage import Lineage, alive_when

MOST_PLANS = 50_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Best:
    """The fastest plan within the budget, and how many were tried."""

    swaps: tuple[Swap, ...]
    recomputes: tuple[Recompute, ...]
    prediction: Prediction
    tried: int


def optimum(problem: Problem, *, most_plans: int = MOST_PLANS) -> Best | None:
    """Return the fastest plan that fits the budget, or None if none does; it recomputes only if the problem can."""
    trace = problem.trace
    gaps = [gap for gap in trace.gaps() if trace.storages[gap.storage].nbytes]
    options = [list(_options(gap, problem)) for gap in gaps]
    count = prod(len(found) for found in options)
    if count > most_plans:
        raise BadArgument(f"{count} plans are too many to try: pass a trace with fewer gaps, or most_plans={count}")
    facts = Sweep(problem)
    lineage = Lineage(trace)
    best: Best | None = None
    for combination in product(*options):
        swaps = tuple(one for one in combination if isinstance(one, Swap))
        recomputes = _recipes(problem, lineage, swaps, [one for one in combination if isinstance(one, Gap)])
        if recomputes is None:
            continue
        prediction = facts.run(swaps, recomputes).prediction
        if prediction.peak_bytes > problem.budget_bytes:
            continue
        if best is None or prediction.step_s < best.prediction.step_s:
            best = Best(swaps=swaps, recomputes=recomputes, prediction=prediction, tried=count)
    return best


def _options(whole: Gap, problem: Problem) -> Iterator[Swap | Gap | None]:
    """Yield what can be done about one gap: nothing, a swap, or a span to be dropped in."""
    yield None
    for after_op in range(whole.after_op, whole.before_op):
        for before_op in range(after_op + 1, whole.before_op + 1):
            gap = Gap(storage=whole.storage, after_op=after_op, before_op=before_op)
            for fetch_op in range(after_op + 1, before_op + 1):
                yield Swap(gap=gap, fetch_op=fetch_op, tier=problem.tier)
            if problem.can_recompute:
                yield gap


def _recipes(
    problem: Problem, lineage: Lineage, swaps: tuple[Swap, ...], dropped: list[Gap]
) -> tuple[Recompute, ...] | None:
    """Return the recomputations that bring the dropped gaps back, or None if one cannot be made again."""
    spans = [*(swap.gap for swap in swaps), *dropped]
    found = []
    for gap in dropped:
        absent = {span.storage for span in spans if span.after_op <= gap.before_op < span.before_op}

        def available(storage: int, op: int = gap.before_op, absent: set[int] = absent) -> bool:
            return storage not in absent and alive_when(problem.trace, storage, op)

        ops = lineage.recipe([gap.storage], available=available, before_op=gap.before_op)
        if ops is None:
            return None
        found.append(Recompute(gap=gap, ops=ops))
    return tuple(found)
