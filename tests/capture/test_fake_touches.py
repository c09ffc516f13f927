"""A step that is not executed shows the gaps of every kind of storage, as an executor that moves pages has them."""

from __future__ import annotations

from functools import cache

import pytest
import torch
from torch import nn

from lowtide import registry, zoo
from lowtide.capture import Training
from lowtide.capture.fake import capture_fake
from lowtide.capture.schema import looks_at_shapes
from lowtide.core.machine import Link
from lowtide.core.plan import Problem
from lowtide.core.trace import Gap, Kind, Phase, Reach, Trace
from lowtide.plan.verify import check
from lowtide.testing.traces import machine_of
from tests.zoo.sizes import SMALL

# Every parameter and moment of these models has more, every step count of an optimizer less.
LEAST_BYTES = 16


@cache
def captured(name: str, reach: Reach = Reach.TOUCHED) -> Trace:
    return capture_fake(lambda: zoo.build(name, **SMALL[name]).training(), least_bytes=LEAST_BYTES, reach=reach)


@cache
def small_gpt() -> Trace:
    sizes = {"layers": 6, "width": 128, "heads": 2, "vocab": 300, "tokens": 16}
    return capture_fake(
        lambda: zoo.build("gpt", batch=1, **sizes).training(), least_bytes=LEAST_BYTES, reach=Reach.TOUCHED
    )


def gaps_of(trace: Trace, kind: Kind) -> dict[int, list[Gap]]:
    """Return the gaps of each storage of a kind that is large enough."""
    found: dict[int, list[Gap]] = {
        storage: []
        for storage, block in enumerate(trace.storages)
        if block.kind is kind and block.nbytes >= trace.least_bytes
    }
    for gap in trace.gaps(kinds={kind}):
        found[gap.storage].append(gap)
    return found


def within_update(trace: Trace, gap: Gap) -> bool:
    """Tell whether both ends of a gap are operators of the same update."""
    count = len(trace.ops)
    return gap.before_op < count and all(
        trace.ops[op].phase is Phase.UPDATE for op in (gap.after_op - 1, gap.before_op)
    )


def test_every_parameter_is_left_alone_from_its_update_to_the_next_forward_pass() -> None:
    trace = small_gpt()
    end = len(trace.ops)
    parameters = gaps_of(trace, Kind.PARAM)
    assert len(parameters) == 4 + 12 * 6
    for gaps in parameters.values():
        [wrapping] = [gap for gap in gaps if gap.before_op > end]
        assert trace.ops[wrapping.after_op - 1].phase is Phase.UPDATE
        assert trace.ops[wrapping.before_op - end].phase is Phase.FORWARD
    weights = [storage for storage in parameters if trace.storages[storage].nbytes == 128 * 4 * 128 * 4]
    assert len(weights) == 2 * 6
    for storage in weights:
        between = [gap for gap in parameters[storage] if trace.ops[gap.after_op - 1].phase is Phase.FORWARD]
        assert [trace.ops[gap.before_op].phase for gap in between] == [Phase.BACKWARD]


def test_moments_have_one_gap_outside_of_their_update_from_one_to_the_next() -> None:
    trace = small_gpt()
    end = len(trace.ops)
    moments = gaps_of(trace, Kind.OPTIMIZER)
    assert len(moments) == 2 * len(gaps_of(trace, Kind.PARAM))
    for gaps in moments.values():
        [waiting] = [gap for gap in gaps if not within_update(trace, gap)]
        assert trace.ops[waiting.after_op - 1].phase is Phase.UPDATE
        assert waiting.before_op > end
        assert trace.ops[waiting.before_op - end].phase is Phase.UPDATE
        # Its own update is a few operators of the sequence: it is away nearly all of the step.
        assert waiting.before_op - waiting.after_op > end - 20


def test_gradients_wait_from_their_accumulation_to_their_update_and_are_gone_in_the_end() -> None:
    trace = small_gpt()
    gradients = gaps_of(trace, Kind.GRAD)
    assert len(gradients) == len(gaps_of(trace, Kind.PARAM))
    for storage, gaps in gradients.items():
        made = trace.storages[storage]
        assert trace.ops[made.first_op].phase is Phase.BACKWARD
        assert made.last_op == len(trace.ops) - 1
        *_, last = gaps  # until it is freed, with the step's last operator
        assert last.before_op == len(trace.ops)
        ends = [(trace.ops[gap.after_op - 1].phase, trace.ops[gap.before_op].phase) for gap in gaps[:-1]]
        assert ends.count((Phase.BACKWARD, Phase.UPDATE)) == 1


def test_the_floor_is_far_below_what_is_alive_between_steps() -> None:
    trace = small_gpt()
    state = sum(block.nbytes for storage, block in enumerate(trace.storages) if trace.lives_on(storage))
    assert trace.static_bytes == state
    parameters = sum(trace.storages[storage].nbytes for storage in gaps_of(trace, Kind.PARAM))
    assert trace.static_bytes > 3 * parameters
    assert trace.floor_bytes() < 0.4 * trace.static_bytes


def gpt_that_frees_gradients(when: str) -> Training:
    work = zoo.build("gpt", batch=1, layers=6, width=128, heads=2, vocab=300, tokens=16)
    optimizer = work.optimizer(work.model.parameters())

    def step() -> None:
        if when == "first":
            optimizer.zero_grad()
        loss = work.loss(work.model(*work.inputs))
        if when == "before backward":
            optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if when == "last":
            optimizer.zero_grad()

    return Training(step=step, model=work.model, optimizer=optimizer)


@pytest.mark.parametrize("when", ["first", "before backward", "last"])
def test_the_largest_operator_sets_the_floor_whenever_gradients_are_freed(when: str) -> None:
    trace = capture_fake(lambda: gpt_that_frees_gradients(when), least_bytes=LEAST_BYTES, reach=Reach.TOUCHED)
    gradients = {storage for storage, block in enumerate(trace.storages) if block.kind is Kind.GRAD}
    heirs = trace.heirs()
    assert len(heirs) == (0 if when == "last" else 4 + 12 * 6)
    assert {*heirs, *heirs.values()} == (set() if when == "last" else gradients)
    largest = max(
        sum(trace.storages[storage].nbytes for storage in {*op.reads, *op.writes} if op.phase is Phase.UPDATE)
        for op in trace.ops
    )
    small = sum(block.nbytes for block in trace.storages if block.nbytes < LEAST_BYTES)
    assert largest <= trace.floor_bytes() <= largest + small
    budget_bytes = trace.floor_bytes() + (trace.peak_bytes - trace.floor_bytes()) // 4
    link = Link(write_bytes_per_s=2e9, read_bytes_per_s=2e9)
    problem = Problem(trace=trace, machine=machine_of(link), budget_bytes=budget_bytes)
    plan = registry.policy("auto").plan(problem)
    assert any(swap.gap.storage in gradients for swap in plan.swaps)
    check(plan, problem)


@pytest.mark.parametrize("name", ["gpt", "unet", "resnet50"])
def test_the_step_and_its_byte_curve_do_not_depend_on_what_can_be_moved(name: str) -> None:
    def operands(trace: Trace) -> list[tuple[list[int], list[int]]]:
        size = [storage.nbytes for storage in trace.storages]
        return [
            (sorted(size[s] for s in op.reads), sorted(size[s] for s in op.writes))
            for op in trace.ops
            if not looks_at_shapes(op.name)  # saved tensors are counted for them all the same
        ]

    touched, saved = captured(name), captured(name, Reach.SAVED)
    for field in ("name", "phase", "module", "start_s", "duration_s", "peak_bytes", "flops"):
        assert [getattr(op, field) for op in touched.ops] == [getattr(op, field) for op in saved.ops], field
    assert operands(touched) == operands(saved)
    assert touched.static_bytes == saved.static_bytes
    assert touched.saves == ()
    assert (saved.reach, saved.least_bytes) == (Reach.SAVED, 0)
    assert (touched.reach, touched.least_bytes) == (Reach.TOUCHED, LEAST_BYTES)
    assert touched.floor_bytes() < saved.floor_bytes()


def test_what_no_operator_touches_is_one_gap_of_the_whole_step() -> None:
    def make() -> Training:
        model = nn.Linear(64, 64)
        model.register_buffer("unused", torch.zeros(1000))
        model.frozen = nn.Parameter(torch.zeros(2000), requires_grad=False)
        return Training(step=lambda: model(torch.ones(2, 64)).sum().backward(), model=model)

    trace = capture_fake(make, least_bytes=1, reach=Reach.TOUCHED)
    end = len(trace.ops)
    [[buffer]] = gaps_of(trace, Kind.BUFFER).values()
    assert trace.storages[buffer.storage].nbytes == 4000
    assert (buffer.after_op, buffer.before_op) == (0, end)
    frozen = [gap for gap in trace.gaps() if trace.storages[gap.storage].nbytes == 8000]
    assert [(gap.after_op, gap.before_op) for gap in frozen] == [(0, end)]


def test_hooks_on_gradients_are_gone_after_the_capture() -> None:
    made: list[nn.Module] = []

    def make() -> Training:
        model = nn.Linear(4, 4)
        made.append(model)
        return Training(step=lambda: model(torch.ones(2, 4)).sum().backward(), model=model)

    capture_fake(make, least_bytes=1, reach=Reach.TOUCHED)
    assert not any(parameter._post_accumulate_grad_hooks for parameter in made[0].parameters())
