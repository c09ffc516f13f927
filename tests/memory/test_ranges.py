"""Pages leave and return under addresses that stay: same bytes, within the budget, written only when they changed."""

from __future__ import annotations

import gc
import mmap
import random
import threading
import time
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
    address_of,
    filled,
    pattern,
    peek,
    poke,
    raw_array,
)

Opened = Callable[..., Engine]
SIZES = [64 * KIB, 64 * KIB + 1, 300 * KIB + 13, 2 * MIB - 4096, 2 * MIB, 2 * MIB + 8, 7 * MIB + 77, 8 * MIB, 40 * MIB]


# ---- leave and return ----


@pytest.mark.parametrize("nbytes", SIZES)
@pytest.mark.parametrize("verify", [False, True])
def test_bytes_come_back_to_the_same_address(opened: Opened, nbytes: int, verify: bool) -> None:
    engine = opened(budget=100 * MIB, verify=verify)
    x = filled(nbytes, seed=nbytes)
    before = address_of(x)
    for _ in range(3):
        engine.send_away(x)
        assert engine.native.counters().live_bytes < nbytes
        assert torch.equal(x, pattern(nbytes, nbytes))
        assert address_of(x) == before
        assert engine.place(x) is Place.HERE
        x.add_(0)  # dirty: it is written again
    assert engine.counted.written == 3 * -(-nbytes // 4096) * 4096
    assert engine.counted.faults == 0


def test_blocks_below_a_range_never_leave(opened: Opened) -> None:
    engine = opened(least=256 * KIB)
    small, medium = torch.empty(1000), filled(200 * KIB)
    assert engine.place(small) is None
    assert not engine.start_leaving(small)
    assert not engine.start_leaving(medium)
    assert engine.place(medium) is Place.HERE


def test_views_and_shared_storages_are_one_range(opened: Opened) -> None:
    engine = opened()
    x = filled(MIB)
    half, turned = x[MIB // 2 :], x.view(1024, 1024).t()
    other = torch.empty(0, dtype=torch.uint8).set_(x.untyped_storage())
    engine.send_away(half)
    assert {engine.place(each) for each in (x, half, turned, other)} == {Place.AWAY}
    assert torch.equal(half, pattern(MIB)[MIB // 2 :])
    assert engine.place(x) is Place.HERE
    engine.send_away(turned)
    assert torch.equal(other, pattern(MIB))
    assert torch.equal(turned, pattern(MIB).view(1024, 1024).t())


def test_room_of_what_is_away_is_used_by_others(opened: Opened) -> None:
    engine = opened(budget=8 * MIB)
    kept = [filled(MIB, seed) for seed in range(24)]
    assert engine.peak <= 8 * MIB
    for seed, each in enumerate(kept):
        assert torch.equal(each, pattern(MIB, seed))
    assert engine.peak <= 8 * MIB
    assert engine.counted.beyond == 0


def play(engine: Engine, rng: random.Random, turns: int, sizes: list[int], most: int) -> None:
    """Allocate, free, read, write and send away at random; compare everything with a copy that never moves."""
    held: list[tuple[torch.Tensor, np.ndarray]] = []
    for _ in range(turns):
        deed = rng.choice(["take", "take", "free", "read", "write", "raw write", "leave", "leave", "lend"])
        if deed == "take" and sum(each.nbytes for each, _ in held) < most:
            seed = rng.randrange(2**30)
            nbytes = rng.choice(sizes)
            held.append((filled(nbytes, seed), pattern(nbytes, seed).numpy()))
        if not held:
            continue
        number = rng.randrange(len(held))
        tensor, shadow = held[number]
        at = rng.randrange(tensor.nbytes)
        if deed == "free":
            del held[number]
        elif deed == "read":
            assert peek(tensor, at) == shadow[at]
        elif deed == "write":
            tensor[at // 2 : at + 1] = at % 251
            shadow[at // 2 : at + 1] = at % 251
        elif deed == "raw write":
            poke(tensor, at % 241, at)
            shadow[at] = at % 241
        elif deed == "lend":
            array = tensor.numpy()
            array[at] = shadow[at] = at % 239
        else:
            engine.start_leaving(tensor)
    for tensor, shadow in held:
        assert np.array_equal(raw_array(tensor), shadow)


SMALL_SIZES = [64 * KIB, 68 * KIB, 100 * KIB + 3, 256 * KIB, MIB + 5]
MIXED_SIZES = [64 * KIB, 300 * KIB, 2 * MIB, 2 * MIB + 4096, 5 * MIB + 1]


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("sizes", [SMALL_SIZES, MIXED_SIZES], ids=["small", "mixed"])
def test_random_use_loses_nothing_and_keeps_the_budget(opened: Opened, seed: int, sizes: list[int]) -> None:
    budget = 12 * MIB
    engine = opened(budget=budget, verify=seed % 2 == 0, announcing=seed % 4 < 3, threads=1 + seed % 3)
    play(engine, random.Random(seed), 250, sizes, 40 * MIB)
    assert engine.peak <= budget
    assert engine.counted.beyond == 0


@pytest.mark.parametrize("seed", range(3))
def test_random_use_on_several_threads(opened: Opened, seed: int) -> None:
    budget = 24 * MIB
    engine = opened(budget=budget, verify=seed == 1)
    failures: list[BaseException] = []

    def one(number: int) -> None:
        try:
            play(engine, random.Random(100 * seed + number), 120, SMALL_SIZES, 12 * MIB)
        except BaseException as error:
            failures.append(error)
            raise

    threads = [threading.Thread(target=one, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE_S)
        assert not thread.is_alive()
    assert not failures
    assert engine.peak <= budget


# ---- clean and dirty ----


def tracked(engine: Engine, nbytes: int = MIB, seed: int = 1) -> torch.Tensor:
    """Return a tensor that came back and is known to leave again: its changes are watched."""
    made = torch.empty(nbytes, dtype=torch.uint8)
    _track(engine, made)
    made.copy_(pattern(nbytes, seed))
    engine.send_away(made)
    assert peek(made) == pattern(nbytes, seed)[0]
    return made


def _track(engine: Engine, tensor: torch.Tensor) -> None:
    native = engine.native
    serial = engine.memory.serial_of(tensor)
    plan = native.plan_add(
        names=[native.name_id("aten::nothing")],
        storages=[(serial, -1, -1, tensor.untyped_storage().nbytes(), engine.memory.first_tier, 1)],
        uses=[(0,)],
        actions=[],
    )
    native.step_begin(plan)
    native.step_end()


def test_unchanged_bytes_are_not_written_again(opened: Opened) -> None:
    engine = opened()
    x = tracked(engine)
    written = engine.counted.written
    for turn in range(1, 4):
        engine.send_away(x)
        assert engine.counted.written == written
        assert engine.counted.released == turn * MIB
        assert torch.equal(x, pattern(MIB, 1))


@pytest.mark.parametrize("way", ["operator", "view", "out", "list", "numpy", "raw array", "bare address", "thread"])
def test_a_write_is_never_lost(opened: Opened, way: str) -> None:
    engine = opened()
    x = tracked(engine)
    written = engine.counted.written
    want = pattern(MIB, 1)
    want[12345] = 77
    if way == "operator":
        x.copy_(want)
    elif way == "view":
        x[12345].fill_(77)
    elif way == "out":
        torch.add(want, 0, out=x)
    elif way == "list":
        torch._foreach_copy_([x], [want])
    elif way == "numpy":
        x.numpy()[12345] = 77
    elif way == "raw array":
        raw_array(x)[12345] = 77
    elif way == "bare address":
        poke(x, 77, 12345)
    else:
        thread = threading.Thread(target=poke, args=(x, 77, 12345))
        thread.start()
        thread.join()
    gc.collect()
    for _ in range(2):
        engine.send_away(x)
        assert torch.equal(x, want)
    assert engine.counted.written >= written + MIB


def test_the_first_write_faults_once(opened: Opened) -> None:
    engine = opened()
    x = tracked(engine)
    faults = engine.counted.write_faults
    poke(x, 1, 5)
    poke(x, 2, MIB - 1)
    assert engine.counted.write_faults == faults + 1
    x.add_(1)  # announced: no fault
    assert engine.counted.write_faults == faults + 1


def test_an_operator_that_writes_needs_no_fault(opened: Opened) -> None:
    engine = opened()
    x = tracked(engine)
    engine.send_away(x)
    faults = engine.counted.faults, engine.counted.write_faults
    x.add_(1)
    assert (engine.counted.faults, engine.counted.write_faults) == faults
    engine.send_away(x)
    assert torch.equal(x, pattern(MIB, 1) + 1)


def test_what_leaves_for_the_last_time_is_not_watched(opened: Opened) -> None:
    engine = opened()
    x, small = filled(MIB), torch.zeros(1)
    native, tier = engine.native, engine.memory.first_tier
    plan = native.plan_add(
        names=[native.name_id("aten::fill_")],
        storages=[(engine.memory.serial_of(x), -1, -1, MIB, tier, 0)],
        uses=[(0,)],
        actions=[],
    )
    native.step_begin(plan)
    small.fill_(1)
    engine.send_away(x)
    assert peek(x) == pattern(MIB)[0]
    assert engine.tier_used() == 0  # its slot is given back: the bytes count as changed
    poke(x, 3)
    assert engine.counted.write_faults == 0
    native.step_end()


# ---- called back while it leaves ----


@pytest.mark.parametrize("verify", [False, True])
@pytest.mark.parametrize("way", ["operator", "fault", "write", "lend"])
def test_what_is_touched_while_it_leaves_comes_back(opened: Opened, verify: bool, way: str) -> None:
    medium = HeldMedium()
    engine = opened(medium, verify=verify)
    x = filled(20 * MIB)
    medium.may_write.clear()
    assert engine.start_leaving(x)
    assert medium.writing.acquire(timeout=PATIENCE_S)
    assert engine.place(x) is Place.LEAVING
    got: list[int] = []

    def use() -> None:
        if way == "operator":
            got.append(20 * MIB if torch.equal(x, pattern(20 * MIB)) else 0)
        elif way == "fault":
            got.append(int((raw_array(x) == pattern(20 * MIB).numpy()).sum()))
        elif way == "lend":
            got.append(int((x.numpy() == pattern(20 * MIB).numpy()).sum()))
        else:
            poke(x, 200, 15 * MIB)
            got.append(20 * MIB)

    thread = threading.Thread(target=use)
    thread.start()
    engine.wait_for_waits(1)
    assert engine.place(x) is Place.LEAVING  # somebody reads its pages: they come back when that ends
    medium.may_write.set()
    thread.join(PATIENCE_S)
    assert got == [20 * MIB]
    engine.native.settle()
    assert engine.place(x) is Place.HERE
    assert engine.tier_used() == 0
    assert engine.counted.read == 0
    want = pattern(20 * MIB)
    if way == "write":
        want[15 * MIB] = 200
    gc.collect()
    engine.send_away(x)
    assert torch.equal(x, want)


@pytest.mark.parametrize("seed", range(4))
def test_files_are_called_back_at_any_instant(opened: Opened, seed: int) -> None:
    engine = opened(budget=128 * MIB, verify=seed % 2 == 1)
    rng = random.Random(seed)
    kept = [filled(3 * MIB, number) for number in range(6)]
    shadows = [pattern(3 * MIB, number) for number in range(6)]
    for turn in range(40):
        for each in kept:
            engine.start_leaving(each)
        number = rng.randrange(6)
        if turn % 2:
            assert torch.equal(kept[number], shadows[number])
        else:
            kept[number][turn * 1000 :] = turn
            shadows[number][turn * 1000 :] = turn
    for each, shadow in zip(kept, shadows, strict=True):
        assert torch.equal(each, shadow)


# ---- freed on the way ----


@pytest.mark.parametrize("when", ["away", "leaving", "queued", "arriving", "recalled"])
def test_what_is_freed_on_its_way_leaves_nothing(opened: Opened, when: str) -> None:
    medium = HeldMedium()
    engine = opened(medium, threads=1)
    first, x = filled(MIB, 1), filled(9 * MIB, 2)
    before = engine.native.counters().live_bytes
    if when in ("away", "arriving"):
        engine.send_away(x)
    if when in ("leaving", "queued", "recalled"):
        medium.may_write.clear()
        assert engine.start_leaving(first if when == "queued" else x)
        assert medium.writing.acquire(timeout=PATIENCE_S)
        if when == "queued":
            assert engine.start_leaving(x)
    if when == "arriving":
        medium.may_read.clear()
        _prefetch(engine, x)
        assert medium.reading.acquire(timeout=PATIENCE_S)
        assert engine.place(x) is Place.ARRIVING
    if when == "recalled":
        _prefetch(engine, x)
    del x
    again = filled(9 * MIB, 3)
    medium.may_write.set()
    medium.may_read.set()
    engine.native.settle()
    assert torch.equal(again, pattern(9 * MIB, 3))
    assert torch.equal(first, pattern(MIB, 1))
    assert engine.native.counters().live_bytes == before
    del first  # its copy stays as long as it does
    assert engine.tier_used() == 0


def _prefetch(engine: Engine, tensor: torch.Tensor) -> None:
    """Start to bring a tensor back, as a plan does; the step that does it is over afterwards."""
    native, small = engine.native, torch.zeros(1)
    native.step_begin(
        native.plan_add(
            names=[native.name_id("aten::fill_")],
            storages=[(engine.memory.serial_of(tensor), -1, -1, tensor.nbytes, engine.memory.first_tier, 0)],
            uses=[(0,)],
            actions=[(0, 1, 0, engine.memory.first_tier, -1, 0)],
        )
    )
    small.fill_(1)
    native.step_end()


# ---- storages that change ----


def test_a_storage_that_is_resized_while_away(opened: Opened) -> None:
    engine = opened()
    x = filled(MIB)
    engine.send_away(x)
    x.resize_(3 * MIB)
    assert torch.equal(x[:MIB], pattern(MIB))
    x[MIB:] = 9
    engine.send_away(x)
    x.resize_(100)
    assert torch.equal(x, pattern(MIB)[:100])
    engine.send_away(x)
    x.untyped_storage().resize_(0)
    assert engine.tier_used() == 0


def test_storages_that_are_swapped_while_away(opened: Opened) -> None:
    engine = opened()
    x, y = filled(MIB, 1), filled(2 * MIB, 2)
    view = x[10:20]
    engine.send_away(x, y)
    x.data = y
    assert engine.place(x) is Place.AWAY
    assert torch.equal(view, pattern(MIB, 1)[10:20])
    del view
    assert torch.equal(x, pattern(2 * MIB, 2))
    x.set_(torch.empty(0, dtype=torch.uint8))
    assert torch.equal(y, pattern(2 * MIB, 2))


def test_copies_of_storages(opened: Opened) -> None:
    engine = opened()
    x = filled(MIB)
    engine.send_away(x)
    copied = x.untyped_storage().clone()
    engine.send_away(x)
    other = torch.UntypedStorage(MIB).copy_(x.untyped_storage())
    for storage in (copied, other):
        assert torch.equal(torch.empty(0, dtype=torch.uint8).set_(storage), pattern(MIB))


def test_lazy_clones(opened: Opened) -> None:
    engine = opened()
    x = filled(MIB)
    lazy = torch._lazy_clone(x)
    engine.send_away(x)
    assert engine.place(lazy) is Place.AWAY
    assert torch.equal(lazy, pattern(MIB))
    engine.send_away(x)
    lazy.add_(1)  # has pages of its own from here on
    assert torch.equal(x, pattern(MIB))
    engine.send_away(x, lazy)
    assert torch.equal(lazy, pattern(MIB) + 1)
    del x
    engine.send_away(lazy)
    assert torch.equal(lazy, pattern(MIB) + 1)


def test_shared_memory_is_left_alone(opened: Opened) -> None:
    engine = opened()
    x = filled(MIB)
    engine.send_away(x)
    x.share_memory_()
    assert engine.place(x) is None
    assert torch.equal(x, pattern(MIB))


# ---- many mappings ----


def test_nobody_sees_pages_that_have_left(opened: Opened) -> None:
    engine = opened()
    x = torch.full((64 * KIB,), 7, dtype=torch.uint8)
    array, over, seen = raw_array(x), threading.Event(), []

    def read() -> None:
        while not over.is_set() and not seen:
            if array.min() != 7:  # without the GIL
                seen.append(array.copy())

    readers = [threading.Thread(target=read) for _ in range(2)]
    for reader in readers:
        reader.start()
    try:
        until = time.monotonic() + PATIENCE_S
        left = 0
        while left < 1500 and not seen:
            left += engine.start_leaving(x)  # as soon as a reader has it back
            assert time.monotonic() < until
    finally:
        over.set()
        for reader in readers:
            reader.join(PATIENCE_S)
    assert not seen


def test_addresses_are_never_free_for_others(opened: Opened) -> None:
    engine = opened()
    kept = [filled(MIB, seed) for seed in range(4)]
    over, broken = threading.Event(), []

    def map_and_unmap() -> None:
        while not over.is_set() and not broken:
            mapped = [mmap.mmap(-1, nbytes) for nbytes in (4096, 64 * KIB, MIB)]
            for each in mapped:
                each[0] = each[len(each) - 1] = 7
            for each in mapped:
                if each[0] != 7 or each[len(each) - 1] != 7:
                    broken.append(len(each))
                each.close()

    thread = threading.Thread(target=map_and_unmap)
    thread.start()
    try:
        for _ in range(100):
            engine.send_away(*kept)
            for each in kept:
                peek(each)
    finally:
        over.set()
        thread.join(PATIENCE_S)
    assert not broken
    for seed, each in enumerate(kept):
        assert torch.equal(each, pattern(MIB, seed))


def test_thousands_of_holes(opened: Opened) -> None:
    engine = opened(budget=400 * MIB)
    kept = [filled(64 * KIB, seed) for seed in range(64)] + [torch.full((64 * KIB,), n % 251) for n in range(400)]
    for turn in range(3):
        for each in kept[turn::2]:
            engine.start_leaving(each)
        engine.native.settle()
        for each in kept[::3]:
            peek(each)
    assert len(Path("/proc/self/maps").read_text().splitlines()) < 5000
    for seed, each in enumerate(kept[:64]):
        assert torch.equal(each, pattern(64 * KIB, seed))
    assert all(bool((each == n % 251).all()) for n, each in enumerate(kept[64:]))
