"""Training with rounded activations is as accurate as exact training, within what another seed changes."""

from __future__ import annotations

import statistics
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import lowtide
from lowtide.plan.policy import Policy
from tests.execute.test_rounded_plans import Rounds

SEEDS = range(4)
STEPS, BATCH, CLASSES = 60, 128, 8


def images(generator: torch.Generator, count: int) -> tuple[Tensor, Tensor]:
    """Return noisy pictures of bars at eight angles."""
    labels = torch.randint(CLASSES, (count,), generator=generator)
    rows, columns = torch.meshgrid(torch.linspace(-1, 1, 16), torch.linspace(-1, 1, 16), indexing="ij")
    angle = labels * torch.pi / CLASSES
    bars = torch.cos(6 * (rows * torch.sin(angle)[:, None, None] + columns * torch.cos(angle)[:, None, None]))
    return (bars + 1.5 * torch.randn(count, 16, 16, generator=generator)).unsqueeze(1), labels


def texts(generator: torch.Generator, count: int) -> tuple[Tensor, Tensor]:
    """Return rows of tokens, labelled by the one at the third place, which is another one now and then."""
    tokens = torch.randint(CLASSES, (count, 24), generator=generator)
    other = torch.randint(CLASSES, (count,), generator=generator)
    return tokens, torch.where(torch.rand(count, generator=generator) < 0.1, other, tokens[:, 2])


class Cnn(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            *(nn.Conv2d(1, 24, 3, padding=1), nn.BatchNorm2d(24), nn.ReLU()),
            *(nn.Conv2d(24, 24, 3, padding=1), nn.BatchNorm2d(24), nn.ReLU(), nn.MaxPool2d(2)),
            *(nn.Conv2d(24, 32, 3, padding=1), nn.ReLU(), nn.AdaptiveAvgPool2d(2), nn.Flatten()),
            nn.Linear(128, CLASSES),
        )

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.layers(x)
        return found


class Transformer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(CLASSES, 64)
        self.places = nn.Parameter(torch.randn(24, 64) * 0.3)
        layer = nn.TransformerEncoderLayer(64, 4, 128, dropout=0.0, batch_first=True, norm_first=True)
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.out = nn.Linear(64, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.out(self.layers(self.embedding(x) + self.places).mean(1))
        return found


CASES: dict[str, tuple[Any, Any, int]] = {"cnn": (Cnn, images, STEPS), "transformer": (Transformer, texts, 2 * STEPS)}


def accuracy(case: str, seed: int, **options: Any) -> tuple[float, dict[str, Any]]:
    """Train one model, and return how much of a test set it gets right."""
    make, draw, steps = CASES[case]
    torch.manual_seed(seed)
    model = make()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    generator = torch.Generator().manual_seed(seed)
    with lowtide.fit(model, optimizer, **options) as tide:
        for _ in range(steps):
            x, y = draw(generator, BATCH)
            with tide.step():
                functional.cross_entropy(model(x), y).backward()
                optimizer.step()
                optimizer.zero_grad()
        stats: dict[str, Any] = tide.stats()
    model.eval()
    x, y = draw(torch.Generator().manual_seed(1000), 2000)
    with torch.no_grad():
        return float((model(x).argmax(1) == y).float().mean()), stats


@cache
def exact_accuracies(case: str) -> tuple[float, ...]:
    """Return what training without rounding reaches, with each seed: the same for all codecs."""
    with TemporaryDirectory() as spill:
        return tuple(accuracy(case, seed, budget="1GiB", spill=spill, policy="keep_all")[0] for seed in SEEDS)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["bf16", "fp8_e4m3", "comet"])
@pytest.mark.parametrize("case", CASES)
def test_accuracy_is_within_what_another_seed_changes(case: str, name: str, tmp_path: Path) -> None:
    exact, rounded = exact_accuracies(case), []
    policy: Policy = Rounds(name)
    for seed in SEEDS:
        # Everything that may be swapped is, and all of it that may be rounded is.
        found, stats = accuracy(
            case, seed, budget=_budget(case, tmp_path), spill=tmp_path, policy=policy, codecs=[name], max_error=0.1
        )
        # What a codec cannot hold within the bound goes as it is: of attention's small weights, half of FP8's do.
        assert stats["encoded_bytes"] > 0.3 * (stats["encoded_bytes"] + stats["unencoded_bytes"])
        rounded.append(found)
    spread = max(exact) - min(exact)
    assert min(exact) > 3 / CLASSES, "it learns"
    assert abs(statistics.mean(rounded) - statistics.mean(exact)) <= max(spread, 0.01), (exact, rounded)


def _budget(case: str, spill: Path) -> int:
    make, draw, _ = CASES[case]
    torch.manual_seed(0)
    model = make()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    with lowtide.fit(model, optimizer, budget="1GiB", spill=spill, policy="keep_all") as tide:
        for _ in range(3):
            x, y = draw(torch.Generator().manual_seed(0), BATCH)
            with tide.step():
                functional.cross_entropy(model(x), y).backward()
                optimizer.step()
                optimizer.zero_grad()
        trace = tide.trace()
    floor = trace.floor_bytes()
    return int(floor + 0.6 * (trace.peak_bytes - floor))
