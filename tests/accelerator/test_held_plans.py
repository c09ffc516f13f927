"""What the program holds follows plans on the device: they leave after their last touch, and are back before the next.

Parameters, buffers, gradients and optimizer state; what happens to them is what the simulator says, storage by storage.
The steps that are compared wait for the device at every save, use and tick, as in `test_plan_order`, and have room for
everything: what moves then, the plan moves.
"""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import lowtide
from lowtide import registry
from lowtide.capture.builder import Recorded
from lowtide.core.plan import Problem
from lowtide.core.timeline import Lane, Timeline
from lowtide.core.trace import HELD_KINDS, Kind, Reach, Trace
from lowtide.execute.step.touching import Touching
from lowtide.execute.tide.device import DeviceTide
from lowtide.execute.tide.feedback import Planned
from lowtide.residency.schedule import StepPlan
from lowtide.simulate import simulate
from tests.accelerator.devices import device, races, shake
from tests.accelerator.test_held import MIB, OPTIMIZERS, WIDTH, Net
from tests.accelerator.test_plan_order import Log, in_both, in_step_with_the_device, logged
from tests.bitwise.record import Record, assert_identical

BATCH, VOCABULARY, LENGTH = 32, 64, 16


class Convolutions(nn.Module):
    """Convolutions with normalisations, whose statistics change in every step, and one layer that does not learn."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(4, 64, 3, padding=1)
        self.layers = nn.ModuleList(nn.Conv2d(64, 64, 3, padding=1) for _ in range(4))
        self.norms = nn.ModuleList(nn.BatchNorm2d(64) for _ in range(4))
        self.frozen = nn.Conv2d(64, 64, 3, padding=1).requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x.view(BATCH, 4, 8, 8))
        for layer, norm in zip(self.layers, self.norms, strict=True):
            x = torch.relu(norm(layer(x)))
        out: Tensor = self.frozen(x)
        return out.flatten(1)[:, :WIDTH]


class Transformer(nn.Module):
    """Two layers of attention over words, whose embedding is the last layer's weight too."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WIDTH, 128)
        self.layers = nn.TransformerEncoder(
            nn.TransformerEncoderLayer(128, 4, 256, dropout=0.1, batch_first=True), 2, enable_nested_tensor=False
        )
        self.last = nn.Linear(128, WIDTH, bias=False)
        self.last.weight = self.words.weight

    def forward(self, x: Tensor) -> Tensor:
        words = (x[:, :LENGTH].abs() * 20).long() % VOCABULARY
        out: Tensor = self.last(self.layers(self.words(words)))
        return out.mean(1)


NETS: dict[str, Callable[[], nn.Module]] = {"mlp": Net, "cnn": Convolutions, "transformer": Transformer}


class Training:
    """A training that can be run with and without Lowtide from the same beginning; `early`: gradients go first."""

    def __init__(self, net: str, optimizer: str = "adamw", *, early: bool = False) -> None:
        self.device = device()
        torch.manual_seed(7)
        self.model = NETS[net]().to(self.device)
        self.optimizer = OPTIMIZERS[optimizer](self.model.parameters())
        self.record = Record()
        self._early = early

    def step(self, index: int, *, batch: int = BATCH) -> None:
        """Run one step."""
        self.record.step = index
        generator = torch.Generator().manual_seed(index)
        x, y = (torch.randn(batch, WIDTH, generator=generator).to(self.device) for _ in range(2))
        if self._early:
            self.optimizer.zero_grad()
        loss = functional.mse_loss(self.model(x), y)
        loss.backward()  # type: ignore[no-untyped-call]
        self.record.add("loss", loss)
        self.optimizer.step()
        if not self._early:
            self.optimizer.zero_grad()

    def finish(self) -> Record:
        """Return all that was computed, with what the training holds in the end."""
        self.record.step = 1000
        self.record.add_state([self.model], [self.optimizer])
        return self.record


@pytest.fixture(autouse=True)
def calm() -> Iterator[None]:
    gc.collect()
    yield
    torch.accelerator.synchronize()
    shake(None)


@cache
def stock(net: str, optimizer: str = "adamw", *, steps: int = 5, early: bool = False) -> Record:
    training = Training(net, optimizer, early=early)
    for index in range(steps):
        training.step(index)
    return training.finish()


@cache
def recorded_trace(net: str, optimizer: str = "adamw", *, early: bool = False) -> Trace:
    """Return a settled step, recorded where everything fits."""
    gc.collect()
    training = Training(net, optimizer, early=early)
    budget = {"device": 24 * MIB}
    with (
        TemporaryDirectory() as spill,
        lowtide.fit(training.model, training.optimizer, budget=budget, spill=spill) as tide,
    ):
        for index in range(3):
            with tide.step():
                training.step(index)
        return tide.trace()


def budget_between(trace: Trace, share: float) -> int:
    """Return a budget between the floor of a step (0) and its peak (1)."""
    floor_bytes = trace.floor_bytes()
    return floor_bytes + int(share * (trace.peak_bytes - floor_bytes))


# ---- the trace ----


@pytest.mark.parametrize("net", NETS)
def test_a_step_knows_every_kind_that_can_leave(net: str) -> None:
    trace = recorded_trace(net)
    assert trace.reach is Reach.HELD
    kinds = Counter(trace.storages[gap.storage].kind for gap in trace.gaps())
    assert kinds.keys() >= {Kind.PARAM, Kind.GRAD, Kind.OPTIMIZER, Kind.ACTIVATION}
    count = len(trace.ops)
    over_the_end = {trace.storages[gap.storage].kind for gap in trace.gaps() if gap.before_op > count}
    assert over_the_end >= {Kind.PARAM, Kind.OPTIMIZER}
    assert trace.floor_bytes() < replace(trace, reach=Reach.SAVED).floor_bytes()


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_what_an_update_changes_is_seen_to_change(optimizer: str) -> None:
    """Frozen parameters do not: they are written out once."""
    trace = recorded_trace("mlp", optimizer)
    changes = trace.changes()
    held = [storage for storage, block in enumerate(trace.storages) if block.nbytes >= trace.least_bytes]
    moments = [storage for storage in held if trace.storages[storage].kind is Kind.OPTIMIZER]
    parameters = [storage for storage in held if trace.storages[storage].kind is Kind.PARAM]
    assert moments
    assert all(changes[storage] for storage in moments)
    assert [len(changes[storage]) > 0 for storage in parameters].count(False) == 1, "the weight that is frozen"


def test_gradients_that_outlive_their_step_are_freed_by_the_next() -> None:
    trace = recorded_trace("mlp", early=True)
    made = {storage for storage in trace.heirs() if trace.storages[storage].nbytes >= trace.least_bytes}
    assert {trace.storages[storage].kind for storage in made} == {Kind.GRAD}
    assert {gap.storage for gap in trace.gaps()} >= made


# ---- exactness ----


@pytest.mark.parametrize("policy", ["auto", "swap_all", "belady", "lru"])
@pytest.mark.parametrize("net", NETS)
def test_every_kind_of_policy_is_exact_and_free_of_races(net: str, policy: str, tmp_path: Path) -> None:
    for seed, share in enumerate((0.2, 0.6)):
        found, stats = managed(net, tmp_path, share=share, policy=policy, seed=seed)
        assert_identical(stock(net), found)
        assert stats["steps_off_plan"] <= 1, "the second step makes no state any more; all others are alike"


@pytest.mark.parametrize("optimizer", [name for name in OPTIMIZERS if name != "adamw"])
@pytest.mark.parametrize("net", ["mlp", "transformer"])
def test_every_form_of_optimizer_follows_its_plan(net: str, optimizer: str, tmp_path: Path) -> None:
    found, stats = managed(net, tmp_path, share=0.4, optimizer=optimizer, seed=3)
    assert_identical(stock(net, optimizer), found)
    assert stats["steps_off_plan"] <= 1


def test_gradients_cleared_first_are_exact(tmp_path: Path) -> None:
    found, _ = managed("mlp", tmp_path, share=0.3, early=True, seed=4)
    assert_identical(stock("mlp", early=True), found)


def managed(
    net: str,
    spill: Path,
    *,
    share: float,
    policy: str = "auto",
    optimizer: str = "adamw",
    early: bool = False,
    seed: int,
) -> tuple[Record, dict[str, Any]]:
    """Train inside a budget while everything is late and races are looked for; nothing may be found."""
    budget_bytes = budget_between(recorded_trace(net, optimizer, early=early), share)
    gc.collect()
    shake(seed, races=True)
    training = Training(net, optimizer, early=early)
    budget = {"device": budget_bytes, "cpu": 64 * MIB}
    with lowtide.fit(training.model, training.optimizer, budget=budget, spill=spill, policy=policy) as tide:
        for index in range(5):
            with tide.step():
                training.step(index)
        stats = dict(tide.stats())
    record = training.finish()
    assert not races()
    assert stats["peak_bytes"] <= stats["peak_reserved_bytes"] <= budget_bytes
    assert stats["swapped_in_bytes"] > 0
    return record, stats


def test_a_step_of_another_size_follows_no_plan_and_is_exact(tmp_path: Path) -> None:
    """Its operators are known by the bytes that they touch: what is held leaves by least recent use then (R8)."""
    sizes = (BATCH, BATCH, BATCH, BATCH // 2, BATCH, BATCH)
    expected = Training("mlp")
    for index, batch in enumerate(sizes):
        expected.step(index, batch=batch)
    training = Training("mlp")
    budget = {"device": budget_between(recorded_trace("mlp"), 0.3), "cpu": 64 * MIB}
    off = []
    with lowtide.fit(training.model, training.optimizer, budget=budget, spill=tmp_path) as tide:
        for index, batch in enumerate(sizes):
            with tide.step():
                training.step(index, batch=batch)
            off.append(tide.stats()["steps_off_plan"])
    assert_identical(expected.finish(), training.finish())
    assert off[3] == off[2] + 1
    assert off[5] == off[3], "the plan is followed again"


# ---- as simulated ----


@dataclass(frozen=True, slots=True)
class Executed:
    """A settled step: what the machine commanded, what moved, and what the simulator says of the same plan."""

    trace: Trace
    log: Log
    moved_out_bytes: int
    moved_in_bytes: int
    timeline: Timeline

    def simulated(self, lane: Lane, *, cause: str) -> list[int]:
        """Return the storages that move in a lane of the simulated step, in order."""
        spans = sorted((span for span in self.timeline.spans if span.lane is lane), key=lambda span: span.start_s)
        return [span.storage for span in spans if span.cause == cause and span.storage is not None]

    def commanded(self, kind: str) -> list[int]:
        """Return the storages that moved in this way, in order."""
        return [storage for one, storage in self.log.events if one == kind]

    def unkept(self, storages: list[int]) -> list[int]:
        """Return those of the storages that had left whenever they were wanted back: the simulator reads the others."""
        return [storage for storage in storages if storage not in self.log.kept]

    def held(self, storages: list[int]) -> list[int]:
        """Return those of the storages that the program holds."""
        return [storage for storage in storages if self.trace.storages[storage].kind in HELD_KINDS]

    def reads_commanded(self) -> list[tuple[str, int]]:
        """Return the reads of what the program holds, in order: the way that each took, and the storage."""
        return self._held_reads([(way, storage) for way, storage in self.log.events if way in ("prefetch", "demand")])

    def reads_simulated(self) -> list[tuple[str, int]]:
        """Return the same of the simulated step."""
        spans = sorted((span for span in self.timeline.spans if span.lane is Lane.IN), key=lambda span: span.start_s)
        return self._held_reads([(span.cause, span.storage) for span in spans if span.storage is not None])

    def _held_reads(self, reads: list[tuple[str, int]]) -> list[tuple[str, int]]:
        return [(way, storage) for way, storage in reads if self.unkept(self.held([storage]))]


def ahead(reads: Sequence[tuple[str, int]]) -> list[tuple[int, int]]:
    """Return the reads that went ahead of need: the storage, and how often it had been read before."""
    before = Counter[int]()
    found = []
    for way, storage in reads:
        if way == "prefetch":
            found.append((storage, before[storage]))
        before[storage] += 1
    return found


@contextmanager
def ticking_with_the_device() -> Iterator[None]:
    """Let every copy end before the next tick as well."""
    ticked = Touching.ticked

    def waiting(self: Touching, number: int) -> None:
        torch.accelerator.synchronize()
        ticked(self, number)

    with pytest.MonkeyPatch.context() as patch, in_step_with_the_device():
        patch.setattr(Touching, "ticked", waiting)
        yield


def executed(net: str, policy: str, spill: Path, *, early: bool = False) -> Executed:
    """Train with room for everything until the plan is settled, and log one more step."""
    budget_bytes = recorded_trace(net, early=early).peak_bytes + MIB
    training = Training(net, early=early)
    last: list[Recorded] = []
    with lowtide.fit(
        training.model, training.optimizer, budget={"device": budget_bytes, "cpu": 64 * MIB}, spill=spill, policy=policy
    ) as tide:
        assert isinstance(tide, DeviceTide)
        follow = tide._follow

        def noting(planned: Planned, signature: tuple[int, ...]) -> None:
            last.append(planned.recorded)
            follow(planned, signature)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(tide, "_follow", noting)
            for index in range(3):
                with tide.step():
                    training.step(index)
        recorded, plan = last[-1], tide.plan()
        assert plan is not None
        names = {key: storage for storage, key in recorded.held.items()}
        names |= {key: save.storage for key, save in enumerate(recorded.trace.saves)}
        with ticking_with_the_device():
            for index in range(3, 5):
                with tide.step():
                    training.step(index)
            before = tide.stats()
            with logged(lambda key: names.get(key, key)) as log, tide.step():
                training.step(5)
            after = tide.stats()
        problem = Problem(trace=recorded.trace, machine=tide.machine, budget_bytes=budget_bytes, can_recompute=True)
    moved = [int(str(after[name])) - int(str(before[name])) for name in ("swapped_out_bytes", "swapped_in_bytes")]
    timeline = simulate(problem, plan, policy=registry.policy(policy), strict=True)
    return Executed(recorded.trace, log, *moved, timeline)


@pytest.mark.parametrize(("net", "early"), [("mlp", False), ("mlp", True), ("cnn", False), ("transformer", False)])
def test_what_is_held_moves_exactly_as_simulated(net: str, early: bool, tmp_path: Path) -> None:
    done = executed(net, "swap_all", tmp_path, early=early)
    assert not done.log.pressed, "there is room for everything: nothing but the plan moves anything"
    out = done.held(done.simulated(Lane.OUT, cause="plan"))
    assert {done.trace.storages[storage].kind for storage in out} >= {Kind.PARAM, Kind.GRAD, Kind.OPTIMIZER}
    assert done.held(done.commanded("out")) == out
    ours, theirs = done.reads_commanded(), done.reads_simulated()
    assert Counter(storage for _, storage in ours) == Counter(storage for _, storage in theirs)
    # Which of two ways a read takes, ahead of need or on demand, is a matter of time.
    ours_ahead, theirs_ahead = in_both(ahead(ours), ahead(theirs))
    assert ours_ahead == theirs_ahead
    assert len(ours_ahead) > max(20, len(ahead(theirs)) / 2)


@pytest.mark.parametrize("net", NETS)
def test_as_many_bytes_move_as_simulated(net: str, tmp_path: Path) -> None:
    """Of every kind, saved tensors included; but what was kept, as it had not left yet, was not read."""
    done = executed(net, "swap_all", tmp_path)
    assert done.moved_out_bytes == done.timeline.moved_out_bytes
    read = Counter(storage for kind, storage in done.log.events if kind in ("prefetch", "demand"))
    expected = Counter(span.storage for span in done.timeline.spans if span.lane is Lane.IN)
    missing = expected - read
    assert not read - expected
    assert set(missing) <= done.log.kept
    missing_bytes = sum(
        done.trace.storages[storage].nbytes * times for storage, times in missing.items() if storage is not None
    )
    assert done.moved_in_bytes == done.timeline.moved_in_bytes - missing_bytes
    assert missing_bytes < done.moved_in_bytes / 10


def test_a_plan_of_auto_moves_what_it_says_within_its_budget(tmp_path: Path) -> None:
    budget_bytes = budget_between(recorded_trace("mlp"), 0.5)
    training = Training("mlp")
    with lowtide.fit(
        training.model, training.optimizer, budget={"device": budget_bytes, "cpu": 64 * MIB}, spill=tmp_path
    ) as tide:
        with ticking_with_the_device():
            for index in range(6):
                before = tide.stats()
                with tide.step():
                    training.step(index)
        after, plan = tide.stats(), tide.plan()
        assert isinstance(tide, DeviceTide)
        followed = tide.runtime.matcher.followed
    assert isinstance(followed, StepPlan)
    assert followed.ticks is not None
    assert plan is not None
    assert plan.prediction is not None
    moved_out_bytes = int(str(after["swapped_out_bytes"])) - int(str(before["swapped_out_bytes"]))
    # Memory pressure may add to it: the device's allocator rounds, and the plan does not know of every operator's end.
    assert plan.prediction.moved_out_bytes <= moved_out_bytes <= 1.1 * plan.prediction.moved_out_bytes
    assert int(str(after["peak_bytes"])) <= budget_bytes
