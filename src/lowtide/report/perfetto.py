"""Timelines in the Chrome trace format, which Perfetto (ui.perfetto.dev) and chrome://tracing open.

One process per timeline, one thread per lane, and two counters: live bytes and the budget. Times are microseconds.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any

from lowtide.core.timeline import Lane, Span, Timeline
from lowtide.core.trace import Trace
from lowtide.core.units import format_bytes

THREADS = {Lane.COMPUTE: 1, Lane.RECOMPUTE: 2, Lane.STALL: 3, Lane.OUT: 4, Lane.IN: 5}
"""The thread of each lane, in the order in which viewers show them."""

_MICRO = 1e6


def perfetto_json(timelines: Sequence[Timeline], trace: Trace) -> str:
    """Return the file content for timelines of one trace, which names their operators."""
    events = [event for number, timeline in enumerate(timelines, 1) for event in _events(number, timeline, trace)]
    document = {
        "traceEvents": events,
        "displayTimeUnit": "ms",
        "otherData": {"model": trace.model, "policies": ", ".join(timeline.policy for timeline in timelines)},
    }
    return json.dumps(document, separators=(",", ":"), allow_nan=False) + "\n"


def _events(process: int, timeline: Timeline, trace: Trace) -> Iterator[dict[str, Any]]:
    title = f"{timeline.policy} on {timeline.machine}, {format_bytes(timeline.budget_bytes)}"
    yield _named(process, 0, "process_name", title)
    for lane, thread in THREADS.items():
        yield _named(process, thread, "thread_name", lane.value)
        yield {"ph": "M", "pid": process, "tid": thread, "name": "thread_sort_index", "args": {"sort_index": thread}}
    for span in timeline.spans:
        yield _slice(process, span, trace)
    for at_s, live_bytes in timeline.memory:
        yield _count(process, "live bytes", at_s, live_bytes)
    for at_s in (0.0, timeline.step_s):
        yield _count(process, "budget", at_s, timeline.budget_bytes)


def _slice(process: int, span: Span, trace: Trace) -> dict[str, Any]:
    op = trace.ops[span.op]
    arguments: dict[str, Any] = {"op": span.op, "operator": op.name, "phase": op.phase.value}
    if op.module:
        arguments["module"] = op.module
    if span.storage is not None:
        arguments["storage"] = span.storage
        arguments["bytes"] = span.nbytes or trace.storages[span.storage].nbytes
    if span.tier:
        arguments["tier"] = span.tier
    if span.cause:
        arguments["cause"] = span.cause
    return {
        "ph": "X",
        "pid": process,
        "tid": THREADS[span.lane],
        "ts": span.start_s * _MICRO,
        "dur": (span.end_s - span.start_s) * _MICRO,
        "name": _name(span, op.name),
        "cat": span.lane.value,
        "args": arguments,
    }


def _name(span: Span, operator: str) -> str:
    if span.lane in (Lane.COMPUTE, Lane.RECOMPUTE):
        return operator
    what = "memory" if span.storage is None else f"storage {span.storage}"
    return f"wait for {what}" if span.lane is Lane.STALL else f"{what}, {format_bytes(span.nbytes)}"


def _named(process: int, thread: int, what: str, name: str) -> dict[str, Any]:
    return {"ph": "M", "pid": process, "tid": thread, "name": what, "args": {"name": name}}


def _count(process: int, name: str, at_s: float, nbytes: int) -> dict[str, Any]:
    return {"ph": "C", "pid": process, "tid": 0, "ts": at_s * _MICRO, "name": name, "args": {"bytes": nbytes}}
