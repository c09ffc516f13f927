"""Infinite memory: the step as it would be if the budget did not exist, which no system can beat."""

from __future__ import annotations

from lowtide.core.plan import Plan, Problem
from lowtide.core.units import format_bytes
from lowtide.plan.costs.sweep import predict
from lowtide.plan.policy import About, Classified, Family, Order, Runs


class InfiniteMemory:
    """Moves nothing and ignores the budget: the bound that other policies are measured against."""

    name = "infinite_memory"
    summary = "the bound: nothing is moved, as if memory were endless"
    about = About(
        family=Family.BASELINE,
        classified=Classified(granularity="tensor", memory="one memory", moment="static", objective="time"),
        runs=(Runs.MODEL,),
        victims=Order.NOTHING,
    )

    def plan(self, problem: Problem) -> Plan:
        """Return a plan without decisions; its prediction may pass the budget, and says so."""
        prediction = predict(problem, ())
        notes: tuple[str, ...] = ()
        if prediction.peak_bytes > problem.budget_bytes:
            taken, budget = format_bytes(prediction.peak_bytes), format_bytes(problem.budget_bytes)
            notes = (f"the budget of {budget} is ignored: {taken} are taken",)
        return Plan(policy=self.name, budget_bytes=problem.budget_bytes, prediction=prediction, notes=notes)
