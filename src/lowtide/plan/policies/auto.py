"""The default: swaps the gaps whose transfers hide best, places every read, and leaves alone what fits.

The search (plan/auto/search.py) tries swaps by several ranks and targets until nothing is left to gain, and where
state moves those that a linear programme finds (plan/auto/cover.py). Of a step that
only reads, as in inference, it also tries to keep a fixed part and to stream the rest. If stalls
remain and operators can run again, it tries recomputation in the place of transfers. If stalls still remain, the
classic policies compete as well, the best plans are polished, and the winner is improved gap by gap
(plan/auto/exchange.py). If stalls remain and there are codecs, all of that is tried once more with every storage
swapped through the codec that is fastest for it (plan/auto/encode.py). Where operators can read slow memory in place,
the best plan of places competes (plan/auto/placed.py). Among the plans within `NEGLIGIBLE` of the fastest, the one
that moves least wins; where pages move, the fastest that moves about the least, within `NEGLIGIBLE_FOR_TRAFFIC` or, in
a step that only reads, `NEGLIGIBLE_FOR_READS`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace

from lowtide.core.plan import IDENTITY, Plan, Prediction, Problem, Recompute, Swap
from lowtide.core.trace import Kind
from lowtide.core.units import format_bytes, format_seconds
from lowtide.plan.auto.encode import ChosenCodecs
from lowtide.plan.auto.exchange import exchange
from lowtide.plan.auto.placed import Placed, best_placed, may_be_faster
from lowtide.plan.auto.search import HEADROOM, NEGLIGIBLE, Attempt, Search
from lowtide.plan.costs.sweep import Sweep
from lowtide.plan.policies.belady import furthest_next_use
from lowtide.plan.policies.capuchin import Capuchin, triggered_earlier
from lowtide.plan.policies.pooch import Pooch
from lowtide.plan.policies.swap_all import one_use_ahead
from lowtide.plan.policy import About, Classified, Family, Order, Runs

__all__ = ["HEADROOM", "NEGLIGIBLE", "Auto"]

# Capuchin weighs every pair of activations' gaps, PoocH predicts the step for every map it tries: with 1,200 gaps, the
# depth of a ResNet-300, that takes seconds of a core, and four times as long with twice as many.
MOST_GAPS_FOR_GUIDES = 1_200
MOST_ITEMS_FOR_GUIDES = 25_000
MOST_ITEMS_FOR_EVERYTHING = 100_000
# How many steps Capuchin's feedback gets.
LESSONS = 16


class Auto:
    """Chooses gaps by predicted stall and places each prefetch against the memory curve."""

    name = "auto"
    summary = "swaps where transfers hide, recomputes where swaps would stall, keeps the rest (the default)"
    about = About(
        family=Family.JOINT,
        classified=Classified(granularity="tensor", memory="device and host", moment="static", objective="time"),
        runs=(Runs.REAL, Runs.SIMULATED),
        recomputes=True,
        victims=Order.FURTHEST_CHEAPEST,
    )

    def plan(self, problem: Problem) -> Plan:
        """Return the fastest plan found, or the best effort if the budget is below the trace's floor."""
        facts = Sweep(problem)
        if problem.trace.peak_bytes <= problem.budget_bytes:
            return self._plan(problem, (), facts.run(()).prediction, note="everything fits: nothing is moved")
        floor_bytes = problem.trace.floor_bytes()
        if problem.budget_bytes < floor_bytes:
            # What operators read in place need not fit.
            placed = best_placed(problem, facts, negligible=NEGLIGIBLE)
            if placed is not None:
                return self._placed(problem, placed)
            swaps = tuple(Swap(gap=gap, fetch_op=gap.before_op, tier=problem.tier) for gap in problem.trace.gaps())
            note = (
                f"best effort: the budget of {format_bytes(problem.budget_bytes)} is below the floor of "
                f"{format_bytes(floor_bytes)}, so every gap is swapped and fetched on demand"
            )
            return self._plan(problem, swaps, facts.run(swaps).prediction, note=note)
        search = self._searched(problem, facts)
        best = search.winner()
        codecs = ChosenCodecs(problem, facts.options)
        if not search.settled() and codecs.any():
            # Transfers through codecs are shorter: other gaps may be worth swapping, and fewer worth making again.
            encoded = self._searched(problem, Sweep(problem, codecs=codecs), before=best)
            other = encoded.winner()
            faster = encoded.watched_s(other) < search.watched_s(best) * (1 - NEGLIGIBLE)
            if faster and (best.outcome.over or not other.outcome.over):
                search, best = encoded, other
        swaps = codecs.without_rounded_recipes(best.swaps, best.recomputes, problem.trace)
        prediction = best.prediction if swaps == best.swaps else facts.run(swaps, best.recomputes).prediction
        if may_be_faster(problem) or prediction.step_s > (1 + NEGLIGIBLE) * problem.trace.duration_s:
            placed = best_placed(problem, facts, negligible=NEGLIGIBLE)
            if placed is not None and placed.prediction.step_s < prediction.step_s:
                return self._placed(problem, placed)
        note = (
            f"swaps {len(swaps)} of {len(search.found)} gaps, {format_bytes(prediction.moved_out_bytes)}; "
            f"predicted stall {format_seconds(prediction.stall_s)}"
        )
        if through := Counter(swap.codec for swap in swaps if swap.codec != IDENTITY.name):
            note += "; through " + ", ".join(f"{name} {count}" for name, count in through.most_common())
        if best.recomputes:
            note += f"; makes {len(best.recomputes)} again in {format_seconds(prediction.recompute_s)}"
        return self._plan(problem, swaps, prediction, note=note, recomputes=best.recomputes)

    def _searched(self, problem: Problem, facts: Sweep, *, before: Attempt | None = None) -> Search:
        """Return a search that has come to its end; `before`: the best of one with other facts, which competes."""
        search = Search(problem, facts)
        search.swap()
        search.cover()
        search.stream()
        if problem.can_recompute and not search.settled():
            search.discard()
        if before is not None:
            search.compete(before.swaps, before.recomputes)
        if not search.settled():
            # In a long step whose pages move, everything is several times as much as has to move.
            if not facts.periodic or search.items <= MOST_ITEMS_FOR_EVERYTHING:
                search.compete(_swap_all(problem))
            search.compete(furthest_next_use(problem))
            weighed = sum(problem.trace.storages[one.gap.storage].kind is Kind.ACTIVATION for one in search.found)
            if weighed <= MOST_GAPS_FOR_GUIDES and search.items <= MOST_ITEMS_FOR_GUIDES:
                for guided in (*_learnt(Capuchin().plan(problem), facts), Pooch().plan(problem)):
                    search.compete(guided.swaps, guided.recomputes)
            search.polish()
            exchange(search)
        return search

    def _placed(self, problem: Problem, placed: Placed) -> Plan:
        """Return the plan of storages that live in slow memory."""
        prediction = placed.prediction
        note = (
            f"{len(placed.places)} stays in slow memory, found by {placed.origin}; operators take "
            f"{format_seconds(prediction.slow_s)} longer, predicted stall {format_seconds(prediction.stall_s)}"
        )
        return Plan(
            policy=self.name,
            budget_bytes=problem.budget_bytes,
            places=placed.places,
            prediction=prediction,
            notes=(note,),
        )

    def _plan(
        self,
        problem: Problem,
        swaps: tuple[Swap, ...],
        prediction: Prediction,
        *,
        note: str,
        recomputes: Sequence[Recompute] = (),
    ) -> Plan:
        return Plan(
            policy=self.name,
            budget_bytes=problem.budget_bytes,
            swaps=swaps,
            recomputes=tuple(recomputes),
            prediction=prediction,
            notes=(note,),
        )


def _learnt(plan: Plan, facts: Sweep) -> Iterator[Plan]:
    """Yield Capuchin's plan as it becomes by what it would observe, by prediction."""
    for _ in range(LESSONS):
        yield plan
        late = {at for at, _ in facts.run(plan.swaps, plan.recomputes).late}
        swaps = triggered_earlier(facts, plan.swaps, plan.recomputes, late=late)
        if swaps == plan.swaps:
            return
        plan = replace(plan, swaps=swaps)


def _swap_all(problem: Problem) -> tuple[Swap, ...]:
    return tuple(Swap(gap=gap, fetch_op=fetch_op, tier=problem.tier) for gap, fetch_op in one_use_ahead(problem.trace))
