"""A small training, repeatable to the bit, and what it needs: shared by the tests of the runtime."""

from __future__ import annotations

import gc
import hashlib
import weakref
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

import lowtide
from lowtide.core.plan import Plan, Problem
from lowtide.memory.native import load
from lowtide.plan.policies.swap_all import SwapAll
from lowtide.tiers import FileMedium, PlainMedium
from tests import models

Step = Callable[[], AbstractContextManager[Any]]
NO_PRESSURE_BYTES = 64 * 2**20  # far more than these models take, and small enough that small tensors count


def digest(tensor: Tensor | None) -> str:
    """Return a tensor's bits in short, without allocating tensor memory."""
    if tensor is None:
        return "none"
    return hashlib.blake2b(tensor.detach().numpy().tobytes(), digest_size=12).hexdigest()


class Training:
    """A model, its optimizer and its batches; two of the same seed do the same, bit by bit."""

    latest: weakref.ref[Training] | None = None

    def __init__(
        self,
        make: Callable[[], nn.Module] = models.mlp,
        *,
        shape: Sequence[int] = (512, 128),
        labels: int = 10,
        vocabulary: int | None = None,
    ) -> None:
        torch.manual_seed(11)
        self.model = make()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
        self.shape = tuple(shape)
        self.labels = labels
        self.vocabulary = vocabulary
        self.done = 0
        self.losses: list[float] = []
        self.gradients: list[str] = []
        Training.latest = weakref.ref(self)

    def held_bytes(self) -> int:
        """Return the bytes of parameters, buffers, gradients and optimizer state."""
        tensors = [*self.model.parameters(), *self.model.buffers()]
        tensors += [parameter.grad for parameter in self.model.parameters() if parameter.grad is not None]
        tensors += [value for state in self.optimizer.state.values() for value in state.values()]
        return sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}.values())

    def batch(self, index: int) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(index)
        if self.vocabulary is None:
            x = torch.randn(*self.shape, generator=generator)
        else:
            x = torch.randint(self.vocabulary, self.shape, generator=generator)
        return x, torch.randint(self.labels, self.shape[:1], generator=generator)

    def loss(self) -> Tensor:
        x, y = self.batch(self.done)
        torch.manual_seed(self.done)
        out = self.model(x)
        while out.dim() > 2:
            out = out.mean(1)
        return functional.cross_entropy(out, y)

    def backward_only(self) -> None:
        """Do a step up to the update: what may fail without changing the model."""
        loss = self.loss()
        loss.backward()
        self.losses.append(loss.item())
        self.gradients.append("".join(digest(parameter.grad) for parameter in self.model.parameters()))

    def one(self) -> None:
        """Do one step."""
        self.backward_only()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.done += 1

    def steps(self, count: int, step: Step = nullcontext) -> Training:
        for _ in range(count):
            with step():
                self.one()
        return self

    def steps_despite_the_disk(self, count: int, step: Step) -> int:
        """Train until `count` steps are done, each anew after a disk that failed; return how often it did."""
        failed = 0
        while self.done < count:
            try:
                self.steps(1, step)
            except lowtide.SpillError:
                failed += 1
                self.optimizer.zero_grad()
        return failed

    def result(self) -> dict[str, object]:
        """Return everything that must be equal."""
        state = [digest(tensor) for tensor in self.model.state_dict().values()]
        return {"losses": self.losses, "gradients": self.gradients, "state": state}


class OnDemand(SwapAll):
    """Swaps everything that can be, and asks for nothing in advance."""

    name = "on_demand"

    def plan(self, problem: Problem) -> Plan:
        plan = super().plan(problem)
        swaps = tuple(replace(swap, fetch_op=swap.gap.before_op) for swap in plan.swaps)
        return replace(plan, policy=self.name, swaps=swaps, prediction=None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Need:
    """What a training takes where nothing presses, without what the process holds besides."""

    base_bytes: int
    static_bytes: int
    peak_bytes: int
    floor_bytes: int

    def share(self, share: float) -> int:
        """Return the budget that leaves this share of what activations add."""
        return self.static_bytes + int(share * (self.peak_bytes - self.static_bytes)) + self._more_bytes()

    def floor(self, factor: float = 1.0) -> int:
        """Return this factor times the smallest budget that any plan can meet."""
        return int(factor * self.floor_bytes) + self._more_bytes()

    def _more_bytes(self) -> int:
        """Return what the process holds more than when this was measured; not the training to be run itself."""
        held = other_bytes()
        latest = Training.latest() if Training.latest is not None else None
        return held - self.base_bytes - (latest.held_bytes() if latest is not None else 0)


def other_bytes() -> int:
    """Return the bytes of all tensors that the process holds now: every budget covers them."""
    with lowtide.fit(budget=NO_PRESSURE_BYTES, policy="keep_all") as tide:
        stats: dict[str, Any] = tide.stats()
        return int(stats["static_bytes"])


def need(make: Callable[[], Training], spill: Path) -> Need:
    """Measure what a training needs."""
    base_bytes = other_bytes()
    training = make()
    with lowtide.fit(training.model, training.optimizer, budget=NO_PRESSURE_BYTES, spill=spill) as tide:
        training.steps(3, tide.step)
        stats: dict[str, Any] = tide.stats()
        floor_bytes = tide.trace().floor_bytes()
    return Need(
        base_bytes=base_bytes,
        static_bytes=stats["static_bytes"],
        peak_bytes=stats["peak_bytes"],
        floor_bytes=floor_bytes,
    )


def away_bytes() -> int:
    """Return the bytes that are elsewhere than in memory, or on their way."""
    gc.collect()
    counted = load().range_counters()
    return counted.away + counted.leaving + counted.arriving


@dataclass
class Spy(PlainMedium):
    """A file medium that notes what goes through it; as it is in Python, it hides the descriptors."""

    directory: Path
    capacity_bytes: int | None = None
    writes: list[int] = field(default_factory=list)
    reads: list[int] = field(default_factory=list)
    name: str = "spy"
    lossy: bool = False

    def __post_init__(self) -> None:
        self._medium = FileMedium([self.directory])

    def write_at(self, offset: int, data: memoryview) -> None:
        self.writes.append(data.nbytes)
        self._medium.write_at(offset, data)

    def read_at(self, offset: int, into: memoryview) -> None:
        self.reads.append(into.nbytes)
        self._medium.read_at(offset, into)

    def close(self) -> None:
        self._medium.close()
