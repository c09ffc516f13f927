"""`foreach` and `fused` optimizers whose lists do not fit: the same bits, and each tensor moves once."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch

import lowtide
from lowtide.execute.update.slices import SlicedUpdates
from tests.execute.update.optimizers import FUSED, OPTIMIZERS

SGD = import_module("torch.optim.sgd")  # torch.optim has no attribute of that name
WIDTH, LAYERS, STEPS = 256, 6, 4

FORMS = [(name, "foreach") for name in OPTIMIZERS] + [(name, "fused") for name in FUSED]


def training(name: str, form: str) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(3)
    layers = [torch.nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)]
    model = torch.nn.Sequential(*layers)
    kind, options = OPTIMIZERS[name]
    half = len(layers) // 2
    groups = [
        {"params": [p for layer in layers[:half] for p in layer.parameters()], "lr": 1e-3},
        {"params": [p for layer in layers[half:] for p in layer.parameters()], "lr": 2e-3, "weight_decay": 0.01},
    ]
    return model, kind(groups, **{**options, form: True})


def train(model: torch.nn.Module, optimizer: torch.optim.Optimizer, step: Callable[[], Any]) -> None:
    torch.manual_seed(4)
    for _ in range(STEPS):
        x = torch.randn(32, WIDTH)
        with step():
            model(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()


def tensors(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> Iterator[torch.Tensor]:
    yield from model.parameters()
    for state in optimizer.state.values():
        yield from (value for value in state.values() if isinstance(value, torch.Tensor))


def assert_equal(one: tuple[Any, Any], other: tuple[Any, Any]) -> None:
    for mine, theirs in zip(tensors(*one), tensors(*other), strict=True):
        assert torch.equal(mine, theirs)


@pytest.mark.parametrize(("name", "form"), FORMS)
def test_an_update_in_slices_has_the_bits_of_the_whole(name: str, form: str) -> None:
    stock = training(name, form)
    train(*stock, nullcontext)
    sliced = training(name, form)
    slices = SlicedUpdates(slice_bytes=3 * WIDTH * WIDTH * 4)
    slices.on()
    try:
        train(*sliced, nullcontext)
    finally:
        slices.off()
    assert_equal(stock, sliced)


@pytest.mark.parametrize(("name", "form"), FORMS)
def test_an_optimizer_larger_than_the_budget_trains_exactly(name: str, form: str, tmp_path: Path) -> None:
    stock = training(name, form)
    train(*stock, nullcontext)
    managed = training(name, form)
    with lowtide.fit(*managed, budget="2MiB", spill=tmp_path, policy="lru") as tide:
        train(*managed, tide.step)
        stats = tide.stats()
    assert stats["peak_reserved_bytes"] <= stats["budget_bytes"] < stats["static_bytes"]
    assert stats["swapped_out_bytes"] > 0
    assert_equal(stock, managed)


def test_each_slice_takes_as_many_parameters_as_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[list[int]] = []
    original = SGD.sgd

    def noted(params: list[torch.Tensor], *args: Any, **kwargs: Any) -> None:
        calls.append([p.numel() for p in params])
        original(params, *args, **kwargs)

    monkeypatch.setattr(SGD, "sgd", noted)
    sizes = [10, 10, 10, 100, 10]
    params = [torch.nn.Parameter(torch.ones(size)) for size in sizes]
    optimizer = torch.optim.SGD(params, lr=0.1, foreach=True)
    slices = SlicedUpdates(slice_bytes=2 * 4 * 25)  # a parameter and its gradient, of four bytes each
    slices.on()
    try:
        for parameter in params:
            parameter.grad = torch.ones_like(parameter)
        optimizer.step()
    finally:
        slices.off()
    assert calls == [[10, 10], [10], [100], [10]]
    assert SGD.sgd is noted


def test_loops_over_single_tensors_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []
    monkeypatch.setattr(SGD, "sgd", lambda params, *_, **__: calls.append(len(params)))
    params = [torch.nn.Parameter(torch.ones(10)) for _ in range(5)]
    optimizer = torch.optim.SGD(params, lr=0.1, foreach=False)
    slices = SlicedUpdates(slice_bytes=1)
    slices.on()
    try:
        for parameter in params:
            parameter.grad = torch.ones_like(parameter)
        optimizer.step()
    finally:
        slices.off()
    assert calls == [5]


@pytest.mark.parametrize("name", FUSED)
def test_a_budget_below_one_parameters_update_is_refused_and_its_figure_is_enough(name: str, tmp_path: Path) -> None:
    """By faults alone, the tensors of one parameter would give each other up for every few elements."""
    stock = training(name, "fused")
    train(*stock, nullcontext)

    def managed(budget: int) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
        found = training(name, "fused")
        with lowtide.fit(*found, budget=budget, spill=tmp_path) as tide:
            train(*found, tide.step)
        return found

    def needed() -> int:
        with pytest.raises(lowtide.BudgetTooSmall) as refusal:
            managed(2 * WIDTH * WIDTH * 4)
        return refusal.value.needed_bytes  # and not the error, whose frames hold the refused training

    assert_equal(stock, managed(needed()))


def test_a_row_of_lists_that_does_not_fit_is_refused_and_one_that_fits_is_not(tmp_path: Path) -> None:
    def scaled(budget: int) -> list[torch.Tensor]:
        torch.manual_seed(5)
        kept, factors, others = ([torch.randn(size, WIDTH) for size in (64, 64, 1024, 64)] for _ in range(3))
        with lowtide.fit(budget=budget, spill=tmp_path) as tide, tide.step():
            torch._foreach_addcmul_(kept, factors, others)
        return kept

    expected = scaled(1 << 30)
    assert all(torch.equal(a, b) for a, b in zip(scaled(13 * 2**18), expected, strict=True)), "three MiB are a row"
    with pytest.raises(lowtide.BudgetTooSmall, match="_foreach_addcmul_"):
        scaled(11 * 2**18)
