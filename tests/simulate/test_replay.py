"""Recorded steps replayed by the simulator, unchanged and changed on paper (Daydream: Zhu et al., ATC 2020)."""

from __future__ import annotations

import statistics
import time
from bisect import bisect
from pathlib import Path

import pytest

from lowtide.core.machine import Link
from lowtide.core.plan import Plan, Problem, Swap
from lowtide.core.serialize import load_trace
from lowtide.core.trace import Gap, Trace
from lowtide.simulate import simulate
from lowtide.simulate.whatif import insert, remove, scale, select
from lowtide.testing.traces import machine_of

RECORDED = [load_trace(path) for path in sorted((Path(__file__).parent.parent / "data").glob("*.trace"))]
recorded = pytest.mark.parametrize("trace", RECORDED, ids=lambda trace: trace.model)


def step_s(trace: Trace, *swaps: Swap, bytes_per_s: float = 1e9) -> float:
    machine = machine_of(Link(write_bytes_per_s=bytes_per_s, read_bytes_per_s=bytes_per_s))
    problem = Problem(trace=trace, machine=machine, budget_bytes=trace.peak_bytes)
    return simulate(problem, Plan(policy="as it was", budget_bytes=trace.peak_bytes, swaps=swaps)).step_s


@pytest.mark.parametrize(
    ("model", "sizes"),
    [
        ("gpt", {"batch": 2, "tokens": 128, "layers": 2, "width": 256, "heads": 4, "vocab": 512}),
        pytest.param("resnet50", {"batch": 4, "image": 64}, marks=pytest.mark.slow),
        pytest.param("vgg16", {"batch": 8, "image": 64, "width": 32}, marks=pytest.mark.slow),
    ],
)
def test_a_step_is_replayed_in_the_time_that_it_took(model: str, sizes: dict[str, int]) -> None:
    """The recorded step itself: recording makes small operators slower, and the trace says how long they took then."""
    from lowtide import capture_step, zoo

    training = zoo.build(model, **sizes).training()
    taken_s = 0.0

    def step() -> None:
        nonlocal taken_s
        begun_s = time.perf_counter()
        training.step()
        taken_s = time.perf_counter() - begun_s

    errors = []
    for _ in range(3):
        trace = capture_step(step, model=training.model, optimizer=training.optimizer)
        errors.append(step_s(trace) / taken_s - 1)
    print(f"{model}:", *(f"{error:+.2%}" for error in errors))
    assert abs(statistics.median(errors)) < 0.01


@recorded
def test_a_recorded_trace_that_is_not_changed_takes_the_time_of_its_operators(trace: Trace) -> None:
    assert step_s(trace) == pytest.approx(sum(op.duration_s for op in trace.ops), rel=1e-9)
    assert step_s(remove(insert(trace, [trace.ops[5]], before=9), (9,))) == pytest.approx(step_s(trace), rel=1e-9)


@recorded
@pytest.mark.parametrize("factor", [0.25, 3.0])
def test_scaling_every_recorded_operator_scales_the_step(trace: Trace, factor: float) -> None:
    assert step_s(scale(trace, select(trace), factor=factor)) == pytest.approx(factor * step_s(trace), rel=1e-9)


@recorded
def test_a_copy_beside_a_recorded_step_costs_nothing_until_it_is_critical(trace: Trace) -> None:
    def idle_s(gap: Gap) -> float:
        return trace.ops[gap.before_op].start_s - trace.ops[gap.after_op].start_s

    gap = max((gap for gap in trace.gaps() if gap.before_op < len(trace.ops)), key=idle_s)
    half_s = trace.ops[gap.after_op].start_s + idle_s(gap) / 2
    swap = Swap(gap=gap, fetch_op=bisect(trace.ops, half_s, key=lambda op: op.start_s) - 1)
    nbytes = trace.storages[gap.storage].nbytes
    assert step_s(trace, swap, bytes_per_s=nbytes / (0.25 * idle_s(gap))) == pytest.approx(step_s(trace), rel=1e-9)
    # Out and back take one and a half times as long as the storage may be away: the half is waited for.
    late_s = step_s(trace, swap, bytes_per_s=nbytes / (0.75 * idle_s(gap))) - step_s(trace)
    assert late_s == pytest.approx(0.5 * idle_s(gap), rel=1e-6)
