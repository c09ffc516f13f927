"""What is made again on a device: what it is made from must not have changed, on whichever thread that would be."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack

import lowtide
from lowtide.errors import SpillCorrupted, SpillError
from lowtide.execute.backends.accelerator.records import same_version
from lowtide.execute.backends.accelerator.remakes import Serials
from lowtide.execute.recompute.rerun import Rerun
from lowtide.execute.tide.script import stepping
from lowtide.execute.tide.tide import Tide
from tests.accelerator.devices import races, shake
from tests.accelerator.remaking import (
    CHANGES,
    WIDTH,
    ChangesWhatItSaved,
    Step,
    assert_gradients_of_stock,
    chained,
    discarded,
    gradients,
    owner_that_gives_up_and_fills_again,
    ran_again,
    saved_sum,
    trained,
)
from tests.bitwise.discard_all import DiscardAll

MIB = 1 << 20
ROOM_BYTES = 8 * MIB


@pytest.fixture(autouse=True)
def there(device: torch.device) -> Iterator[None]:
    """Let tensors be made on the device, where everything is late and new memory is filled with NaN."""
    shake(5, races=True)
    with torch.device(device):
        yield
    assert not races()


def opened(spill: Path, *, room_bytes: int = ROOM_BYTES, **options: Any) -> Tide:
    budget: dict[str, int | str] = {"device": torch.accelerator.memory_allocated() + room_bytes}
    return lowtide.fit(budget=budget, spill=spill, policy=DiscardAll(once=True), **options)


def assert_exact(step: Step, spill: Path, **options: Any) -> None:
    stock = gradients(step, None)
    with opened(spill, **options) as tide:
        managed = gradients(step, tide)
        assert ran_again(tide)
    for index, (expected, found) in enumerate(zip(stock, managed, strict=True)):
        assert torch.equal(expected, found), f"step {index} differs"


@pytest.mark.parametrize("change", CHANGES)
def test_an_operand_that_changes_after_its_product_was_given_up(
    change: Callable[[Tensor], None], tmp_path: Path
) -> None:
    def step(index: int, weight: Tensor, offset: Tensor) -> Tensor:
        value = saved_sum(weight, offset)
        if index >= 4:
            change(offset)
        return value * 2

    assert_exact(step, tmp_path)


def test_a_product_that_is_changed_in_place_is_made_as_each_of_its_readers_saw_it(tmp_path: Path) -> None:
    def step(_index: int, weight: Tensor, offset: Tensor) -> Tensor:
        sums = offset + weight
        before = sums.detach().sigmoid()  # reads it as it was
        after = sums.relu_().sigmoid()
        return (weight * before * after).sigmoid()

    assert_exact(step, tmp_path)


@pytest.mark.parametrize("room_bytes", [8 * MIB, 16 * MIB])
def test_a_saved_tensor_that_backward_changes_behind_autograd(room_bytes: int, tmp_path: Path) -> None:
    """Backward runs on autograd's own thread, which is watched too."""

    def step(index: int, weight: Tensor, offset: Tensor) -> Tensor:
        ChangesWhatItSaved.changes = index >= 3
        one = two = (offset + weight).sigmoid()
        for _ in range(4):
            one = one.exp().sigmoid()
        two = ChangesWhatItSaved.apply(two)
        for _ in range(4):
            two = two.exp().sigmoid()
        return one + two

    assert_exact(step, tmp_path, room_bytes=room_bytes)
    races()  # a copy out may be under way when backward writes: what it copied is thrown away


def test_an_operand_that_its_owner_gives_up_and_fills_again(tmp_path: Path) -> None:
    assert_exact(owner_that_gives_up_and_fills_again(), tmp_path)


def test_operands_of_inference_mode_are_left_alone(tmp_path: Path) -> None:
    def step(_index: int, weight: Tensor, offset: Tensor) -> Tensor:
        with torch.inference_mode():
            fixed = offset.neg()
        return saved_sum(weight, fixed + offset)

    assert_exact(step, tmp_path)


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


def test_a_graph_that_is_kept_outlives_the_tide(tmp_path: Path) -> None:
    with opened(tmp_path, room_bytes=14 * MIB) as tide:
        weights, inputs = trained(tide, layers=24)
        for weight in weights:
            weight.grad = None
        with pytest.raises(ZeroDivisionError), tide.step():
            kept = chained(weights, inputs)
            _ = 1 / 0
        assert discarded(tide) > 0
    kept.backward()
    assert_gradients_of_stock(weights, inputs)


def test_what_was_given_up_went_with_a_tide_that_an_exception_closed(tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError), opened(tmp_path) as tide:
        weights, inputs = trained(tide)
        with tide.step():
            kept = chained(weights, inputs)
            _ = 1 / 0
    with pytest.raises(SpillError, match="the tide was closed before backward ran"):
        kept.backward()


def test_verify_notices_an_operator_that_does_not_repeat_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def value(self: Rerun, leaf: object) -> object:
        found = honest(self, leaf)
        return found + 1 if isinstance(found, Tensor) and found.numel() > 1024 else found

    honest = Rerun._value
    with opened(tmp_path, verify=True) as tide:
        trained(tide)
        with monkeypatch.context() as patch:
            patch.setattr(Rerun, "_value", value)
            with pytest.raises(SpillCorrupted, match="had different bits when its operators ran again"):
                trained(tide)


def test_operators_run_again_in_a_script_whose_steps_follow_one_another(tmp_path: Path) -> None:
    """There the mode that numbers calls and the one that makes room come and go independently."""

    def weights(tide: Tide | None) -> list[Tensor]:
        torch.manual_seed(0)
        found = [torch.randn(256, requires_grad=True) for _ in range(12)]
        inputs = torch.randn(1024, 256)
        optimizer = torch.optim.SGD(found, lr=0.1)

        def train(steps: int) -> None:
            for _ in range(steps):
                chained(found, inputs).backward()
                optimizer.step()
                optimizer.zero_grad()

        if tide is None:
            train(6)
            return found
        with stepping(tide):
            train(6)
        return found

    before = _get_current_dispatch_mode_stack()
    stock = weights(None)
    with opened(tmp_path, room_bytes=10 * MIB) as tide:
        managed = weights(tide)
        assert ran_again(tide)
    assert all(torch.equal(a, b) for a, b in zip(stock, managed, strict=True))
    assert _get_current_dispatch_mode_stack() == before


def test_the_same_memory_has_the_same_version_also_inside_a_mode() -> None:
    class Look(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func is torch.ops.aten.sin.default:
                self.alias = same_version(args[0])
            return func(*args, **(kwargs or {}))

    tensor = torch.ones(4, requires_grad=True) * 2
    with Look() as look:  # type: ignore[no-untyped-call]
        tensor.sin()
    assert (look.alias._version, look.alias.requires_grad) == (0, False)
    tensor.mul_(2.0)
    assert look.alias._version == 1
    assert look.alias.untyped_storage()._cdata == tensor.untyped_storage()._cdata


def test_a_storages_number_is_never_anothers() -> None:
    serials, seen = Serials(), set()
    for _ in range(3000):  # more than are remembered at once
        storage = torch.empty(1).untyped_storage()
        number = serials.of(storage)
        assert number == serials.of(storage)
        assert number not in seen
        seen.add(number)
    assert len(serials._known) < 3000


def test_what_the_last_remembered_call_made_is_given_up_too(tmp_path: Path) -> None:
    # What a call makes is saved when the call is over: by its own operator, or by one that reads it.
    with opened(tmp_path) as tide:
        weights, inputs = trained(tide)
        plan = tide.plan()
        assert plan is not None
        with tide.step():
            loss = chained(weights, inputs)
            assert discarded(tide) == len({one.gap.storage for one in plan.recomputes}) > 1
            written = tide.stats()["swapped_out_bytes"]
            loss.backward()
        assert tide.stats()["swapped_out_bytes"] == written


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

    assert_exact(evaluated, tmp_path, room_bytes=16 << 20)
    assert_exact(read, tmp_path, room_bytes=16 << 20)


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


def test_a_call_that_raises_half_way_may_have_changed_its_operands(tmp_path: Path) -> None:
    def step(index: int, weight: Tensor, offset: Tensor) -> Tensor:
        one, two = offset.neg(), offset.abs()
        first, second = one.abs(), two.abs()[:, : 3 if index >= 3 else WIDTH]
        with suppress(RuntimeError):
            torch._foreach_add_([one, two], [first, second])
        sums = one + weight
        del one, two, first, second
        return sums.sigmoid().exp().sigmoid() * 2

    assert_exact(step, tmp_path, room_bytes=12 << 20)


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


@pytest.mark.parametrize("in_step", [True, False], ids=["after the step", "after the tide"])
def test_what_cannot_be_made_any_more_is_said_when_backward_asks_for_it(
    in_step: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The end of a step, or of the tide, does not ask, and makes everything else."""

    def values(weights: list[Tensor], first: Tensor, second: Tensor) -> tuple[Tensor, Tensor]:
        return saved_sum(weights[0], first).sum(), saved_sum(weights[1], second).sum()

    weights = [torch.randn(WIDTH, requires_grad=True) for _ in range(2)]
    with opened(tmp_path) as tide:
        for _ in range(4):
            first, second = torch.randn(1024, WIDTH), torch.randn(1024, WIDTH)
            with tide.step():
                for value in values(weights, first, second):
                    value.backward()
        assert ran_again(tide)
        weights[1].grad = None
        with suppress(ZeroDivisionError), tide.step():
            lost, kept = values(weights, first, second)
            given_up = discarded(tide)
            with monkeypatch.context() as patched:
                patched.setattr(Rerun, "run", lambda _self: 1 / 0)
                first.data.mul_(0.5)
            with pytest.raises(ZeroDivisionError):
                _ = first * weights[0]  # the next save
            if not in_step:
                _ = 1 / 0
        assert 0 < discarded(tide) == (given_up // 2 if in_step else given_up)
        if in_step:
            with pytest.raises(RuntimeError, match="was changed in place"):
                lost.backward()
    with pytest.raises(RuntimeError, match="was changed in place"):
        lost.backward()
    kept.backward()
    stock = weights[1].detach().requires_grad_()
    saved_sum(stock, second).sum().backward()
    assert weights[1].grad is not None
    assert stock.grad is not None
    assert torch.equal(weights[1].grad, stock.grad)


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

    assert_exact(step, tmp_path, room_bytes=14 << 20)


def test_nothing_is_held_longer_than_its_record(tmp_path: Path) -> None:
    with opened(tmp_path, room_bytes=10 << 20) as tide:
        weights, inputs = trained(tide, layers=12)
        held: list[int] = []
        weights[0].register_hook(lambda _gradient: held.append(len(tide._runtime.machine.records())))
        with tide.step():
            chained(weights, inputs).backward()
    assert held[0] <= 3, "what backward has passed is let go"


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

    with opened(tmp_path, room_bytes=12 << 20) as tide:
        managed = flops(tide)
        assert ran_again(tide)
    assert managed == flops(None)
