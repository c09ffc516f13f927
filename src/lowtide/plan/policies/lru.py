"""Least recently used: no foresight at all, the reactive baseline of every cache."""

from __future__ import annotations

from lowtide.core.plan import Plan, Problem
from lowtide.plan.policy import About, Classified, Family, Runs


class Lru:
    """Waits until memory runs out, and then gives up what was touched longest ago."""

    name = "lru"
    summary = "reactive: gives up the least recently used when memory runs out"
    about = About(
        family=Family.BASELINE,
        classified=Classified(granularity="tensor", memory="device and host", moment="dynamic", objective="time"),
        runs=(Runs.REAL, Runs.SIMULATED),
    )

    def plan(self, problem: Problem) -> Plan:
        """Return a plan without decisions or prediction: what moves is only known when it happens."""
        notes = ("reactive: victims are chosen when memory runs out",)
        return Plan(policy=self.name, budget_bytes=problem.budget_bytes, notes=notes)
