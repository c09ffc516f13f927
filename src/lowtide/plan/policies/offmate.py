"""OffMate: recomputation and offloading in one integer programme, transfers beside compute, on our trace.

Only one sentence about it is known here: an integer programme over recomputation and offloading. The programme is ours:
what both directions of the link take longer than the compute they run beside is what offloading costs.
"""

from __future__ import annotations

from lowtide.core.plan import Plan, Problem
from lowtide.plan.compose import FITS, compose
from lowtide.plan.policies.checkmate import MOST_BLOCKS, Paging, solved
from lowtide.plan.policy import ACTIVATIONS, About, Classified, Family, Runs


class OffMate:
    """Makes again or offloads, and pays for transfers only where they do not hide."""

    name = "offmate"
    summary = "OffMate's joint programme: recomputation and offloading beside compute, on our trace"
    about = About(
        kinds=ACTIVATIONS,
        family=Family.JOINT,
        classified=Classified(granularity="tensor", memory="device and host", moment="static", objective="time"),
        runs=(Runs.REAL, Runs.SIMULATED),
        paper="OffMate, of Rockmate's line: known from one sentence",
        reconstructed=(
            "ours, on our trace: the programme is Checkmate's with a link whose time counts beyond the compute of each "
            f"pass; beyond {MOST_BLOCKS} values several are one; optimizer state stays"
        ),
        recomputes=True,
    )

    def plan(self, problem: Problem) -> Plan:
        """Return the optimum of the programme, if its plan fits."""
        if problem.trace.peak_bytes <= problem.budget_bytes:
            return compose(self.name, problem, notes=(FITS,))
        return solved(self.name, problem, paging=Paging.OVERLAPPED)
