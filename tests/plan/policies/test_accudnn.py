"""AccUDNN: swaps that hide, and a batch size tuned to them (Guo et al., ICCD 2019)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from random import Random

import numpy as np
import pytest
from hypothesis import given, settings

from lowtide.core.machine import Link
from lowtide.core.plan import Problem
from lowtide.core.trace import Trace
from lowtide.errors import BadArgument
from lowtide.plan.policies.accudnn import AccUdnn, BatchModel, fit_lines, tune
from lowtide.plan.verify import check, replay
from lowtide.testing.networks import INPUT, Layer, network_trace, networks
from lowtide.testing.traces import chain_trace, machine_of, problems
from tests.plan.policies.shapes import BOUND, DISK, densenet, inception, predicted, problem_of, resnet, vgg

NETS = (vgg(), resnet(), inception(), densenet())
FIVE = (4, 8, 16, 24, 32)
KIB = 1 << 10


def step_at(batch: int, *, noise: float = 0.0, seed: int = 0) -> Trace:
    """Return the step of a convolutional net whose times and bytes are straight lines in the batch."""
    random = Random(seed * 1000 + batch)
    layers = [
        Layer(
            kind="conv" if k % 2 == 0 else "relu",
            inputs=(INPUT if k == 0 else k - 1,),
            nbytes=(24 - k) * 16 * KIB * batch,
            duration_s=(2e-4 + 1e-4 * batch * (1 if k % 2 == 0 else 0.1)) * (1 + noise * random.uniform(-1, 1)),
            param_bytes=64 * KIB,
        )
        for k in range(20)
    ]
    return network_trace(layers, input_bytes=16 * KIB * batch, model="net")


def profile(batches: Sequence[int] = FIVE, *, noise: float = 0.0) -> BatchModel:
    return BatchModel({batch: step_at(batch, noise=noise) for batch in batches})


@given(problem=problems(networks()) | problems())
@settings(max_examples=80, deadline=None)
def test_every_budget_from_the_floor_on_is_met(problem: Problem) -> None:
    for budget_bytes in (problem.trace.floor_bytes(), problem.budget_bytes):
        tight = replace(problem, budget_bytes=budget_bytes)
        assert replay(AccUdnn().plan(tight), tight).peak_bytes <= budget_bytes


@pytest.mark.parametrize("trace", NETS, ids=lambda trace: trace.model)
def test_swaps_that_can_hide_do(trace: Trace) -> None:
    link = Link(write_bytes_per_s=1e11, read_bytes_per_s=1e11)
    problem = problem_of(trace, (trace.floor_bytes() + trace.peak_bytes) // 2, link)
    plan = AccUdnn().plan(problem)
    check(plan, problem)
    assert predicted(plan).stall_s <= 1e-3 * trace.duration_s
    assert plan.notes == (f"{len(plan.swaps)} of {len(plan.swaps)} swaps are short enough to hide",)


def test_reads_are_asked_for_at_the_last_moment_that_hides() -> None:
    trace = chain_trace(12, duration_s=1e-3)
    link = Link(write_bytes_per_s=1e9, read_bytes_per_s=1e9)  # a read takes 1.05 ms, a backward operator 2 ms
    problem = problem_of(trace, 8 << 20, link)
    plan = AccUdnn().plan(problem)
    assert predicted(plan).stall_s == 0
    assert {swap.gap.before_op - swap.fetch_op for swap in plan.swaps} == {1}


def test_the_longest_gaps_are_swapped_first() -> None:
    trace = chain_trace(12)
    plan = AccUdnn().plan(problem_of(trace, trace.peak_bytes - (3 << 20)))
    assert [swap.gap.storage for swap in plan.swaps] == [0, 1, 2]


def test_exposed_swaps_are_exchanged_if_that_helps() -> None:
    for trace in NETS:
        for link in (DISK, BOUND):
            problem = problem_of(trace, (2 * trace.floor_bytes() + trace.peak_bytes) // 3, link)
            plan = AccUdnn().plan(problem)
            assert plan.trials >= 1
            check(plan, problem)


def test_lines_are_found_exactly() -> None:
    lines = fit_lines((1, 2, 4), [[5.0, 7.0, 0.0], [7.0, 7.0, 0.0], [11.0, 7.0, 0.0]])
    assert lines.at_zero == pytest.approx([3, 7, 0])
    assert lines.per_sample == pytest.approx([2, 0, 0])
    assert lines.r2 == pytest.approx([1, 1, 1])
    assert lines.at(10) == pytest.approx([23, 7, 0])


def test_a_curve_that_is_no_line_shows_in_the_fit() -> None:
    lines = fit_lines((1, 2, 3, 4, 5), [[1.0], [9.0], [2.0], [8.0], [1.0]])
    assert lines.r2[0] < 0.5


def test_the_model_predicts_the_trace_of_a_batch_it_has_not_seen() -> None:
    model, truth = profile(), step_at(12)
    trace = model.trace(12)
    assert model.time_r2 > 0.98
    assert model.memory_r2 > 0.98
    assert trace.peak_bytes == truth.peak_bytes
    assert [storage.nbytes for storage in trace.storages] == [storage.nbytes for storage in truth.storages]
    assert trace.duration_s == pytest.approx(truth.duration_s)
    assert trace.gaps() == truth.gaps()


def test_measurements_scatter_and_the_fit_bears_it() -> None:
    model = profile(noise=0.03)
    assert model.time_r2 > 0.98
    assert model.trace(20).duration_s == pytest.approx(step_at(20).duration_s, rel=0.05)


@pytest.mark.parametrize("link", [DISK, BOUND], ids=("disk", "bound"))
@pytest.mark.parametrize("share", [0.3, 0.6, 1.0])
def test_the_best_batch_is_within_one_grid_step_of_the_true_one(link: Link, share: float) -> None:
    grid = tuple(range(2, 65, 2))
    budget_bytes = int(share * step_at(32).peak_bytes)
    tuned = tune(profile(noise=0.02), machine=machine_of(link), budget_bytes=budget_bytes, batches=grid)
    assert tuned.best is not None
    true_rate = {}
    for batch in grid:
        truth = predicted(AccUdnn().plan(problem_of(step_at(batch), budget_bytes, link)))
        if truth.peak_bytes <= budget_bytes:
            true_rate[batch] = batch / truth.step_s
    best = max(true_rate, key=lambda batch: true_rate[batch])
    assert abs(grid.index(tuned.best.batch) - grid.index(best)) <= 1
    assert tuned.learning_rate_factor == tuned.best.batch / FIVE[0]


@pytest.mark.parametrize("link", [DISK, BOUND], ids=("disk", "bound"))
@pytest.mark.parametrize("share", [0.3, 0.6, 1.0])
def test_throughput_rises_to_the_best_batch_and_falls_after_it(link: Link, share: float) -> None:
    budget_bytes = int(share * step_at(32).peak_bytes)
    tuned = tune(profile(), machine=machine_of(link), budget_bytes=budget_bytes, batches=range(1, 100))
    rates = [one.samples_per_s for one in tuned.choices if one.fits]
    peak = rates.index(max(rates))
    assert 0 < peak < len(rates) - 1
    assert rates[: peak + 1] == sorted(rates[: peak + 1])
    # Storages leave whole: from one batch to the next the fall is a sawtooth, from one tooth to the next it is not.
    falling = rates[peak::8]
    assert falling == sorted(falling, reverse=True)


def test_swapping_makes_larger_batches_possible() -> None:
    budget_bytes = step_at(16).peak_bytes
    tuned = tune(profile(), machine=machine_of(DISK), budget_bytes=budget_bytes, batches=range(1, 65))
    assert max(one.batch for one in tuned.choices if one.fits) > 2 * 16
    assert tuned.best is not None
    assert tuned.best.batch >= 16


def test_no_batch_fits_a_budget_of_nothing() -> None:
    tuned = tune(profile(), machine=machine_of(DISK), budget_bytes=1, batches=(4, 8))
    assert tuned.best is None
    assert tuned.learning_rate_factor == 1.0
    assert [one.fits for one in tuned.choices] == [False, False]


@pytest.mark.parametrize(
    ("samples", "message"),
    [
        ({}, "no batch size was recorded"),
        ({4: step_at(4)}, "1 batch sizes are too few to fit a line"),
        ({4: step_at(4), 8: chain_trace(3)}, "the step at batch 4 has"),
    ],
)
def test_recordings_that_make_no_model_are_refused(samples: dict[int, Trace], message: str) -> None:
    with pytest.raises(BadArgument, match=message):
        BatchModel(samples)


def test_a_batch_without_samples_is_refused() -> None:
    with pytest.raises(BadArgument, match="a batch of 0 has no sample"):
        profile().trace(0)


def test_lines_do_not_go_below_zero() -> None:
    lines = fit_lines((2, 4), [[1.0], [5.0]])
    assert lines.at(1)[0] == 0.0
    assert isinstance(lines.at(1), np.ndarray)


def test_steps_captured_at_five_batch_sizes_make_a_model() -> None:
    pytest.importorskip("torch")
    from lowtide import zoo
    from lowtide.capture.fake import capture_fake

    def captured(batch: int) -> Trace:
        return capture_fake(
            lambda: zoo.build("gpt", batch=batch, layers=1, width=64, heads=2, tokens=64, vocab=512).training(),
            least_bytes=4 * KIB,
        )

    model = BatchModel({batch: captured(batch) for batch in FIVE})
    assert model.time_r2 > 0.98
    assert model.memory_r2 > 0.98
    expected, truth = model.trace(12), captured(12)
    assert expected.duration_s == pytest.approx(truth.duration_s, rel=0.01)
    assert expected.peak_bytes == pytest.approx(truth.peak_bytes, rel=0.001)


@pytest.mark.parametrize(
    ("trace", "share", "link"), [(vgg(), 0.7, BOUND), (vgg(), 0.3, DISK)], ids=("vgg-bound", "vgg-disk")
)
def test_exchanging_what_turns_out_exposed_gains_time(
    trace: Trace, share: float, link: Link, monkeypatch: pytest.MonkeyPatch
) -> None:
    problem = problem_of(trace, trace.floor_bytes() + int(share * (trace.peak_bytes - trace.floor_bytes())), link)
    exchanged = AccUdnn().plan(problem)
    monkeypatch.setattr("lowtide.plan.policies.accudnn.ROUNDS", 1)
    first = AccUdnn().plan(problem)
    assert exchanged.trials > first.trials == 1
    assert predicted(exchanged).step_s < 0.97 * predicted(first).step_s
    assert {swap.gap for swap in exchanged.swaps} != {swap.gap for swap in first.swaps}


def test_what_hides_leaves_before_what_does_not() -> None:
    # Both transfers of a layer take 6 ms; the gap of layer k covers 3 ms for each layer after it. The last two do not
    # hide, and stay though they would be enough.
    trace = chain_trace(8, duration_s=1e-3)
    link = Link(write_bytes_per_s=(1 << 20) / 3e-3, read_bytes_per_s=(1 << 20) / 3e-3, duplex=True)
    plan = AccUdnn().plan(problem_of(trace, trace.peak_bytes - (1 << 20), link))
    assert plan.swaps
    assert max(swap.gap.storage for swap in plan.swaps) < 6
    assert plan.notes == (f"{len(plan.swaps)} of {len(plan.swaps)} swaps are short enough to hide",)
