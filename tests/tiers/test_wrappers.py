from __future__ import annotations

import copy
import errno
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from lowtide.errors import BadArgument, SpillError, SpillFull
from lowtide.testing.stores import some_bytes
from lowtide.tiers import (
    Direction,
    Fault,
    FaultKind,
    Faulty,
    FileMedium,
    Latency,
    Medium,
    NullMedium,
    Throttle,
    Wrapper,
)

WRAPS: list[Callable[[Medium], Wrapper]] = [
    Wrapper,
    lambda medium: Latency(medium, write_s=0.0, read_s=0.0),
    lambda medium: Throttle(medium, write_bytes_per_s=1e9, read_bytes_per_s=1e9),
    lambda medium: Faulty(medium, script=[]),
]


class Clock:
    """Time that passes only when somebody sleeps."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.slept_s: list[float] = []

    def __call__(self) -> float:
        return self.now_s

    def sleep(self, seconds: float) -> None:
        self.slept_s.append(seconds)
        self.now_s += seconds


def faulty(tmp_path: Path, *script: Fault) -> Faulty:
    return Faulty(FileMedium([tmp_path]), script=script)


@pytest.mark.parametrize("wrap", WRAPS)
def test_what_a_medium_says_is_forwarded_but_its_files_are_not(
    tmp_path: Path, wrap: Callable[[Medium], Wrapper]
) -> None:
    inner = FileMedium([tmp_path], capacity_bytes=12345)
    twice = wrap(wrap(inner))
    assert (twice.name, twice.capacity_bytes, twice.lossy) == ("file", 12345, False)
    assert (twice.directories, twice.codecs, twice.figures()) == ((tmp_path,), (), {})
    assert inner.files is not None
    assert twice.files is None
    twice.close()
    assert inner.fds == ()


def test_wrappers_say_when_what_they_wrap_is_lossy() -> None:
    assert Wrapper(NullMedium()).lossy


def test_wrappers_can_be_copied() -> None:
    assert copy.copy(Wrapper(NullMedium())).name == "null"


def test_latency_is_paid_by_every_operation() -> None:
    clock = Clock()
    medium = Latency(NullMedium(), write_s=0.5, read_s=2.0, sleep=clock.sleep)
    medium.write_at(0, memoryview(b"x"))
    medium.read_at(0, memoryview(bytearray(1)))
    medium.write_at(0, memoryview(b"x"))
    assert clock.slept_s == [0.5, 2.0, 0.5]


def test_throttle_holds_the_stated_pace_in_each_direction() -> None:
    clock = Clock()
    medium = Throttle(NullMedium(), write_bytes_per_s=1000, read_bytes_per_s=4000, clock=clock, sleep=clock.sleep)
    for _ in range(3):
        medium.write_at(0, memoryview(bytes(500)))
    assert clock.now_s == pytest.approx(1.5)
    medium.read_at(0, memoryview(bytearray(8000)))
    assert clock.now_s == pytest.approx(3.5)


def test_throttle_counts_the_time_the_medium_took_and_saves_up_none() -> None:
    clock = Clock()
    slow = Latency(NullMedium(), write_s=0.4, sleep=clock.sleep)
    medium = Throttle(slow, write_bytes_per_s=1000, clock=clock, sleep=clock.sleep)
    medium.write_at(0, memoryview(bytes(500)))
    assert clock.slept_s == [0.4, pytest.approx(0.1)]
    clock.now_s = 100.0
    medium.write_at(0, memoryview(bytes(500)))
    assert clock.now_s == pytest.approx(100.5)


def test_throttle_is_shared_by_threads() -> None:
    clock = Clock()
    asleep: list[float] = []
    # Time stands still, so each thread is told to sleep until the end of its own span.
    medium = Throttle(NullMedium(), write_bytes_per_s=1000, clock=clock, sleep=asleep.append)
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda _: medium.write_at(0, memoryview(bytes(100))), range(8)))
    assert sorted(asleep) == pytest.approx([0.1 * n for n in range(1, 9)])


@pytest.mark.parametrize("rate", [0, -1, float("nan")])
def test_rates_that_move_nothing_are_refused(rate: float) -> None:
    with pytest.raises(BadArgument, match="rate"):
        Throttle(NullMedium(), write_bytes_per_s=rate)


def test_negative_latency_is_refused() -> None:
    with pytest.raises(BadArgument, match="latency"):
        Latency(NullMedium(), read_s=-1)


@pytest.mark.parametrize(
    ("kind", "number", "error"),
    [(FaultKind.ENOSPC, errno.ENOSPC, SpillFull), (FaultKind.EIO, errno.EIO, SpillError)],
)
def test_the_scripted_write_fails_and_moves_nothing(
    tmp_path: Path, kind: FaultKind, number: int, error: type[SpillError]
) -> None:
    fault = Fault(direction=Direction.WRITE, nth=2, kind=kind)
    medium = faulty(tmp_path, fault)
    medium.write_at(0, memoryview(b"old"))
    with pytest.raises(error, match="3 bytes") as caught:
        medium.write_at(0, memoryview(b"new"))
    assert caught.value.errno == number
    into = bytearray(3)
    medium.read_at(0, memoryview(into))
    assert into == b"old"
    medium.write_at(0, memoryview(b"new"))
    assert medium.fired == [fault]
    medium.close()


def test_a_lasting_fault_lasts(tmp_path: Path) -> None:
    medium = faulty(tmp_path, Fault(direction=Direction.WRITE, nth=2, kind=FaultKind.ENOSPC, lasting=True))
    medium.write_at(0, memoryview(b"x"))
    for _ in range(3):
        with pytest.raises(SpillFull):
            medium.write_at(0, memoryview(b"x"))
    medium.read_at(0, memoryview(bytearray(1)))
    medium.close()


def test_a_short_read_gives_half_and_raises(tmp_path: Path) -> None:
    content = some_bytes(1000)
    medium = faulty(tmp_path, Fault(direction=Direction.READ, nth=1, kind=FaultKind.SHORT_READ))
    medium.write_at(0, memoryview(content))
    into = bytearray(1000)
    with pytest.raises(SpillError, match=r"short read: .* gave 500 of 1000 bytes"):
        medium.read_at(0, memoryview(into))
    assert into == content[:500] + bytes(500)
    medium.close()


@pytest.mark.parametrize("direction", list(Direction))
def test_a_flip_changes_one_byte_and_raises_nothing(tmp_path: Path, direction: Direction) -> None:
    content = some_bytes(1000)
    medium = faulty(tmp_path, Fault(direction=direction, nth=1, kind=FaultKind.FLIP))
    medium.write_at(0, memoryview(content))
    into = bytearray(1000)
    medium.read_at(0, memoryview(into))
    assert [index for index in range(1000) if into[index] != content[index]] == [500]
    medium.read_at(0, memoryview(into))
    assert (into == content) == (direction is Direction.READ), "a wrong write stays wrong, a wrong read does not"
    medium.close()


def test_a_hang_delays_and_succeeds(tmp_path: Path) -> None:
    clock = Clock()
    fault = Fault(direction=Direction.READ, nth=1, kind=FaultKind.HANG, hang_s=30.0)
    medium = Faulty(FileMedium([tmp_path]), script=[fault], sleep=clock.sleep)
    medium.write_at(0, memoryview(b"x"))
    into = bytearray(1)
    medium.read_at(0, memoryview(into))
    assert (into, clock.slept_s) == (b"x", [30.0])
    medium.close()


def test_scripts_that_mean_nothing_are_refused() -> None:
    with pytest.raises(BadArgument, match="count from 1"):
        Fault(direction=Direction.READ, nth=0, kind=FaultKind.EIO)
    with pytest.raises(BadArgument, match="short read"):
        Fault(direction=Direction.WRITE, nth=1, kind=FaultKind.SHORT_READ)
    with pytest.raises(BadArgument, match="hang_s"):
        Fault(direction=Direction.READ, nth=1, kind=FaultKind.HANG)
