"""DTR: when memory runs out, discard what is cheapest to lose and make it again on need (Kirisame et al., ICLR 2021).

Symbols: c(t), the seconds it takes to make tensor t again, with everything discarded that hangs together with it (its
*evicted neighbourhood*); m(t), its bytes; s(t), the seconds since it was last touched.

There is no plan. Whenever an allocation finds no room, the tensor with the least h(t) is discarded, and what was
discarded is made again when an operator asks for it, which may discard others in turn:

    dtr      h = c / (m s)        msps     h = c / m        lru      h = 1 / s        largest  h = 1 / m
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from math import inf

from lowtide.core.plan import Plan, Problem
from lowtide.errors import BadArgument
from lowtide.plan.policy import About, Costs, Family, Runs, View, until_covered

Heuristic = Callable[[float, int, float], float]


def _ratio(cost_s: float, divisor: float) -> float:
    return cost_s / divisor if divisor > 0 else inf


HEURISTICS: dict[str, Heuristic] = {
    "dtr": lambda cost_s, nbytes, stale: _ratio(cost_s, nbytes * stale),
    "msps": lambda cost_s, nbytes, _: _ratio(cost_s, nbytes),
    "lru": lambda _cost_s, _nbytes, stale: _ratio(1.0, stale),
    "largest": lambda _cost_s, nbytes, _: _ratio(1.0, nbytes),
}


class Dtr:
    """Discards the tensor that is cheapest to make again for its bytes and its staleness, whenever memory runs out."""

    name = "dtr"
    summary = "DTR: when memory runs out, discards what is cheap to make again, large and stale"
    about = About(
        family=Family.RECOMPUTE,
        runs=(Runs.REAL, Runs.SIMULATED),
        paper="Kirisame et al., ICLR 2021",
        reconstructed=(
            "only what autograd saved is discarded; what cannot be made again is swapped when nothing else is left. In "
            "the runtime, neighbourhoods are the paper's approximation with union-find, and steps that are recorded "
            "swap; where the executor cannot run operators again, victims are swapped and all cost the same"
        ),
        recomputes=True,
        discards_victims=True,
    )

    def __init__(self, *, heuristic: str = "dtr") -> None:
        if heuristic not in HEURISTICS:
            raise BadArgument(f"unknown heuristic {heuristic!r}: choose one of {', '.join(HEURISTICS)}")
        self._heuristic = HEURISTICS[heuristic]

    def plan(self, problem: Problem) -> Plan:
        """Return a plan without decisions or prediction: what is discarded is only known when it happens."""
        how = (
            "discarded and made again"
            if problem.can_recompute
            else "swapped, since the executor cannot run operators again"
        )
        notes = (f"reactive: victims are chosen when memory runs out, and {how}",)
        return Plan(policy=self.name, budget_bytes=problem.budget_bytes, notes=notes)

    def victims(self, view: View, need_bytes: int) -> Iterator[int]:
        """Yield the least h first; where the view knows no costs, all cost the same and events stand for seconds."""
        records = view.evictable()
        newest = max((view.last_access(record) for record in records), default=0)

        def h(record: int) -> tuple[float, int]:
            last = view.last_access(record)
            if isinstance(view, Costs):
                cost_s, stale = view.recompute_s(record), view.staleness_s(record)
            else:
                cost_s, stale = 1.0, 1.0 + newest - last
            return self._heuristic(cost_s, view.nbytes(record), stale), last

        return until_covered(sorted(records, key=h), view, need_bytes)
