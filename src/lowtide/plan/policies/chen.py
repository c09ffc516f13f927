"""Sublinear memory: keep some values, make the rest again segment by segment (Chen et al., arXiv 1604.06174, 2016).

Symbols: *n* values wait for backward; a *checkpoint* is one that is kept; a *segment* is what lies between two of them,
made again at once when backward reaches it. Checkpoints are articulation points: everything after one is made through
it, so a segment needs nothing from before. *b* is the greedy's limit on the bytes of a segment.

`chen_sqrt` keeps every k-th articulation point, k the root of their number: memory of the order of the root of n, for
one more forward pass. `chen_greedy` sums bytes along the network and checkpoints at the first articulation point after
b of them; b is searched. A network whose layers are all bridged, as a U-Net's, has hardly any such point:
`linearised=True` takes every value in the order of the forward pass for one, at the price of segments that reach back
into others.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import ceil, sqrt

from lowtide.core.plan import Plan, Problem
from lowtide.plan.compose import compose, fastest_that_fits, nothing_to_discard
from lowtide.plan.policy import ACTIVATIONS, About, Classified, Family, Runs
from lowtide.plan.views.values import Values

# The limits that the greedy tries, as shares of all bytes that wait.
LIMITS = 24


class ChenSqrt:
    """Keeps every k-th articulation point."""

    name = "chen_sqrt"
    summary = "Chen: keeps every root-of-n-th articulation point, makes segments again"
    about = About(
        kinds=ACTIVATIONS,
        family=Family.RECOMPUTE,
        classified=Classified(granularity="layer", memory="one memory", moment="static", objective="memory"),
        runs=(Runs.REAL, Runs.SIMULATED),
        paper="Chen et al., arXiv 1604.06174, 2016",
        reconstructed="nothing is discarded while the step fits; a segment made again is kept until its last use",
        recomputes=True,
    )

    def __init__(self, *, linearised: bool = False) -> None:
        self._linearised = linearised

    def plan(self, problem: Problem) -> Plan:
        """Return the plan with the checkpoints of the paper, if it fits."""
        if (idle := nothing_to_discard(self.name, problem)) is not None:
            return idle
        values = Values(problem)
        points = values.waiting() if self._linearised else values.cuts()
        kept = points[:: max(1, ceil(sqrt(len(points))))]
        plan = compose(
            self.name,
            problem,
            (),
            values.discards(moments_of(values, kept)),
            notes=(f"keeps {len(kept)} of {len(points)} points",),
        )
        return fastest_that_fits(self.name, problem, [plan])


class ChenGreedy:
    """Keeps the first articulation point after every b bytes."""

    name = "chen_greedy"
    summary = "Chen: keeps an articulation point after every b bytes, the best b that fits"
    about = About(
        kinds=ACTIVATIONS,
        family=Family.RECOMPUTE,
        classified=Classified(granularity="layer", memory="one memory", moment="static", objective="time"),
        runs=(Runs.REAL, Runs.SIMULATED),
        paper="Chen et al., arXiv 1604.06174, 2016",
        reconstructed=f"{LIMITS} limits are tried; the fastest plan that fits wins",
        recomputes=True,
    )

    def __init__(self, *, linearised: bool = False) -> None:
        self._linearised = linearised

    def plan(self, problem: Problem) -> Plan:
        """Return the fastest of the plans that fit."""
        if (idle := nothing_to_discard(self.name, problem)) is not None:
            return idle
        values = Values(problem)
        points = values.waiting() if self._linearised else values.cuts()
        return fastest_that_fits(
            self.name,
            problem,
            (
                compose(
                    self.name,
                    problem,
                    (),
                    values.discards(moments_of(values, kept)),
                    notes=(f"keeps {len(kept)} of {len(points)} points",),
                )
                for kept in _by_limit(values, points)
            ),
        )


def moments_of(values: Values, kept: Sequence[int]) -> dict[int, int]:
    """Return when values are made again if some are kept: each segment at once, when backward first needs it."""
    moments: dict[int, int] = {}
    segment: list[int] = []
    checkpoints = set(kept)
    for k in values.waiting():
        if k in checkpoints:
            moments |= values.at_once(segment)
            segment = []
        else:
            segment.append(k)
    return moments | values.at_once(segment)


def _by_limit(values: Values, points: Sequence[int]) -> Iterator[tuple[int, ...]]:
    """Yield the checkpoints for each limit on the bytes of a segment, without repeating any."""
    total = sum(value.nbytes for value in values.all)
    allowed = set(points)
    seen: set[tuple[int, ...]] = set()
    for part in range(LIMITS + 1):
        limit_bytes, held, kept = total * part // LIMITS, 0, []
        for k in values.waiting():
            held += values.all[k].nbytes
            if k in allowed and held > limit_bytes:
                kept.append(k)
                held = 0
        if tuple(kept) not in seen:
            seen.add(tuple(kept))
            yield tuple(kept)
