"""Steps whose saved tensors are made from operands that may change, and their gradients: for tests of making again."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from lowtide.execute.tide.tide import Tide

WIDTH = 256
Step = Callable[[int, Tensor, Tensor], Tensor]


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
