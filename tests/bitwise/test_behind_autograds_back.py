"""Programs that change memory where autograd does not see it get the gradients that stock gives, or a clear error."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import lowtide
from lowtide.tiers.file import FileMedium
from lowtide.tiers.wrappers import Latency

MIB = 1 << 20


def under_pressure(body: Callable[[], Any], spill: Path, *, budget_bytes: int) -> tuple[Any, dict[str, Any]]:
    with lowtide.fit(budget=budget_bytes, spill=spill) as tide:
        with tide.step():
            result = body()
        return result, tide.stats()


def eight_saved(weight: Tensor) -> Tensor:
    """Return a sum whose graph saves eight tensors of 4 MiB that nobody else holds."""
    return torch.stack([(weight * torch.full((MIB,), float(i))).sum() for i in range(8)]).sum()


def test_a_numpy_array_that_is_written_after_the_forward_pass_shows_in_backward(tmp_path: Path) -> None:
    def body() -> Tensor:
        array = np.ones(MIB, np.float32)
        weight = torch.ones(1, requires_grad=True)
        y = (weight * torch.from_numpy(array)).sum() + eight_saved(weight)
        array[:] = 5
        y.backward()
        assert weight.grad is not None
        return weight.grad

    expected = body()
    result, stats = under_pressure(body, tmp_path, budget_bytes=20 * MIB)
    assert torch.equal(result, expected)
    assert stats["swapped_out_bytes"] > 0
    assert stats["unmanaged"] == {"memory of another allocator": 1}


class _Doubling(torch.autograd.Function):
    """Doubles what it saved, behind autograd's back, each time backward runs."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * weight

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, Tensor]:
        (x,) = ctx.saved_tensors
        result = (gradient * x).sum().reshape(1)
        x.data.mul_(2)
        return None, result


def test_a_saved_tensor_changed_through_data_in_backward_keeps_its_change_when_it_leaves_again(tmp_path: Path) -> None:
    def body() -> tuple[Tensor, Tensor]:
        weight = torch.ones(1, requires_grad=True)
        y = _Doubling.apply(torch.ones(MIB), weight).sum() + eight_saved(weight)
        y.backward(retain_graph=True)
        assert weight.grad is not None
        first = weight.grad.clone()
        room = [torch.empty(MIB) for _ in range(3)]  # sends away what came back
        del room
        y.backward()
        return first, weight.grad - first

    expected = body()
    result, stats = under_pressure(body, tmp_path, budget_bytes=16 * MIB)
    assert torch.equal(result[0], expected[0])
    assert torch.equal(result[1], expected[1])
    assert not torch.equal(expected[0], expected[1])
    assert stats["swapped_out_bytes"] > 0


def test_a_parameter_given_other_data_between_forward_and_backward_is_seen_as_in_stock(tmp_path: Path) -> None:
    def body() -> Tensor:
        weight = nn.Parameter(torch.ones(8))
        x = torch.ones(8, requires_grad=True)
        y = (x * weight).sum()
        weight.data = weight.data * 10
        y.backward()
        assert x.grad is not None
        return x.grad

    expected = body()
    result, _ = under_pressure(body, tmp_path, budget_bytes=64 * MIB)
    assert torch.equal(result, expected)
    assert expected[0] == 10


def test_what_was_saved_can_be_looked_at_in_inference_mode(tmp_path: Path) -> None:
    def body() -> Tensor:
        weight = torch.ones(1, requires_grad=True)
        y = weight * torch.full((MIB,), 3.0)
        with torch.inference_mode():
            return y.grad_fn._saved_other.clone()  # type: ignore[union-attr]

    result, _ = under_pressure(body, tmp_path, budget_bytes=64 * MIB)
    assert bool((result == 3).all())


def test_a_lossy_tier_is_refused() -> None:
    with pytest.raises(lowtide.BadArgument, match="does not keep its data"):
        lowtide.fit(budget=64 * MIB, spill="null:")


def test_a_second_fit_is_refused_and_the_first_goes_on(tmp_path: Path) -> None:
    weight = torch.ones(1, requires_grad=True)
    slow = Latency(FileMedium([tmp_path]), write_s=1e-4, read_s=1e-4)  # a medium in Python: the movers call back
    with lowtide.fit(budget=20 * MIB, spill=slow) as tide:
        with pytest.raises(lowtide.BadArgument, match="another tide is open"):
            lowtide.fit(budget=20 * MIB, spill=Latency(FileMedium([tmp_path]), write_s=0, read_s=0))
        with tide.step():
            eight_saved(weight).backward()
        assert tide.stats()["swapped_out_bytes"] > 0  # type: ignore[operator]
    assert weight.grad is not None
    assert weight.grad.item() == sum(range(8)) * MIB


def test_backward_in_a_forked_child_reads_its_parents_bytes(tmp_path: Path) -> None:
    weight = torch.ones(1, requires_grad=True)
    with lowtide.fit(budget=20 * MIB, spill=tmp_path) as tide, tide.step():
        y = eight_saved(weight)
        child = os.fork()
        if child == 0:
            signal.alarm(20)  # a child that hangs is killed, and the test fails on its status
            y.backward()
            os._exit(0 if weight.grad is not None and weight.grad.item() == sum(range(8)) * MIB else 7)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        y.backward()
    assert weight.grad is not None
    assert weight.grad.item() == sum(range(8)) * MIB


def test_gradients_from_before_fit_count_as_static(tmp_path: Path) -> None:
    model = nn.Linear(1000, 1000, bias=False)
    model(torch.ones(1, 1000)).sum().backward()
    with lowtide.fit(model, budget=1 << 30, spill=tmp_path) as tide:
        assert tide.stats()["static_bytes"] >= 2 * 4_000_000  # type: ignore[operator]


def test_tensors_from_before_fit_make_room_when_they_are_freed_inside_a_step(tmp_path: Path) -> None:
    old = [torch.ones(MIB) for _ in range(4)]
    with lowtide.fit(budget=24 * MIB, spill=tmp_path) as tide, tide.step():
        old.clear()
        new = [torch.empty(MIB) for _ in range(5)]
        assert len(new) == 5


def test_the_profiler_sees_the_memory_it_sees_without_lowtide(tmp_path: Path) -> None:
    model = nn.Linear(512, 512)

    def profiled_bytes() -> int:
        with torch.profiler.profile(profile_memory=True) as profile:
            model(torch.ones(512, 512))
        return sum(max(0, event.self_cpu_memory_usage) for event in profile.key_averages())

    expected = profiled_bytes()
    with lowtide.fit(model, budget=1 << 30, spill=tmp_path):
        assert profiled_bytes() == expected > 0
