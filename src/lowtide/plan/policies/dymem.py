"""Dymem: swap out when the last forward reader is done, fetch a number of operators ahead (Yang & Cheng, HPDC 2020).

Each tensor has a counter of the forward operators that have yet to read it, so that forks, joins and skip connections
need no special case: at zero it leaves. A gap of the trace begins exactly there. On the way back a read is requested
`distance_ops` operators before the one that needs it.
"""

from __future__ import annotations

from lowtide.core.plan import Plan, Problem, Swap
from lowtide.errors import BadArgument
from lowtide.plan.costs.sweep import predict
from lowtide.plan.policy import ACTIVATIONS, About, Classified, Family, Runs
from lowtide.plan.views.layers import crossing_gaps

# The largest with which it takes no more memory than vDNN on ResNet, Inception and DenseNet, as its paper reports.
DISTANCE_OPS = 3


class Dymem:
    """Moves every tensor that no forward operator reads any more, under every budget."""

    name = "dymem"
    summary = "Dymem: swaps out at the last forward reader, fetches a fixed number of operators ahead"
    about = About(
        kinds=ACTIVATIONS,
        family=Family.SWAP_OUT,
        classified=Classified(granularity="tensor", memory="device and host", moment="static", objective="memory"),
        runs=(Runs.REAL, Runs.SIMULATED),
        paper="Yang & Cheng, HPDC 2020",
        reconstructed=f"all but the two rules, known from a survey only; the distance of {DISTANCE_OPS} operators",
        adapts=False,
    )

    def __init__(self, *, distance_ops: int = DISTANCE_OPS) -> None:
        if distance_ops < 0:
            raise BadArgument(f"distance_ops is {distance_ops}: it counts operators, so pass 0 or more")
        self._distance_ops = distance_ops

    def plan(self, problem: Problem) -> Plan:
        """Return a swap for everything that waits for the backward pass."""
        swaps = tuple(
            Swap(gap=gap, fetch_op=max(gap.before_op - self._distance_ops, gap.after_op + 1), tier=problem.tier)
            for gap in sorted(crossing_gaps(problem.trace).values())
        )
        prediction = predict(problem, swaps)
        return Plan(policy=self.name, budget_bytes=problem.budget_bytes, swaps=swaps, prediction=prediction)
