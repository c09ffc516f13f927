"""Random legal plans for a problem: parts of gaps, prefetches, barriers and recomputation."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from lowtide.core.plan import Place, Plan, Problem, Recompute, Swap
from lowtide.core.trace import Gap, Life
from lowtide.plan.costs.sweep import Sweep
from lowtide.plan.views.lineage import Lineage, alive_when

if TYPE_CHECKING:
    from hypothesis.strategies import DrawFn, SearchStrategy


def plans(problem: Problem) -> SearchStrategy[Plan]:
    """Return a strategy for plans that keep every rule of the verifier but the budget (V4).

    They recompute if the problem can. The plans' own budget is the problem's.
    """
    from hypothesis import strategies as st

    @st.composite
    def build(draw: DrawFn) -> Plan:
        swaps: list[Swap] = []
        discarded: list[Gap] = []
        heirs = problem.trace.heirs()
        facts = Sweep(problem)
        for whole in problem.trace.gaps():
            choice = draw(st.sampled_from(("keep", "swap", "discard") if problem.can_recompute else ("keep", "swap")))
            outlives = whole.storage in heirs and whole.before_op > len(problem.trace.ops)
            gap = whole if outlives else draw(_parts(whole))
            if choice == "swap":
                swap = draw(_swaps(gap, problem))
                if outlives and swap.fetch_op >= len(problem.trace.ops):  # nothing can be asked for it there
                    swap = replace(swap, fetch_op=gap.before_op, arrived_op=None)
                swaps.append(swap)
            elif choice == "discard" and facts.may_discard(gap):
                discarded.append(gap)
        # What turns out not to be recomputable stays: more is in memory then, so the other recipes still hold.
        recomputes = recompute_gaps(problem, swaps=swaps, discarded=discarded)
        return Plan(
            policy="random",
            budget_bytes=problem.budget_bytes,
            swaps=tuple(swaps),
            recomputes=tuple(one for one in recomputes if one is not None),
        )

    return build()


def placed_plans(problem: Problem) -> SearchStrategy[Plan]:
    """Return a strategy for plans that have some storages live in slow memory for a while, and swap others."""
    from hypothesis import strategies as st

    @st.composite
    def build(draw: DrawFn) -> Plan:
        swapping = draw(plans(replace(problem, can_recompute=False)))
        places: list[Place] = []
        for storage, life in problem.trace.lives().items():
            nbytes = problem.trace.storages[storage].nbytes
            if not nbytes or not draw(st.booleans()):
                continue
            part = draw(st.none() | st.integers(1, nbytes))
            first = draw(_places(storage, life, problem, earliest=life.begin_op))
            found = [first]
            if first.until_op + 1 < len(problem.trace.ops) and first.until_op + 1 < life.end_op and draw(st.booleans()):
                second = draw(_places(storage, life, problem, earliest=first.until_op + 1))
                if second.until_op - len(problem.trace.ops) < first.from_op or not life.forever:
                    found.append(second)
            places += [replace(place, nbytes=part) for place in found]
        placed = {place.storage for place in places}
        swaps = tuple(swap for swap in swapping.swaps if swap.gap.storage not in placed)
        return replace(swapping, swaps=swaps, places=tuple(places))

    return build()


def _places(storage: int, life: Life, problem: Problem, *, earliest: int) -> SearchStrategy[Place]:
    """Return a strategy for stays of a storage in slow memory, with and without barriers and prefetches."""
    from hypothesis import strategies as st

    @st.composite
    def build(draw: DrawFn) -> Place:
        count = len(problem.trace.ops)
        tier = draw(st.sampled_from(problem.addressable()))
        from_op = draw(st.just(earliest) | st.integers(earliest, min(life.end_op, count) - 1))
        latest = from_op + count - 1 if life.forever else life.end_op
        if latest <= from_op:  # a step of one operator
            return Place(storage=storage, tier=tier, from_op=0, until_op=count)
        until_op = draw(st.just(latest) | st.integers(from_op + 1, latest))
        touches = (*life.touches, *(count + op for op in life.touches)) if life.forever else life.touches
        inside = [op for op in touches if from_op <= op < until_op]
        first, last = (inside[0], inside[-1]) if inside else (until_op, from_op)
        fetch_op = draw(st.none() | st.integers(last + 1, until_op))
        if fetch_op is not None and not life.forever and fetch_op >= count:  # nothing can be asked for it there
            fetch_op = None
        landed_op = draw(st.none() | st.integers(from_op, first))
        return Place(
            storage=storage, tier=tier, from_op=from_op, until_op=until_op, fetch_op=fetch_op, landed_op=landed_op
        )

    return build()


def recompute_gaps(problem: Problem, *, swaps: list[Swap], discarded: list[Gap]) -> list[Recompute | None]:
    """Return each discarded gap with its recipe beside the other decisions, or None where there is none."""
    lineage = Lineage(problem.trace)
    spans = [(swap.gap.storage, swap.gap.after_op, _due_op(swap)) for swap in swaps]
    spans += [(gap.storage, gap.after_op, gap.before_op + 1) for gap in discarded]
    found: list[Recompute | None] = []
    for gap in discarded:
        later_op = gap.before_op + len(problem.trace.ops)  # an absence may reach into the next step
        absent = {
            storage
            for storage, after_op, due_op in spans
            if after_op <= gap.before_op < due_op or after_op <= later_op < due_op
        }

        def available(storage: int, op: int = gap.before_op, absent: set[int] = absent) -> bool:
            return storage not in absent and alive_when(problem.trace, storage, op)

        ops = lineage.recipe([gap.storage], available=available, before_op=gap.before_op)
        found.append(None if ops is None else Recompute(gap=gap, ops=ops))
    return found


def _due_op(swap: Swap) -> int:
    # A storage that never comes back has no arrival: the whole gap is a safe answer.
    return swap.gap.before_op if swap.arrived_op is None else max(swap.arrived_op, swap.fetch_op)


def _parts(whole: Gap) -> SearchStrategy[Gap]:
    """Return a strategy for spans inside a gap; most are the gap itself."""
    from hypothesis import strategies as st

    @st.composite
    def build(draw: DrawFn) -> Gap:
        if draw(st.integers(0, 2)):
            return whole
        after_op = draw(st.integers(whole.after_op, whole.before_op - 1))
        before_op = draw(st.integers(after_op + 1, whole.before_op))
        return Gap(storage=whole.storage, after_op=after_op, before_op=before_op)

    return build()


def _swaps(gap: Gap, problem: Problem) -> SearchStrategy[Swap]:
    """Return a strategy for swaps of a span to any tier through any codec, with and without barriers."""
    from hypothesis import strategies as st

    @st.composite
    def build(draw: DrawFn) -> Swap:
        fetch_op = draw(st.integers(gap.after_op + 1, gap.before_op))
        landed_op = draw(st.none() | st.integers(gap.after_op + 1, gap.before_op))
        arrived_op = draw(st.none() | st.integers(fetch_op, gap.before_op))
        return Swap(
            gap=gap,
            fetch_op=fetch_op,
            tier=draw(st.sampled_from(problem.tiers or (problem.tier,))),
            codec=draw(st.sampled_from([codec.name for codec in problem.codecs])),
            landed_op=landed_op,
            arrived_op=arrived_op,
        )

    return build()
