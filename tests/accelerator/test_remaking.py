"""What is made again on a device: what it is made from must not have changed, on whichever thread that would be."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack

import lowtide
from lowtide.errors import SpillCorrupted, SpillError
from lowtide.execute.backends.accelerator.records import same_version
from lowtide.execute.backends.accelerator.remakes import Serials
from lowtide.execute.recompute.rerun import Rerun
from lowtide.execute.tide.script import stepping
from lowtide.execute.tide.tide import Tide
from tests.accelerator.devices import races, shake
from tests.bitwise.discard_all import DiscardAll
from tests.execute.recompute.test_remaking import (
    CHANGES,
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
