"""Swaps every gap and fetches one use ahead: the classic scheme of vDNN (Rhu et al., MICRO 2016, "vDNN-all").

vDNN offloads the input of every layer as soon as the layer has run, and prefetches it while the layer before it in the
backward pass runs. Here the unit is a gap and "the layer before" is the operator with the previous use of any gap.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator

from lowtide.core.plan import Plan, Problem, Swap
from lowtide.core.trace import Gap, Trace
from lowtide.plan.costs.sweep import predict
from lowtide.plan.policy import About, Classified, Family, Runs


class SwapAll:
    """Moves everything that can be moved, under every budget."""

    name = "swap_all"
    summary = "swaps every gap, fetched one use ahead"
    about = About(
        family=Family.BASELINE,
        classified=Classified(granularity="tensor", memory="device and host", moment="static", objective="memory"),
        runs=(Runs.REAL, Runs.SIMULATED),
        adapts=False,
    )

    def plan(self, problem: Problem) -> Plan:
        """Return a swap for every gap of the trace."""
        swaps = tuple(
            Swap(gap=gap, fetch_op=fetch_op, tier=problem.tier) for gap, fetch_op in one_use_ahead(problem.trace)
        )
        prediction = predict(problem, swaps)
        return Plan(policy=self.name, budget_bytes=problem.budget_bytes, swaps=swaps, prediction=prediction)


def one_use_ahead(trace: Trace) -> Iterator[tuple[Gap, int]]:
    """Yield every gap with the operator of the use before its own, or its own where that comes too soon.

    Too soon is also an operator of the next step for what that has an heir of: nothing can be asked for it there.
    """
    gaps, heirs = trace.gaps(), trace.heirs()
    uses = sorted({gap.before_op for gap in gaps})
    if any(gap.before_op > len(trace.ops) for gap in gaps):
        # Before the first use of a step comes the last one of the step before.
        in_step = {use % len(trace.ops) for use in uses}
        uses = sorted(in_step | {use + len(trace.ops) for use in in_step})
    for gap in gaps:
        position = bisect_left(uses, gap.before_op)
        earlier = uses[position - 1] if position else -1
        too_soon = earlier <= gap.after_op or (earlier >= len(trace.ops) and gap.storage in heirs)
        yield gap, gap.before_op if too_soon else earlier
