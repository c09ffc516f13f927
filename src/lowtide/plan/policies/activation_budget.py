"""PyTorch's `activation_memory_budget`: a knapsack over what to keep for backward, as a policy on our trace.

The compiler's partitioner takes a share between 0 (keep only what nothing else can give: recompute all that may be) and
1 (keep what it keeps by itself), and chooses by a 0/1 knapsack: *weight*, the bytes of a value; *gain*, the time to
make it again; *capacity*, the share of all bytes. Ours decides about the values of a recorded step instead of a
compiled graph, and looks for the largest share that fits the budget.
"""

from __future__ import annotations

import numpy as np

from lowtide.core.plan import Plan, Problem
from lowtide.plan.compose import compose, fastest_that_fits, nothing_to_discard
from lowtide.plan.policy import ACTIVATIONS, About, Classified, Family, Runs
from lowtide.plan.views.values import Values

# The knapsack's capacity in steps: bytes are rounded up to one of them.
STEPS = 512
# How often the share is halved on the way to the largest that fits.
HALVINGS = 7


class ActivationBudget:
    """Keeps what is dearest to make again within a share of the bytes, the largest share that fits."""

    name = "activation_budget"
    summary = "PyTorch's activation_memory_budget: a knapsack of values to keep, on our trace"
    about = About(
        kinds=ACTIVATIONS,
        family=Family.RECOMPUTE,
        classified=Classified(granularity="tensor", memory="one memory", moment="static", objective="time"),
        runs=(Runs.REAL, Runs.SIMULATED),
        paper="PyTorch, torch._functorch.config.activation_memory_budget",
        reconstructed=(
            "ours, on a recorded step: the compiler decides about a compiled graph; the share is searched for instead "
            f"of stated, and bytes are rounded up to {STEPS} steps"
        ),
        recomputes=True,
    )

    def plan(self, problem: Problem) -> Plan:
        """Return the plan of the largest share that fits."""
        if (idle := nothing_to_discard(self.name, problem)) is not None:
            return idle
        values = Values(problem)
        tried: list[Plan] = []
        low, high = 0.0, 1.0
        for share in [0.0, *[0.5] * HALVINGS]:
            share = share and (low + high) / 2
            kept = keep(values, share=share)
            gone = {k: None for k in values.waiting() if k not in kept}
            plan = compose(self.name, problem, (), values.discards(gone), notes=(f"keeps {share:.1%} of the bytes",))
            tried.append(plan)
            assert plan.prediction is not None
            if plan.prediction.peak_bytes <= problem.budget_bytes:
                low = share
            elif share:
                high = share
        return fastest_that_fits(self.name, problem, tried)


def keep(values: Values, *, share: float) -> frozenset[int]:
    """Return the values with the most time to make again whose bytes are within a share of all that wait."""
    waiting = values.waiting()
    total = sum(values.all[k].nbytes for k in waiting)
    if share >= 1 or not total:
        return frozenset(waiting)
    weights = [-(-values.all[k].nbytes * STEPS // total) for k in waiting]
    capacity = int(share * STEPS)
    best = np.zeros(capacity + 1)
    taken = np.zeros((len(waiting), capacity + 1), dtype=bool)
    for row, (k, weight) in enumerate(zip(waiting, weights, strict=True)):
        if weight <= capacity:
            with_it = best[: capacity + 1 - weight] + values.all[k].cost_s
            better = with_it > best[weight:]
            taken[row, weight:] = better
            best[weight:] = np.where(better, with_it, best[weight:])
    found, room = set(), capacity
    for row in reversed(range(len(waiting))):
        if taken[row, room]:
            found.add(waiting[row])
            room -= weights[row]
    return frozenset(found)
