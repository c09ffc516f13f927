"""The two-level budget planner of torchtitan's graph trainer, as a policy on our trace (pull request 4636, 2025).

For each value that waits for backward: keep it, make it again, or move it out. Symbols: n_i, its bytes; r_i, the time
to make it again; s_i, what its transfers take longer than the compute that the gap covers.

*Outer*: a linear programme shares the bytes that have to go over the layers. With x_i and y_i the parts of value i that
are made again and moved,

    min  sum_i r_i x_i + s_i y_i
    s.t. sum_i n_i (x_i + y_i) >= need,   x_i + y_i <= 1,   all transfers <= the compute of the step

and a layer's share are the n_i (x_i + y_i) of its values.
*Inner*: in each layer the values with the least time per byte go, each in its cheaper way, until its share is covered.

Random operators are never run again, and views never move: here they are no storages of their own. The need is that of
the peak; where other operators do not fit then, it is raised.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from math import inf

from lowtide.core.plan import Plan, Problem
from lowtide.core.trace import Gap
from lowtide.core.units import format_bytes
from lowtide.plan.auto.choose import Candidate, candidates
from lowtide.plan.auto.layout import lay_out
from lowtide.plan.auto.mix import Discarding, swaps_only
from lowtide.plan.compose import FITS, compose
from lowtide.plan.costs.sweep import Sweep
from lowtide.plan.policy import ACTIVATIONS, About, Classified, Family, Order, Runs, activation_gaps
from lowtide.plan.programme import Programme
from lowtide.plan.views.layers import layers_of

# How often the need is raised, by this share of the bytes that could go, before everything does.
ROUNDS = 8
_SOLVER_S = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Value:
    """A gap whose bytes could go, the layer that made them, and what either way costs."""

    one: Candidate
    layer: int
    again_s: float
    exposed_s: float

    @property
    def cheaper_s(self) -> float:
        """The time that giving it up costs."""
        return min(self.again_s, self.exposed_s)

    @property
    def made_again(self) -> bool:
        """Whether making it again is the cheaper way."""
        return self.again_s < self.exposed_s


def shares(values: Sequence[Value], *, need_bytes: int, link_s: float) -> dict[int, float]:
    """Return the bytes that each layer gives up, by the outer programme; `link_s`: what transfers may take in all."""
    programme = Programme()
    again = [programme.variable(cost=min(one.again_s, 1e9), upper=float(one.again_s < inf)) for one in values]
    moved = [programme.variable(cost=one.exposed_s, upper=1.0) for one in values]
    short = programme.variable(cost=1e6)  # what the link does not take; the inner level still moves it
    terms = {k: float(one.one.nbytes) for ks in (again, moved) for k, one in zip(ks, values, strict=True)}
    programme.at_least(terms, float(min(need_bytes, sum(one.one.nbytes for one in values))))
    for first, second in zip(again, moved, strict=True):
        programme.at_least({first: -1.0, second: -1.0}, -1.0)
    transfers = {k: -(one.one.write_s + one.one.read_s) for k, one in zip(moved, values, strict=True)}
    programme.at_least({**transfers, short: 1.0}, -link_s)
    solution = programme.solve(seconds=_SOLVER_S, gap=0.0, relaxed=True)
    given: dict[int, float] = {}
    for first, second, one in zip(again, moved, values, strict=True):
        part = 1.0 if solution is None else solution.values[first] + solution.values[second]
        given[one.layer] = given.get(one.layer, 0.0) + part * one.one.nbytes
    return given


def chosen(values: Sequence[Value], given: dict[int, float]) -> list[Value]:
    """Return what goes, by the inner level: in each layer the least time per byte first."""
    left = dict(given)
    found = []
    for one in sorted(values, key=lambda one: (one.cheaper_s / one.one.nbytes, one.one.gap)):
        if left.get(one.layer, 0.0) > 0.5:
            found.append(one)
            left[one.layer] -= one.one.nbytes
    return found


class LayerBudgets:
    """Shares the bytes that have to go over layers by a linear programme, and chooses inside each greedily."""

    name = "layer_budgets"
    summary = "torchtitan's two-level planner: an LP over layers, greedy inside, on our trace"
    about = About(
        kinds=ACTIVATIONS,
        family=Family.JOINT,
        classified=Classified(granularity="tensor", memory="device and host", moment="static", objective="time"),
        runs=(Runs.REAL, Runs.SIMULATED),
        paper="torchtitan, graph trainer, pull request 4636",
        reconstructed=(
            "ours, on a recorded step: the objective of the linear programme and the order of the greedy level are not "
            f"in the pull request's text; the need is raised up to {ROUNDS} times where the plan does not fit"
        ),
        recomputes=True,
        victims=Order.FURTHEST,
    )

    def plan(self, problem: Problem) -> Plan:
        """Return the first plan that fits, or the one that gives up everything."""
        if problem.trace.peak_bytes <= problem.budget_bytes:
            return compose(self.name, problem, notes=(FITS,))
        facts = Sweep(problem)
        found = candidates(problem, facts, activation_gaps(problem.trace))
        discarding = Discarding(problem, facts, found) if problem.can_recompute else None
        values = values_of(problem, found, {} if discarding is None else discarding.remake_s)
        total_bytes = sum(one.one.nbytes for one in values)
        need_bytes = problem.trace.peak_bytes - problem.budget_bytes
        step = max(1, (total_bytes - need_bytes) // ROUNDS)
        plan = compose(self.name, problem)
        for round_ in range(ROUNDS + 1):
            wanted = need_bytes + round_ * step if round_ < ROUNDS else total_bytes
            given = shares(values, need_bytes=wanted, link_s=facts.start_s[-1])
            gone = chosen(values, given)
            again = {one.one.gap for one in gone if one.made_again}
            mix = swaps_only([one.one for one in gone])
            if discarding is not None and again:
                mix = discarding.mix([one.one for one in gone], discarded=again, once=False)
            swaps = lay_out(problem, facts, mix.swapped, comfort_bytes=problem.budget_bytes, margin=inf)
            note = (
                f"{len(given)} layers give up {format_bytes(round(sum(given.values())))}: {len(swaps)} values move, "
                f"{len(mix.recomputes)} are made again"
            )
            plan = compose(self.name, problem, swaps, mix.recomputes, notes=(note,), trials=round_ + 1)
            assert plan.prediction is not None
            if plan.prediction.peak_bytes <= problem.budget_bytes:
                return plan
        everything = lay_out(problem, facts, found, comfort_bytes=problem.budget_bytes, margin=inf)
        return compose(self.name, problem, everything, notes=("no share fits: everything moves",), trials=plan.trials)


def values_of(problem: Problem, found: Sequence[Candidate], remake_s: dict[Gap, float]) -> list[Value]:
    """Return what could go, with its layer: that of the operator that made it."""
    starts = [layer.forward.start for layer in layers_of(problem.trace)]
    values = []
    for one in found:
        producer = problem.trace.storages[one.gap.storage].producer
        layer = max(0, bisect_right(starts, producer) - 1) if producer is not None else 0
        exposed_s = max(0.0, -one.slack_s)
        values.append(Value(one=one, layer=layer, again_s=remake_s.get(one.gap, inf), exposed_s=exposed_s))
    return values
