"""The best plan that has storages live in slow memory: of every system that needs no solver, and of a search of knobs.

The systems are those of plan/policies; the knobs those of DeepTM's strategy (plan/rl/strategy.py), on a grid beside
those that its agent finds; with the best of them storages then earn heat by what they cost, for many steps. All are
judged by the sweep, so that nothing here depends on how fast this machine is.
"""

from __future__ import annotations

from collections.abc import Sequence
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
from lowtide.plan.policy import Policy
from lowtide.plan.rl.strategy import Knobs, Strategy
from lowtide.plan.views.slow_memory import SlowMemory

_HORIZONS = (1.0, 4.0)
_LEADS = (2.0, 8.0)
_GAINS = (0.0, 0.25, 1.0)
_WEIGHTS = ((1.0, 0.0, 0.0, 0.0), (1.0, 0.25, 0.25, 0.25), (1.0, 0.0, 1.0, 0.5))
# With so many of the best knobs storages earn heat, for so many steps.
_TAUGHT = 4
_LESSONS = 12
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
    search = _Search(problem, facts, negligible=negligible)
    if not search.systems():
        search.knobs()
    return search.best


class _Search:
    """The best plan so far. Its parts return whether it is good enough to end with."""

    def __init__(self, problem: Problem, facts: Sweep, *, negligible: float) -> None:
        self.problem = problem
        self.facts = facts
        self.best: Placed | None = None
        self._may_gain = may_be_faster(problem)
        self._enough_s = (1 + negligible) * problem.trace.duration_s

    def systems(self) -> bool:
        """Try every system that needs no solver."""
        return any(self._judge(system.name, system.plan(self.problem).places) for system in _systems())

    def knobs(self) -> bool:
        """Try the grid of knobs, then earned heat with the best of them."""
        strategy = Strategy(SlowMemory(self.problem))
        many = len(self.problem.trace.ops) > MANY_OPS
        found: list[tuple[float, Knobs]] = []
        for weights, horizon, lead, gain in list(product(_WEIGHTS, _HORIZONS, _LEADS, _GAINS))[:: 4 if many else 1]:
            knobs = Knobs(weights=weights, horizon=horizon, lead=lead, gain=gain)
            places = strategy.places(knobs)
            seen = self.facts.run((), (), places).prediction
            if self._judge("a search", places, seen):
                return True
            found.append((seen.step_s, knobs))
        found.sort(key=lambda one: one[0])
        for knobs in (Knobs(), *(knobs for _, knobs in found[: _TAUGHT // (2 if many else 1)])):
            for places, outcome in strategy.lessons(self.facts, knobs, count=_LESSONS):
                if self._judge("a search", places, outcome.prediction):
                    return True
        return False

    def _judge(self, origin: str, places: Sequence[Place], seen: Prediction | None = None) -> bool:
        """Keep a plan if it is the best, and tell whether the best is good enough."""
        seen = self.facts.run((), (), places).prediction if seen is None else seen
        better = self.best is None or seen.step_s < self.best.prediction.step_s
        if better and seen.peak_bytes <= self.problem.budget_bytes and self._holds(places):
            self.best = Placed(
                origin=origin, places=tuple(sorted(places, key=lambda place: place.gap)), prediction=seen
            )
        return self.best is not None and not self._may_gain and self.best.prediction.step_s <= self._enough_s

    def _holds(self, places: Sequence[Place]) -> bool:
        return min(self.facts.room_in_tiers((), places).values(), default=0) >= 0


def may_be_faster(problem: Problem) -> bool:
    """Tell whether slow memory may make a step faster than fast memory alone: if it has channels of its own."""
    links = (problem.machine.links[tier] for tier in problem.addressable())
    return any(link.access is not None and link.access.own_channel for link in links)


def _systems() -> tuple[Policy, ...]:
    return (
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
