"""Daydream's primitives: what is changed on paper is planned and simulated like what was recorded."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import Phase as Phases
from hypothesis import given, settings
from hypothesis import strategies as st

from lowtide.core import serialize
from lowtide.core.machine import Link
from lowtide.core.plan import Plan, Problem, Swap
from lowtide.core.trace import Gap, Kind, Op, Phase, Trace
from lowtide.errors import BadArgument
from lowtide.plan.policies.auto import Auto
from lowtide.simulate import simulate
from lowtide.simulate.whatif import insert, remove, resize, scale, select
from lowtide.testing.traces import chain_trace, machine_of, traces

TRACE = chain_trace(4, nbytes=100, duration_s=1.0, static_bytes=50, scratch_bytes=10)
MACHINE = machine_of(Link(write_bytes_per_s=200.0, read_bytes_per_s=200.0))


def step_s(trace: Trace) -> float:
    problem = Problem(trace=trace, machine=MACHINE, budget_bytes=trace.peak_bytes)
    return simulate(problem, Plan(policy="none", budget_bytes=0)).step_s


def sound(trace: Trace) -> Trace:
    """The trace, if a reader would take it, and if it can be planned and simulated."""
    assert serialize.loads(serialize.dumps(trace)) == trace
    problem = Problem(trace=trace, machine=MACHINE, budget_bytes=max(trace.floor_bytes(), 1))
    simulate(problem, Auto().plan(problem), policy=Auto(), strict=True)
    return trace


def test_a_trace_that_is_not_changed_takes_its_recorded_time() -> None:
    assert step_s(TRACE) == TRACE.duration_s


def test_operators_are_selected_by_name_module_phase_and_any_condition() -> None:
    assert select(TRACE) == tuple(range(8))
    assert select(TRACE, name="layer1") == (1, 6)
    assert select(TRACE, phase=Phase.BACKWARD) == (4, 5, 6, 7)
    assert select(TRACE, name="layer1", phase=Phase.FORWARD) == (1,)
    assert select(TRACE, where=lambda op: op.peak_bytes == TRACE.peak_bytes) == (3, 4)
    assert select(TRACE, module="encoder") == ()


@given(factor=st.sampled_from((0.0, 0.5, 1.0, 3.0)))
def test_scaling_every_operator_scales_the_step(factor: float) -> None:
    scaled = scale(TRACE, select(TRACE), factor=factor)
    assert step_s(scaled) == pytest.approx(factor * TRACE.duration_s)
    assert scaled.ops[-1].start_s == pytest.approx(factor * TRACE.ops[-1].start_s)


def test_scaling_some_leaves_the_others_alone() -> None:
    assert scale(TRACE, (4, 5), factor=0.5).duration_s == pytest.approx(12.0 - 2.0)


def test_smaller_storages_lower_the_curve_where_they_are_alive() -> None:
    half = resize(TRACE, range(4), factor=0.5)
    assert [op.peak_bytes for op in half.ops] == [
        op.peak_bytes - sum(50 for block in TRACE.storages if block.first_op <= index <= block.last_op)
        for index, op in enumerate(TRACE.ops)
    ]
    assert half.static_bytes == TRACE.static_bytes
    sound(half)


def test_a_smaller_parameter_lowers_the_static_bytes_too() -> None:
    param = replace(TRACE.storages[0], first_op=-1, last_op=8, kind=Kind.PARAM, producer=None)
    trace = replace(TRACE, storages=(param, *TRACE.storages[1:]), saves=TRACE.saves[1:])
    half = resize(trace, (0,), factor=0.5)
    assert half.static_bytes == trace.static_bytes - 50
    assert all(new.peak_bytes == old.peak_bytes - 50 for new, old in zip(half.ops, trace.ops, strict=True))


def test_an_inserted_operator_takes_its_time_and_memory_and_moves_what_follows() -> None:
    extra = Op(name="check", phase=Phase.FORWARD, start_s=0.0, duration_s=3.0, peak_bytes=7, reads=(2,))
    longer = sound(insert(TRACE, [extra], before=3))
    assert longer.duration_s == pytest.approx(15.0)
    assert longer.ops[3].start_s == pytest.approx(3.0)
    # Three outputs and the static bytes are alive there.
    assert longer.ops[3].peak_bytes == 50 + 10 + 300 + 7
    assert longer.gaps()[0] == Gap(storage=0, after_op=2, before_op=8)
    assert [op.name for op in longer.ops[4:6]] == ["layer3", "layer3.backward"]
    assert longer.storages[3].producer == 4


def test_a_transfer_on_an_idle_link_leaves_the_step_alone_until_it_is_critical() -> None:
    problem = Problem(trace=TRACE, machine=MACHINE, budget_bytes=TRACE.peak_bytes)

    def with_read_at(fetch_op: int) -> float:
        swap = Swap(gap=Gap(storage=0, after_op=2, before_op=7), fetch_op=fetch_op)
        return simulate(problem, Plan(policy="one", budget_bytes=0, swaps=(swap,))).step_s

    assert with_read_at(6) == TRACE.duration_s
    assert with_read_at(7) == pytest.approx(TRACE.duration_s + 0.5)


def test_a_removed_operator_takes_its_time_with_it() -> None:
    shorter = sound(remove(TRACE, (7,)))
    assert shorter.duration_s == pytest.approx(10.0)
    assert [op.name for op in shorter.ops] == [op.name for op in TRACE.ops[:7]]
    assert shorter.saves[0].uses == ()


def test_what_only_a_removed_operator_touched_goes_with_it() -> None:
    # Layer 3's output is read by its own backward pass only.
    shorter = sound(remove(TRACE, select(TRACE, name="layer3")))
    assert (len(shorter.storages), len(shorter.saves), len(shorter.ops)) == (3, 3, 6)
    assert shorter.peak_bytes == TRACE.peak_bytes - 100
    assert [shorter.storages[storage].producer for storage in range(3)] == [0, 1, 2]


def test_what_others_still_read_stays_without_a_producer() -> None:
    shorter = sound(remove(TRACE, (1,)))
    assert len(shorter.storages) == 4
    assert shorter.storages[1].producer is None
    assert shorter.storages[1].first_op == 1


@given(trace=traces(), data=st.data())
@settings(max_examples=60, deadline=None, phases=[Phases.generate])
def test_any_removal_and_insertion_gives_a_sound_trace(trace: Trace, data: st.DataObject) -> None:
    gone = data.draw(st.sets(st.integers(0, len(trace.ops) - 1), max_size=4))
    shorter = sound(remove(trace, gone))
    assert shorter.duration_s == pytest.approx(
        sum(op.duration_s for index, op in enumerate(trace.ops) if index not in gone)
    )
    place = data.draw(st.integers(0, len(shorter.ops)))
    extra = Op(name="new", phase=Phase.FORWARD, start_s=0.0, duration_s=1.0, peak_bytes=5)
    sound(insert(shorter, [extra, extra], before=place))


def test_bad_arguments_are_named() -> None:
    with pytest.raises(BadArgument, match="operator 8 does not exist: the trace has 8 operators"):
        scale(TRACE, (8,), factor=1.0)
    with pytest.raises(BadArgument, match="operator -1 does not exist"):
        remove(TRACE, (-1,))
    with pytest.raises(BadArgument, match="storage 4 does not exist"):
        resize(TRACE, (4,), factor=1.0)
    with pytest.raises(BadArgument, match="factor -1"):
        scale(TRACE, (), factor=-1)
    with pytest.raises(BadArgument, match="no place before operator 9"):
        insert(TRACE, [], before=9)
