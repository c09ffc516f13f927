"""A policy for tests: discards whatever can be made again, whether or not that is wise, and swaps the rest."""

from __future__ import annotations

from math import inf

from lowtide.core.plan import Plan, Problem, Swap
from lowtide.plan.auto.choose import candidates
from lowtide.plan.auto.mix import Discarding
from lowtide.plan.compose import compose
from lowtide.plan.costs.sweep import Sweep
from lowtide.plan.policy import About, Family, Runs


class DiscardAll:
    """Discards every gap; `once`: a storage that others are made from is made once and held, where there is room."""

    name = "discard_all"
    summary = "discards all it can"
    about = About(family=Family.RECOMPUTE, runs=(Runs.REAL,), recomputes=True)

    def __init__(self, *, once: bool) -> None:
        self._once = once

    def plan(self, problem: Problem) -> Plan:
        """Return the plan with the most recomputation."""
        facts = Sweep(problem)
        found = candidates(problem, facts)
        discarding = Discarding(problem, facts, found)
        discarded = {one.gap for one in found if discarding.remake_s[one.gap] < inf}
        mix = discarding.mix(found, discarded=discarded, once=self._once)
        swaps = [Swap(gap=one.gap, fetch_op=one.gap.before_op) for one in mix.swapped]
        return compose(self.name, problem, swaps, mix.recomputes)
