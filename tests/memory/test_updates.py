"""Calls that are put off on bare ranges: in which order they run, who waits for whom, and what is left of a failure."""

from __future__ import annotations

import errno
import gc
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from lowtide.core.log import Event
from lowtide.memory.native.bindings import Place
from lowtide.tiers.medium import Medium
from tests.memory.engine import MIB, PATIENCE_S, Engine, HeldMedium, in_fork, raw_array
from tests.memory.test_remakes import Halves

Opened = Callable[..., Engine]
COUNT = MIB // 4  # numbers in a mebibyte


@pytest.fixture(name="opened")
def opened_until_all_is_given_back(opened: Opened) -> Iterator[Opened]:
    """A thread that ran an update for a fault gives what it held back a moment after whoever faulted goes on."""
    engines: list[Engine] = []

    def open_engine(*media: Medium, **settings: Any) -> Engine:
        engines.append(opened(*media, **settings))
        return engines[-1]

    yield open_engine
    gc.collect()
    until = time.monotonic() + PATIENCE_S
    for engine in engines:
        while engine.counted.ranges > engine.ranges_at_open and time.monotonic() < until:
            os.sched_yield()


@contextmanager
def put_off(engine: Engine) -> Iterator[None]:
    """Have what is called meanwhile wait until somebody looks."""
    engine.native.put_off(1)
    try:
        with torch.no_grad():
            yield
    finally:
        engine.native.put_off(0)


def full(value: float, count: int = COUNT) -> Tensor:
    return torch.full((count,), value)


def waiting(engine: Engine) -> int:
    return int(engine.native.update_counters().waiting)


def calls_run(engine: Engine) -> int:
    """Return how many calls have run that were put off, in all engines of this process."""
    return int(engine.native.update_counters().run)


def seen(tensor: Tensor) -> float:
    """Return a number by a bare access in the middle of a tensor."""
    return float(raw_array(tensor)[tensor.numel() // 2])


def is_nowhere(tensor: Tensor) -> bool:
    """Tell whether nothing in a tensor looks like a value."""
    return bool(np.isnan(raw_array(tensor)).all())


class Background(threading.Thread):
    """A thread whose result is wanted later."""

    def __init__(self, body: Callable[[], Any]) -> None:
        super().__init__(daemon=True)
        self._body = body
        self.found: Any = None
        self.start()

    def run(self) -> None:
        """Keep what the body returns."""
        self.found = self._body()

    def result(self) -> Any:
        """Wait for the end."""
        self.join(PATIENCE_S)
        assert not self.is_alive(), "it hangs"
        return self.found

    def until_it_waits(self) -> None:
        """Go on once it has ended, or sleeps without anything that this thread could let it go on with."""
        asleep = 0
        while self.is_alive() and asleep < 200:
            os.sched_yield()
            state = Path(f"/proc/self/task/{self.native_id}/stat").read_text().rpartition(")")[2].split()[0]
            asleep = asleep + 1 if state == "S" else 0


# ---- what an update reads ----


def test_what_is_only_read_may_be_looked_at_and_is_used_before_it_changes(opened: Opened) -> None:
    engine = opened()
    weight, grad = full(1.0), full(2.0)
    with put_off(engine):
        weight.add_(grad)
    assert waiting(engine) == 1
    assert seen(grad) == 2.0
    assert float(grad.sum()) == 2.0 * COUNT
    assert waiting(engine) == 1  # nobody has to wait for that
    raw_array(grad)[:] = 7.0
    assert waiting(engine) == 0
    assert (seen(weight), seen(grad)) == (3.0, 7.0)


def test_what_changes_cannot_be_seen_too_early_when_it_came_back(opened: Opened) -> None:
    engine = opened()
    weight, grad = full(1.0), full(2.0)
    with put_off(engine):
        weight.add_(grad)
    engine.send_away(weight)
    assert engine.native.fetch(weight._cdata) == 0
    engine.native.settle()
    assert engine.place(weight) is Place.HERE
    assert waiting(engine) == 1  # its bytes are those before the update, and nothing has looked at them
    assert seen(weight) == 3.0
    assert waiting(engine) == 0


def test_what_is_only_read_stays_so_when_it_was_called_back(opened: Opened) -> None:
    medium = HeldMedium()
    engine = opened(medium)
    weight, grad = full(1.0), full(2.0)
    with put_off(engine):
        weight.add_(grad)
    medium.may_write.clear()
    assert engine.start_leaving(grad)
    assert medium.writing.acquire(timeout=PATIENCE_S)
    reader = Background(lambda: seen(grad))  # the mover has its pages until the write ends
    reader.until_it_waits()
    medium.may_write.set()
    assert reader.result() == 2.0
    assert engine.place(grad) is Place.HERE
    raw_array(grad)[:] = 7.0
    assert seen(weight) == 3.0


def test_what_was_read_and_what_is_done_leaves_nothing(opened: Opened) -> None:
    """Also where two updates became one: the memory of all of them goes back (the engine's end checks that)."""
    engine = opened()
    weights, grads = [full(float(at)) for at in range(4)], [full(2.0) for _ in range(4)]
    with put_off(engine):
        for weight, grad in zip(weights, grads, strict=True):
            weight.add_(grad)
        assert waiting(engine) == 4
        weights[0].add_(weights[3])
        weights[1].add_(weights[2])
        assert waiting(engine) == 2
        weights[0].mul_(weights[1])
        assert waiting(engine) == 1
    assert float(weights[2].sum()) == 4.0 * COUNT
    assert waiting(engine) == 0
    assert [seen(weight) for weight in weights] == [(2.0 + 5.0) * (3.0 + 4.0), 7.0, 4.0, 5.0]
    held = engine.counted.ranges
    del grads, grad
    gc.collect()
    assert engine.counted.ranges == held - 4


def test_calls_run_in_the_order_of_the_program(opened: Opened) -> None:
    """Also those of updates that became one later: a plan knows operators by their order."""
    engine = opened()
    first, second, third = full(1.0), full(2.0), full(3.0)
    with put_off(engine):
        first.add_(1.0)
        second.mul_(3.0)
        third.sub_(1.0)
        second.neg_()
        first.exp_()
        third.sqrt_()
        third.div_(first)
        third.add_(second)
    assert waiting(engine) == 1
    engine.native.log_start()
    third.sum()
    entries, names = engine.native.log_stop(), engine.native.names()
    assert entries is not None
    begun = [names[entry.a] for entry in entries if entry.kind == Event.OP_BEGIN]
    changes = ["add_", "mul_", "sub_", "neg_", "exp_", "sqrt_", "div_", "add_"]
    assert [name for name in begun if name.removeprefix("aten::") in changes] == [f"aten::{name}" for name in changes]


# ---- who keeps an update ----


def test_what_was_read_first_and_changed_later_is_not_forgotten(opened: Opened) -> None:
    engine = opened()
    weight, average = full(1.0), full(5.0)
    with put_off(engine):
        average.add_(weight)
        weight.mul_(3.0)
    assert waiting(engine) == 1
    del average
    gc.collect()
    engine.native.step_begin(-1)  # what nobody has any more is forgotten
    assert waiting(engine) == 1
    assert seen(weight) == 3.0
    engine.native.step_end()


def test_what_is_only_read_does_not_keep_an_update(opened: Opened) -> None:
    engine = opened()
    weight, grad = full(1.0), full(2.0)
    before = calls_run(engine)
    with put_off(engine):
        weight.add_(grad)
    del weight
    gc.collect()
    engine.native.step_begin(-1)
    assert (waiting(engine), calls_run(engine)) == (0, before)
    raw_array(grad)[:] = 7.0
    engine.native.step_end()


# ---- what has to run at once ----


def test_what_somebody_has_borrowed_is_changed_at_once(opened: Opened) -> None:
    """The kernel reads for the borrower, and would fail where nobody has access."""
    engine = opened()
    weight = full(1.0)
    lent = weight.numpy()
    with put_off(engine):
        weight.add_(1.0)
    assert waiting(engine) == 0
    reading, writing = os.pipe()
    os.write(writing, lent[:8])
    assert np.frombuffer(os.read(reading, 32), dtype=np.float32).tolist() == [2.0] * 8
    os.close(reading)
    os.close(writing)


def test_what_others_are_made_from_is_changed_at_once(opened: Opened) -> None:
    """A range that was discarded is made from its source as it was."""
    engine = opened()
    halves = Halves(engine)
    halves.try_out()
    half = halves.begin()
    expected = raw_array(halves.whole).copy()
    assert engine.place(half) is Place.AWAY
    with put_off(engine):
        halves.whole.mul_(4.0)
    assert np.array_equal(raw_array(half), expected / 2)
    assert np.array_equal(raw_array(halves.whole), expected * 4)
    halves.end()


def test_what_autograd_records_is_not_put_off(opened: Opened) -> None:
    engine = opened()
    weight = full(3.0).requires_grad_()
    engine.native.put_off(1)
    try:
        loss = (weight * weight).sum()
    finally:
        engine.native.put_off(0)
    loss.backward()
    assert weight.grad is not None
    assert seen(weight.grad) == 6.0


def test_many_tensors_in_one_call_may_be_larger_than_the_budget(opened: Opened) -> None:
    engine = opened(budget=8 * MIB)
    weights = [full(float(at)) for at in range(12)]
    with put_off(engine):
        torch._foreach_add_(weights, 1.0)
    assert waiting(engine) == 1
    assert float(weights[0].sum()) == COUNT
    assert waiting(engine) == 0
    assert [seen(weight) for weight in weights] == [at + 1.0 for at in range(12)]
    assert engine.memory.take_errors() == (None, "")
    assert engine.peak <= 8 * MIB


# ---- several threads ----


def test_two_threads_that_want_one_update_have_it_run_once(opened: Opened) -> None:
    medium = HeldMedium()
    engine = opened(medium)
    weight, grad = full(1.0), full(2.0)
    engine.send_away(grad)
    with put_off(engine):
        weight.add_(grad)
    medium.may_read.clear()
    before = calls_run(engine)
    first = Background(lambda: float(weight.sum()))
    assert medium.reading.acquire(timeout=PATIENCE_S)
    second = Background(lambda: float(weight.sum()))
    second.until_it_waits()
    medium.may_read.set()
    assert first.result() == second.result() == 3.0 * COUNT
    assert calls_run(engine) == before + 1


def test_an_operator_waits_for_the_end_of_an_update_that_runs(opened: Opened) -> None:
    medium = HeldMedium()
    engine = opened(medium)
    weight, grad = full(1.0), full(2.0)
    engine.send_away(grad)
    with put_off(engine):
        weight.add_(10.0)
        weight.add_(grad)
    medium.may_read.clear()
    before = calls_run(engine)
    first = Background(lambda: float(weight.sum()))
    assert medium.reading.acquire(timeout=PATIENCE_S)  # the first call has run
    assert calls_run(engine) == before + 1
    second = Background(lambda: float(weight.sum()))
    second.until_it_waits()
    medium.may_read.set()
    assert second.result() == first.result() == 13.0 * COUNT


def test_nothing_joins_an_update_that_runs(opened: Opened) -> None:
    medium = HeldMedium()
    engine = opened(medium)
    weight, grad = full(1.0), full(2.0)
    engine.send_away(grad)
    with put_off(engine):
        weight.add_(grad)
    medium.may_read.clear()
    first = Background(lambda: float(weight.sum()))
    assert medium.reading.acquire(timeout=PATIENCE_S)

    def double() -> int:
        with put_off(engine):
            weight.mul_(2.0)
        return waiting(engine)

    second = Background(double)
    second.until_it_waits()
    medium.may_read.set()
    assert second.result() == 0
    assert first.result() in (3.0 * COUNT, 6.0 * COUNT)  # as the two threads met
    assert seen(weight) == 6.0


# ---- failures ----


def broken(opened: Opened) -> tuple[Engine, HeldMedium, Tensor, Tensor]:
    """Return a weight and a gradient whose update cannot be run: the gradient is away, and the disk is broken."""
    medium = HeldMedium()
    engine = opened(medium)
    weight, grad = full(1.0), full(2.0)
    engine.send_away(grad)
    with put_off(engine):
        weight.add_(grad)
    medium.read_errno = errno.EIO
    return engine, medium, weight, grad


def test_a_failed_update_shows_what_was_until_it_is_told_and_then_runs(opened: Opened) -> None:
    engine, medium, weight, _ = broken(opened)
    assert seen(weight) == 1.0
    assert waiting(engine) == 1
    assert engine.memory.take_errors()[0] is not None
    medium.read_errno = 0
    assert seen(weight) == 3.0
    assert waiting(engine) == 0


def test_whoever_writes_over_a_failed_update_gives_it_up(opened: Opened) -> None:
    engine, medium, weight, grad = broken(opened)
    assert seen(weight) == 1.0
    raw_array(weight)[0] = 5.0  # no operator announces it
    assert waiting(engine) == 0
    assert float(raw_array(weight)[0]) == 5.0
    assert is_nowhere(weight[1:])
    assert engine.memory.take_errors()[0] is not None
    medium.read_errno = 0
    assert seen(grad) == 2.0  # it was only read


def test_what_a_failed_update_would_have_made_is_no_number(opened: Opened) -> None:
    engine, medium, weight, _ = broken(opened)
    with put_off(engine):
        made = weight * 2
    assert waiting(engine) == 1
    assert is_nowhere(made)
    assert waiting(engine) == 0
    assert engine.memory.take_errors()[0] is not None
    medium.read_errno = 0
    assert is_nowhere(weight)


def test_an_update_without_room_runs_when_there_is_some(opened: Opened) -> None:
    engine = opened(budget=8 * MIB)
    weight, grad = full(1.0), full(2.0)
    engine.send_away(grad)
    with put_off(engine):
        weight.add_(grad)
    held = []
    while engine.free_bytes >= MIB:
        held.append(full(0.0).numpy())
    with pytest.raises(torch.OutOfMemoryError):
        weight.sum()
        torch.empty(COUNT)  # whoever allocates next is told
    assert waiting(engine) == 1
    held.clear()
    assert seen(weight) == 3.0
    assert waiting(engine) == 0
    engine.memory.take_errors()


def test_a_child_has_the_update_done_whatever_the_budget_says(opened: Opened) -> None:
    engine = opened(budget=8 * MIB)
    weight, grad = full(1.0), full(2.0)
    engine.send_away(grad)
    with put_off(engine):
        weight.add_(grad)
    held = []
    while engine.free_bytes >= MIB:
        held.append(full(0.0).numpy())
    assert in_fork(lambda: seen(weight))() == 3.0
    assert waiting(engine) == 0
    held.clear()
    engine.memory.take_errors()
