"""Closing: everything comes back, or what has no room lingers, is served by faults, and goes when there is room."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

import lowtide
from lowtide.memory import ranges
from lowtide.memory.native.bindings import Place
from tests.memory.engine import MIB, PATIENCE_S, Engine, HeldMedium, files, filled, pattern, peek, poke

Opened = Callable[..., Engine]


@pytest.fixture
def room(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """The bytes that the machine says may come back."""
    left = [1 << 40]
    monkeypatch.setattr(ranges, "_room_bytes", lambda: left[0])
    yield left
    left[0] = 1 << 40
    if ranges._lingering is not None:
        assert ranges._lingering.give_over() == ()
        monkeypatch.setattr(ranges, "_lingering", None)


def test_everything_comes_back(opened: Opened) -> None:
    engine = opened(budget=8 * MIB)
    xs = [filled(MIB, seed) for seed in range(20)]
    engine.close(left=20)
    assert engine.native.range_counters().away == 0
    assert not engine.native.ranges_running()
    for seed, x in enumerate(xs):
        assert torch.equal(x, pattern(MIB, seed))
        poke(x, 1)
    assert engine.native.counters().budget_bytes == 0


def test_a_second_engine_is_refused_while_one_is_open(opened: Opened, tmp_path: Path) -> None:
    opened()
    medium = files(tmp_path)
    with pytest.raises(lowtide.BadArgument, match="another tide is open"):
        Engine(medium)
    medium.close()


def test_what_has_no_room_lingers_within_its_budget(opened: Opened, room: list[int]) -> None:
    engine = opened(budget=8 * MIB)
    xs = [filled(MIB, seed) for seed in range(20)]
    room[0] = 0
    engine.open = False
    engine.memory.close()
    engine.native.reset_peaks()
    for seed, x in enumerate(xs):
        assert torch.equal(x, pattern(MIB, seed))
        poke(x, 5, 9)
    assert engine.peak <= 8 * MIB
    assert engine.counted.away > 0
    room[0] = 1 << 40
    assert ranges._lingering is not None
    assert ranges._lingering.give_over() == ()
    ranges._lingering = None
    assert not engine.native.ranges_running()
    for seed, x in enumerate(xs):
        want = pattern(MIB, seed)
        want[9] = 5
        assert torch.equal(x, want)


@pytest.mark.parametrize("verify", [False, True])
def test_a_second_tide_joins_one_that_lingers(opened: Opened, room: list[int], tmp_path: Path, verify: bool) -> None:
    first = opened(budget=8 * MIB, verify=not verify)
    xs = [filled(MIB, seed) for seed in range(20)]
    room[0] = 0
    first.open = False
    first.memory.close()
    lingering_bytes = first.native.tier_counters(first.memory.first_tier)[2]
    medium = HeldMedium()
    second = Engine(medium, budget=6 * MIB, verify=verify)
    second.open = False  # nothing of the checks at the end holds for two
    assert second.memory.first_tier == first.memory.first_tier + 1
    second.native.reset_peaks()
    ys = [filled(MIB, 100 + seed) for seed in range(10)]
    assert medium.writes  # what leaves now goes to the new tier
    assert second.native.tier_counters(first.memory.first_tier)[2] <= lingering_bytes
    for seed, (x, y) in enumerate(zip(xs, ys, strict=False)):
        assert torch.equal(x, pattern(MIB, seed))
        assert torch.equal(y, pattern(MIB, 100 + seed))
    assert second.peak <= 6 * MIB
    assert second.memory.take_errors() == (None, "")
    room[0] = 1 << 40
    second.memory.close()
    assert not second.native.ranges_running()
    for seed, x in enumerate(xs):
        assert torch.equal(x, pattern(MIB, seed))


def test_joining_while_bytes_are_on_their_way(opened: Opened, room: list[int], tmp_path: Path) -> None:
    medium = HeldMedium()
    first = opened(medium, budget=8 * MIB)
    xs = [filled(MIB, seed) for seed in range(4)]
    first.send_away(*xs[:2])
    while medium.writing.acquire(blocking=False):
        pass
    medium.may_write.clear()
    assert first.start_leaving(xs[2])
    assert medium.writing.acquire(timeout=PATIENCE_S)
    room[0] = 0
    first.open = False
    first.memory.close()
    second = Engine.__new__(Engine)
    opening = threading.Thread(target=second.__init__, args=(files(tmp_path),), kwargs={"budget": 8 * MIB})  # type: ignore[misc]
    opening.start()
    opening.join(PATIENCE_S)
    second.open = False
    medium.may_write.set()
    second.native.settle()
    assert min(second.native.range_meter()) >= 0
    for seed, x in enumerate(xs):
        assert torch.equal(x, pattern(MIB, seed))
        x.copy_(pattern(MIB, seed))  # else it need not be written
        before = second.native.range_meter()
        second.send_away(x)
        after = second.native.range_meter()
        assert after[0] + after[6] == before[0] + before[6] + MIB
        assert after[2] + after[8] > before[2] + before[8]  # every write takes time
    assert min(second.native.range_meter()) >= 0
    room[0] = 1 << 40
    second.memory.close()
    for seed, x in enumerate(xs):
        assert peek(x) == int(pattern(MIB, seed)[0])


def test_engines_one_after_the_other(opened: Opened, tmp_path: Path) -> None:
    x = filled(MIB)
    for turn in range(4):
        engine = opened(files(tmp_path), verify=turn % 2 == 0)
        engine.send_away(x)
        x.add_(1)
        assert engine.place(x) is Place.HERE
        engine.close(left=1)
    assert torch.equal(x, pattern(MIB) + 4)
