"""Operator times by proportion: exact where the formula is, and nothing but ratios between machines."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lowtide.core.machine import Link, Machine
from lowtide.core.trace import Kind, Op, Phase, Storage, Trace
from lowtide.errors import BadArgument
from lowtide.estimate import Shares, fit_shares, machine, retime
from lowtide.estimate.predict import moved_bytes, operator_s
from lowtide.testing.traces import chain_trace

IDEAL = Shares(compute=1.0, memory=1.0, launch_s=0.0)


def a_machine(*, flops_per_s: float | None = 1e12, memory_bytes_per_s: float | None = 1e11) -> Machine:
    link = Link(write_bytes_per_s=1e9, read_bytes_per_s=1e9)
    return Machine(
        name="m", links={"spill": link}, flops_per_s=flops_per_s, memory_bytes_per_s=memory_bytes_per_s, source="stated"
    )


def a_trace(*ops: tuple[str, float, float]) -> Trace:
    """Return a trace of operators (name, flops, seconds), each of which reads and writes 1 MB."""
    storages = tuple(
        Storage(nbytes=1_000_000, kind=Kind.OTHER, first_op=i - 1, last_op=i, producer=i - 1 if i else None)
        for i in range(len(ops) + 1)
    )
    made, start_s = [], 0.0
    for index, (name, flops, seconds) in enumerate(ops):
        made.append(
            Op(
                name=name,
                phase=Phase.FORWARD,
                start_s=start_s,
                duration_s=seconds,
                peak_bytes=2_000_000,
                reads=(index,),
                writes=(index + 1,),
                flops=flops,
            )
        )
        start_s += seconds
    return Trace(ops=tuple(made), storages=storages, saves=(), static_bytes=0)


def test_an_operator_takes_the_longer_of_compute_and_memory_but_at_least_a_launch() -> None:
    here = a_machine()
    assert operator_s(2e9, 0, here, IDEAL) == 2e-3
    assert operator_s(2e9, 10**9, here, IDEAL) == 1e-2
    assert operator_s(0, 0, here) == Shares().launch_s
    assert operator_s(2e9, 0, here, replace(IDEAL, compute=0.5)) == 4e-3
    assert operator_s(0, 10**9, here, replace(IDEAL, memory=0.25)) == 4e-2


def test_a_retimed_trace_has_the_machines_times_and_nothing_else_changed() -> None:
    trace = a_trace(("aten::mm", 4e9, 9.0), ("aten::relu", 0.0, 9.0))
    got = retime(trace, a_machine(), shares=IDEAL)
    assert [op.duration_s for op in got.ops] == [4e-3, 2e-5]
    assert [op.start_s for op in got.ops] == [0.0, 4e-3]
    assert got.duration_s == pytest.approx(4.02e-3)
    assert replace(got, ops=trace.ops) == replace(trace, timed_for="m")
    assert [replace(op, start_s=0.0, duration_s=0.0) for op in got.ops] == [
        replace(op, start_s=0.0, duration_s=0.0) for op in trace.ops
    ]


@given(st.floats(1e9, 1e15), st.floats(1e9, 1e13), st.floats(0, 1e13))
def test_scaling_to_the_same_machine_changes_nothing(flops_per_s: float, rate: float, flops: float) -> None:
    here = a_machine(flops_per_s=flops_per_s, memory_bytes_per_s=rate)
    trace = a_trace(("aten::mm", flops, 0.25), ("aten::relu", 0.0, 0.5))
    got = retime(trace, here, measured_on=here)
    assert [op.duration_s for op in got.ops] == pytest.approx([0.25, 0.5])


def test_a_measured_trace_is_scaled_by_the_ratio_of_the_machines() -> None:
    trace = a_trace(("aten::mm", 4e12, 3.0), ("aten::relu", 0.0, 7.0))
    fast = a_machine(flops_per_s=4e12, memory_bytes_per_s=2e11)
    got = retime(trace, fast, measured_on=a_machine(), shares=IDEAL)
    # Compute is four times as fast, memory twice; what made both operators slow here does so there.
    assert [op.duration_s for op in got.ops] == pytest.approx([0.75, 3.5])


@given(st.floats(1.0, 100.0))
def test_a_faster_machine_is_never_slower(factor: float) -> None:
    trace = a_trace(("aten::mm", 1e9, 1.0), ("aten::relu", 0.0, 1.0), ("aten::mm", 1e3, 1.0))
    slow, fast = a_machine(), a_machine(flops_per_s=1e12 * factor, memory_bytes_per_s=1e11 * factor)
    assert retime(trace, fast).duration_s <= retime(trace, slow).duration_s


def test_shares_are_found_again_in_a_trace_made_with_them() -> None:
    shares = Shares(compute=0.37, memory=0.61, launch_s=1e-9)
    blank = a_trace(*(("aten::mm", 1e10 * (i + 1), 0.0) for i in range(5)), *(("aten::relu", 0.0, 0.0),) * 5)
    got = fit_shares(retime(blank, a_machine(), shares=shares), a_machine(), launch_s=1e-9)
    assert got.compute == pytest.approx(0.37)
    assert got.memory == pytest.approx(0.61)
    assert fit_shares(a_trace(), a_machine()) == Shares()


def test_a_lookup_moves_what_it_returns_and_an_allocation_nothing() -> None:
    assert moved_bytes("aten::mm", read=[10, 20], written=[5]) == 35
    assert moved_bytes("aten::embedding", read=[10**9, 8], written=[64]) == 128
    assert moved_bytes("aten::empty_like", read=[10**9], written=[10**9]) == 0


def test_what_cannot_be_predicted_is_refused_with_a_way_out() -> None:
    with pytest.raises(BadArgument, match="name the machine it was measured on"):
        retime(chain_trace(3), machine("v100"))
    with pytest.raises(BadArgument, match="run 'lowtide probe'"):
        retime(a_trace(("aten::mm", 1.0, 1.0)), a_machine(flops_per_s=None))
    assert retime(chain_trace(3), machine("v100"), measured_on=machine("cpu")).duration_s > 0
    empty = Trace(ops=(), storages=(), saves=(), static_bytes=0)
    assert retime(empty, machine("v100")) == replace(empty, timed_for="v100")


def test_compute_and_traffic_overlap_unless_paleo_is_asked_for() -> None:
    # 2 s of compute and 3 s of traffic.
    there = a_machine(flops_per_s=1e12, memory_bytes_per_s=1e11)
    assert operator_s(2e12, int(3e11), there, IDEAL) == pytest.approx(3.0)
    assert operator_s(2e12, int(3e11), there, replace(IDEAL, overlap=False)) == pytest.approx(5.0)
    assert operator_s(0.0, 0, there, replace(IDEAL, overlap=False, launch_s=1e-3)) == 1e-3
