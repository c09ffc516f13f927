"""Operators in another order: only as their data allows, with the memory that is alive then."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lowtide.core.serialize import load_trace
from lowtide.core.trace import Kind, Phase, Storage, Trace
from lowtide.errors import BadArgument
from lowtide.plan.views.reorder import Dependencies, crossed_orders
from lowtide.testing.traces import Step, make_trace, traces, training_trace
from tests.plan.policies.shapes import densenet, inception, resnet, vgg

RECORDED = sorted((Path(__file__).parents[2] / "data").glob("*.trace"))


def two_branches() -> Trace:
    """Two branches, whose wide beginnings are both alive as recorded, and an operator that joins their narrow ends."""
    steps = [
        Step(name="wide_a", phase=Phase.FORWARD, duration_s=1.0, writes=(0,)),
        Step(name="wide_b", phase=Phase.FORWARD, duration_s=2.0, writes=(1,)),
        Step(name="narrow_a", phase=Phase.FORWARD, duration_s=3.0, reads=(0,), writes=(2,), scratch_bytes=7),
        Step(name="narrow_b", phase=Phase.FORWARD, duration_s=4.0, reads=(1,), writes=(3,)),
        Step(name="join", phase=Phase.FORWARD, duration_s=5.0, reads=(2, 3), writes=(4,)),
    ]
    lives = ((100, 0, 2), (100, 1, 3), (10, 2, 4), (10, 3, 4), (10, 4, 4))
    storages = [Storage(nbytes=n, kind=Kind.ACTIVATION, first_op=a, last_op=b, producer=a) for n, a, b in lives]
    return make_trace(steps, storages, [], static_bytes=1000)


def shuffled(dependencies: Dependencies, seed: int, *, moves: int = 40) -> tuple[int, ...]:
    random = Random(seed)
    order: tuple[int, ...] = tuple(range(len(dependencies.trace.ops)))
    for _ in range(moves if order else 0):
        order = dependencies.moved(order, random.randrange(len(order)), share=random.random())
    return order


def test_a_branch_can_run_to_its_end_before_the_other_begins() -> None:
    trace = two_branches()
    found = Dependencies(trace).reordered((0, 2, 1, 3, 4))
    assert [op.name for op in found.ops] == ["wide_a", "narrow_a", "wide_b", "narrow_b", "join"]
    assert [op.start_s for op in found.ops] == [0.0, 1.0, 4.0, 6.0, 10.0]
    assert [op.peak_bytes for op in trace.ops] == [1100, 1200, 1217, 1120, 1030]
    assert [op.peak_bytes for op in found.ops] == [1100, 1117, 1110, 1120, 1030]
    assert [(block.first_op, block.last_op) for block in found.storages] == [(0, 1), (2, 3), (1, 4), (3, 4), (4, 4)]


@pytest.mark.parametrize("order", [(1, 3, 4, 0, 2), (2, 0, 1, 3, 4), (0, 1, 2, 3), (0, 0, 1, 2, 3)])
def test_nothing_runs_before_what_it_needs(order: tuple[int, ...]) -> None:
    dependencies = Dependencies(two_branches())
    assert not dependencies.allow(order)
    with pytest.raises(BadArgument, match="the order"):
        dependencies.reordered(order)


def written_over(*, name: str = "op") -> Trace:
    """An operator makes something, two read it, one writes over it, one reads that."""
    steps = [
        Step(name=f"{name}{k}", phase=Phase.FORWARD, duration_s=1.0, reads=reads, writes=writes)
        for k, (reads, writes) in enumerate([((), (0,)), ((0,), ()), ((0,), ()), ((), (0,)), ((0,), ())])
    ]
    return make_trace(steps, [Storage(nbytes=1, kind=Kind.OTHER, first_op=-1, last_op=5)], [])


def test_reads_pass_each_other_and_neither_passes_a_write() -> None:
    dependencies = Dependencies(written_over())
    assert dependencies.allow((0, 2, 1, 3, 4))
    assert not dependencies.allow((0, 1, 3, 2, 4))
    assert not dependencies.allow((0, 1, 2, 4, 3))
    assert not dependencies.allow((1, 0, 2, 3, 4))


def test_random_numbers_keep_their_order_and_nothing_passes_what_the_program_looks_at() -> None:
    assert not Dependencies(written_over(name="aten::dropout")).allow((0, 2, 1, 3, 4))
    trace = two_branches()
    looked_at = replace(trace, ops=(trace.ops[0], replace(trace.ops[1], name="aten::item"), *trace.ops[2:]))
    assert not Dependencies(looked_at).allow((1, 0, 2, 3, 4))
    assert Dependencies(trace).allow((1, 0, 2, 3, 4))


def test_a_storage_is_freed_behind_every_touch_of_it() -> None:
    """The one that frees it does not touch it: a reference that ended there."""
    trace = two_branches()
    freed = replace(trace, storages=(replace(trace.storages[0], last_op=3), *trace.storages[1:]))
    assert not Dependencies(freed).allow((0, 1, 3, 2, 4))
    assert Dependencies(trace).allow((0, 1, 3, 2, 4))


@pytest.mark.parametrize("trace", [vgg(), resnet(), inception(), densenet(), training_trace(5)], ids=lambda t: t.model)
def test_the_recorded_order_is_the_recorded_step(trace: Trace) -> None:
    assert Dependencies(trace).reordered(range(len(trace.ops))) == trace


@given(trace=traces(), seed=st.integers(0, 99), at=st.integers(0, 30))
@settings(max_examples=100, deadline=None)
def test_moved_and_crossed_orders_are_allowed_and_lose_nothing(trace: Trace, seed: int, at: int) -> None:
    dependencies = Dependencies(trace)
    one, other = shuffled(dependencies, seed), shuffled(dependencies, seed + 1)
    child = crossed_orders(one, other, at=at)
    assert child[:at] == one[:at]
    assert [op for op in other if op in child[at:]] == list(child[at:])
    for order in (one, other, child):
        found = dependencies.reordered(order)
        assert sorted(op.name for op in found.ops) == sorted(op.name for op in trace.ops)
        assert [found.ops[order.index(k)].reads for k in range(len(order))] == [op.reads for op in trace.ops]
        for storage, touched in enumerate(found.touches()):
            block = found.storages[storage]
            assert all(block.first_op <= op <= block.last_op for op in touched) or block == trace.storages[storage]


@pytest.mark.parametrize("path", RECORDED, ids=lambda path: path.stem)
def test_a_recorded_step_can_be_reordered_and_taken_back(path: Path) -> None:
    trace = load_trace(path)
    dependencies = Dependencies(trace)
    order = shuffled(dependencies, 1)
    found = dependencies.reordered(order)
    assert found != trace
    back = [order.index(op) for op in range(len(order))]
    again = Dependencies(found).reordered(back)
    assert [(op.name, op.peak_bytes) for op in again.ops] == [(op.name, op.peak_bytes) for op in trace.ops]
    assert again.storages == trace.storages
