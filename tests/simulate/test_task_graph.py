"""Daydream's graph: what is changed in it changes the step as far as it is on the critical path (Zhu et al., 2020)."""

from __future__ import annotations

from pathlib import Path

import pytest

from lowtide import registry
from lowtide.core.machine import Link
from lowtide.core.plan import Plan, Problem
from lowtide.core.serialize import load_trace
from lowtide.core.timeline import Lane, Timeline
from lowtide.core.trace import Trace
from lowtide.errors import BadArgument
from lowtide.simulate import simulate
from lowtide.simulate.task_graph import Task, TaskGraph, of_timeline, of_trace
from lowtide.testing.shapes import resnet_trace, vgg_trace
from lowtide.testing.traces import machine_of

RECORDED = [load_trace(path) for path in sorted((Path(__file__).parent.parent / "data").glob("*.trace"))]
TRACES = [*RECORDED, vgg_trace(), resnet_trace()]
by_model = pytest.mark.parametrize("trace", TRACES, ids=lambda trace: trace.model)


def step(trace: Trace, *, policy: str, share: float, seconds: float) -> Timeline:
    """Return a step under a policy, on a link that takes `seconds` of the step's compute for all that is saved."""
    nbytes = sum(trace.storages[gap.storage].nbytes for gap in trace.gaps())
    rate = nbytes / (seconds * trace.duration_s)
    machine = machine_of(Link(write_bytes_per_s=rate, read_bytes_per_s=rate, duplex=True))
    budget_bytes = trace.floor_bytes() + int(share * (trace.peak_bytes - trace.floor_bytes()))
    problem = Problem(trace=trace, machine=machine, budget_bytes=budget_bytes)
    found = registry.policy(policy)
    return simulate(problem, found.plan(problem), policy=found)


@by_model
def test_a_step_that_is_not_changed_takes_its_time(trace: Trace) -> None:
    assert of_trace(trace).makespan_s() == pytest.approx(trace.duration_s, rel=1e-9)
    problem = Problem(
        trace=trace, machine=machine_of(Link(write_bytes_per_s=1e9, read_bytes_per_s=1e9)), budget_bytes=1 << 60
    )
    plain = simulate(problem, Plan(policy="none", budget_bytes=0))
    assert of_timeline(plain).makespan_s() == pytest.approx(plain.step_s, rel=1e-9)


@by_model
@pytest.mark.parametrize("policy", ["vdnn_all", "capuchin"])
@pytest.mark.parametrize("seconds", [0.3, 3.0])
def test_a_step_with_transfers_is_replayed_within_two_percent(trace: Trace, policy: str, seconds: float) -> None:
    timeline = step(trace, policy=policy, share=0.6, seconds=seconds)
    assert timeline.moved_in_bytes
    assert of_timeline(timeline).makespan_s() == pytest.approx(timeline.step_s, rel=0.02)


def test_scaling_every_task_scales_the_step() -> None:
    graph = of_timeline(step(resnet_trace(), policy="vdnn_all", share=0.6, seconds=2.0))
    every = graph.select(lambda task: True)
    assert graph.scale(every, factor=3.0).makespan_s() == pytest.approx(3 * graph.makespan_s(), rel=1e-9)


def test_faster_copies_help_only_where_they_are_waited_for() -> None:
    bound = of_timeline(step(vgg_trace(), policy="vdnn_all", share=0.6, seconds=3.0))
    hidden = of_timeline(step(vgg_trace(), policy="vdnn_all", share=0.6, seconds=0.05))
    gains = []
    for graph in (bound, hidden):
        copies = graph.select(lambda task: task.thread in (Lane.OUT, Lane.IN))
        assert copies
        gains.append(1 - graph.scale(copies, factor=0.5).makespan_s() / graph.makespan_s())
    assert gains[0] > 0.2
    assert gains[1] < 0.05


def test_a_copy_that_nobody_waits_for_is_free_until_it_is_the_longest() -> None:
    graph = of_trace(resnet_trace())
    step_s = graph.makespan_s()
    for duration_s, expected_s in ((0.5 * step_s, step_s), (step_s, step_s), (1.5 * step_s, 1.5 * step_s)):
        copy = Task(name="copy", thread=Lane.OUT, duration_s=duration_s)
        assert graph.insert(copy, at=0).makespan_s() == pytest.approx(expected_s, rel=1e-9)


def test_a_copy_that_is_waited_for_holds_the_step_up() -> None:
    graph = TaskGraph(tuple(Task(name=f"op{k}", thread="compute", duration_s=1.0) for k in range(4)))
    # It begins after operator 0, takes 2.5 s, and operator 2 waits for it: 1 + 2.5 + 2 s instead of 4.
    copy = Task(name="copy", thread="copies", duration_s=2.5, after=(0,))
    held_up = graph.insert(copy, at=1, before=(2,))
    assert [task.name for task in held_up.tasks] == ["op0", "copy", "op1", "op2", "op3"]
    assert held_up.makespan_s() == 5.5
    # Without the copy, who waited for it waits for operator 0.
    freed = held_up.remove((1,))
    assert freed.makespan_s() == 4.0
    assert freed.tasks[2].after == (0,)


def test_what_makes_no_sense_is_refused() -> None:
    graph = TaskGraph((Task(name="a", thread="t", duration_s=1.0),))
    with pytest.raises(BadArgument, match="only for tasks before it"):
        TaskGraph((Task(name="a", thread="t", duration_s=1.0, after=(0,)),))
    with pytest.raises(BadArgument, match="position 3"):
        graph.insert(Task(name="b", thread="t", duration_s=1.0), at=3)
    with pytest.raises(BadArgument, match="factor -1"):
        graph.scale((0,), factor=-1)
