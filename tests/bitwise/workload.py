"""What a training is here: something that can be run twice from one seed, with and without Lowtide."""

from __future__ import annotations

import gc
import random
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import TypeAlias

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from tests.bitwise.data import Batch
from tests.bitwise.record import Record

STEPS = 5
SEED = 20

StepContext: TypeAlias = Callable[[], AbstractContextManager[object]]


@dataclass(kw_only=True)
class Workload:
    """One training: its models, its optimizers and the loop body that a user would write.

    `batch(index)` makes the data before the step, `body(index, batch, record)` runs inside `tide.step()`, `after(index,
    record)` runs between two steps. The body notes losses, and gradients before they are cleared.
    """

    modules: list[nn.Module]
    optimizers: list[Optimizer]
    batch: Callable[[int], Batch]
    body: Callable[[int, Batch, Record], None]
    after: Callable[[int, Record], None] = field(default=lambda index, record: None)

    @property
    def model(self) -> nn.Module:
        """The one model that is handed to `lowtide.fit`."""
        return self.modules[0] if len(self.modules) == 1 else nn.ModuleList(self.modules)


@dataclass(frozen=True, slots=True, kw_only=True)
class Need:
    """What a training takes when nothing presses: bytes between steps, at the peak, and at the least."""

    static_bytes: int
    peak_bytes: int
    floor_bytes: int

    def budget_bytes(self, share: float) -> int:
        """Return the budget that leaves `share` of what activations add."""
        return int(self.static_bytes + share * (self.peak_bytes - self.static_bytes))

    @property
    def promised_bytes(self) -> int:
        """The budget with which every training has to work."""
        return int(1.15 * self.floor_bytes)


def build(factory: Callable[[], Workload]) -> Workload:
    """Return the workload as it always starts: same weights, same random state, no tensors left from the last one.

    What survives the collection (modules, the test runner) is frozen, which makes the next collection cheap.
    """
    gc.collect()
    gc.freeze()
    torch.manual_seed(SEED)
    random.seed(SEED)
    return factory()


def run(
    workload: Workload,
    *,
    step: StepContext = nullcontext,
    record: Record | None = None,
    each: Callable[[], None] = lambda: None,
) -> Record:
    """Train the workload and return what it computed; `each` is called after every step."""
    record = Record() if record is None else record
    for index in range(STEPS):
        record.step = index
        batch = workload.batch(index)
        with step():
            workload.body(index, batch, record)
        del batch
        workload.after(index, record)
        record.add_state(workload.modules, workload.optimizers)
        each()
    return record


def supervised(
    module: nn.Module,
    *,
    optimizer: Callable[[list[nn.Parameter]], Optimizer],
    batch: Callable[[int], Batch],
    loss: Callable[[Tensor, Tensor], Tensor],
) -> Workload:
    """Return the plainest training there is: forward, loss, backward, update, clear."""
    chosen = optimizer(list(module.parameters()))

    def body(index: int, data: Batch, record: Record) -> None:
        inputs, targets = data
        value = loss(module(inputs), targets)
        value.backward()  # type: ignore[no-untyped-call]
        record.add("loss", value)
        record.add_gradients([module])
        chosen.step()
        chosen.zero_grad()

    return Workload(modules=[module], optimizers=[chosen], batch=batch, body=body)
