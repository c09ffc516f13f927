"""AccUDNN's tuner held against trainings on this machine. Slow: it needs it more or less alone.

Of each time the least counts: what the machine takes when nothing else is in the way.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import pytest
import torch
from torch import nn

import lowtide
from lowtide import capture_step
from lowtide.core.machine import Machine
from lowtide.core.trace import Trace
from lowtide.errors import BudgetTooSmall
from lowtide.estimate.calibrate import SPILL, measure_link
from lowtide.estimate.predict import with_durations
from lowtide.plan.policies.accudnn import BatchModel, tune
from lowtide.tiers.file import FileMedium
from lowtide.tiers.wrappers import Throttle

pytestmark = pytest.mark.slow

FIVE = (2, 4, 6, 8, 10)
GRID = tuple(range(3, 22, 3))
WARMUP_STEPS = 3
STEPS = 4
MOST_ROUNDS = 6

T = TypeVar("T")


def training(batch: int) -> tuple[nn.Module, torch.optim.Optimizer, Callable[[], None]]:
    """Return a network whose update takes as long for any batch, and whose activations take most of the memory."""
    torch.manual_seed(0)
    layers: list[nn.Module] = [nn.Conv2d(3, 16, 3, padding=1), nn.ReLU()]
    for _ in range(7):
        layers += [nn.Conv2d(16, 16, 3, padding=1), nn.ReLU()]
    layers += [nn.MaxPool2d(8), nn.Flatten(), nn.Linear(16 * 64, 12288), nn.ReLU(), nn.Linear(12288, 10)]
    model = nn.Sequential(*layers)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
    images, labels = torch.randn(batch, 3, 64, 64), torch.randint(10, (batch,))

    def step() -> None:
        nn.functional.cross_entropy(model(images), labels).backward()
        optimizer.step()
        optimizer.zero_grad()

    return model, optimizer, step


def recorded(batch: int) -> Trace:
    model, optimizer, step = training(batch)
    return capture_step(step, model=model, optimizer=optimizer, steps=3)


def faster(trace: Trace, other: Trace | None) -> Trace:
    """Return the trace with the shorter time of every operator."""
    if other is None:
        return trace
    return with_durations(trace, lambda index, op: min(op.duration_s, other.ops[index].duration_s))


def until_settled(
    again: Callable[[dict[int, T]], dict[int, T]], seconds: Callable[[dict[int, T]], list[float]]
) -> dict[int, T]:
    """Measure again until two rounds in a row make no time much shorter."""
    known, quiet_rounds = again({}), 0
    for _ in range(MOST_ROUNDS):
        before_s, known = seconds(known), again(known)
        settled = all(now >= 0.98 * before for now, before in zip(seconds(known), before_s, strict=True))
        quiet_rounds = quiet_rounds + 1 if settled else 0
        if quiet_rounds == 2:
            break
    return known


def steps_s(batch: int, *, budget_bytes: int, medium: Throttle) -> list[float]:
    """Train under AccUDNN and return what steps take once they are planned; for ever, if the batch does not fit."""
    model, optimizer, step = training(batch)
    taken_s = []
    try:
        with lowtide.fit(model, optimizer, budget=budget_bytes, spill=medium, policy="accudnn") as tide:
            for index in range(WARMUP_STEPS + STEPS):
                with tide.step():
                    step()
                if index >= WARMUP_STEPS:
                    taken_s.append(float(tide.stats()["last_step_s"]))
    except BudgetTooSmall:
        return [math.inf]
    return taken_s


def test_the_tuned_batch_is_within_one_grid_step_of_the_one_measured_as_the_best(tmp_path: Path) -> None:
    def record(known: dict[int, Trace]) -> dict[int, Trace]:
        return {batch: faster(recorded(batch), known.get(batch)) for batch in FIVE}

    model = BatchModel(until_settled(record, lambda traces: [trace.duration_s for trace in traces.values()]))
    budget_bytes = model.trace(9).peak_bytes
    # A link that hides what a batch of 12 has to move, and not much more.
    larger = model.trace(12)
    bytes_per_s = 3 * (larger.peak_bytes - budget_bytes) / larger.duration_s

    def medium() -> Throttle:
        return Throttle(FileMedium([tmp_path]), write_bytes_per_s=bytes_per_s, read_bytes_per_s=bytes_per_s)

    probed = medium()
    machine = Machine(name="here", links={SPILL: measure_link(probed)})
    probed.close()
    tuned = tune(model, machine=machine, budget_bytes=budget_bytes, batches=GRID)
    assert tuned.best is not None

    def train(known_s: dict[int, float]) -> dict[int, float]:
        return {
            batch: min(*steps_s(batch, budget_bytes=budget_bytes, medium=medium()), known_s.get(batch, math.inf))
            for batch in GRID
        }

    best_s = until_settled(train, lambda times_s: list(times_s.values()))
    rates = {batch: batch / seconds for batch, seconds in best_s.items() if seconds < math.inf}
    for one in tuned.choices:
        measured = f"{rates[one.batch]:.1f}" if one.batch in rates else "refused"
        print(f"batch {one.batch}: {one.samples_per_s:.1f} samples/s predicted, {measured}, fits: {one.fits}")

    # Past the floor the tuner and the runtime agree on what cannot run, up to the pages that the allocator rounds to.
    fitting = [one.batch for one in tuned.choices if one.fits]
    assert abs(len(fitting) - len(rates)) <= 1
    best = max(rates, key=lambda batch: rates[batch])
    assert abs(GRID.index(tuned.best.batch) - GRID.index(best)) <= 1
    # There is a peak to find: with fewer samples the update is not paid for, with more the link is not fast enough.
    assert max(rates[GRID[0]], rates[max(rates)]) < 0.9 * rates[best]
