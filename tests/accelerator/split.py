"""A training whose model is spread over two devices, with and without Lowtide."""

from __future__ import annotations

import gc
import tempfile
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import lowtide
from tests.accelerator.devices import NAME, races, shake
from tests.bitwise.record import Record
from tests.bitwise.workload import Need

FIRST, SECOND = f"{NAME}:0", f"{NAME}:1"
BOTH = (FIRST, SECOND)
BATCH, WIDTH, STEPS = 256, 128, 4


def _layers(count: int) -> list[nn.Module]:
    return [part for _ in range(count) for part in (nn.Linear(WIDTH, WIDTH), nn.GELU())]


class Split(nn.Module):
    """A stem on the first device, a branch on each at the same time, and a head on the first again.

    The stem's result is copied to the second device, and both devices save it. Backward runs both branches at the same
    time, so nothing has more than two gradients to add up: of three, the bits of the sum would be a matter of luck.
    """

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(*_layers(3), nn.BatchNorm1d(WIDTH), nn.Dropout(0.1)).to(FIRST)
        self.left = nn.Sequential(*_layers(2), nn.Dropout(0.1)).to(FIRST)
        self.right = nn.Sequential(*_layers(5), nn.BatchNorm1d(WIDTH), nn.Dropout(0.1)).to(SECOND)
        self.head = nn.Sequential(*_layers(1), nn.Linear(WIDTH, 1)).to(FIRST)

    def forward(self, x: Tensor) -> Tensor:
        stem = self.stem(x.to(FIRST))
        there = stem.to(SECOND)
        right = self.right(there) * there
        out: Tensor = self.head(self.left(stem) + right.to(FIRST))
        return out


@dataclass(slots=True)
class Outcome:
    """What a training computed, and what Lowtide told of it."""

    record: Record = field(default_factory=Record)
    stats: dict[str, Any] = field(default_factory=dict)
    races: tuple[str, ...] = ()

    def on(self, device: str) -> dict[str, Any]:
        """Return what happened on one device."""
        found: dict[str, Any] = self.stats["devices"][device]
        return found


def batch(index: int) -> Tensor:
    """Return an input, on the host."""
    return torch.randn(BATCH, WIDTH, generator=torch.Generator().manual_seed(index))


def build() -> tuple[Split, torch.optim.Optimizer]:
    """Return the model and its optimizer as they always start."""
    gc.collect()
    torch.manual_seed(5)
    model = Split()
    return model, torch.optim.AdamW(model.parameters(), lr=1e-3)


def train(model: Split, optimizer: torch.optim.Optimizer, record: Record, tide: lowtide.Tide | None = None) -> None:
    """Train with two batches to each step, and look at a third without gradients after the second step."""

    def step() -> AbstractContextManager[None]:
        return nullcontext() if tide is None else tide.step()

    for index in range(STEPS):
        record.step = index
        with step():
            for half in range(2):
                loss = model(batch(2 * index + half)).square().mean()
                loss.backward()
                record.add(f"loss {half}", loss)
            record.add_gradients([model])
            optimizer.step()
            optimizer.zero_grad()
        if index == 1:
            model.eval()
            with step(), torch.no_grad():
                record.add("evaluation", model(batch(1000)))
            model.train()
    record.add_state([model], [optimizer])
    for device in BOTH:
        record.add(f"random state of {device}", torch.get_device_module(NAME).get_rng_state(device))


@cache
def stock() -> Record:
    """Return what the training computes without Lowtide, and without jitter."""
    record = Record()
    train(*build(), record)
    return record


def managed(
    budget: Any,
    *,
    spill: Path,
    seed: int | None = None,
    knobs: Mapping[str, object] | None = None,
    watch_races: bool = False,
    **options: Any,
) -> Outcome:
    """Train inside a budget; nothing may be left in `spill` afterwards."""
    shake(seed, races=watch_races, **(knobs or {}))
    outcome = Outcome()
    try:
        model, optimizer = build()
        with lowtide.fit(model, optimizer, budget=budget, spill=spill, **options) as tide:
            train(model, optimizer, outcome.record, tide)
            outcome.stats = tide.stats()
        outcome.races = races()
    finally:
        for device in BOTH:
            torch.accelerator.synchronize(torch.device(device))
        shake(None)
        assert not list(spill.iterdir()), "something was left in the spill directory"
    return outcome


@cache
def needs() -> dict[str, Need]:
    """Return what the training takes on each device when nothing presses."""
    model, optimizer = build()
    with tempfile.TemporaryDirectory() as spill:
        with lowtide.fit(model, optimizer, budget="128MiB", spill=spill) as tide:
            train(model, optimizer, Record(), tide)
            stats: dict[str, Any] = tide.stats()
            traces = {device: tide.trace(device) for device in BOTH}
    return {
        device: Need(
            static_bytes=stats["devices"][device]["static_bytes"],
            peak_bytes=stats["devices"][device]["peak_bytes"],
            floor_bytes=traces[device].floor_bytes(),
        )
        for device in BOTH
    }


def tight(share: float = 0.5) -> dict[str, int]:
    """Return a budget with room for that share of what activations add on each device."""
    return {device: max(need.budget_bytes(share), need.promised_bytes) for device, need in needs().items()}
