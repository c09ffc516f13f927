"""Gradients leave while backward runs, and nobody can tell: not the program, nor whoever reads them later."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint
from torch.utils.hooks import RemovableHandle

import lowtide
from lowtide.autograd import gradients as gradients_module
from lowtide.core.trace import Kind
from lowtide.execute.backends.cpu.backend import CpuBackend
from lowtide.residency.machine import Residence
from lowtide.tiers import Direction, Fault, FaultKind, Faulty, FileMedium
from tests.execute.training import NO_PRESSURE_BYTES, OnDemand, Training, digest, need, records

Step = Callable[[], AbstractContextManager[Any]]
Sees = list[tuple[str, str]]

_STOCK_GRAD = nn.Parameter.grad


class HeavyHead(nn.Module):
    """Convolutions below linear layers whose gradients come first in backward and are larger than the rest."""

    def __init__(self) -> None:
        super().__init__()
        widths = [3, 8, 8, 8]
        convolutions = [nn.Conv2d(a, b, 3, padding=1) for a, b in pairwise(widths)]
        self.body = nn.Sequential(*(layer for conv in convolutions for layer in (conv, nn.ReLU())))
        self.head = nn.Sequential(nn.AdaptiveAvgPool2d(8), nn.Flatten(), nn.Linear(512, 1536), nn.Linear(1536, 512))
        self.last = nn.Linear(512, 10)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.last(self.head(self.body(x)))
        return out


def heavy() -> Training:
    return Training(HeavyHead, shape=(16, 3, 32, 32))


_hooks: list[RemovableHandle] = []


def after_gradient(parameter: Tensor, hook: Callable[[Tensor], None]) -> None:
    """Let the program have a hook of its own; a cycle through one is never collected, so it is removed at the end."""
    _hooks.append(parameter.register_post_accumulate_grad_hook(hook))  # type: ignore[no-untyped-call]


@pytest.fixture(autouse=True)
def _nothing_is_left_behind() -> Any:
    yield
    while _hooks:
        _hooks.pop().remove()
    assert nn.Parameter.grad is _STOCK_GRAD
    torch.ones((), requires_grad=True).backward()  # PyTorch keeps the graph of a backward that raised until the next
    assert records() == 0


def swapping(training: Training, spill: Path, **options: Any) -> lowtide.Tide:
    """Return a tide in which everything leaves that can, gradients too."""
    return lowtide.fit(
        training.model, training.optimizer, budget=NO_PRESSURE_BYTES, spill=spill, policy="swap_all", **options
    )


def moved_gradient_bytes(tide: lowtide.Tide) -> int:
    trace, plan = tide.trace(), tide.plan()
    assert plan is not None
    moved = [trace.storages[swap.gap.storage] for swap in plan.swaps]
    return sum(storage.nbytes for storage in moved if storage.kind is Kind.GRAD)


def test_a_budget_holds_that_finished_gradients_alone_would_break(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wide = partial(Training, HeavyHead, shape=(96, 3, 32, 32))
    needed = need(wide, tmp_path)

    def run() -> tuple[dict[str, object], int]:
        training = wide()
        with lowtide.fit(training.model, training.optimizer, budget=needed.floor(1.05), spill=tmp_path) as tide:
            training.steps(5, tide.step)
            return training.result(), moved_gradient_bytes(tide)

    result, moved_bytes = run()
    assert result == wide().steps(5).result()
    assert moved_bytes > 0
    monkeypatch.setattr(CpuBackend, "gradients", None)
    with pytest.raises(lowtide.BudgetTooSmall):
        run()


def test_every_gradient_that_is_large_enough_leaves_and_comes_back(tmp_path: Path) -> None:
    training = heavy()
    with swapping(training, tmp_path, verify=True) as tide:
        training.steps(4, tide.step)
        large = [p.numel() * 4 for p in training.model.head.parameters() if p.dim() == 2]
        assert moved_gradient_bytes(tide) >= sum(large)
    assert training.result() == heavy().steps(4).result()


def test_gradients_that_accumulate_over_batches(tmp_path: Path) -> None:
    def run(step: Step, training: Training) -> dict[str, object]:
        for _ in range(4):
            with step():
                for _ in range(3):
                    training.backward_only()
                training.optimizer.step()
                training.optimizer.zero_grad(set_to_none=False)
            training.done += 1
        return training.result()

    training = heavy()
    with swapping(training, tmp_path) as tide:
        got = run(tide.step, training)
        assert tide.stats()["swapped_out_bytes"]
    assert got == run(nullcontext, heavy())


def looks_at(training: Training, sees: Sees) -> None:
    """Let hooks of the lower layers look at the gradients of the upper ones while backward runs."""
    head = training.model.head[2].weight

    def hook(name: str, _parameter: Tensor) -> None:
        sees.append((name, digest(head.grad)))

    for name, parameter in training.model.body.named_parameters():
        after_gradient(parameter, partial(hook, name))


def test_a_hook_that_looks_at_another_parameters_gradient_sees_it(tmp_path: Path) -> None:
    expected: Sees = []
    stock = heavy()
    looks_at(stock, expected)
    stock.steps(4)
    assert all(seen != "none" for _, seen in expected)
    got: Sees = []
    training = heavy()
    looks_at(training, got)
    with swapping(training, tmp_path) as tide:
        training.steps(4, tide.step)
        assert moved_gradient_bytes(tide) > 0
    assert got == expected
    assert training.result() == stock.result()


def steps_inside_backward(training: Training) -> None:
    """Update and forget each gradient as soon as it is there, as programs do to save its memory."""
    for parameter in training.model.parameters():
        optimizer = torch.optim.SGD([parameter], lr=0.01, momentum=0.9)

        def update(parameter: Tensor, optimizer: torch.optim.Optimizer = optimizer) -> None:
            optimizer.step()
            optimizer.zero_grad()

        after_gradient(parameter, update)


@pytest.mark.parametrize("before", [True, False])
def test_an_optimizer_that_steps_inside_backward(before: bool, tmp_path: Path) -> None:
    stock = heavy()
    steps_inside_backward(stock)
    stock.steps(4)
    training = heavy()
    if before:
        steps_inside_backward(training)
    with swapping(training, tmp_path) as tide:
        if not before:
            with tide.step():
                training.loss()  # ours are there first
            steps_inside_backward(training)
        training.steps(4, tide.step)
    assert training.result() == stock.result()


class Breaks(torch.autograd.Function):
    """Raises in backward when it is told to."""

    wanted = False

    @staticmethod
    def forward(_ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(_ctx: Any, grad: Tensor) -> Tensor:
        if Breaks.wanted:
            raise ValueError("a bug of the program's")
        return grad


def breaking() -> Training:
    training = heavy()
    training.model.body.insert(2, Broken())
    return training


class Broken(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = Breaks.apply(x)
        return out


@pytest.mark.parametrize("how", ["inside the step", "through the step", "through the tide"])
def test_what_an_error_in_backward_leaves_is_what_stock_leaves(
    how: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(training: Training, step: Step) -> None:
        training.steps(3, step)
        monkeypatch.setattr(Breaks, "wanted", True)
        if how == "inside the step":
            with step():
                with pytest.raises(ValueError, match="a bug of the program's"):
                    training.loss().backward()
        else:
            with pytest.raises(ValueError, match="a bug of the program's"):
                with step():
                    training.loss().backward()
        monkeypatch.setattr(Breaks, "wanted", False)

    stock = breaking()
    run(stock, nullcontext)
    expected = [digest(parameter.grad) for parameter in stock.model.parameters()]
    assert "none" in expected
    assert expected[-1] != "none"

    training = breaking()
    if how == "through the tide":
        with pytest.raises(KeyError), swapping(training, tmp_path) as tide:
            run(training, tide.step)
            assert tide._runtime.gradients is not None
            raise KeyError
        assert [digest(parameter.grad) for parameter in training.model.parameters()] == expected
        return
    with swapping(training, tmp_path) as tide:
        run(training, tide.step)
        assert [digest(parameter.grad) for parameter in training.model.parameters()] == expected
        training.steps(2, tide.step)  # on top of what is left
    stock.steps(2)
    assert training.result() == stock.result()


class Tied(nn.Module):
    """One large weight used outside and inside of a segment whose backward runs inside backward."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(64, 256)
        self.shared = nn.Linear(256, 256)
        self.last = nn.Linear(256, 10)

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(self.first(x))
        hidden = checkpoint(lambda h: torch.tanh(self.shared(h)), hidden, use_reentrant=True)
        for _ in range(3):
            hidden = torch.tanh(self.shared(hidden))
        hidden = checkpoint(lambda h: torch.tanh(self.shared(h)), hidden, use_reentrant=True)
        out: Tensor = self.last(hidden)
        return out


def test_backward_inside_backward_adds_to_a_gradient_that_had_left(tmp_path: Path) -> None:
    make = partial(Training, Tied, shape=(128, 64))
    training = make()
    with swapping(training, tmp_path) as tide:
        training.steps(4, tide.step)
    assert training.result() == make().steps(4).result()


class TiedEmbedding(nn.Module):
    """One large weight with a dense gradient outside of a segment that is checkpointed, and a sparse one inside."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(256, 256)

    def forward(self, x: Tensor) -> Tensor:
        indices = x[:, 0].abs().mul(64).long().clamp(max=255)

        def look_up(scale: Tensor) -> Tensor:
            return functional.embedding(indices, self.table.weight, sparse=True) * scale

        hidden: Tensor = checkpoint(look_up, x[:, 1:2].clone().requires_grad_(), use_reentrant=True)
        return torch.tanh(hidden @ self.table.weight)


def test_backward_inside_backward_adds_a_sparse_gradient_to_one_that_had_left(tmp_path: Path) -> None:
    make = partial(Training, TiedEmbedding, shape=(128, 64))
    training = make()
    with swapping(training, tmp_path) as tide:
        training.steps(4, tide.step)
        assert moved_gradient_bytes(tide) > 0
    assert training.result() == make().steps(4).result()


def test_a_gradient_that_somebody_has_stays_where_it_is(tmp_path: Path) -> None:
    """Views of a flat buffer, as some optimizers keep them."""

    def flat(training: Training) -> Tensor:
        parameters = list(training.model.parameters())
        buffer = torch.zeros(sum(p.numel() for p in parameters))
        at = 0
        for parameter in parameters:
            parameter.grad = buffer[at : at + parameter.numel()].view_as(parameter)
            at += parameter.numel()
        return buffer

    def run(training: Training, step: Step) -> tuple[str, dict[str, object]]:
        buffer = flat(training)
        for _ in range(3):
            with step():
                training.backward_only()
                training.optimizer.step()
                buffer.zero_()
            training.done += 1
        with step():
            training.backward_only()
        return digest(buffer), training.result()

    training = heavy()
    with swapping(training, tmp_path) as tide:
        got = run(training, tide.step)
        assert moved_gradient_bytes(tide) == 0
    assert got == run(heavy(), nullcontext)


def test_a_gradient_that_is_held_keeps_its_identity(tmp_path: Path) -> None:
    training = heavy()
    weight = training.model.head[2].weight
    with swapping(training, tmp_path) as tide:
        training.steps(3, tide.step)
        with tide.step():
            training.backward_only()
            held = weight.grad
            training.backward_only()
            assert weight.grad is held


def test_a_program_may_replace_a_gradient_while_backward_runs(tmp_path: Path) -> None:
    def replace_in(training: Training) -> None:
        weight, other = training.model.head[2].weight, training.model.head[3].weight

        def hook(_parameter: Tensor) -> None:
            weight.grad = torch.full_like(weight, 0.5)
            del other.grad

        after_gradient(training.model.body[0].weight, hook)

    stock = heavy()
    replace_in(stock)
    training = heavy()
    replace_in(training)
    with swapping(training, tmp_path) as tide:
        training.steps(4, tide.step)
        assert moved_gradient_bytes(tide) > 0
    assert training.result() == stock.steps(4).result()


def test_backward_with_a_graph_of_its_own(tmp_path: Path) -> None:
    """A gradient that has a graph is part of it: it stays."""

    def run(training: Training, step: Step) -> dict[str, object]:
        for _ in range(3):
            with step():
                training.loss().backward(create_graph=True)
                norm = sum(p.grad.square().sum() for p in training.model.parameters() if p.grad is not None)
                training.optimizer.zero_grad()
                norm.backward()  # type: ignore[union-attr]
                training.gradients.append("".join(digest(p.grad) for p in training.model.parameters()))
                training.optimizer.step()
                training.optimizer.zero_grad()
            training.done += 1
        return training.result()

    training = Training(HeavyHead, shape=(4, 3, 32, 32))
    with swapping(training, tmp_path) as tide:
        got = run(training, tide.step)
    assert got == run(Training(HeavyHead, shape=(4, 3, 32, 32)), nullcontext)


def test_where_a_reducer_may_read_them_gradients_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gradients_module, "_reducers_may_run", lambda: True)
    training = heavy()
    with swapping(training, tmp_path) as tide:
        training.steps(3, tide.step)
        assert moved_gradient_bytes(tide) == 0


def test_a_gradient_that_cannot_be_read_back_is_an_error_and_then_a_warning(tmp_path: Path) -> None:
    training = heavy()
    medium = Faulty(FileMedium([tmp_path]), script=())
    tide = lowtide.fit(training.model, training.optimizer, budget=NO_PRESSURE_BYTES, spill=medium, policy=OnDemand())

    def break_disk(_parameter: Tensor) -> None:  # by then only gradients are away
        if training.done == 2:
            machine = tide._runtime.machine
            for record in machine.records():
                if machine.where(record) is Residence.LEAVING:
                    tide._backend.wait(record)
            medium.script = (Fault(direction=Direction.READ, nth=1, kind=FaultKind.EIO, lasting=True),)

    after_gradient(training.model.body[0].weight, break_disk)
    with pytest.warns(RuntimeWarning, match="a gradient is lost"):
        with pytest.raises(lowtide.SpillError), tide:
            training.steps(3, tide.step)
    assert medium.fired
    assert training.done == 2
    assert training.model.head[2].weight.grad is None


def test_hooks_go_with_the_tide(tmp_path: Path) -> None:
    training = heavy()
    with swapping(training, tmp_path) as tide:
        training.steps(2, tide.step)
        assert training.model.last.weight._post_accumulate_grad_hooks
    assert not training.model.last.weight._post_accumulate_grad_hooks
