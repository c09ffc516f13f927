"""First touch: what is allocated while fast memory has room stays there, the rest in slow memory; nothing ever moves.

What Linux does on machines with several memory nodes, and the baseline of every paper on heterogeneous memory.
"""

from __future__ import annotations

from lowtide.core.plan import Plan, Problem
from lowtide.plan.compose import compose, nothing_to_place
from lowtide.plan.policy import About, Classified, Family, Runs
from lowtide.plan.views.slow_memory import SlowMemory


class FirstTouch:
    """Fills fast memory in the order of allocation."""

    name = "first_touch"
    summary = "slow memory read in place: fast memory is filled in the order of allocation, nothing moves"
    about = About(
        family=Family.PLACEMENT,
        classified=Classified(granularity="page", memory="fast and slow memory", moment="dynamic", objective="time"),
        runs=(Runs.EMULATED, Runs.SIMULATED),
        paper="the default of Linux on NUMA machines",
        reconstructed="what an operator needs beside its operands always finds fast memory",
    )

    def plan(self, problem: Problem) -> Plan:
        """Return a place for everything that finds fast memory full."""
        if (nothing := nothing_to_place(self.name, problem)) is not None:
            return nothing
        memory = SlowMemory(problem)
        slow = memory.fill(sorted(memory.lives, key=lambda storage: (memory.span(storage)[0], storage)))
        return compose(self.name, problem, places=[memory.for_life(storage) for storage in slow])
