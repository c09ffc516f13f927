from __future__ import annotations

import json
from itertools import pairwise
from typing import Any

import pytest

from lowtide.core.timeline import Lane
from lowtide.report import perfetto_json
from lowtide.report.perfetto import THREADS
from tests.report.samples import sample


@pytest.fixture(scope="module")
def events() -> list[dict[str, Any]]:
    _, focus = sample()
    document = json.loads(perfetto_json([step.timeline for step in focus.steps], focus.problem.trace))
    found = document["traceEvents"]
    assert isinstance(found, list)
    return found


def test_every_span_is_a_slice_on_its_lanes_thread_with_its_times(events: list[dict[str, Any]]) -> None:
    _, focus = sample()
    for process, step in enumerate(focus.steps, 1):
        slices = [event for event in events if event["ph"] == "X" and event["pid"] == process]
        assert len(slices) == len(step.timeline.spans)
        for event, span in zip(slices, step.timeline.spans, strict=True):
            assert event["tid"] == THREADS[span.lane]
            assert event["ts"] == pytest.approx(span.start_s * 1e6)
            assert event["dur"] == pytest.approx((span.end_s - span.start_s) * 1e6)
            assert event["args"]["operator"] == focus.problem.trace.ops[span.op].name
            assert event["cat"] == span.lane.value


def test_memory_and_the_budget_are_counters(events: list[dict[str, Any]]) -> None:
    _, focus = sample()
    timeline = focus.steps[0].timeline
    counts = [event for event in events if event["ph"] == "C" and event["pid"] == 1]
    live = [(event["ts"], event["args"]["bytes"]) for event in counts if event["name"] == "live bytes"]
    assert live == [(at_s * 1e6, nbytes) for at_s, nbytes in timeline.memory]
    assert max(nbytes for _, nbytes in live) == timeline.peak_bytes
    budget = {event["args"]["bytes"] for event in counts if event["name"] == "budget"}
    assert budget == {timeline.budget_bytes}


def test_lanes_and_policies_have_names(events: list[dict[str, Any]]) -> None:
    _, focus = sample()
    threads = {
        (event["pid"], event["tid"]): event["args"]["name"] for event in events if event["name"] == "thread_name"
    }
    assert threads == {
        (process, THREADS[lane]): lane.value for process in range(1, len(focus.steps) + 1) for lane in Lane
    }
    titles = [event["args"]["name"] for event in events if event["name"] == "process_name"]
    assert [title.split(" ")[0] for title in titles] == [step.timeline.policy for step in focus.steps]


def test_slices_of_one_thread_do_not_overlap(events: list[dict[str, Any]]) -> None:
    """Viewers nest slices that overlap on a thread, which would hide them."""
    threads: dict[tuple[int, int], list[tuple[float, float]]] = {}
    for event in events:
        if event["ph"] == "X":
            threads.setdefault((event["pid"], event["tid"]), []).append((event["ts"], event["ts"] + event["dur"]))
    for spans in threads.values():
        spans.sort()
        assert all(one[1] <= two[0] + 1e-6 for one, two in pairwise(spans))
