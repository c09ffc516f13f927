"""What discarding under pressure (DTR) must not do: outlive its step, miss a change, hold memory, pin a whole chain."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import lowtide
from lowtide.memory.native import load

MIB = 2**20
Step = Callable[[], AbstractContextManager[Any]]


@pytest.mark.parametrize("change", ["behind autograd", "in place"])
def test_nothing_given_up_outlives_its_step(change: str, tmp_path: Path) -> None:
    def gradients(step: Step) -> list[Tensor]:
        torch.manual_seed(0)
        biases = [nn.Parameter(torch.randn(512)) for _ in range(12)]

        def forward(seed: int) -> Tensor:
            torch.manual_seed(seed)
            x = torch.randn(512, 512)
            for bias in biases:
                x = torch.relu(x + bias)
            return x.sum()

        for seed in range(3):
            with step():
                forward(seed).backward()  # type: ignore[no-untyped-call]
                for bias in biases:
                    bias.grad = None
        with step():
            loss = forward(9)
        with torch.no_grad():
            for bias in biases:
                (bias.data if change == "behind autograd" else bias).add_(1.0)
        loss.backward()  # type: ignore[no-untyped-call]
        return [bias.grad.clone() for bias in biases if bias.grad is not None]

    expected = gradients(nullcontext)
    with lowtide.fit(budget=9 * MIB, spill=tmp_path, policy="dtr") as tide:
        got = gradients(tide.step)
        assert int(str(tide.stats()["recomputed_ops"])) > 0
    assert all(torch.equal(one, other) for one, other in zip(got, expected, strict=True))


def test_running_statistics_that_the_step_made_itself_are_changed_by_a_normalisation(tmp_path: Path) -> None:
    channels = 262144

    def gradient(step: Step) -> Tensor:
        torch.manual_seed(0)
        weight = nn.Parameter(torch.randn(channels))
        layers = [nn.Parameter(torch.randn(512, 512) / 16) for _ in range(12)]
        for seed in range(3):
            with step():
                torch.manual_seed(seed)
                x, mean, variance = torch.randn(4, channels), torch.zeros(channels), torch.ones(channels)
                functional.batch_norm(x, mean, variance, training=True, momentum=0.5)
                del x, variance
                out = (weight * mean).sum()
                del mean
                h = torch.randn(512, 512)
                for layer in layers:
                    h = torch.tanh(h @ layer)
                (out + h.sum()).backward()  # type: ignore[no-untyped-call]
                assert weight.grad is not None
                found = weight.grad.clone()
                weight.grad = None
                for layer in layers:
                    layer.grad = None
        return found

    expected = gradient(nullcontext)
    with lowtide.fit(budget=20 * MIB, spill=tmp_path, policy="dtr", verify=True) as tide:
        assert torch.equal(gradient(tide.step), expected)
        assert int(str(tide.stats()["recomputed_ops"])) > 0


@pytest.mark.parametrize("inplace", [True, False])
def test_nothing_is_held_longer_than_backward_needs_it(inplace: bool, tmp_path: Path) -> None:
    torch.manual_seed(0)
    layers = [layer for _ in range(6) for layer in (nn.Linear(256, 256), nn.ReLU(inplace=inplace), nn.Dropout(0.1))]
    model = nn.Sequential(*layers)
    with lowtide.fit(model, budget=9 * MIB, spill=tmp_path, policy="dtr") as tide:
        for _ in range(6):
            with tide.step():
                for _ in range(2):  # micro-batches
                    model(torch.randn(1024, 256)).sum().backward()
                    # Parameters and their gradients, and nothing that a release was put off for.
                    assert load().range_counters().ranges == 12
                model.zero_grad()
        assert int(str(tide.stats()["recomputed_ops"])) > 0


def test_a_long_chain_of_operands_that_cannot_be_made_is_not_in_memory_at_once(tmp_path: Path) -> None:
    def gradient(step: Step) -> Tensor:
        torch.manual_seed(0)
        x = nn.Parameter(torch.randn(512, 512))
        for _ in range(4):
            x.grad = None
            with step():
                h: Tensor = x
                for _ in range(24):
                    h = torch.sin(h) * torch.randn(512, 512)
                h.sum().backward()  # type: ignore[no-untyped-call]
                del h
        assert x.grad is not None
        return x.grad

    expected = gradient(nullcontext)
    with lowtide.fit(budget=14 * MIB, spill=tmp_path, policy="dtr") as tide:
        assert torch.equal(gradient(tide.step), expected)
        assert int(str(tide.stats()["recomputed_ops"])) > 24
