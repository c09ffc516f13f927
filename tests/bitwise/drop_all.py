"""A policy for tests: drops whatever can be made again, whether or not that is wise, and swaps the rest."""

from __future__ import annotations

from collections.abc import Iterator
from math import inf

from lowtide.core.plan import Plan, Problem, Swap
from lowtide.plan.auto.choose import candidates
from lowtide.plan.auto.mix import Dropping
from lowtide.plan.compose import compose
from lowtide.plan.costs.sweep import Sweep
from lowtide.plan.policy import View, until_covered


class DropAll:
    """Drops every gap; `once`: a storage that others are made from is made once and held, where there is room."""

    name = "drop_all"
    summary = "drops all it can"
    recomputes = True

    def __init__(self, *, once: bool) -> None:
        self._once = once

    def plan(self, problem: Problem) -> Plan:
        """Return the plan with the most recomputation."""
        facts = Sweep(problem)
        found = candidates(problem, facts)
        dropping = Dropping(problem, facts, found)
        dropped = {one.gap for one in found if dropping.remake_s[one.gap] < inf}
        mix = dropping.mix(found, dropped=dropped, once=self._once)
        swaps = [Swap(gap=one.gap, fetch_op=one.gap.before_op) for one in mix.swapped]
        return compose(self.name, problem, swaps, mix.recomputes)

    def victims(self, view: View, need_bytes: int) -> Iterator[int]:
        """Give up what was used least recently."""
        return until_covered(sorted(view.evictable(), key=view.last_access), view, need_bytes)
