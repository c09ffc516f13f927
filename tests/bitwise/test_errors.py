"""What fails without Lowtide fails in the same way under it, and the next step is exact again (rule R5)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import lowtide
from tests import models
from tests.bitwise import data
from tests.bitwise.architectures import adamw
from tests.bitwise.harness import need
from tests.bitwise.record import Record, assert_identical
from tests.bitwise.workload import SEED, StepContext

STEPS = 6
BATCH = data.vectors(512, 128)


class Training:
    """The suite's MLP with a loop whose third step goes wrong in a chosen way."""

    def __init__(self) -> None:
        torch.manual_seed(SEED)
        self.module = models.mlp()
        self.optimizer = adamw(list(self.module.parameters()))
        self.record = Record()

    def loss(self, index: int, *, after_layer: Callable[[int, Tensor], None] = lambda position, x: None) -> Tensor:
        x, labels = BATCH(index)
        for position, layer in enumerate(self.module):
            x = layer(x)
            after_layer(position, x)
        return functional.cross_entropy(x, labels)

    def good_step(self, index: int) -> None:
        loss = self.loss(index)
        backward(loss)
        self.record.add("loss", loss)
        self.record.add_gradients([self.module])
        self.optimizer.step()
        self.optimizer.zero_grad()

    def run(self, step: StepContext, failure: Callable[[Training, int], None]) -> Raised:
        """Train; return what the failing step raised."""
        caught: list[Raised] = []
        for index in range(STEPS):
            self.record.step = index
            try:
                with step():
                    if index == 2:
                        failure(self, index)
                    else:
                        self.good_step(index)
            except (RuntimeError, UserError) as error:
                caught.append(Raised(kind=type(error), message=str(error)))
                self.optimizer.zero_grad()
            self.record.add_state([self.module], [self.optimizer])
        assert len(caught) == 1, f"one step has to fail, these did: {caught}"
        return caught[0]


@dataclass(frozen=True, slots=True, kw_only=True)
class Raised:
    """An exception without its traceback, which would hold tensors and so use up the budget."""

    kind: type[Exception]
    message: str


class UserError(Exception):
    """An error of the user's own."""


def backward(loss: Tensor) -> None:
    loss.backward()  # type: ignore[no-untyped-call]


def change_a_saved_activation(training: Training, index: int) -> None:
    def spoil(position: int, x: Tensor) -> None:
        if position == 3:
            spoiled.append(x)

    spoiled: list[Tensor] = []
    loss = training.loss(index, after_layer=spoil)
    with torch.no_grad():
        spoiled[0].mul_(2.0)
    del spoiled[:]
    backward(loss)


def change_a_saved_parameter(training: Training, index: int) -> None:
    loss = training.loss(index)
    layer = training.module[4]
    assert isinstance(layer, nn.Linear)
    before = layer.weight.detach().clone()
    with torch.no_grad():
        layer.weight.add_(1.0)
    try:
        backward(loss)
    finally:
        with torch.no_grad():
            layer.weight.copy_(before)


def backward_twice(training: Training, index: int) -> None:
    loss = training.loss(index)
    backward(loss)
    backward(loss)


def raise_in_forward(training: Training, index: int) -> None:
    def spoil(position: int, x: Tensor) -> None:
        if position == 9:
            raise UserError("the user's forward failed")

    training.loss(index, after_layer=spoil)


def raise_in_backward(training: Training, index: int) -> None:
    def refuse(gradient: Tensor) -> Tensor:
        raise UserError("the user's hook failed")

    def attach(position: int, x: Tensor) -> None:
        if position == 5:
            x.register_hook(refuse)  # type: ignore[no-untyped-call]

    backward(training.loss(index, after_layer=attach))


def raise_after_backward(training: Training, index: int) -> None:
    backward(training.loss(index))
    raise UserError("the user's code failed before the update")


def mismatched_shapes(training: Training, index: int) -> None:
    training.module(torch.zeros(512, 100))


@contextmanager
def under_pressure(training: Training, spill: Path, *, policy: str) -> Iterator[StepContext]:
    """Yield the step context of a managed training that has to swap."""
    with lowtide.fit(
        training.module, training.optimizer, budget=need("mlp").budget_bytes(0.5), spill=spill, policy=policy
    ) as tide:
        yield tide.step
        stats: dict[str, Any] = tide.stats()
        assert stats["swapped_out_bytes"] > 0
        assert stats["peak_reserved_bytes"] <= stats["budget_bytes"]


def stock_run(failure: Callable[[Training, int], None]) -> tuple[Raised, Record]:
    """Return what plain PyTorch does; its training is gone afterwards, because the budget counts every live tensor."""
    training = Training()
    raised = training.run(nullcontext, failure)
    return raised, training.record


@pytest.mark.parametrize("policy", ["auto", "swap_all", "lru"])
@pytest.mark.parametrize(
    ("failure", "essence"),
    [
        (change_a_saved_activation, "has been modified by an inplace operation"),
        (change_a_saved_parameter, "has been modified by an inplace operation"),
        (backward_twice, "Trying to backward through the graph a second time"),
        (raise_in_forward, "the user's forward failed"),
        (raise_in_backward, "the user's hook failed"),
        (raise_after_backward, "the user's code failed before the update"),
        (mismatched_shapes, "mat1 and mat2 shapes cannot be multiplied"),
    ],
)
def test_a_failing_step_fails_as_stock_does_and_the_next_one_is_exact(
    failure: Callable[[Training, int], None], essence: str, policy: str, tmp_path: Path
) -> None:
    expected, record = stock_run(failure)
    managed = Training()
    with under_pressure(managed, tmp_path, policy=policy) as step:
        found = managed.run(step, failure)
    assert essence in expected.message
    assert found.kind is expected.kind
    assert essence in found.message
    assert_identical(record, managed.record)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("policy", ["auto", "swap_all"])
def test_a_change_after_the_write_out_is_still_noticed(policy: str, tmp_path: Path) -> None:
    """The versions stock names are named, although the bytes that autograd saved have long left memory."""
    expected, _ = stock_run(change_a_saved_activation)
    managed = Training()
    with under_pressure(managed, tmp_path, policy=policy) as step:
        found = managed.run(step, change_a_saved_activation)
    for text in ("[512, 128]", "is at version 1; expected version 0 instead"):
        assert text in expected.message
        assert text in found.message


def test_an_error_that_leaves_the_context_leaves_the_model_usable(tmp_path: Path) -> None:
    stock = Training()
    for index in range(2):
        stock.record.step = index
        stock.good_step(index)
    expected = finish(stock)
    del stock
    managed = Training()
    with pytest.raises(UserError):
        two_good_steps_and_a_bad_one(managed, tmp_path)
    assert not list(tmp_path.iterdir())
    assert_identical(expected, finish(managed))


def two_good_steps_and_a_bad_one(training: Training, spill: Path) -> None:
    with under_pressure(training, spill, policy="auto") as step:
        for index in range(2):
            training.record.step = index
            with step():
                training.good_step(index)
        with step():
            raise_in_forward(training, 2)


def finish(training: Training) -> Record:
    for index in range(2, 4):
        training.record.step = index
        training.good_step(index)
        training.record.add_state([training.module], [training.optimizer])
    return training.record
