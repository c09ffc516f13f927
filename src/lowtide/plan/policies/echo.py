"""Echo: recompute what is cheap and frees more than it takes, never what GEMMs stash (Zheng et al., ISCA 2020).

For a stashed value, its *cone* is what has to run again for it: grown from the value toward the inputs, through all
that is not in memory by then, stopping at what is. What a matrix product or a convolution makes is never discarded.
Symbols: *delta_mem* is what a cone frees less what it takes beside the value, which the paper stashes and which is made
on the way here; *delta_time* the time that all cones take with it; *epsilon* the share of the step that they may take.
"""

from __future__ import annotations

from lowtide.core.plan import Plan, Problem
from lowtide.plan.compose import compose, fastest_that_fits, nothing_to_discard
from lowtide.plan.policy import ACTIVATIONS, About, Classified, Family, Runs
from lowtide.plan.views.layers import LayerKind, kind_of
from lowtide.plan.views.values import Values

EPSILON = 0.05
_DEAR = frozenset({LayerKind.LINEAR, LayerKind.CONV, LayerKind.ATTENTION, LayerKind.EMBEDDING})


class Echo:
    """Accepts cones by size while they free memory and cost little."""

    name = "echo"
    summary = "Echo: recomputes cheap cones that free more than they pin, never matrix products"
    about = About(
        kinds=ACTIVATIONS,
        family=Family.RECOMPUTE,
        classified=Classified(granularity="tensor", memory="one memory", moment="static", objective="memory"),
        runs=(Runs.REAL, Runs.SIMULATED),
        paper="Zheng et al., ISCA 2020",
        reconstructed=(
            f"epsilon is {EPSILON:.0%} of the step; nothing is discarded while the step fits. The paper also stashes "
            "what a cone begins with; a program frees that after forward, so it is made again as well, and counted"
        ),
        recomputes=True,
    )

    def __init__(self, *, epsilon: float = EPSILON) -> None:
        self._epsilon = epsilon

    def plan(self, problem: Problem) -> Plan:
        """Return the accepted cones; the budget only says whether any are wanted, and whether they are enough."""
        if (idle := nothing_to_discard(self.name, problem)) is not None:
            return idle
        values = Values(problem)
        accepted = self.accepted(problem, values)
        plan = compose(
            self.name,
            problem,
            (),
            values.discards(dict.fromkeys(accepted)),
            notes=(f"{len(accepted)} of {len(values.waiting())} stashed values are made again",),
        )
        return fastest_that_fits(self.name, problem, [plan])

    def accepted(self, problem: Problem, values: Values) -> frozenset[int]:
        """Return the stashed values that are made again."""
        trace = problem.trace
        dear = {k for k, value in enumerate(values.all) if any(kind_of(trace.ops[op]) in _DEAR for op in value.ops)}
        most_s = self._epsilon * trace.duration_s
        gone: set[int] = set()
        room_bytes = 0
        for k in sorted(set(values.waiting()) - dear, key=lambda k: (-values.all[k].nbytes, k)):
            taken_bytes = sum(
                values.all[one].made_bytes for one in cone_of(k, values, gone=gone) if not values.all[one].waiting
            )
            # Cones run one after another, so they share what they take; and a cone that reaches into another makes
            # that one longer, too: all of them are estimated again.
            delta_mem = values.all[k].nbytes - max(0, taken_bytes - room_bytes)
            if delta_mem >= 0 and cones_s(values, gone | {k}) <= most_s:
                gone.add(k)
                room_bytes = max(room_bytes, taken_bytes)
        return frozenset(gone)


def cones_s(values: Values, gone: set[int]) -> float:
    """Return how long all cones take together."""
    return sum(values.all[one].cost_s for k in gone for one in cone_of(k, values, gone=gone))


def cone_of(k: int, values: Values, *, gone: set[int]) -> frozenset[int]:
    """Return the values that have to be made for one: itself, and what is not in memory by then."""
    cone, reached = {k}, [k]
    while reached:
        for source in values.all[reached.pop()].sources:
            if source not in cone and (source in gone or not values.all[source].waiting):
                cone.add(source)
                reached.append(source)
    return frozenset(cone)
