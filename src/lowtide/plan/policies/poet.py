"""POET: Checkmate's programme with paging, its transfers waited for (Patil et al., ICML 2022), on our trace."""

from __future__ import annotations

from lowtide.core.plan import Plan, Problem
from lowtide.plan.compose import FITS, compose
from lowtide.plan.policies.checkmate import MOST_BLOCKS, Paging, solved
from lowtide.plan.policy import ACTIVATIONS, About, Classified, Family, Runs


class Poet:
    """Makes again or pages out, whichever takes less time in all."""

    name = "poet"
    summary = "POET: recomputation and paging in one integer programme, on our trace"
    about = About(
        kinds=ACTIVATIONS,
        family=Family.JOINT,
        classified=Classified(granularity="tensor", memory="device and drive", moment="static", objective="time"),
        runs=(Runs.REAL, Runs.SIMULATED),
        paper="Patil et al., ICML 2022",
        reconstructed=(
            "ours, on our trace: time instead of energy; every transfer counts in full, as on a device that waits for "
            f"it; beyond {MOST_BLOCKS} values several are one; where operators cannot run again it pages only"
        ),
        recomputes=True,
    )

    def plan(self, problem: Problem) -> Plan:
        """Return the optimum of the programme, if its plan fits."""
        if problem.trace.peak_bytes <= problem.budget_bytes:
            return compose(self.name, problem, notes=(FITS,))
        return solved(self.name, problem, paging=Paging.WAITED)
