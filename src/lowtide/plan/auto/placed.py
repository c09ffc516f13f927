"""The best plan that has storages live in slow memory: of every system that needs no solver, and of a search of knobs.

The systems are those of plan/policies; the knobs those of DeepTM's strategy (plan/rl/strategy.py), on a grid beside
those that its agent finds. All are judged by the sweep, so that nothing here depends on how fast this machine is.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product

from lowtide.core.plan import Place, Prediction, Problem
from lowtide.plan.costs.sweep import Sweep
from lowtide.plan.policies.bandwidth_aware import BandwidthAware
from lowtide.plan.policies.cori import Cori
from lowtide.plan.policies.deeptm import DeepTm
from lowtide.plan.policies.first_touch import FirstTouch
from lowtide.plan.policies.halo import Halo
from lowtide.plan.policies.sentinel import Sentinel
from lowtide.plan.policies.soft2lm import Soft2Lm
from lowtide.plan.policies.tahoe import Tahoe
from lowtide.plan.policies.tiertrain import TierTrain
from lowtide.plan.policies.two_level import TwoLevel
from lowtide.plan.rl.strategy import Knobs, Strategy
from lowtide.plan.views.slow_memory import SlowMemory

_HORIZONS = (1.0, 4.0)
_LEADS = (2.0, 8.0)
_GAINS = (0.0, 0.25, 1.0)
_WEIGHTS = ((1.0, 0.0, 0.0, 0.0), (1.0, 0.25, 0.25, 0.25), (1.0, 0.0, 1.0, 0.5))
# Steps of more operators get a coarser grid: judging a plan takes longer there.
MANY_OPS = 3_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Placed:
    """The best of them: whose it is, its places, and what it is predicted to take."""

    origin: str
    places: tuple[Place, ...]
    prediction: Prediction


def best_placed(problem: Problem, facts: Sweep, *, negligible: float) -> Placed | None:
    """Return the fastest plan of places that keeps the budget and every tier's capacity, if there is one.

    The search ends with a plan that loses no more than a `negligible` share of the step, unless one may even gain.
    """
    if not problem.addressable():
        return None
    best: Placed | None = None
    may_gain, enough_s = may_be_faster(problem), (1 + negligible) * problem.trace.duration_s
    for origin, places in _candidates(problem):
        seen = facts.run((), (), places).prediction
        fits = seen.peak_bytes <= problem.budget_bytes and min(facts.room_in_tiers((), places).values(), default=0) >= 0
        if fits and (best is None or seen.step_s < best.prediction.step_s):
            best = Placed(origin=origin, places=tuple(sorted(places, key=lambda place: place.gap)), prediction=seen)
        if best is not None and not may_gain and best.prediction.step_s <= enough_s:
            break
    return best


def may_be_faster(problem: Problem) -> bool:
    """Tell whether slow memory may make a step faster than fast memory alone: if it has channels of its own."""
    links = (problem.machine.links[tier] for tier in problem.addressable())
    return any(link.access is not None and link.access.own_channel for link in links)


def _candidates(problem: Problem) -> Iterator[tuple[str, Sequence[Place]]]:
    systems = (
        DeepTm(),
        DeepTm(learned=False),
        Sentinel(),
        Cori(),
        Tahoe(),
        Halo(),
        TierTrain(),
        TwoLevel(),
        BandwidthAware(),
        FirstTouch(),
        Soft2Lm(),
    )
    for system in systems:
        yield system.name, system.plan(problem).places
    strategy = Strategy(SlowMemory(problem))
    every = 1 if len(problem.trace.ops) <= MANY_OPS else 4
    for weights, horizon, lead, gain in list(product(_WEIGHTS, _HORIZONS, _LEADS, _GAINS))[::every]:
        yield "a search", strategy.places(Knobs(weights=weights, horizon=horizon, lead=lead, gain=gain))
