"""The verifier's rules about the decisions themselves, V1 to V3: no clock is needed to check them."""

from __future__ import annotations

from itertools import pairwise

from lowtide.core.plan import Place, Plan, Problem, Recompute, Swap
from lowtide.core.trace import Gap, Trace
from lowtide.errors import PlanError
from lowtide.plan.verify.places import Days, check_place, check_runs
from lowtide.plan.verify.spans import Spans

_Decision = Swap | Recompute | Place


def label(decision: _Decision) -> str:
    """Return how messages name a decision."""
    what = {Swap: "swap", Recompute: "recomputation", Place: "place"}[type(decision)]
    gap = decision.gap
    return f"the {what} of storage {gap.storage} in operators {gap.after_op} to {gap.before_op}"


def check_shape(plan: Plan, problem: Problem) -> None:
    """Check V1, V2 and V3."""
    trace = problem.trace
    eligible: dict[int, list[Gap]] = {}
    for gap in trace.gaps():
        eligible.setdefault(gap.storage, []).append(gap)
    by_storage: dict[int, list[_Decision]] = {}
    decisions: tuple[_Decision, ...] = (*plan.swaps, *plan.recomputes, *plan.places)
    days = Days(trace)
    for decision in decisions:
        if isinstance(decision, Place):
            check_place(decision, problem, days)
        else:
            _check_span(decision, trace, eligible)
        if isinstance(decision, Swap):
            _check_place(decision, problem)
            _check_moments(decision)
        by_storage.setdefault(decision.gap.storage, []).append(decision)
    check_runs(plan)
    spans = Spans(plan, trace)
    _check_named(plan, trace, spans)
    for of_one in by_storage.values():
        of_one.sort(key=lambda decision: decision.gap)
        for first, second in pairwise(of_one):
            if second.gap.after_op <= first.gap.before_op:
                raise PlanError(f"V3: {label(first)} and {label(second)} overlap")
        if isinstance(of_one[0], Place) or isinstance(of_one[-1], Place):
            _check_next_step(of_one, trace)
        if trace.repeats and len(of_one) > 1:
            _check_around(of_one, spans)


def _check_named(plan: Plan, trace: Trace, spans: Spans) -> None:
    """Check V2 for storages that the next step has an heir of: nothing is asked for them there.

    They leave in their own step. They come back by a request in it, or on demand, when the heir is touched.
    """
    count, heirs = len(trace.ops), trace.heirs()
    touched = {(gap.storage, gap.before_op) for gap in trace.gaps()}
    for swap in plan.swaps:
        storage, begin, end = swap.gap.storage, swap.gap.after_op, swap.gap.before_op
        if storage not in heirs:
            continue
        if begin >= count:
            raise PlanError(
                f"V2: {label(swap)} begins with operator {begin - count} of the next step, which knows it as storage "
                f"{heirs[storage]} and cannot make it leave: it has to leave before operator {count}"
            )
        on_demand = swap.fetch_op == end and (storage, end) in touched
        if swap.fetch_op >= count and spans.returns(swap.gap) and not on_demand:
            raise PlanError(
                f"V2: {label(swap)} is fetched at operator {swap.fetch_op - count} of the next step, which knows it as "
                f"storage {heirs[storage]}: fetch it before operator {count}, or on demand at the end of its gap"
            )


def _check_next_step(of_one: list[_Decision], trace: Trace) -> None:
    """Check V3 for what reaches into the next step, where the same decisions are taken again."""
    block, count = trace.storages[of_one[0].gap.storage], len(trace.ops)
    if not (block.first_op < 0 and block.last_op >= count):
        return
    first, last = of_one[0].gap, of_one[-1].gap
    whole = len(of_one) == 1 and (first.after_op, first.before_op) == (0, count)
    if not whole and last.before_op - count >= first.after_op:
        raise PlanError(f"V3: {label(of_one[-1])} and {label(of_one[0])} of the next step overlap")


def _check_around(of_one: list[_Decision], spans: Spans) -> None:
    """Check V3 across the end of the step: a touch parts the gaps of one step from those of the next, if there is one.

    A storage that no operator touches is away from one step to the next, so that there is no other decision about it.
    """
    for one in of_one:
        if not isinstance(one, Place) and spans.for_good(one.gap):
            other = next(each for each in of_one if each is not one)
            raise PlanError(f"V3: {label(one)}, which no operator needs, is away for good; {label(other)} is another")


def _check_span(decision: Swap | Recompute, trace: Trace, eligible: dict[int, list[Gap]]) -> None:
    gap = decision.gap
    if not 0 <= gap.storage < len(trace.storages):
        raise PlanError(f"V1: storage {gap.storage} does not exist: the trace has {len(trace.storages)} storages")
    wholes = eligible.get(gap.storage, ())
    if not any(whole.after_op <= gap.after_op < gap.before_op <= whole.before_op for whole in wholes):
        spans = [(whole.after_op, whole.before_op) for whole in wholes]
        raise PlanError(f"V1: {label(decision)} is in no gap of its storage: the trace has {spans}")


def _check_place(swap: Swap, problem: Problem) -> None:
    tiers = problem.tiers or (problem.tier,)
    if swap.tier not in tiers or swap.tier not in problem.machine.links:
        has = f"tier is {tiers[0]!r}" if len(tiers) == 1 else f"{len(tiers)} tiers are {sorted(tiers)}"
        raise PlanError(
            f"V1: {label(swap)} goes to tier {swap.tier!r}; the problem's {has} "
            f"and the machine has {sorted(problem.machine.links)}"
        )
    codecs = sorted(codec.name for codec in problem.codecs)
    if swap.codec not in codecs:
        raise PlanError(
            f"V1: {label(swap)} uses codec {swap.codec!r}, whose cost is not known: "
            f"the problem's executor has {len(codecs)}, {codecs}"
        )
    if swap.codec != "identity" and swap.tier in problem.addressable():
        raise PlanError(
            f"V1: {label(swap)} goes through codec {swap.codec!r} to {swap.tier!r}, whose pages operators use in place"
        )


def _check_moments(swap: Swap) -> None:
    """Check V2: where the read is requested, and which operators wait."""
    after_op, before_op = swap.gap.after_op, swap.gap.before_op
    if not after_op < swap.fetch_op <= before_op:
        raise PlanError(
            f"V2: {label(swap)} is fetched at operator {swap.fetch_op}: "
            f"that has to be after {after_op} and not after {before_op}"
        )
    if swap.landed_op is not None and not after_op < swap.landed_op <= before_op:
        raise PlanError(
            f"V2: {label(swap)} has operator {swap.landed_op} wait for its write: "
            f"that has to be after {after_op} and not after {before_op}"
        )
    if swap.arrived_op is not None and not swap.fetch_op <= swap.arrived_op <= before_op:
        raise PlanError(
            f"V2: {label(swap)} has operator {swap.arrived_op} wait for its read: "
            f"that has to be from {swap.fetch_op}, where it is requested, to {before_op}"
        )
