"""A forked child reads everything as it was at the fork, while its parent goes on; see Note [Children] in ranges.h."""

from __future__ import annotations

import gc
import os
import random
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from lowtide.memory.native.bindings import Place
from tests.memory.engine import (
    KIB,
    MIB,
    PATIENCE_S,
    Engine,
    HeldMedium,
    files,
    filled,
    in_fork,
    pattern,
    peek,
    poke,
    raw_array,
)

Opened = Callable[..., Engine]


class Gate:
    """Lets a child go on when its parent says so."""

    def __init__(self) -> None:
        self._read, self._write = os.pipe()

    def wait(self) -> None:
        """In the child."""
        assert os.read(self._read, 1) == b"!"

    def open(self) -> None:
        """In the parent."""
        os.write(self._write, b"!")
        os.close(self._write)
        os.close(self._read)


def _all_right(xs: list[torch.Tensor], shadows: list[np.ndarray]) -> list[bool]:
    return [bool(np.array_equal(raw_array(x), shadow)) for x, shadow in zip(xs, shadows, strict=True)]


@pytest.mark.parametrize("verify", [False, True])
@pytest.mark.parametrize("python", [False, True], ids=["file", "python"])
def test_a_child_reads_what_was_while_its_parent_writes(
    opened: Opened, tmp_path: Path, verify: bool, python: bool
) -> None:
    engine = opened(HeldMedium() if python else files(tmp_path), verify=verify)
    xs = [filled(MIB, seed) for seed in range(6)]
    shadows = [pattern(MIB, seed).numpy() for seed in range(6)]
    engine.send_away(*xs[:4])
    gate = Gate()

    def child() -> list[bool]:
        gate.wait()
        return _all_right(xs, shadows)

    result = in_fork(child)
    for turn in range(3):  # the same slots would be written again and again
        for seed, x in enumerate(xs):
            x.copy_(pattern(MIB, 100 * turn + seed + 7))
        engine.send_away(*xs)
    if python:
        # A medium in Python's own memory is the child's as it was; its slots are kept all the same.
        assert engine.tier_used() > 6 * MIB
    gate.open()
    assert result() == [True] * 6
    for seed, x in enumerate(xs):
        assert torch.equal(x, pattern(MIB, 207 + seed))


def test_a_copy_that_is_still_valid_is_the_childs(opened: Opened) -> None:
    x = filled(MIB, 1)  # from before: its changes are watched, its slot stays when it comes back
    engine = opened()
    engine.send_away(x)
    gate = Gate()
    result = in_fork(lambda: (gate.wait(), raw_array(x).tobytes())[1])
    for turn in range(2):
        x.add_(1)
        engine.send_away(x)
        assert engine.tier_used() >= 2 * x.nbytes - 3 * 4096, turn
    gate.open()
    assert result() == pattern(MIB, 1).numpy().tobytes()
    assert torch.equal(x, pattern(MIB, 1) + 2)
    engine.close(left=1)


def test_slots_are_used_again_once_children_are_gone(opened: Opened) -> None:
    engine = opened()
    x, y = filled(MIB, 1), filled(MIB, 2)
    engine.send_away(x)
    gate = Gate()
    result = in_fork(lambda: (gate.wait(), peek(x, 5))[1])
    x.add_(1)
    engine.send_away(x)
    assert engine.tier_used() == 2 * MIB  # the child's slot and a new one
    gate.open()
    assert result() == int(pattern(MIB, 1)[5])
    x.add_(1)
    engine.send_away(y)  # looks after children
    engine.send_away(x)
    assert engine.tier_used() == 2 * MIB
    assert torch.equal(x, pattern(MIB, 1) + 2)


def test_a_child_whose_slots_were_freed(opened: Opened) -> None:
    engine = opened()
    xs, shadow = [filled(MIB, 1)], pattern(MIB, 1).numpy()
    engine.send_away(*xs)
    gate = Gate()

    def child() -> bool:
        gate.wait()
        return bool(np.array_equal(raw_array(xs[0]), shadow))

    result = in_fork(child)
    xs.clear()
    others = [filled(MIB, seed) for seed in range(4)]
    engine.send_away(*others)
    gate.open()
    assert result()


def test_many_forks(opened: Opened) -> None:
    engine = opened()
    x = filled(256 * KIB, 0)
    results = []
    for turn in range(12):
        x.copy_(pattern(256 * KIB, turn))
        engine.send_away(x)
        gate = Gate()
        results.append((gate, in_fork(lambda gate=gate: (gate.wait(), raw_array(x).tobytes())[1])))
    for turn, (gate, result) in reversed(list(enumerate(results))):
        gate.open()
        assert result() == pattern(256 * KIB, turn).numpy().tobytes()


def test_a_child_writes_for_itself_alone(opened: Opened) -> None:
    engine = opened()
    xs = [filled(MIB, seed) for seed in range(3)]
    engine.send_away(xs[0], xs[1])
    peek(xs[1])

    def child() -> list[int]:
        for x in xs:
            poke(x, 99, 7)
            x[8:].fill_(3)
        return [int(x[7]) + int(x[MIB - 1]) for x in xs]

    assert in_fork(child)() == [102] * 3
    for seed, x in enumerate(xs):
        assert torch.equal(x, pattern(MIB, seed))


@pytest.mark.parametrize("way", ["numpy", "data_ptr", "dlpack", "tobytes", "pipe"])
def test_a_child_lends_its_memory(opened: Opened, way: str) -> None:
    engine = opened()
    x = filled(MIB)
    engine.send_away(x)

    def child() -> int:
        if way == "numpy":
            return int(x.numpy()[77])
        if way == "data_ptr":
            x.data_ptr()
            return peek(x, 77)
        if way == "dlpack":
            return int(np.from_dlpack(x)[77])
        if way == "tobytes":
            return int(x.numpy().tobytes()[77])
        reading, writing = os.pipe()
        os.write(writing, x.numpy()[:1000])
        return os.read(reading, 1000)[77]

    assert in_fork(child)() == int(pattern(MIB)[77])


@pytest.mark.parametrize("direction", ["leaving", "arriving"])
@pytest.mark.parametrize("verify", [False, True])
def test_a_fork_while_bytes_are_on_their_way(opened: Opened, direction: str, verify: bool) -> None:
    medium = HeldMedium()
    engine = opened(medium, verify=verify)
    x, y = filled(20 * MIB, 1), filled(MIB, 2)
    if direction == "leaving":
        medium.may_write.clear()
        assert engine.start_leaving(x)
        assert medium.writing.acquire(timeout=PATIENCE_S)
    else:
        engine.send_away(x)
        medium.may_read.clear()
        reader = threading.Thread(target=peek, args=(x,))
        reader.start()
        assert medium.reading.acquire(timeout=PATIENCE_S)
        engine.wait_for_waits(1)
    before = engine.place(x)

    def child() -> bool:
        medium.may_write.set()
        medium.may_read.set()
        same = bool(np.array_equal(raw_array(x), pattern(20 * MIB, 1).numpy()))
        poke(x, 3, 19 * MIB)
        return same and bool(np.array_equal(raw_array(y), pattern(MIB, 2).numpy())) and peek(x, 19 * MIB) == 3

    result = in_fork(child)
    assert engine.place(x) is before
    medium.may_write.set()
    medium.may_read.set()
    assert result()
    engine.native.settle()
    if direction == "arriving":
        reader.join(PATIENCE_S)
    assert torch.equal(x, pattern(20 * MIB, 1))


def test_forks_while_files_are_written_and_read(opened: Opened) -> None:
    engine = opened(budget=128 * MIB, verify=True)
    rng = random.Random(4)
    xs = [filled(3 * MIB, seed) for seed in range(5)]
    shadows = [pattern(3 * MIB, seed).numpy() for seed in range(5)]
    for turn in range(12):
        for x in xs:
            engine.start_leaving(x)
        if turn % 2:
            engine.native.settle()
            readers = [threading.Thread(target=peek, args=(x,)) for x in xs[:3]]
            for reader in readers:
                reader.start()
        else:
            readers = []
        result = in_fork(lambda: _all_right(xs, shadows))
        number = rng.randrange(5)
        xs[number][turn:] = turn
        parent_sees = xs[number].clone()
        assert result() == [True] * 5
        shadows[number][turn:] = turn
        assert torch.equal(parent_sees, torch.from_numpy(shadows[number]))
        for reader in readers:
            reader.join(PATIENCE_S)
    assert _all_right(xs, shadows) == [True] * 5


@pytest.mark.parametrize("busy", [False, True])
def test_a_child_that_has_an_engine_of_its_own(opened: Opened, tmp_path: Path, busy: bool) -> None:
    medium = HeldMedium() if busy else files(tmp_path)
    engine = opened(medium, budget=24 * MIB)
    xs = [filled(MIB, seed) for seed in range(8)]
    engine.send_away(*xs[:6])
    if busy:  # a fork with transfers under way both ways
        while medium.writing.acquire(blocking=False):
            pass
        medium.may_write.clear()
        medium.may_read.clear()
        assert engine.start_leaving(xs[6])
        reader = threading.Thread(target=peek, args=(xs[0],))
        reader.start()
        assert medium.writing.acquire(timeout=PATIENCE_S)
        assert medium.reading.acquire(timeout=PATIENCE_S)

    def child() -> tuple[bool, bool, int]:
        medium.may_write.set() if busy else None
        medium.may_read.set() if busy else None
        own = Engine(files(tmp_path), budget=8 * MIB)
        ys = [filled(MIB, 100 + seed) for seed in range(12)]
        mine = all(torch.equal(y, pattern(MIB, 100 + seed)) for seed, y in enumerate(ys))
        theirs = all(torch.equal(x, pattern(MIB, seed)) for seed, x in enumerate(xs))
        written = own.counted.written
        assert own.peak <= 8 * MIB
        peek(ys[0])
        assert own.place(ys[0]) is Place.HERE
        assert not own.start_leaving(ys[0], tier=-1)  # never to its parent's file
        own.memory.close()
        again = all(torch.equal(x, pattern(MIB, seed)) for seed, x in enumerate(xs))
        return mine, theirs and again, written > 0

    result = in_fork(child)
    if busy:
        medium.may_write.set()
        medium.may_read.set()
        reader.join(PATIENCE_S)
    for turn in range(3):
        engine.send_away(*(x for x in xs if engine.place(x) is Place.HERE and engine.native.settle() is None))
        for seed, x in enumerate(xs):
            assert torch.equal(x, pattern(MIB, seed)), (turn, seed)
    assert result() == (True, True, True)
    for seed, x in enumerate(xs):
        assert torch.equal(x, pattern(MIB, seed))


def test_a_child_that_finds_its_bytes_changed_dies(opened: Opened, tmp_path: Path) -> None:
    medium = files(tmp_path)
    engine = opened(medium, verify=True)
    x = filled(MIB)
    engine.send_away(x)
    medium.write_at(8192, memoryview(b"?" * 4096))
    assert in_fork(lambda: peek(x))() is None  # no answer rather than a wrong one
    peek(x)
    engine.memory.take_errors()


def test_programs_that_are_started_while_bytes_are_away(opened: Opened) -> None:
    engine = opened()
    x = filled(MIB)
    engine.send_away(x)
    say = "import sys; sys.stdout.buffer.write(sys.stdin.buffer.read()[:3])"
    run = subprocess.run([sys.executable, "-c", say], input=memoryview(x.numpy()), capture_output=True, check=True)
    assert run.stdout == pattern(MIB).numpy().tobytes()[:3]
    pid = os.fork()
    if pid == 0:
        os.execv("/bin/true", ["true"])
    assert os.waitpid(pid, 0)[1] == 0
    gc.collect()
    x.add_(1)
    engine.send_away(x)
    x.add_(1)
    engine.send_away(x)
    assert engine.tier_used() == MIB  # they hold nothing
    assert torch.equal(x, pattern(MIB) + 2)


class Rows(torch.utils.data.Dataset[torch.Tensor]):
    """Rows of a tensor that may be away."""

    def __init__(self, table: torch.Tensor) -> None:
        self.table = table

    def __len__(self) -> int:
        return len(self.table)

    def __getitem__(self, index: int) -> torch.Tensor:
        return self.table[index]


def test_workers_of_a_loader(opened: Opened) -> None:
    engine = opened()
    table = filled(MIB).view(16, -1)
    engine.send_away(table)
    loader = torch.utils.data.DataLoader(Rows(table), batch_size=4, num_workers=2, multiprocessing_context="fork")
    rows = []
    for batch in loader:
        rows.append(batch.clone())
        table.add_(1)
        engine.send_away(table)
    assert torch.equal(torch.cat(rows).view(-1), pattern(MIB))
