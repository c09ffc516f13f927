"""Saved tensors that are given up without a copy and made again: what they are made from must not have changed."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import lowtide
from lowtide.errors import SpillCorrupted
from lowtide.execute.recipes import repeats, without_side_effects, writes_of
from lowtide.execute.rerun import Rerun
from lowtide.execute.tide import Tide
from tests.bitwise.drop_all import DropAll

WIDTH = 256
BUDGET_BYTES = 8 << 20  # a tensor here has 1 MiB; the policy drops all the same
aten = torch.ops.aten
Step = Callable[[int, Tensor, Tensor], Tensor]


def opened(spill: Path) -> Tide:
    return lowtide.fit(budget=BUDGET_BYTES, spill=spill, policy=DropAll(once=True))


def gradients(step: Step, tide: Tide | None, *, steps: int = 6) -> list[Tensor]:
    """Return the gradient of every step; from the fourth on a managed one runs operators again."""
    found = []
    for index in range(steps):
        torch.manual_seed(index)
        weight = torch.randn(WIDTH, requires_grad=True)
        offset = torch.randn(1024, WIDTH)
        if tide is None:
            step(index, weight, offset).sum().backward()
        else:
            with tide.step():
                step(index, weight, offset).sum().backward()
        assert weight.grad is not None
        found.append(weight.grad)
    return found


def saved_sum(weight: Tensor, offset: Tensor) -> Tensor:
    """Return a value whose backward needs what is made from `offset`, and nothing else of it."""
    return ((offset + weight).sigmoid().exp()).sigmoid()


def change_in_place(offset: Tensor) -> None:
    offset.mul_(2.0)


def change_behind_the_version(offset: Tensor) -> None:
    offset.data.mul_(2.0)


def change_in_a_list(offset: Tensor) -> None:
    torch._foreach_mul_([offset], 2.0)


def change_as_a_result(offset: Tensor) -> None:
    torch.add(offset, 1.0, out=offset)


def change_a_view(offset: Tensor) -> None:
    offset[3:5].zero_()


CHANGES = [change_in_place, change_behind_the_version, change_in_a_list, change_as_a_result, change_a_view]


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("first", [0, 4], ids=("always", "not when it was recorded"))
def test_an_operand_that_changes_after_its_product_was_given_up(
    change: Callable[[Tensor], None], first: int, tmp_path: Path
) -> None:
    def step(index: int, weight: Tensor, offset: Tensor) -> Tensor:
        offset = offset.clone()  # memory of ours
        value = saved_sum(weight, offset)
        if index >= first:
            change(offset)
        return value * 2

    with opened(tmp_path) as tide:
        managed = gradients(step, tide)
        assert int(str(tide.stats()["recomputed_ops"])) > 0
    for index, (stock, found) in enumerate(zip(gradients(step, None), managed, strict=True)):
        assert torch.equal(stock, found), f"step {index} differs"


def test_a_product_that_is_changed_in_place_is_made_as_each_of_its_readers_saw_it(tmp_path: Path) -> None:
    def step(_index: int, weight: Tensor, offset: Tensor) -> Tensor:
        sums = offset + weight
        before = sums.detach().sigmoid()  # reads it as it was
        after = sums.relu_().sigmoid()
        return (weight * before * after).sigmoid()

    with opened(tmp_path) as tide:
        managed = gradients(step, tide)
        assert int(str(tide.stats()["recomputed_ops"])) > 0
    for stock, found in zip(gradients(step, None), managed, strict=True):
        assert torch.equal(stock, found)


def test_nothing_given_up_outlives_its_step(tmp_path: Path) -> None:
    torch.manual_seed(0)
    weight, offset = torch.randn(WIDTH, requires_grad=True), torch.randn(1024, WIDTH)
    with opened(tmp_path) as tide:
        for _ in range(4):
            with tide.step():
                value = saved_sum(weight, offset.clone())
                kept = value.sum()
            with torch.no_grad():
                weight.data.add_(0.0)  # unseen by versions, between two steps
            records = tide._runtime.machine.records()
            assert not any(tide._runtime.is_dropped(record) for record in records)
            with tide.step():
                kept.backward()
            del value, kept


def test_what_was_given_up_comes_back_when_the_tide_closes(tmp_path: Path) -> None:
    torch.manual_seed(0)
    weight, offset = torch.randn(WIDTH, requires_grad=True), torch.randn(1024, WIDTH)
    saved_sum(weight, offset.clone()).sum().backward()
    stock, weight.grad = weight.grad, None
    with opened(tmp_path) as tide:
        for _ in range(3):
            with tide.step():
                saved_sum(weight, offset.clone()).sum().backward()
        weight.grad = None
        with tide.step():
            last = saved_sum(weight, offset.clone()).sum()
    last.backward()
    assert stock is not None
    assert weight.grad is not None
    assert torch.equal(stock, weight.grad)


def test_an_exception_in_forward_leaves_the_training_usable(tmp_path: Path) -> None:
    def step(_index: int, weight: Tensor, offset: Tensor) -> Tensor:
        return saved_sum(weight, offset.clone())

    class Unlucky(Exception):
        pass

    with opened(tmp_path) as tide:
        first = gradients(step, tide)
        for _ in range(2):
            with pytest.raises(Unlucky), tide.step():
                saved_sum(torch.randn(WIDTH, requires_grad=True), torch.randn(1024, WIDTH))
                raise Unlucky
            again = gradients(step, tide)
    for stock, one, two in zip(gradients(step, None), first, again, strict=True):
        assert torch.equal(stock, one)
        assert torch.equal(stock, two)


def test_modes_and_autocast_of_the_program_do_not_see_what_runs_again(tmp_path: Path) -> None:
    from torch.utils.flop_counter import FlopCounterMode

    model = nn.Sequential(*(layer for _ in range(4) for layer in (nn.Linear(WIDTH, WIDTH), nn.ReLU())))
    inputs = torch.randn(1024, WIDTH)

    def flops(tide: Tide | None) -> list[int]:
        found = []
        for _ in range(5):
            with FlopCounterMode(display=False) as counter:
                if tide is None:
                    model(inputs).sum().backward()
                else:
                    with tide.step():
                        model(inputs).sum().backward()
            found.append(counter.get_total_flops())
        return found

    with lowtide.fit(model, budget=12 << 20, spill=tmp_path, policy=DropAll(once=True)) as tide:
        managed = flops(tide)
        assert int(str(tide.stats()["recomputed_ops"])) > 0
    assert managed == flops(None)


def test_the_mode_is_off_when_no_plan_asks_for_it(tmp_path: Path) -> None:
    with lowtide.fit(budget=64 << 20, spill=tmp_path) as tide:
        for index in range(4):
            with tide.step():
                saved_sum(torch.randn(WIDTH, requires_grad=True), torch.randn(1024, WIDTH)).sum().backward()
                on = torch._C._len_torch_dispatch_stack()
            assert on == (1 if index < 2 else 0), "only steps that are recorded are watched here"


@pytest.mark.slow
def test_what_torch_compile_made_is_what_runs(tmp_path: Path) -> None:
    """It compiles for half a minute, and leaves this process with compiled code: a process of its own."""
    program = f"""
        import torch, lowtide
        from torch._dynamo.utils import counters
        from tests.bitwise.drop_all import DropAll

        def steps(context):
            torch._dynamo.reset()
            torch.manual_seed(3)
            first, second = torch.nn.Linear(256, 256), torch.nn.Linear(256, 256)
            middle = torch.compile(lambda x: (x.sin() + 1).cos().relu() * 2)
            for _ in range(5):
                with context():
                    second(middle(first(torch.randn(512, 256)).relu())).relu().sum().backward()
            return first.weight.grad, second.weight.grad

        from contextlib import nullcontext
        stock = steps(nullcontext)
        assert counters["frames"]["ok"] == 1, counters
        counters.clear()
        with lowtide.fit(budget=12 << 20, spill={str(tmp_path)!r}, policy=DropAll(once=True)) as tide:
            managed = steps(tide.step)
            assert tide.stats()["recomputed_ops"] == 0
        assert counters["frames"]["ok"] == 1, counters
        assert all(torch.equal(a, b) for a, b in zip(stock, managed))
    """
    root = Path(__file__).parents[2]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(root), *sys.path])}
    subprocess.run([sys.executable, "-c", textwrap.dedent(program)], check=True, env=environment)


def test_verify_notices_an_operator_that_does_not_repeat_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def value(self: Rerun, leaf: object) -> object:
        found = honest(self, leaf)
        return found + 1 if isinstance(found, Tensor) and found.numel() > WIDTH else found

    def step(_index: int, weight: Tensor, offset: Tensor) -> Tensor:
        return saved_sum(weight, offset.clone())

    honest = Rerun._value
    with lowtide.fit(budget=BUDGET_BYTES, spill=tmp_path, policy=DropAll(once=True), verify=True) as tide:
        exact = gradients(step, tide)
        with monkeypatch.context() as patch:
            patch.setattr(Rerun, "_value", value)
            with pytest.raises(SpillCorrupted, match="came out otherwise when its operators ran again"):
                gradients(step, tide)
    assert all(torch.equal(a, b) for a, b in zip(gradients(step, None), exact, strict=True))


def test_which_calls_repeat() -> None:
    x = torch.ones(2)
    assert repeats(aten.relu.default, (x,), {})
    assert not repeats(aten.bernoulli.default, (x,), {})
    assert not repeats(aten.native_dropout.default, (x, 0.5, True), {})
    attention = aten._scaled_dot_product_flash_attention_for_cpu.default
    assert repeats(attention, (x, x, x), {})
    assert repeats(attention, (x, x, x, 0.0), {})
    assert not repeats(attention, (x, x, x, 0.1), {})


def test_which_arguments_calls_write() -> None:
    x, y = torch.ones(2), torch.ones(2)
    assert writes_of(aten.relu.default) is None
    in_place, listed, out = writes_of(aten.relu_.default), writes_of(aten._foreach_mul_.Scalar), writes_of(aten.add.out)
    assert in_place is not None
    assert listed is not None
    assert out is not None
    assert [one is x for one in in_place.written((x,), {})] == [True]
    assert len(list(listed.written(([x, y], 2.0), {}))) == 2
    assert [one is y for one in out.written((x, x), {"out": y})] == [True]


def test_a_normalisation_runs_again_without_its_running_statistics() -> None:
    x, w, mean = torch.randn(2, 3, 4), torch.ones(3), torch.zeros(3)
    training = (x, w, w, mean, mean, True, 0.1, 1e-5)
    evaluating = (x, w, w, mean, mean, False, 0.1, 1e-5)
    norm = aten.native_batch_norm.default
    pure = without_side_effects(norm, training)
    assert pure is not None
    assert pure[3] is pure[4] is None
    assert all(torch.equal(a, b) for a, b in zip(norm(*training), norm(*pure), strict=True))
    assert without_side_effects(norm, evaluating) == evaluating
