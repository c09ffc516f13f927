"""Saved tensors that are given up without a copy and made again: what they are made from must not have changed."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import lowtide
from lowtide.capture.schema import is_view
from lowtide.errors import SpillCorrupted, SpillError
from lowtide.execute.backends.cpu.backend import CpuBackend
from lowtide.execute.observe import operators
from lowtide.execute.recompute.recipes import repeats, without_statistics, writes_of
from lowtide.execute.recompute.rerun import Rerun
from lowtide.execute.tide.tide import Tide
from tests.bitwise.discard_all import DiscardAll

WIDTH = 256
BUDGET_BYTES = 8 << 20  # a tensor here has 1 MiB; the policy discards all the same
aten = torch.ops.aten
Step = Callable[[int, Tensor, Tensor], Tensor]


def opened(spill: Path) -> Tide:
    return lowtide.fit(budget=BUDGET_BYTES, spill=spill, policy=DiscardAll(once=True))


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


def ran_again(tide: Tide) -> bool:
    return int(str(tide.stats()["recomputed_ops"])) > 0


def assert_exact(step: Step, spill: Path, *, budget_bytes: int = BUDGET_BYTES) -> None:
    """Compare every step's gradient with stock's, whether a discarded storage is made once or on the way."""
    stock = gradients(step, None)
    for once in (True, False):
        with lowtide.fit(budget=budget_bytes, spill=spill, policy=DiscardAll(once=once)) as tide:
            managed = gradients(step, tide)
            assert ran_again(tide)
        for index, (expected, found) in enumerate(zip(stock, managed, strict=True)):
            assert torch.equal(expected, found), f"step {index} differs, once={once}"


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
        value = saved_sum(weight, offset)
        if index >= first:
            change(offset)
        return value * 2

    with opened(tmp_path) as tide:
        managed = gradients(step, tide)
        assert first == 0 or ran_again(tide)
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
        assert ran_again(tide)
    for stock, found in zip(gradients(step, None), managed, strict=True):
        assert torch.equal(stock, found)


def trained(tide: Tide, *, layers: int = 3) -> tuple[list[Tensor], Tensor]:
    """Train a chain of layers until its plan is followed; return its weights and its input."""
    torch.manual_seed(0)
    weights = [torch.randn(WIDTH, requires_grad=True) for _ in range(layers)]
    inputs = torch.randn(1024, WIDTH)
    for _ in range(4):
        with tide.step():
            chained(weights, inputs).backward()
    assert ran_again(tide)
    return weights, inputs


def chained(weights: list[Tensor], inputs: Tensor) -> Tensor:
    for weight in weights:
        inputs = (inputs * weight).sigmoid()
    return inputs.sum()


def assert_gradients_of_stock(weights: list[Tensor], inputs: Tensor) -> None:
    stock = [weight.detach().clone().requires_grad_() for weight in weights]
    chained(stock, inputs).backward()
    for expected, found in zip(stock, weights, strict=True):
        assert expected.grad is not None
        assert found.grad is not None
        assert torch.equal(expected.grad, found.grad)


def discarded(tide: Tide) -> int:
    return sum(bool(tide._runtime.is_discarded(record)) for record in tide._runtime.machine.records())


def test_what_the_last_remembered_call_made_is_given_up_too(tmp_path: Path) -> None:
    # What a call makes is saved when the call is over: by its own operator, or by one that reads it.
    with lowtide.fit(budget=BUDGET_BYTES, spill=tmp_path, policy=DiscardAll(once=True)) as tide:
        weights, inputs = trained(tide)
        plan = tide.plan()
        assert plan is not None
        with tide.step():
            loss = chained(weights, inputs)
            assert discarded(tide) == len({one.gap.storage for one in plan.recomputes}) > 1
            written = tide.stats()["swapped_out_bytes"]
            loss.backward()
        assert tide.stats()["swapped_out_bytes"] == written


def test_nothing_given_up_outlives_its_step(tmp_path: Path) -> None:
    with opened(tmp_path) as tide:
        weights, inputs = trained(tide)
        with tide.step():
            kept = chained(weights, inputs)
            assert discarded(tide) > 0
        assert discarded(tide) == 0
        for weight in weights:
            weight.grad = None
        kept.backward()
    assert_gradients_of_stock(weights, inputs)


@pytest.mark.parametrize("end", ["the step's end", "the tide's end"])
def test_a_graph_that_is_kept_fits_into_the_budget_and_lasts(end: str, tmp_path: Path) -> None:
    # 24 layers of 1 MiB under 14 MiB: what is made again one by one has to be swapped meanwhile.
    with lowtide.fit(budget=14 << 20, spill=tmp_path, policy=DiscardAll(once=True)) as tide:
        weights, inputs = trained(tide, layers=24)
        for weight in weights:
            weight.grad = None
        if end == "the step's end":
            with tide.step():
                kept = chained(weights, inputs)
            assert discarded(tide) == 0
            with tide.step():
                kept.backward()
        else:
            with pytest.raises(ZeroDivisionError), tide.step():
                kept = chained(weights, inputs)
                _ = 1 / 0
            assert discarded(tide) > 0
    if end != "the step's end":
        kept.backward()
    assert_gradients_of_stock(weights, inputs)


def test_what_was_given_up_went_with_a_tide_that_an_exception_closed(tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError), opened(tmp_path) as tide:
        weights, inputs = trained(tide)
        with tide.step():
            kept = chained(weights, inputs)
            _ = 1 / 0
    with pytest.raises(SpillError, match="which was closed: run backward before that"):
        kept.backward()


def test_running_statistics_that_move_after_they_were_read(tmp_path: Path) -> None:
    norm = nn.BatchNorm1d(WIDTH)

    def evaluated(_index: int, weight: Tensor, offset: Tensor) -> Tensor:
        norm.reset_running_stats()
        norm.eval()
        first = saved_sum(weight, norm(offset))
        norm.train()
        return (first * norm(first * 3 + 1)).sigmoid()

    def read(_index: int, weight: Tensor, offset: Tensor) -> Tensor:
        norm.reset_running_stats()
        first = saved_sum(weight - norm.running_mean, offset)
        return (first * norm(first * 3 + 1)).sigmoid()

    assert_exact(evaluated, tmp_path, budget_bytes=16 << 20)
    assert_exact(read, tmp_path, budget_bytes=16 << 20)


class ChangesWhatItSaved(torch.autograd.Function):
    changes = False

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        if ChangesWhatItSaved.changes:
            x.data.mul_(0.5)
        return gradient


@pytest.mark.parametrize("first", [0, 3])
@pytest.mark.parametrize("budget_bytes", [8 << 20, 16 << 20])
def test_a_saved_tensor_that_backward_changes_behind_autograd(first: int, budget_bytes: int, tmp_path: Path) -> None:
    def step(index: int, weight: Tensor, offset: Tensor) -> Tensor:
        ChangesWhatItSaved.changes = index >= first
        one = two = (offset + weight).sigmoid()
        for _ in range(4):
            one = one.exp().sigmoid()
        two = ChangesWhatItSaved.apply(two)
        for _ in range(4):
            two = two.exp().sigmoid()
        return one + two

    assert_exact(step, tmp_path, budget_bytes=budget_bytes)


def test_an_operator_of_another_library_may_write_what_it_is_given(tmp_path: Path) -> None:
    library = torch.library.Library("lowtide_test", "DEF")
    library.define("fill(Tensor x) -> ()")  # and does not say that it writes

    def fill(x: Tensor) -> None:
        x.fill_(0.5)

    library.impl("fill", fill, "CompositeExplicitAutograd")

    def step(index: int, weight: Tensor, offset: Tensor) -> Tensor:
        made = offset.neg()
        if index >= 3:
            torch.ops.lowtide_test.fill(made)
        sums = made + weight
        del made
        return saved_sum(weight, sums)

    assert_exact(step, tmp_path)


def test_memory_that_numpy_has_is_no_operand(tmp_path: Path) -> None:
    def source(_index: int, weight: Tensor, offset: Tensor) -> Tensor:
        array = offset.numpy()
        value = saved_sum(weight, offset)
        array *= 2
        return value * 2

    def product(_index: int, weight: Tensor, offset: Tensor) -> Tensor:
        made = offset.neg()
        array = made.numpy()
        array *= 2
        return saved_sum(weight, made) * 2

    assert_exact(source, tmp_path)
    assert_exact(product, tmp_path)


def through_a_capsule(tensor: Tensor) -> numpy.ndarray[Any, Any]:
    return torch.from_dlpack(torch.to_dlpack(tensor)).numpy()


@pytest.mark.parametrize("lend", [numpy.from_dlpack, through_a_capsule])
def test_memory_that_dlpack_lent_is_no_operand(
    lend: Callable[[Tensor], numpy.ndarray[Any, Any]], tmp_path: Path
) -> None:
    """Unlike what `numpy()` lent it looks as before."""

    def source(index: int, weight: Tensor, offset: Tensor) -> Tensor:
        borrowed = lend(offset)
        value = saved_sum(weight, offset)
        if index >= 3:
            borrowed.fill(0.5)
        return value * 2

    def product(index: int, weight: Tensor, offset: Tensor) -> Tensor:
        made = offset.neg()
        borrowed = lend(made)
        value = saved_sum(weight, made)
        if index >= 3:
            borrowed.fill(0.5)
        return value * 2

    assert_exact(source, tmp_path)
    assert_exact(product, tmp_path)


def test_memory_that_dlpack_lent_between_steps_is_no_operand(tmp_path: Path) -> None:
    lent: list[tuple[Tensor, numpy.ndarray[Any, Any]]] = []

    def step(index: int, weight: Tensor, _offset: Tensor) -> Tensor:
        refilled, borrowed = lent[0]
        borrowed.fill(1.0 + index)
        value = saved_sum(weight, refilled)
        borrowed.fill(0.5)
        return value * 2

    refilled = torch.ones(1024, WIDTH)
    lent.append((refilled, numpy.from_dlpack(refilled)))
    stock = gradients(step, None)
    with lowtide.fit(budget=BUDGET_BYTES, spill=tmp_path, policy=DiscardAll(once=True)) as tide:
        lent[0] = (refilled, numpy.from_dlpack(refilled))
        managed = gradients(step, tide)
    assert all(map(torch.equal, stock, managed))


@pytest.mark.parametrize("lend", [lambda tensor: tensor.numpy(), numpy.asarray], ids=("numpy", "asarray"))
def test_an_operand_that_numpy_gets_after_its_product_was_given_up(
    lend: Callable[[Tensor], numpy.ndarray[Any, Any]], tmp_path: Path
) -> None:
    def step(index: int, weight: Tensor, offset: Tensor) -> Tensor:
        value = saved_sum(weight, offset)
        if index >= 3:
            array = lend(offset)
            array *= 2
        return value * 2

    before = vars(Tensor).get("numpy"), vars(Tensor)["__dlpack__"]
    assert_exact(step, tmp_path)
    assert (vars(Tensor).get("numpy"), vars(Tensor)["__dlpack__"]) == before


@pytest.mark.parametrize("what", ["product", "source", "small source"])
def test_another_thread_changes_an_operand(what: str, tmp_path: Path) -> None:
    def step(index: int, weight: Tensor, offset: Tensor) -> Tensor:
        made = {"product": offset.neg, "source": lambda: offset, "small source": small.zero_}[what]()
        if what == "source":
            sums = made + weight
        if what == "small source":
            sums = offset + made + weight
        if index >= 3:
            thread = threading.Thread(target=made.add_, args=(3,))
            thread.start()
            thread.join()
        if what == "product":
            sums = made + weight
        del made
        return sums.sigmoid().exp().sigmoid() * 2

    small = torch.ones(1)
    assert_exact(step, tmp_path)


def owner_that_gives_up_and_fills_again() -> Step:
    """Return a step with a parameter that its owner gives up after forward and gathers again, as FSDP does."""
    gathered = torch.ones(WIDTH)

    def step(index: int, weight: Tensor, offset: Tensor) -> Tensor:
        gathered.fill_(3.0)
        value = (offset + gathered + weight).sigmoid().exp().sigmoid()
        if index >= 3:
            storage = gathered.untyped_storage()
            nbytes = storage.nbytes()
            storage.resize_(0)
            storage.resize_(nbytes)
            with torch.autograd._unsafe_preserve_version_counter(gathered):
                gathered.fill_(7.0)
        return value * 2

    return step


def test_an_operand_that_its_owner_gives_up_and_fills_again(tmp_path: Path) -> None:
    assert_exact(owner_that_gives_up_and_fills_again(), tmp_path)


def test_a_call_that_raises_half_way_may_have_changed_its_operands(tmp_path: Path) -> None:
    def step(index: int, weight: Tensor, offset: Tensor) -> Tensor:
        one, two = offset.neg(), offset.abs()
        first, second = one.abs(), two.abs()[:, : 3 if index >= 3 else WIDTH]
        with suppress(RuntimeError):
            torch._foreach_add_([one, two], [first, second])
        sums = one + weight
        del one, two, first, second
        return sums.sigmoid().exp().sigmoid() * 2

    assert_exact(step, tmp_path, budget_bytes=12 << 20)


def test_settings_of_the_kernels_are_those_of_the_first_run(tmp_path: Path) -> None:
    def step(_index: int, weight: Tensor, offset: Tensor) -> Tensor:
        kernel = torch.arange(2304).float().sin().view(16, 16, 3, 3) + weight[0]
        with torch.backends.mkldnn.flags(enabled=False):
            value = torch.conv2d(offset[:256].reshape(1, 16, 64, 64), kernel, padding=1)
        return value.sigmoid().exp().sigmoid()

    assert_exact(step, tmp_path, budget_bytes=32 << 20)
    assert torch.backends.mkldnn.enabled


def test_what_could_not_be_made_before_a_write_raises_instead_of_being_wrong(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The operator that writes cannot be kept from it: neither the error nor the loss of the bytes may be hidden."""
    raised = []

    def step(index: int, weight: Tensor, offset: Tensor) -> Tensor:
        value = saved_sum(weight, offset)
        if index == 4:
            with monkeypatch.context() as patched:
                patched.setattr(Rerun, "run", lambda _self: raised.append(1) or 1 / 0)
                offset.data.mul_(0.5)
            with pytest.raises(ZeroDivisionError):
                (offset * weight).sigmoid()  # the next save
        return value * 2

    with opened(tmp_path) as tide:
        gradients(step, tide, steps=4)
        with pytest.raises(RuntimeError, match="was changed in place"):
            gradients(lambda index, *operands: step(index + 4, *operands), tide, steps=1)
    assert raised


def test_calls_run_again_flush_small_numbers_as_the_first_time(tmp_path: Path) -> None:
    def step(_index: int, weight: Tensor, offset: Tensor) -> Tensor:
        torch.set_flush_denormal(True)
        small = offset.abs() * 1e-39  # not normal: zero here, and not without the setting
        value = (small * 1e38 + weight).sigmoid()
        torch.set_flush_denormal(False)
        return value.exp().sigmoid() * 2

    try:
        assert_exact(step, tmp_path)
        assert torch.tensor(1e-39).item() > 0
    finally:
        torch.set_flush_denormal(False)


def test_what_the_program_has_set_is_as_it_was_after_calls_have_run_again(tmp_path: Path) -> None:
    def step(_index: int, weight: Tensor, offset: Tensor) -> Tensor:
        torch.use_deterministic_algorithms(False)
        value = saved_sum(weight, offset)
        torch.use_deterministic_algorithms(True, warn_only=True)
        return value * 2

    try:
        assert_exact(step, tmp_path)
        assert torch.are_deterministic_algorithms_enabled()
        assert torch.is_deterministic_algorithms_warn_only_enabled()
    finally:
        torch.use_deterministic_algorithms(False)


def test_a_change_through_a_view_of_another_dtype(tmp_path: Path) -> None:
    def step(_index: int, weight: Tensor, offset: Tensor) -> Tensor:
        made = offset.neg()
        made.view(torch.int32).bitwise_not_()
        sums = made.nan_to_num() + weight
        del made
        return sums.sigmoid().exp().sigmoid() * 2

    assert_exact(step, tmp_path)


def test_what_many_layers_read_may_change_within_the_budget(tmp_path: Path) -> None:
    def step(index: int, weight: Tensor, offset: Tensor) -> Tensor:
        value = offset.abs()
        for _ in range(24):
            value = (value * weight + offset).sigmoid()
        if index >= 3:
            offset.data.mul_(0.5)
        return value

    assert_exact(step, tmp_path, budget_bytes=14 << 20)


def test_nothing_is_held_longer_than_its_record(tmp_path: Path) -> None:
    with lowtide.fit(budget=10 << 20, spill=tmp_path, policy=DiscardAll(once=True)) as tide:
        weights, inputs = trained(tide, layers=12)
        held: list[int] = []
        weights[0].register_hook(lambda _gradient: held.append(len(tide._runtime.machine.records())))
        with tide.step():
            chained(weights, inputs).backward()
    assert held[0] <= 3, "what backward has passed is let go"


def test_only_the_programs_own_calls_are_numbered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # What is attached when bytes land comes at a time of its own: numbered, it would shift the calls after it.
    class Counter(TorchDispatchMode):
        calls = 0

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            Counter.calls += not is_view(func._schema)
            return func(*args, **(kwargs or {}))

    def step(weights: list[Tensor], inputs: Tensor) -> None:
        for _ in range(2):
            chained(weights, inputs).backward()

    torch.manual_seed(1)
    weights, inputs = [torch.randn(WIDTH, requires_grad=True) for _ in range(12)], torch.randn(1024, WIDTH)
    step(weights, inputs)
    with Counter():
        step(weights, inputs)
    numbers: list[int] = []
    original = CpuBackend.mark_call
    monkeypatch.setattr(CpuBackend, "mark_call", lambda self, number: (numbers.append(number), original(self, number)))
    with lowtide.fit(budget=BUDGET_BYTES, spill=tmp_path, policy=DiscardAll(once=True)) as tide:
        with tide.step():
            step(weights, inputs)
        assert int(str(tide.stats()["swapped_in_bytes"])) > 0
    assert numbers == list(range(Counter.calls))


def test_a_mode_that_the_program_leaves_after_the_step_is_left_alone(tmp_path: Path) -> None:
    from torch.utils.flop_counter import FlopCounterMode

    before = torch._C._len_torch_dispatch_stack()
    with opened(tmp_path) as tide:
        mode = FlopCounterMode(display=False)
        with tide.step():
            mode.__enter__()
            saved_sum(torch.randn(WIDTH, requires_grad=True), torch.randn(1024, WIDTH)).sum().backward()
        mode.__exit__(None, None, None)
    assert torch._C._len_torch_dispatch_stack() == before
    assert not operators._watchers


@pytest.mark.parametrize("policy", ["auto", "capuchin"])
def test_policies_that_recompute_do_unless_told_otherwise(policy: str, tmp_path: Path) -> None:
    for recompute, watched in ((None, 1), (True, 1), (False, 0)):
        with (
            lowtide.fit(budget=BUDGET_BYTES, spill=tmp_path, policy=policy, recompute=recompute) as tide,
            tide.step(),
        ):
            assert len(operators._watchers) == watched
            assert torch._C._len_torch_dispatch_stack() == 0
    with lowtide.fit(budget=BUDGET_BYTES, spill=tmp_path, policy="swap_all") as tide, tide.step():
        assert len(operators._watchers) == 0


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
            kept = []
            with pytest.raises(Unlucky), tide.step():
                kept.append(saved_sum(torch.randn(WIDTH, requires_grad=True), torch.randn(1024, WIDTH)))
                raise Unlucky
            again = gradients(step, tide)
        assert ran_again(tide)
    for stock, one, two in zip(gradients(step, None), first, again, strict=True):
        assert torch.equal(stock, one)
        assert torch.equal(stock, two)


def test_modes_of_the_program_do_not_see_what_runs_again(tmp_path: Path) -> None:
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

    with lowtide.fit(model, budget=12 << 20, spill=tmp_path, policy=DiscardAll(once=True)) as tide:
        managed = flops(tide)
        assert ran_again(tide)
    assert managed == flops(None)


def test_operators_are_watched_only_where_a_plan_asks_for_it(tmp_path: Path) -> None:
    with lowtide.fit(budget=64 << 20, spill=tmp_path, recompute=True) as tide:
        for index in range(4):
            with tide.step():
                saved_sum(torch.randn(WIDTH, requires_grad=True), torch.randn(1024, WIDTH)).sum().backward()
                watched = len(operators._watchers)
                assert torch._C._len_torch_dispatch_stack() == 0
            assert watched == (1 if index < 2 else 0), "only steps that are recorded are watched here"


@pytest.mark.slow
def test_what_torch_compile_made_is_what_runs(tmp_path: Path) -> None:
    """It compiles for half a minute, and leaves this process with compiled code: a process of its own."""
    program = f"""
        import torch, lowtide
        from torch._dynamo.utils import counters
        from tests.bitwise.discard_all import DiscardAll

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
        with lowtide.fit(budget=12 << 20, spill={str(tmp_path)!r}, policy=DiscardAll(once=True)) as tide:
            managed = steps(tide.step)
            assert tide.stats()["recomputed_ops"] == 0
        assert counters["frames"]["ok"] == 1, counters
        assert all(torch.equal(a, b) for a, b in zip(stock, managed))
    """
    root = Path(__file__).parents[3]
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
    with lowtide.fit(budget=BUDGET_BYTES, spill=tmp_path, policy=DiscardAll(once=True), verify=True) as tide:
        exact = gradients(step, tide)
        with monkeypatch.context() as patch:
            patch.setattr(Rerun, "_value", value)
            with pytest.raises(SpillCorrupted, match="had different bits when its operators ran again"):
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
    x, w, mean, var = torch.randn(2, 3, 4), torch.ones(3), torch.zeros(3), torch.ones(3)
    training = (x, w, w, mean, var, True, 0.1, 1e-5)
    evaluating = (x, w, w, mean, var, False, 0.1, 1e-5)
    norm = aten.native_batch_norm.default
    writes = writes_of(norm)
    assert writes is not None
    assert [one is mean or one is var for one in writes.moved_along(training)] == [True, True]
    assert not writes.moved_along(evaluating)
    pure = without_statistics(writes, training)
    assert pure[3] is pure[4] is None
    assert all(torch.equal(a, b) for a, b in zip(norm(*training), norm(*pure), strict=True))
    assert without_statistics(writes, evaluating) == evaluating


def test_normalisations_of_devices_write_running_statistics_and_do_not_say_so() -> None:
    x, mean = torch.ones(2), torch.zeros(2)
    fused = writes_of(aten.cudnn_batch_norm.default)
    assert fused is not None
    assert [one is mean for one in fused.moved_along((x, x, x, mean, mean, True, 0.1, 1e-5))] == [True, True]
    part = writes_of(aten.batch_norm_update_stats.default)  # the results of a part are not what training makes of it
    assert part is not None
    assert [one is mean for one in part.written((x, mean, mean, 0.1), {})] == [True, True]
    assert writes_of(aten.native_batch_norm_backward.default) is None
