"""The plan explained storage by storage: which left, when each came back, why, and how long operators waited for it."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

from lowtide.core.plan import Plan, Recompute
from lowtide.core.timeline import Lane, Span, Timeline
from lowtide.core.trace import Op, Phase, Trace


class Way(StrEnum):
    """How a storage was away.

    SWAPPED: copied to the tier and read back. CARRIED: away from the end of one step to the next, so that this step has
    only its copy or only its return. UNUSED: copied, and never needed again. KEPT: needed while it was being copied, so
    that it stayed. RELEASED: its bytes were given up without a copy, for the tier still had one. REMADE: given up
    without a copy, and made again by running operators.
    """

    SWAPPED = "swapped"
    CARRIED = "carried over"
    UNUSED = "unused"
    KEPT = "kept"
    RELEASED = "released"
    REMADE = "remade"


@dataclass(frozen=True, slots=True, kw_only=True)
class Journey:
    """One absence of one storage.

    `out_s` is when its copy began (or its bytes were given up), `landed_s` when they were free, `back_s` when it began
    to come back, `ready_s` when it was there. None: it did not happen, or the timeline does not tell. `stall_s` is how
    long operators waited for this storage; `cause_out` and `cause_back` are the spans' causes.
    """

    storage: int
    way: Way
    nbytes: int
    out_op: int | None = None
    back_op: int | None = None
    out_s: float | None = None
    landed_s: float | None = None
    back_s: float | None = None
    ready_s: float | None = None
    cause_out: str = ""
    cause_back: str = ""
    tier: str = ""
    stall_s: float = 0.0
    remade_ops: int = 0


def journeys(trace: Trace, plan: Plan | None, timeline: Timeline) -> tuple[Journey, ...]:
    """Return every absence in a timeline, in the order in which they began."""
    waits = _Waits(timeline.spans)
    found = [*_moved(trace, timeline, waits), *_remade(trace, plan, timeline)]
    found.sort(key=lambda journey: (_begins_s(journey), journey.storage))
    return tuple(found)


def needs(trace: Trace) -> Mapping[int, Sequence[int]]:
    """Return the operators that need each storage to be there, ascending.

    Where state moves, that is every operator that touches it; those of the next step count on from `len(trace.ops)`.
    Elsewhere it is each operator before which autograd asks for what it saved.
    """
    if trace.repeats:
        end = len(trace.ops)
        return {
            storage: (*life.touches, *(end + op for op in life.touches[:1] if life.forever))
            for storage, life in trace.lives().items()
        }
    found: dict[int, set[int]] = {}
    for save in trace.saves:
        found.setdefault(save.storage, set()).update(save.uses)
    return {storage: sorted(uses) for storage, uses in found.items()}


def module_of(trace: Trace) -> Mapping[int, str]:
    """Return the module that each storage belongs to, where the trace tells.

    That is the module of its maker; of a storage that was there before, the first that uses it. Gradients and optimizer
    state belong to the module whose parameter is updated with them by an operator that updates no other.
    """
    found: dict[int, str] = {}
    for storage in range(len(trace.storages)):
        made_by = maker(trace, storage)
        if made_by is not None and made_by.module:
            found[storage] = made_by.module
    for op in trace.ops:
        for storage in (*op.reads, *op.writes):
            if op.module and trace.storages[storage].first_op < 0:
                found.setdefault(storage, op.module)
    updates = [{*op.reads, *op.writes} for op in trace.ops if op.phase is Phase.UPDATE]
    known = -1
    while known < len(found):  # a moment meets its parameter in one operator, and its gradient in another
        known = len(found)
        for storages in updates:
            modules = {found[storage] for storage in storages if storage in found}
            if len(modules) == 1:
                found.update(dict.fromkeys(storages, *modules))
    return found


def maker(trace: Trace, storage: int) -> Op | None:
    """Return the operator that made a storage (None: it was there before the step)."""
    block = trace.storages[storage]
    op = block.producer if block.producer is not None else block.first_op
    return trace.ops[op] if 0 <= op < len(trace.ops) else None


class _Waits:
    """How long operators waited for a storage, by when."""

    def __init__(self, spans: Iterable[Span]) -> None:
        self._waits: dict[int, list[Span]] = {}
        for span in spans:
            if span.lane is Lane.STALL and span.storage is not None:
                self._waits.setdefault(span.storage, []).append(span)

    def between(self, storage: int, start_s: float, end_s: float) -> float:
        """Return the time waited for a storage by waits that began in `start_s <= t < end_s`."""
        return sum(
            span.end_s - span.start_s for span in self._waits.get(storage, ()) if start_s <= span.start_s < end_s
        )


def _moved(trace: Trace, timeline: Timeline, waits: _Waits) -> Iterator[Journey]:
    """Yield the absences that used a link: a write with the read that follows it, or one of the two."""
    spans: dict[int, list[Span]] = {}
    for span in timeline.spans:
        if span.lane in (Lane.OUT, Lane.IN) and span.storage is not None:
            spans.setdefault(span.storage, []).append(span)
    uses = needs(trace)
    for storage, own in spans.items():
        pairs = list(_pairs(sorted(own, key=lambda span: span.start_s)))
        # A wait belongs to the absence in which it began; the last one has no end.
        begins_s = [first.start_s for first in (out or back for out, back in pairs) if first is not None]
        ends_s = [*begins_s[1:], float("inf")]
        for (out, back), begin_s, end_s in zip(pairs, begins_s, ends_s, strict=True):
            first_s = 0.0 if begin_s == begins_s[0] else begin_s
            yield Journey(
                storage=storage,
                way=_way(out, back, uses.get(storage, ()), end=len(trace.ops)),
                nbytes=trace.storages[storage].nbytes,
                out_op=out.op if out else None,
                back_op=back.op if back else None,
                out_s=out.start_s if out else None,
                landed_s=out.end_s if out else None,
                back_s=back.start_s if back else None,
                ready_s=back.end_s if back else None,
                cause_out=out.cause if out else "",
                cause_back=back.cause if back else "",
                tier=out.tier if out else back.tier if back else "",
                stall_s=waits.between(storage, first_s, end_s),
            )


def _pairs(spans: Sequence[Span]) -> Iterator[tuple[Span | None, Span | None]]:
    pending: Span | None = None
    for span in spans:
        if span.lane is Lane.OUT:
            if pending is not None:
                yield pending, None
            pending = span
        else:
            yield pending, span
            pending = None
    if pending is not None:
        yield pending, None


def _way(out: Span | None, back: Span | None, uses: Sequence[int], *, end: int) -> Way:
    """Return how a storage was away that these operators need; those from `end` on are of the next step."""
    returns = any(use >= end for use in uses)
    if out is None:
        carried = returns and back is not None and not any(use < back.op for use in uses)
        return Way.CARRIED if carried else Way.RELEASED
    if back is not None:
        return Way.SWAPPED
    if any(out.op <= use < end for use in uses):
        return Way.KEPT
    return Way.CARRIED if returns else Way.UNUSED


def _remade(trace: Trace, plan: Plan | None, timeline: Timeline) -> Iterator[Journey]:
    """Yield the absences that ended by running operators again, with the runs that came before each operator."""
    starts_s = {span.op: span.start_s for span in timeline.spans if span.lane is Lane.COMPUTE}
    again = sorted((span for span in timeline.spans if span.lane is Lane.RECOMPUTE), key=lambda span: span.start_s)
    planned: set[int] = set()
    for recompute in plan.recomputes if plan is not None else ():
        run = _run_before(recompute, again, starts_s)
        planned.update(id(span) for span in run)
        yield Journey(
            storage=recompute.gap.storage,
            way=Way.REMADE,
            nbytes=trace.storages[recompute.gap.storage].nbytes,
            out_op=recompute.gap.after_op,
            back_op=recompute.gap.before_op,
            out_s=starts_s.get(recompute.gap.after_op),
            landed_s=starts_s.get(recompute.gap.after_op),
            back_s=run[0].start_s if run else None,
            ready_s=run[-1].end_s if run else None,
            cause_out="plan",
            cause_back="recompute" if run else "",
            remade_ops=len(run),
        )
    yield from _remade_unplanned(trace, [span for span in again if id(span) not in planned])


def _run_before(recompute: Recompute, again: Sequence[Span], starts_s: dict[int, float]) -> list[Span]:
    """Return the runs for one recomputation: those of its operators between the operator before and its own."""
    due_s = starts_s.get(recompute.gap.before_op, 0.0)
    before_s = starts_s.get(recompute.gap.before_op - 1, -1.0)
    wanted = set(recompute.ops)
    first = bisect_left(again, before_s, key=lambda span: span.start_s)
    found = []
    for span in again[first:]:
        if span.start_s > due_s:
            break
        if span.op in wanted:
            found.append(span)
    return found


def _remade_unplanned(trace: Trace, again: Iterable[Span]) -> Iterator[Journey]:
    """Yield what a reactive policy discarded and made again: when it was discarded, the timeline does not tell."""
    saved = {save.storage for save in trace.saves}
    for span in again:
        for storage in trace.ops[span.op].writes:
            if storage in saved:
                yield Journey(
                    storage=storage,
                    way=Way.REMADE,
                    nbytes=trace.storages[storage].nbytes,
                    back_s=span.start_s,
                    ready_s=span.end_s,
                    cause_out="pressure",
                    cause_back="recompute",
                    remade_ops=1,
                )


def _begins_s(journey: Journey) -> float:
    if journey.out_s is not None:
        return journey.out_s
    return journey.back_s if journey.back_s is not None else 0.0
