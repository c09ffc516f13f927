"""A step that is not executed gives the trace of the executed one."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import pytest
import torch
from torch import nn

from lowtide import capture_model, capture_step, zoo
from lowtide.capture import Training
from lowtide.capture.fake import capture_fake
from lowtide.capture.flops import CountFlops, with_flops
from lowtide.core.trace import RANGE_BYTES, Kind, Phase, Reach, Trace
from lowtide.errors import BadArgument
from lowtide.estimate import machine
from tests.zoo.sizes import SMALL

KIB = 1 << 10


@pytest.fixture(autouse=True, scope="module")
def one_compute_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def small(name: str) -> Callable[[], Training]:
    return lambda: zoo.build(name, **SMALL[name]).training()


@cache
def executed(name: str) -> Trace:
    training = small(name)()
    assert training.model is not None
    assert training.optimizer is not None
    return capture_step(training.step, model=training.model, optimizer=training.optimizer)


@cache
def faked(name: str) -> Trace:
    return capture_fake(small(name), least_bytes=RANGE_BYTES, reach=Reach.TOUCHED)


def pages(nbytes: int) -> int:
    """Return what the native allocator counts for a block: whole pages from 64 KiB on."""
    return nbytes if nbytes < 64 * KIB else -(-nbytes // 4096) * 4096


# Thousands of operators each: they take too long for every run.
LONG = ("densenet121", "inception_v3", "seq2seq")
every_model = pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow) if name in LONG else name for name in SMALL]
)


@every_model
def test_the_same_operators_run_in_the_same_order_and_modules(name: str) -> None:
    real, fake = executed(name), faked(name)
    assert [op.name for op in fake.ops] == [op.name for op in real.ops]
    assert [op.module for op in fake.ops] == [op.module for op in real.ops]
    for ours, theirs in zip(fake.ops, real.ops, strict=True):
        if ours.phase is not theirs.phase:
            # What the engine itself does between two nodes is the backward pass too; the recorder cannot tell.
            assert (ours.phase, theirs.phase) == (Phase.BACKWARD, Phase.FORWARD)
            assert ours.name in ("aten::add", "aten::add_", "aten::sum")


@every_model
def test_the_gaps_are_the_same(name: str) -> None:
    def gaps(trace: Trace) -> list[tuple[int, int, int]]:
        found = ((g.after_op, g.before_op, pages(trace.storages[g.storage].nbytes)) for g in trace.gaps())
        return sorted(found)

    assert gaps(faked(name)) == gaps(executed(name)) != []


@every_model
def test_the_peak_is_the_executed_one_but_for_scratch_inside_operators(name: str) -> None:
    real, fake = executed(name), faked(name)
    # Scratch is a larger part of these tiny models than of real ones: 2.7% of U-Net's peak, and a third of its floor,
    # which is one convolution with its operands and scratch.
    least = 0.67 if name == "unet" else 0.95
    assert 0.97 * real.peak_bytes <= fake.peak_bytes <= real.peak_bytes
    assert least * real.floor_bytes() <= fake.floor_bytes() <= real.floor_bytes()
    # The native allocator counts small blocks with their headers and larger ones in pages.
    assert fake.static_bytes == pytest.approx(real.static_bytes, rel=0.01)
    assert fake.static_bytes <= real.static_bytes


@every_model
def test_storages_are_of_the_kinds_they_are(name: str) -> None:
    def of(trace: Trace, kind: Kind) -> list[int]:
        return sorted(pages(storage.nbytes) for storage in trace.storages if storage.kind is kind)

    real, fake = executed(name), faked(name)
    for kind in (Kind.PARAM, Kind.BUFFER, Kind.OPTIMIZER):
        assert of(fake, kind) == of(real, kind), kind


@every_model
def test_operands_and_results_are_the_executed_ones(name: str) -> None:
    real, fake = executed(name), faked(name)

    def sizes(trace: Trace, storages: tuple[int, ...]) -> Counter[int]:
        # Executed, a Python number is a tensor of 8 bytes to an operator; on fake tensors it stays a number.
        return Counter(pages(trace.storages[s].nbytes) for s in storages if trace.storages[s].nbytes > 8)

    for ours, theirs in zip(fake.ops, real.ops, strict=True):
        assert sizes(fake, ours.reads) == sizes(real, theirs.reads), theirs
        assert sizes(fake, ours.writes) <= sizes(real, theirs.writes), theirs  # and scratch that no fake tensor shows


# ---- sizes no machine has ----


def test_saved_bytes_grow_with_the_batch() -> None:
    few, many = capture_model("resnet50", batch=32, fake=True), capture_model("resnet50", batch=4096, fake=True)
    saved = [
        sum(storage.nbytes for s in t.saves if (storage := t.storages[s.storage]).kind is not Kind.GRAD)
        for t in (few, many)
    ]
    assert saved[1] == pytest.approx(128 * saved[0], rel=0.01)
    assert many.peak_bytes > 300 << 30
    assert sum(op.flops for op in many.ops) == pytest.approx(128 * sum(op.flops for op in few.ops))


GPT3 = """
import json, resource, time
begun = time.perf_counter()
from lowtide import capture_model
trace = capture_model("gpt3-175b", batch=1, fake=True)
print(json.dumps({
    "seconds": time.perf_counter() - begun,
    "resident_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
    "static_bytes": trace.static_bytes,
    "flops": sum(op.flops for op in trace.ops),
    "blocks": len({op.module.split(".")[1] for op in trace.ops if op.module.startswith("blocks.")}),
}))
"""


@pytest.mark.slow
def test_a_gpt_of_175_billion_parameters_is_captured_in_a_minute_and_4_gb() -> None:
    done = subprocess.run([sys.executable, "-c", GPT3], capture_output=True, text=True, env=os.environ, check=True)
    told = json.loads(done.stdout)
    assert told["blocks"] == 96
    # Parameters and two moments in single precision.
    assert told["static_bytes"] == pytest.approx(3 * 4 * 174.6e9, rel=0.01)
    # Six operations for each parameter and token, and attention besides.
    assert told["flops"] == pytest.approx(6 * 174.6e9 * 2048, rel=0.05)
    assert told["seconds"] < 60
    assert told["resident_bytes"] < 4e9


# ---- operations and times ----


def test_operations_are_those_of_the_formulas() -> None:
    trace = faked("vgg16")
    first = next(op for op in trace.ops if op.name == "aten::convolution")
    assert first.flops == 2 * 4 * 8 * 32 * 32 * 3 * 3 * 3  # two x batch x channels x image x kernel
    backward = [op for op in trace.ops if op.name == "aten::convolution_backward"]
    # The first layer's input needs no gradient.
    assert backward[-1].flops == first.flops
    second = [op for op in trace.ops if op.name == "aten::convolution"][1]
    assert backward[-2].flops == 2 * second.flops
    assert all(op.flops == 0 for op in trace.ops if "relu" in op.name or op.phase is Phase.UPDATE)
    attention = [op for op in faked("gpt").ops if "scaled_dot_product" in op.name]
    assert len(attention) == 4
    assert all(op.flops > 0 for op in attention)


def test_counting_a_run_gives_an_executed_trace_the_same_operations() -> None:
    training = small("gpt")()
    counter = CountFlops()
    with counter:
        training.step()
    counted = with_flops(executed("gpt"), counter.counted)
    assert [op.flops for op in counted.ops] == [op.flops for op in faked("gpt").ops]


def test_counts_of_another_step_are_not_believed() -> None:
    trace = executed("gpt")
    assert with_flops(trace, [("aten::addmm", 5.0)]) == trace


def test_times_are_those_of_the_machine_asked_for() -> None:
    slow = capture_fake(small("vgg16"), machine=machine("k40c"), least_bytes=RANGE_BYTES)
    fast = capture_fake(small("vgg16"), machine=machine("h100"), least_bytes=RANGE_BYTES)
    assert fast.duration_s < slow.duration_s
    assert all(quick.duration_s <= long.duration_s for quick, long in zip(fast.ops, slow.ops, strict=True))
    assert slow.duration_s == pytest.approx(sum(op.duration_s for op in slow.ops))


# ---- other programs ----


def test_a_step_that_looks_at_values_is_refused_in_one_line() -> None:
    def make() -> Training:
        model = nn.Linear(4, 4)
        return Training(step=lambda: model(torch.randn(2, 4)).sum().item(), model=model)

    with pytest.raises(BadArgument, match="capture it by running it") as caught:
        capture_fake(make)
    assert "\n" not in str(caught.value)
    with pytest.raises(BadArgument, match="pass 1 or more"):
        capture_fake(make, steps=0)


def test_a_kept_result_is_never_free_and_one_let_go_of_is() -> None:
    def make() -> Training:
        weight = nn.Parameter(torch.randn(256, 256))
        kept: list[torch.Tensor] = []

        def step() -> None:
            kept.clear()
            first = (weight @ weight).sin()
            second = first.sin()
            kept.append(first)
            third = second.sin()
            del first, second
            third.sin().sum().backward()
            weight.grad = None

        return Training(step=step)

    trace = capture_fake(make, least_bytes=1)
    sines = [index for index, op in enumerate(trace.ops) if op.name == "aten::sin"]
    saved_by = {save.packed_op: save for save in trace.saves}
    assert saved_by[sines[1]].free_op is None, "the program keeps what the second sine read"
    assert saved_by[sines[2]].free_op is not None
    product = saved_by[sines[0]]
    assert trace.storages[product.storage].producer == sines[0] - 1


def test_the_second_step_is_as_all_that_follow() -> None:
    first, later = (capture_fake(small("vit"), steps=steps, least_bytes=RANGE_BYTES) for steps in (2, 4))
    assert (first.ops, first.saves, first.static_bytes) == (later.ops, later.saves, later.static_bytes)


def test_a_model_is_captured_by_name_with_its_operations_and_for_another_machine() -> None:
    sizes: dict[str, Any] = {"image": 64, "width": 16}
    here = capture_model("vgg16", batch=4, **sizes)
    there = capture_model("vgg16", batch=4, machine=machine("v100"), **sizes)
    fake = capture_model("vgg16", batch=4, fake=True, machine=machine("v100"), **sizes)
    assert here.model == there.model == fake.model == "vgg16"
    assert [op.flops for op in here.ops] == [op.flops for op in fake.ops]
    assert there.duration_s == pytest.approx(fake.duration_s, rel=0.05)
