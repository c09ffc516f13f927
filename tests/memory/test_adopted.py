"""Tensors from before: their pages leave and return inside another allocator's memory, which stays whole."""

from __future__ import annotations

import ctypes
import mmap
import random
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from lowtide.memory.native.bindings import Place
from tests.memory.engine import KIB, MIB, Engine, HeldMedium, address_of, filled, pattern, peek

Opened = Callable[..., Engine]

libc = ctypes.CDLL(None)
libc.malloc.restype = ctypes.c_void_p
libc.malloc.argtypes = [ctypes.c_size_t]
libc.free.argtypes = [ctypes.c_void_p]


class Neighbour:
    """A block of malloc's own with a pattern in it."""

    def __init__(self, nbytes: int, mark: int) -> None:
        self.address, self.nbytes, self.mark = libc.malloc(nbytes), nbytes, mark
        ctypes.memset(self.address, mark, nbytes)

    def check_and_free(self) -> None:
        """See that nobody wrote into it."""
        assert ctypes.string_at(self.address, self.nbytes) == bytes([self.mark]) * self.nbytes
        libc.free(self.address)


def test_a_model_from_before_leaves_and_returns_in_place(opened: Opened) -> None:
    made = [filled(nbytes, nbytes) for nbytes in (100 * KIB, MIB + 77, 3 * MIB, 40 * MIB)]
    addresses = [address_of(each) for each in made]
    engine = opened(budget=100 * MIB)
    for _ in range(2):
        engine.send_away(*made)
        for each in made:
            assert torch.equal(each, pattern(each.nbytes, each.nbytes))
    assert [address_of(each) for each in made] == addresses
    assert engine.counted.faults == 0
    assert engine.counted.released > 0  # unchanged the second time
    for each in made:
        each.add_(1)
    engine.send_away(*made)
    for each in made:
        assert torch.equal(each, pattern(each.nbytes, each.nbytes) + 1)
    del made, each
    engine.forget_adopted()


@pytest.mark.parametrize("seed", range(4))
def test_the_allocators_own_blocks_stay_intact(opened: Opened, seed: int) -> None:
    rng = random.Random(seed)
    neighbours: list[Neighbour] = []
    adopted: list[tuple[torch.Tensor, int]] = []
    for number in range(60):
        neighbours.append(Neighbour(rng.choice([40, 1000, 5000, 100 * KIB]), number))
        nbytes = rng.choice([70 * KIB, 100 * KIB, 120 * KIB, 300 * KIB, MIB])
        adopted.append((filled(nbytes, number), number))
        neighbours.append(Neighbour(rng.choice([24, 200, 4096]), number))
    before = sum(each.nbytes for each, _ in adopted)
    engine = opened(budget=before // 2, verify=seed % 2 == 0)
    rng.shuffle(adopted)
    while adopted:
        for each, _ in adopted:
            if rng.random() < 0.5:
                engine.start_leaving(each)
        if rng.random() < 0.5:
            engine.native.settle()
        tensor, number = adopted.pop()
        if rng.random() < 0.5:
            assert torch.equal(tensor, pattern(tensor.nbytes, number))
        del tensor  # here, leaving, away or arriving
        each = None
        neighbours.append(Neighbour(rng.choice([70 * KIB, 100 * KIB, 500]), 200))  # as likely as not in its place
        neighbours.pop(rng.randrange(len(neighbours))).check_and_free()
    assert engine.peak <= before // 2
    for neighbour in neighbours:
        neighbour.check_and_free()
    engine.forget_adopted()


@pytest.mark.parametrize("when", ["here", "away", "leaving", "clean"])
def test_freed_memory_is_the_allocators_again(opened: Opened, when: str) -> None:
    x = filled(4 * MIB, 1)
    medium = HeldMedium()
    engine = opened(medium)
    reserved = engine.native.counters().reserved_bytes
    if when in ("away", "clean"):
        engine.send_away(x)
    if when == "clean":
        peek(x)  # back, and mapped for reading only
    if when == "leaving":
        medium.may_write.clear()
        assert engine.start_leaving(x)
        assert medium.writing.acquire(timeout=60)
    del x
    block = Neighbour(4 * MIB, 7)
    medium.may_write.set()
    engine.native.settle()
    block.check_and_free()
    engine.memory.forget_freed()
    engine.native.trim()
    assert engine.native.counters().reserved_bytes <= reserved - 4 * MIB + 8 * KIB
    assert engine.tier_used() == 0
    engine.forget_adopted()


def test_memory_of_others_is_not_adopted(opened: Opened, tmp_path: Path) -> None:
    array = np.ones(MIB, dtype=np.uint8)
    of_numpy = torch.from_numpy(array)
    mapped = mmap.mmap(-1, MIB)
    of_map = torch.frombuffer(mapped, dtype=torch.uint8)
    shared = torch.ones(MIB, dtype=torch.uint8).share_memory_()
    (tmp_path / "bytes").write_bytes(bytes(MIB))
    of_file = torch.from_file(str(tmp_path / "bytes"), size=MIB, dtype=torch.uint8)
    engine = opened()
    for each in (of_numpy, of_map, shared, of_file):
        assert engine.place(each) is None
        assert not engine.start_leaving(each)
    foreign = engine.native.counters().foreign_bytes
    assert foreign >= 4 * MIB  # the budget covers them all the same
    del of_numpy, of_map, shared, of_file, each
    engine.memory.forget_freed()
    assert engine.native.counters().foreign_bytes <= foreign - 4 * MIB
    mapped.close()
    engine.forget_adopted()


def test_what_is_too_large_for_the_budget_leaves_at_once(opened: Opened) -> None:
    made = [filled(MIB, seed) for seed in range(20)]
    engine = opened(budget=8 * MIB)
    assert engine.native.counters().reserved_bytes <= 8 * MIB
    assert engine.counted.away >= 12 * MIB - 20 * 8 * KIB
    for seed, each in enumerate(made):
        assert torch.equal(each, pattern(MIB, seed))
    assert engine.peak <= 8 * MIB
    del made, each
    engine.forget_adopted()


def test_a_second_engine_counts_them_once(opened: Opened) -> None:
    made = [filled(2 * MIB, seed) for seed in range(4)]
    first = opened()
    figures = first.native.counters()
    first.close(left=4)
    second = opened()
    again = second.native.counters()
    assert (again.reserved_bytes, again.foreign_bytes) == (figures.reserved_bytes, figures.foreign_bytes)
    second.send_away(*made)
    for seed, each in enumerate(made):
        assert torch.equal(each, pattern(2 * MIB, seed))
    second.close(left=4)
    del made, each


def test_storages_from_before_that_grow_are_under_the_budget(opened: Opened) -> None:
    large, small, empty = filled(MIB), torch.zeros(10), torch.empty(0, dtype=torch.uint8)
    engine = opened(budget=16 * MIB)
    large.resize_(4 * MIB)
    small.resize_(MIB)
    torch.ones(4 * MIB, dtype=torch.uint8, out=empty)
    assert torch.equal(large[:MIB], pattern(MIB))
    engine.send_away(large, small, empty)
    assert bool((empty == 1).all())
    with pytest.raises(torch.OutOfMemoryError):
        empty.resize_(32 * MIB)
    del large, small, empty
    engine.forget_adopted()


def test_storages_from_before_that_change(opened: Opened) -> None:
    x, y = filled(MIB, 1), filled(MIB, 2)
    view = y[5:]
    engine = opened()
    engine.send_away(x, y)
    x.resize_(2 * MIB)
    y.data = x
    assert torch.equal(view, pattern(MIB, 2)[5:])
    assert torch.equal(y[:MIB], pattern(MIB, 1))
    assert engine.place(view) is Place.HERE
    del x, y, view
    engine.forget_adopted()
