"""Everything leaves at random operators: random models train to the same bits as without an engine."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.nn import functional

from tests.memory.engine import MIB, Engine

Opened = Callable[..., Engine]


class Block(nn.Module):
    """Attention and a gate over (rows, width), with a buffer that changes."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(width, 4, batch_first=True)
        self.norm = nn.LayerNorm(width)
        self.gate = nn.Parameter(torch.randn(width, width))
        self.register_buffer("seen", torch.zeros(width, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Change the buffer in place on the way."""
        self.seen += self.gate.detach()
        y, _ = self.attention(x[None], x[None], x[None], need_weights=False)
        return self.norm(x + y[0] @ self.gate.sigmoid())


def build(rng: random.Random) -> tuple[nn.Module, tuple[int, ...]]:
    """Return a random model and the shape of its input."""
    if rng.random() < 0.3:
        channels = rng.choice([8, 16])
        layers: list[nn.Module] = [nn.Conv2d(3, channels, 3, padding=1)]
        for _ in range(rng.randrange(1, 3)):
            layers += [nn.BatchNorm2d(channels), nn.ReLU(inplace=True), nn.Conv2d(channels, channels, 3, padding=1)]
        return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(4), nn.Flatten(), nn.Linear(16 * channels, 10)), (
            8,
            3,
            32,
            32,
        )
    width = rng.choice([128, 160])
    layers = []
    for _ in range(rng.randrange(2, 5)):
        kind = rng.randrange(4)
        if kind == 0:
            layers.append(Block(width))
        elif kind == 1:
            layers += [nn.Linear(width, 2 * width), nn.GELU(), nn.Dropout(0.1), nn.Linear(2 * width, width)]
        elif kind == 2:
            layers += [nn.Linear(width, width), nn.ReLU(inplace=True)]
        else:
            layers.append(nn.utils.parametrizations.weight_norm(nn.Linear(width, width)))
    return nn.Sequential(*layers, nn.Linear(width, 10)), (64, width)


def train(
    seed: int, begin: Callable[[], object] = lambda: None, end: Callable[[], object] = lambda: None
) -> list[bytes]:
    """Train for three steps; return everything that must be equal."""
    rng = random.Random(seed)
    torch.manual_seed(seed)
    model, shape = build(rng)
    make = rng.choice(
        [
            lambda p: torch.optim.AdamW(p, foreach=rng.random() < 0.5),
            lambda p: torch.optim.Adam(p, fused=True),
            lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
            lambda p: torch.optim.Adagrad(p),
        ]
    )
    optimizer = make(model.parameters())
    losses = []
    for _ in range(3):
        x, y = torch.randn(shape), torch.randint(10, shape[:1])
        begin()
        loss = functional.cross_entropy(model(x), y)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=rng.random() < 0.5)
        end()
        losses.append(loss.detach().numpy().tobytes())
    return losses + [each.numpy().tobytes() for each in model.state_dict().values()]


@pytest.mark.parametrize("seed", range(12))
def test_random_models_train_to_the_same_bits(opened: Opened, seed: int) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(1 + seed % 2)
    try:
        want = train(seed)
        engine = opened(
            budget=256 * MIB,
            verify=seed % 4 == 0,
            announcing=seed % 5 != 0,
        )
        native = engine.native
        native.stress(1 + seed % 4, seed)

        def begin() -> None:
            native.step_begin(-1)
            if seed % 5 == 0:
                native.leave_all()  # nobody announces operators: once for each step

        assert train(seed, begin, native.step_end) == want
        # On a slow disk all that leaves may be called back before it is written.
        while engine.counted.read + engine.counted.faults == 0:
            assert train(seed, begin, native.step_end) == want
        native.stress(0, 0)
    finally:
        torch.set_num_threads(before)
    assert engine.memory.take_errors() == (None, "")


def test_huge_ranges(opened: Opened) -> None:
    torch.manual_seed(1)
    a, b = torch.randn(2000, 1500), torch.randn(1500, 2000)
    want = torch.relu(a @ b).sum(0).numpy().copy()
    engine = opened(budget=80 * MIB, verify=True)
    native = engine.native
    native.stress(1, 3)
    native.step_begin(-1)
    for _ in range(3):
        got = torch.relu(a @ b).sum(0)
        assert (got.numpy() == want).all()
    native.step_end()
    native.stress(0, 0)
    assert engine.peak <= 80 * MIB
    del a, b, got
    engine.close(left=1)
