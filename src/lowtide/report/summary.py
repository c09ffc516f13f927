"""The figures of one step in words: where the time went, how full memory and the link were."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from lowtide.core.timeline import Lane, Span, Timeline
from lowtide.core.units import format_bytes, format_seconds

WAITS = {
    "room": "for memory",
    "landing": "for writes to land",
    "arrival": "for reads to arrive",
}
"""What an operator waited for, by the cause of the span."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """What a timeline comes to. `infinite_s` is the step's time with endless memory; waits are by cause."""

    infinite_s: float
    waits_s: dict[str, float]
    out_busy_s: float
    in_busy_s: float
    writes: int
    reads: int
    pressed: int
    remade: int

    def slowdown(self, timeline: Timeline) -> float:
        """Return the step's time as a multiple of that with endless memory."""
        return timeline.step_s / self.infinite_s if self.infinite_s else 1.0


def summarize(timeline: Timeline, *, infinite_s: float) -> Summary:
    """Return what a timeline comes to, given the step's time with endless memory."""
    by_lane: dict[Lane, list[Span]] = {lane: [] for lane in Lane}
    for span in timeline.spans:
        by_lane[span.lane].append(span)
    waits_s: dict[str, float] = {}
    for span in by_lane[Lane.STALL]:
        waits_s[span.cause] = waits_s.get(span.cause, 0.0) + span.end_s - span.start_s
    return Summary(
        infinite_s=infinite_s,
        waits_s=waits_s,
        out_busy_s=_busy_s(by_lane[Lane.OUT]),
        in_busy_s=_busy_s(by_lane[Lane.IN]),
        writes=len(by_lane[Lane.OUT]),
        reads=len(by_lane[Lane.IN]),
        pressed=sum(span.cause == "pressure" for span in by_lane[Lane.OUT]),
        remade=len(by_lane[Lane.RECOMPUTE]),
    )


def rows(timeline: Timeline, summary: Summary) -> list[tuple[str, str]]:
    """Return a timeline as names and values for a table."""
    slowdown = summary.slowdown(timeline)
    share = f"{timeline.peak_bytes / timeline.budget_bytes:.0%} of {format_bytes(timeline.budget_bytes)}"
    found = [
        ("machine", timeline.machine),
        ("step", f"{format_seconds(timeline.step_s)}, {slowdown:.2f}x of infinite memory"),
        ("compute", format_seconds(timeline.compute_s)),
        ("recompute", _counted(timeline.recompute_s, summary.remade, "operator", "run again")),
        ("stall", _stall(timeline, summary)),
        ("peak", f"{format_bytes(timeline.peak_bytes)}, {share}"),
        ("moved out", _moved(timeline.moved_out_bytes, summary.writes, summary.out_busy_s, timeline.step_s)),
        ("moved in", _moved(timeline.moved_in_bytes, summary.reads, summary.in_busy_s, timeline.step_s)),
    ]
    if timeline.reserved_peak_bytes != timeline.peak_bytes:
        found.insert(6, ("allocator's peak", format_bytes(timeline.reserved_peak_bytes)))
    if timeline.trials:
        found.append(("trials", f"{timeline.trials} steps before the plan was settled"))
    found.extend(("note", note) for note in timeline.notes)
    return found


def _stall(timeline: Timeline, summary: Summary) -> str:
    parts = [
        f"{format_seconds(waited_s)} {WAITS.get(cause, cause)}"
        for cause, waited_s in sorted(summary.waits_s.items(), key=lambda item: -item[1])
    ]
    return f"{format_seconds(timeline.stall_s)}{': ' if parts else ''}{', '.join(parts)}"


def _moved(nbytes: int, count: int, busy_s: float, step_s: float) -> str:
    if not count:
        return "nothing"
    busy = f", link busy {busy_s / step_s:.0%} of the step" if step_s else ""
    return f"{format_bytes(nbytes)} in {count} transfers{busy}"


def _counted(seconds: float, count: int, what: str, done: str) -> str:
    if not count:
        return "nothing"
    return f"{format_seconds(seconds)}, {count} {what}{'s' if count != 1 else ''} {done}"


def _busy_s(spans: Iterable[Span]) -> float:
    """Return how long at least one of the spans lasted; they may overlap where there are several tiers."""
    total_s = end_s = 0.0
    for span in sorted(spans, key=lambda span: span.start_s):
        total_s += max(0.0, span.end_s - max(span.start_s, end_s))
        end_s = max(end_s, span.end_s)
    return total_s
