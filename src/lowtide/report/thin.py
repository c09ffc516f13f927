"""Timelines of very long steps, thinned for a screen: what no pixel could show is merged, peaks are kept."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from lowtide.core.timeline import Lane, Span

# Up to `most` a page takes everything; above, spans shorter than a part of the step become one with their neighbours.
MOST = 20_000
_PARTS = 0.4

Moments = Sequence[tuple[float, int]]


def thin_spans(spans: Sequence[Span], *, step_s: float, most: int = MOST) -> tuple[Span, ...]:
    """Return the spans, the short ones of operators merged with those right beside them where there are too many.

    A merged span keeps its first operator. Transfers and waits are never merged: each is explained by itself.
    """
    if len(spans) <= most:
        return tuple(spans)
    short_s = step_s / (most * _PARTS)
    kept: list[Span] = []
    last: dict[Lane, int] = {}
    for span in spans:
        before = kept[last[span.lane]] if span.lane in last else None
        if (
            span.lane in (Lane.COMPUTE, Lane.RECOMPUTE)
            and before is not None
            and span.start_s - before.end_s <= short_s / 100
            and span.end_s - before.start_s <= short_s
        ):
            kept[last[span.lane]] = replace(before, end_s=span.end_s)
        else:
            last[span.lane] = len(kept)
            kept.append(span)
    return tuple(kept)


def thin_memory(memory: Moments, *, step_s: float, most: int = MOST) -> tuple[tuple[float, int], ...]:
    """Return the memory curve; where it has too many moments, the lowest and highest of each part of the step."""
    if len(memory) <= most or step_s <= 0:
        return tuple(memory)
    parts: dict[int, list[tuple[float, int]]] = {}
    for moment in memory:
        parts.setdefault(int(moment[0] / step_s * most * _PARTS / 2), []).append(moment)
    kept: list[tuple[float, int]] = []
    for part in parts.values():
        ends = {part[0], part[-1], min(part, key=lambda each: each[1]), max(part, key=lambda each: each[1])}
        kept.extend(sorted(ends))
    return tuple(kept)
