"""Waits on a link that is faster while the program waits.

A step is simulated at the rates that transfers have beside operators. While the program waits, nothing but transfers
goes on, so that a link which is k times as fast then does the same in 1/k of the time: events keep their order and
memory its curve, and only the clock is another. Several links, or a codec, would not go faster all alike: such steps
are simulated at the rates beside operators throughout.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

from lowtide.core.timeline import Timeline


@dataclass(frozen=True, slots=True, kw_only=True)
class Wait:
    """A wait of the program, and how long it lasts in fact."""

    start_s: float
    end_s: float
    lasts_s: float


def shortened(timeline: Timeline, waits: Sequence[Wait]) -> Timeline:
    """Return the step with its waits as long as they last in fact; they are in the order of time and do not overlap."""
    if not waits:
        return timeline
    starts_s = [wait.start_s for wait in waits]
    saved_s = [0.0, *accumulate(wait.end_s - wait.start_s - wait.lasts_s for wait in waits)]

    def at(moment_s: float) -> float:
        last = bisect_right(starts_s, moment_s) - 1
        if last < 0:
            return moment_s
        wait = waits[last]
        if moment_s >= wait.end_s:
            return moment_s - saved_s[last + 1]
        share = (moment_s - wait.start_s) / (wait.end_s - wait.start_s)
        return wait.start_s - saved_s[last] + share * wait.lasts_s

    step_s = at(timeline.step_s)
    return replace(
        timeline,
        step_s=step_s,
        stall_s=max(0.0, step_s - timeline.compute_s - timeline.slow_s - timeline.recompute_s),
        spans=tuple(replace(span, start_s=at(span.start_s), end_s=at(span.end_s)) for span in timeline.spans),
        memory=tuple((at(moment_s), live_bytes) for moment_s, live_bytes in timeline.memory),
        tiers={
            tier: tuple((at(moment_s), nbytes) for moment_s, nbytes in curve) for tier, curve in timeline.tiers.items()
        },
    )
