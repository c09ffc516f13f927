"""Optimizers that Lowtide knows nothing of: their state moves by touches and faults, and their bits are stock's."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import lowtide

WIDTH, LAYERS, STEPS = 256, 6, 4
Step = Callable[[], AbstractContextManager[Any]]


class Lion(torch.optim.Optimizer):
    """Tensor by tensor, as most optimizers outside of PyTorch are written."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 1e-3})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.state[parameter]
                if not state:
                    state["moment"] = torch.zeros_like(parameter)
                moment = state["moment"]
                parameter.add_(moment.mul(0.9).add(parameter.grad, alpha=0.1).sign_(), alpha=-group["lr"])
                moment.mul_(0.99).add_(parameter.grad, alpha=0.01)


class InNumpy(torch.optim.Optimizer):
    """Computes past the dispatcher: nothing is announced."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 1e-3})

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.state[parameter]
                if not state:
                    state["moment"] = torch.zeros_like(parameter).detach()
                values, moment = parameter.detach().numpy(), state["moment"].numpy()
                moment *= np.float32(0.9)
                moment += parameter.grad.numpy()
                values -= np.float32(group["lr"]) * moment


class NewTensors(torch.optim.Optimizer):
    """Replaces the data of parameters and its own state in each step, instead of changing them."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 1e-3})

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                moment = self.state[parameter].get("moment", torch.zeros(()))
                self.state[parameter]["moment"] = 0.9 * moment + parameter.grad.detach()
                parameter.data = parameter.data - group["lr"] * self.state[parameter]["moment"]


class Flat(torch.optim.Optimizer):
    """Keeps one flat moment for all parameters, as fused third-party kernels do."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 1e-3})
        self.moment: Tensor | None = None

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        parameters = [parameter for group in self.param_groups for parameter in group["params"]]
        if self.moment is None:
            self.moment = torch.zeros(sum(parameter.numel() for parameter in parameters))
            self.state[parameters[0]]["moment"] = self.moment
        for parameter, moment in zip(
            parameters, self.moment.split([parameter.numel() for parameter in parameters]), strict=True
        ):
            moment.mul_(0.9).add_(parameter.grad.flatten())
            parameter.add_(moment.view_as(parameter), alpha=-1e-3)


def huggingface_adafactor(parameters: Any) -> torch.optim.Optimizer:
    library = pytest.importorskip("transformers.optimization")
    return library.Adafactor(parameters, lr=1e-3, relative_step=False, scale_parameter=True)  # type: ignore[no-any-return]


def muon(parameters: Any) -> torch.optim.Optimizer:
    kind = getattr(torch.optim, "Muon", None)
    if kind is None:
        pytest.skip("this torch has no Muon")
    return kind([p for p in parameters if p.dim() == 2], lr=1e-3)  # type: ignore[no-any-return]


MAKERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "lion": Lion,
    "in_numpy": InNumpy,
    "new_tensors": NewTensors,
    "flat": Flat,
    "huggingface_adafactor": huggingface_adafactor,
    "adafactor": lambda parameters: torch.optim.Adafactor(parameters, lr=1e-3),
    "muon": muon,
    "lbfgs": lambda parameters: torch.optim.LBFGS(parameters, lr=0.1, max_iter=3, history_size=2),
}
# One operator of theirs uses all parameters' elements at once.
WHOLE = {"flat": 2, "lbfgs": 6}


def training(name: str) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(3)
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)))
    return model, MAKERS[name](list(model.parameters()))


def train(model: nn.Module, optimizer: torch.optim.Optimizer, step: Step) -> list[float]:
    torch.manual_seed(4)
    losses = []
    for _ in range(STEPS):
        x = torch.randn(32, WIDTH)

        def closure(x: Tensor = x) -> Tensor:
            optimizer.zero_grad()
            loss: Tensor = model(x).square().mean()
            loss.backward()  # type: ignore[no-untyped-call]
            losses.append(loss.item())
            return loss

        with step():
            if isinstance(optimizer, torch.optim.LBFGS):
                optimizer.step(closure)  # type: ignore[no-untyped-call]
            else:
                closure()
                optimizer.step()
    return losses


def found(value: object) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value.detach()
    elif isinstance(value, dict):
        for one in value.values():
            yield from found(one)
    elif isinstance(value, list | tuple):
        for one in value:
            yield from found(one)


@pytest.mark.parametrize("name", MAKERS)
def test_an_optimizer_that_lowtide_does_not_know_trains_exactly(name: str, tmp_path: Path) -> None:
    stock = training(name)
    losses = train(*stock, nullcontext)
    managed = training(name)
    budget = WHOLE.get(name, 1) * LAYERS * WIDTH * WIDTH * 4
    with lowtide.fit(*managed, budget=budget, spill=tmp_path) as tide:
        assert train(*managed, tide.step) == losses
        stats: dict[str, Any] = dict(tide.stats())
    assert stats["peak_reserved_bytes"] <= budget
    assert stats["swapped_out_bytes"] > 0, "nothing pressed: the test proves nothing"
    mine, theirs = ([*model.parameters(), *found(dict(optimizer.state))] for model, optimizer in (managed, stock))
    assert len(mine) == len(theirs) > LAYERS
    assert all(torch.equal(a, b) for a, b in zip(mine, theirs, strict=True))


def test_sparse_gradients_with_their_own_optimizer_train_exactly(tmp_path: Path) -> None:
    def sparse() -> tuple[nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(3)
        model = nn.ModuleList(nn.EmbeddingBag(2048, 64, sparse=True) for _ in range(6))
        return model, torch.optim.SparseAdam(list(model.parameters()), lr=1e-2)

    def train_sparse(model: Any, optimizer: torch.optim.Optimizer, step: Step) -> None:
        torch.manual_seed(4)
        for _ in range(STEPS):
            ids = torch.randint(2048, (16, 8))
            with step():
                sum(table(ids).square().sum() for table in model).backward()
                optimizer.step()
                optimizer.zero_grad()

    stock, managed = sparse(), sparse()
    train_sparse(*stock, nullcontext)
    with lowtide.fit(*managed, budget="3MiB", spill=tmp_path) as tide:
        train_sparse(*managed, tide.step)
        stats: dict[str, Any] = dict(tide.stats())
    assert stats["peak_reserved_bytes"] <= stats["budget_bytes"] < stats["static_bytes"]
    assert stats["swapped_out_bytes"] > 0
    mine, theirs = ([*model.parameters(), *found(dict(optimizer.state))] for model, optimizer in (managed, stock))
    assert all(torch.equal(a, b) for a, b in zip(mine, theirs, strict=True))
