"""A recorded step says what the unmanaged one does, whatever happened while it was recorded."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import lowtide
from lowtide import capture_step
from lowtide.core.trace import Kind, Phase, Reach, Trace
from lowtide.errors import BadArgument
from lowtide.execute.tide.recording import typical
from lowtide.memory.native import load
from lowtide.testing.traces import chain_trace
from tests import models
from tests.execute.training import NO_PRESSURE_BYTES, Training, need

KIB = 1024


@pytest.fixture(autouse=True, scope="module")
def one_compute_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def cnn() -> Training:
    return Training(models.cnn, shape=(8, 3, 32, 32))


def transformer() -> Training:
    return Training(models.Transformer, shape=(8, 64), labels=256, vocabulary=256)


@pytest.fixture(scope="module")
def trace() -> Trace:
    """The second step of a small CNN whose gradients stay until the next one begins."""
    training = cnn()

    def step() -> None:
        training.optimizer.zero_grad()
        training.backward_only()
        training.optimizer.step()

    return capture_step(step, model=training.model, optimizer=training.optimizer)


def recorded(training: Training, *, budget: int, spill: Path, policy: str = "auto") -> tuple[Trace, dict[str, Any]]:
    with lowtide.fit(training.model, training.optimizer, budget=budget, spill=spill, policy=policy) as tide:
        training.steps(2, tide.step)
        return tide.trace(), dict(tide.stats())


def test_the_traces_peak_is_the_allocators(tmp_path: Path) -> None:
    training = cnn()
    native = load()
    with lowtide.fit(training.model, training.optimizer, budget=NO_PRESSURE_BYTES, spill=tmp_path) as tide:
        training.steps(1, tide.step)
        native.reset_peaks()
        training.steps(1, tide.step)
        peak = native.counters().peak_live_bytes
        got = tide.trace()
    assert got.peak_bytes == pytest.approx(peak, rel=0.01)
    assert got.static_bytes < got.floor_bytes() < got.peak_bytes


def test_every_kind_of_storage_is_known_for_what_it_is(trace: Trace) -> None:
    training = cnn()
    parameters = sorted(p.nbytes for p in training.model.parameters())
    by_kind: dict[Kind, list[int]] = {}
    for storage in trace.storages:
        by_kind.setdefault(storage.kind, []).append(storage.nbytes)
    assert sorted(by_kind[Kind.PARAM]) == parameters
    # Those that the step before has left, and those that this one makes.
    assert sorted(by_kind[Kind.GRAD]) == sorted([*parameters, *parameters])
    # AdamW keeps two moments of each parameter, and a step count of four bytes.
    assert sorted(by_kind[Kind.OPTIMIZER]) == sorted([*parameters, *parameters, *[4] * len(parameters)])
    assert sorted(by_kind[Kind.BUFFER]) == sorted(tensor.nbytes for tensor in training.model.buffers())
    # Each of the four blocks has what the convolution and BatchNorm (before ReLU, in place) make, and nothing else.
    forward = [
        storage.nbytes
        for storage in trace.storages
        if storage.kind is Kind.ACTIVATION and trace.ops[storage.first_op].phase is Phase.FORWARD
    ]
    assert forward.count(8 * 16 * 32 * 32 * 4) == 8


def test_activations_may_be_away_between_their_last_use_in_forward_and_their_first_in_backward(trace: Trace) -> None:
    assert trace.reach is Reach.TOUCHED
    large = [gap for gap in trace.gaps(kinds={Kind.ACTIVATION}) if trace.storages[gap.storage].nbytes == 16 * 32 * KIB]
    across = [
        gap
        for gap in large
        if trace.ops[gap.after_op - 1].phase is Phase.FORWARD and trace.ops[gap.before_op].phase is Phase.BACKWARD
    ]
    assert len(across) >= 7  # all but the last, which backward needs at once


def test_an_operator_reads_what_an_earlier_one_wrote(trace: Trace) -> None:
    norms = [index for index, op in enumerate(trace.ops) if op.name == "aten::native_batch_norm"]
    assert len(norms) == 4
    for index in norms:
        read = trace.storages[trace.ops[index].reads[0]]
        assert read.producer is not None
        assert read.producer < index
        assert "conv" in trace.ops[read.producer].name


def test_an_in_place_relu_is_a_new_version_of_what_batch_norm_made(trace: Trace) -> None:
    relus = [op for op in trace.ops if op.name in ("aten::relu_", "aten::clamp_min_")]
    assert len(relus) == 4
    for op in relus:
        (written,) = op.writes
        assert written in op.reads
        assert trace.storages[written].versions == 1
        assert "batch_norm" in trace.ops[trace.storages[written].producer or 0].name


def test_modules_name_the_operators_of_forward(trace: Trace) -> None:
    convolutions = [op.module for op in trace.ops if "conv" in op.name and op.phase is Phase.FORWARD]
    assert convolutions == ["0", "3", "6", "9"]
    assert trace.model == "Sequential"


def test_phases_follow_each_other(trace: Trace) -> None:
    phases = [op.phase for op in trace.ops]
    forward = phases.index(Phase.BACKWARD)
    update = phases.index(Phase.UPDATE)
    assert forward < update
    assert set(phases[forward:update]) == {Phase.BACKWARD, Phase.FORWARD} or set(phases[forward:update]) == {
        Phase.BACKWARD
    }
    assert Phase.BACKWARD not in phases[update:]


@pytest.mark.parametrize("make", [cnn, transformer])
@pytest.mark.parametrize("policy", ["auto", "lru", "swap_all"])
def test_a_step_recorded_under_pressure_is_the_step_recorded_without(make: Any, policy: str, tmp_path: Path) -> None:
    needed = need(make, tmp_path)
    free, _ = recorded(make(), budget=needed.share(1.5), spill=tmp_path)
    tight, stats = recorded(make(), budget=needed.floor(1.2), spill=tmp_path, policy=policy)
    assert stats["swapped_out_bytes"] > 0
    assert [op.name for op in tight.ops] == [op.name for op in free.ops]
    assert [op.phase for op in tight.ops] == [op.phase for op in free.ops]
    assert sorted(storage.nbytes for storage in tight.storages) == sorted(storage.nbytes for storage in free.storages)
    assert [op.reads for op in tight.ops] == [op.reads for op in free.ops]
    assert [op.writes for op in tight.ops] == [op.writes for op in free.ops]
    assert tight.peak_bytes == pytest.approx(free.peak_bytes, rel=0.01)
    assert tight.floor_bytes() == pytest.approx(free.floor_bytes(), rel=0.02)
    assert tight.static_bytes == pytest.approx(free.static_bytes, rel=0.01)
    # Under a smaller budget smaller tensors count: then there are more saves, and the others are the same.
    uses = {save.storage: save.uses for save in tight.saves}
    assert {save.storage: save.uses for save in free.saves}.items() <= uses.items()
    for ours, theirs in zip(tight.ops, free.ops, strict=True):
        assert ours.peak_bytes == pytest.approx(theirs.peak_bytes, rel=0.02), ours


def test_odd_sizes_do_not_drift_under_pressure(tmp_path: Path) -> None:
    def make() -> Training:
        return Training(models.mlp, shape=(157, 128))  # 80,384 bytes: not whole pages

    needed = need(make, tmp_path)
    free, _ = recorded(make(), budget=needed.share(1.5), spill=tmp_path)
    tight, stats = recorded(make(), budget=needed.floor(1.2), spill=tmp_path, policy="swap_all")
    assert stats["swapped_out_bytes"] > 0
    assert tight.peak_bytes == free.peak_bytes
    assert [op.peak_bytes for op in tight.ops] == [op.peak_bytes for op in free.ops]


def test_waiting_for_a_slow_disk_is_not_an_operators_time(tmp_path: Path) -> None:
    from lowtide.tiers import FileMedium, Latency

    needed = need(Training, tmp_path)
    training = Training()
    slow = Latency(FileMedium([tmp_path]), write_s=0.03, read_s=0.03)
    with lowtide.fit(training.model, training.optimizer, budget=needed.floor(1.2), spill=slow, policy="lru") as tide:
        training.steps(2, tide.step)
        stats: dict[str, Any] = tide.stats()
        got = tide.trace()
    assert stats["last_step_stall_s"] > 0.2
    assert got.duration_s < stats["last_step_s"] - 0.8 * stats["last_step_stall_s"]


def test_a_step_without_a_model_or_an_optimizer_is_recorded_too() -> None:
    weight = torch.randn(256, 256, requires_grad=True)

    def step() -> None:
        (weight @ weight).sin().sum().backward()
        weight.grad = None

    got = capture_step(step)
    assert {"aten::mm", "aten::sin"} <= {op.name for op in got.ops}


def test_a_step_that_runs_no_operator_cannot_be_captured_and_says_so() -> None:
    with pytest.raises(BadArgument, match="no step was recorded"):
        capture_step(lambda: None)
    assert capture_step(lambda: torch.ones(10).sum()).gaps() == ()


@torch.jit.script
def scripted(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    c = a * 2
    return (a + c) + c.mul_(b)  # the sum waits on the interpreter's stack while c is written


def test_operators_of_torchscript_touch_their_own_operands(tmp_path: Path) -> None:
    with lowtide.fit(budget=256 << 20, spill=tmp_path) as tide:
        for _ in range(4):  # the interpreter optimizes what it has seen
            a, b = torch.ones(1 << 18), torch.full((1 << 18,), 3.0)
            with tide.step():
                scripted(a, b)
        trace = tide.trace()
        (written,) = [op for op in trace.ops if op.name == "aten::mul_"]
        (made,) = [op for op in trace.ops if op.name == "aten::mul"]
        assert len(written.reads) == 2
        assert set(written.writes) == set(written.reads) & set(made.writes)


def test_of_several_settled_steps_the_one_of_median_duration_is_typical() -> None:
    steps = [chain_trace(3, duration_s=seconds) for seconds in (5.0, 1.0, 3.0)]
    assert typical(steps) is steps[2]
    assert typical(steps[:2]) is steps[1]


def test_a_step_of_other_operators_is_another_kind_of_step() -> None:
    steps = [chain_trace(3, duration_s=seconds) for seconds in (5.0, 1.0, 3.0)]
    other = chain_trace(4, duration_s=1.0)
    assert typical([other, *steps]) is steps[2]
    assert typical([*steps, other]) is other
