"""Keeps everything in memory: the step as it would run without Lowtide, and the yardstick for every other policy."""

from __future__ import annotations

from lowtide.core.plan import Plan, Problem
from lowtide.plan.costs.sweep import predict
from lowtide.plan.policy import About, Classified, Family, Order, Runs


class KeepAll:
    """Moves nothing, so it only runs where the whole step fits."""

    name = "keep_all"
    summary = "moves nothing: the step has to fit as it is"
    about = About(
        family=Family.BASELINE,
        classified=Classified(granularity="tensor", memory="one memory", moment="static", objective="time"),
        runs=(Runs.REAL, Runs.SIMULATED),
        victims=Order.NOTHING,
    )

    def plan(self, problem: Problem) -> Plan:
        """Return a plan without decisions."""
        return Plan(policy=self.name, budget_bytes=problem.budget_bytes, prediction=predict(problem, ()))
