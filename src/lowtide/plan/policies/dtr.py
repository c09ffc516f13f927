"""DTR: when memory runs out, discard what is cheapest to lose and make it again on need (Kirisame et al., ICLR 2021).

Symbols: c(t), the seconds it takes to make tensor t again, with everything discarded that hangs together with it (its
*evicted neighbourhood*); m(t), its bytes; s(t), the seconds since it was last touched.

There is no plan. Whenever an allocation finds no room, the tensor with the least h(t) is discarded, and what was
discarded is made again when an operator asks for it, which may discard others in turn:

    dtr      h = c / (m s)        msps     h = c / m        lru      h = 1 / s        largest  h = 1 / m
"""

from __future__ import annotations

from dataclasses import replace

from lowtide.core.plan import Plan, Problem
from lowtide.errors import BadArgument
from lowtide.plan.policy import About, Classified, Family, Order, Runs

HEURISTICS = {
    "dtr": Order.CHEAPEST_STALE,
    "msps": Order.CHEAPEST,
    "lru": Order.OLDEST,
    "largest": Order.LARGEST,
}


class Dtr:
    """Discards the tensor that is cheapest to make again for its bytes and its staleness, whenever memory runs out."""

    name = "dtr"
    summary = "DTR: when memory runs out, discards tensors that are large, stale and cheap to make again"
    about = About(
        family=Family.RECOMPUTE,
        classified=Classified(granularity="tensor", memory="one memory", moment="dynamic", objective="time"),
        runs=(Runs.REAL, Runs.SIMULATED),
        paper="Kirisame et al., ICLR 2021",
        reconstructed=(
            "only what forward made is discarded; what cannot be made again is swapped when nothing else is left. For "
            "real, neighbourhoods are the paper's approximation with union-find (h with e*), and what is discarded for "
            "the first time is swapped and made again for comparison, or on an accelerator in a recorded step; where "
            "the executor cannot run operators again, victims are swapped and all cost the same"
        ),
        recomputes=True,
        discards_victims=True,
        victims=Order.CHEAPEST_STALE,
    )

    def __init__(self, *, heuristic: str = "dtr") -> None:
        if heuristic not in HEURISTICS:
            raise BadArgument(f"unknown heuristic {heuristic!r}: choose one of {', '.join(HEURISTICS)}")
        self.about = replace(Dtr.about, victims=HEURISTICS[heuristic])

    def plan(self, problem: Problem) -> Plan:
        """Return a plan without decisions or prediction: what is discarded is only known when it happens."""
        how = (
            "discarded and made again"
            if problem.can_recompute
            else "swapped, since the executor cannot run operators again"
        )
        notes = (f"reactive: victims are chosen when memory runs out, and {how}",)
        return Plan(policy=self.name, budget_bytes=problem.budget_bytes, notes=notes)
