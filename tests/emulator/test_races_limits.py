from __future__ import annotations

import ctypes
import shutil
from pathlib import Path

import pytest

from tests.emulator.races_model import Detector, compile_detector, compiler

pytestmark = pytest.mark.skipif(compiler() is None, reason="the race detector is compiled for its test: needs g++")

READ, WRITE = False, True


@pytest.fixture(scope="module")
def shared() -> Detector:
    return Detector(compile_detector())


@pytest.fixture
def races(shared: Detector) -> Detector:
    return shared.afresh()


@pytest.fixture
def streams(races: Detector) -> list[int]:
    return [races.stream(i) for i in range(4)]


@pytest.fixture
def separate(tmp_path: Path) -> Detector:
    """A detector whose tables no other test has filled: a library under another name has its own."""
    return Detector(Path(shutil.copy(compile_detector(), tmp_path / "libseparate.so")))


def test_nothing_is_found_while_it_is_off_and_what_happened_before_is_forgotten(races, streams):
    races.submit(streams[0], "before", (0, 64, WRITE))
    races.enable(False)
    races.submit(streams[1], "unseen", (0, 64, WRITE))
    races.enable(True)
    races.submit(streams[2], "after", (0, 64, WRITE))
    assert races.take_report() == []


def test_a_record_from_before_a_reset_still_orders_what_it_ordered_and_nothing_more(races, streams):
    races.record(1, streams[0])
    races.enable(False)
    races.enable(True)
    races.submit(streams[0], "job", (0, 64, WRITE))
    races.wait(1, streams[1])
    races.submit(streams[1], "other", (0, 64, WRITE))
    assert races.pairs() == {("race", "job", "other")}


def test_neighbours_with_the_same_history_are_one_range(races, streams):
    for i in range(64):
        races.submit(streams[0], "piece", (i * 64, 64, WRITE))
    assert races.tracked_ranges() == 64
    races.submit(streams[0], "whole", (0, 4096, WRITE))
    assert races.tracked_ranges() == 1
    races.submit(streams[1], "half", (0, 2048, READ))
    races.submit(streams[0], "whole", (0, 4096, READ))
    assert races.tracked_ranges() == 2
    races.alloc(0, 4096, streams[0])
    assert races.tracked_ranges() == 1


def test_a_flood_of_different_findings_is_bounded_and_counted(separate):
    a, b = separate.stream(0), separate.stream(1)
    for i in range(2100):
        separate.submit(a, f"writer {i}", (0, 8, WRITE))
        separate.submit(b, f"writer {i}", (0, 8, WRITE))
    total = separate.count()
    lines = separate.take_report()
    assert len(lines) == 2048 + 1
    assert lines[-1] == f"note: {total - 2048} more races between other pairs of jobs"


def test_too_many_ranges_drop_the_history_and_say_so(separate):
    stream = separate.stream(0)
    accesses = [(i * 2, 1, WRITE) for i in range(1 << 12)]
    for i in range(65):
        separate.submit(stream, "scatter", *((at + i * (1 << 13), n, w) for at, n, w in accesses))
    assert separate.count() == 0
    assert separate.tracked_ranges() < 1 << 18
    (line,) = separate.take_report()
    assert line.startswith("note: more than 262144 ranges of memory were tracked, their history was dropped 1 times")


def test_a_hundred_thousand_accesses_take_about_a_second(separate):
    separate.lib.bench_training.restype = ctypes.c_double
    seconds = separate.lib.bench_training(ctypes.c_int64(33_334))
    print(f"100,000 accesses: {seconds:.3f} s of CPU time, {separate.count()} races")
    assert separate.count() > 0
    assert seconds < 1.5


def test_a_call_costs_next_to_nothing_while_it_is_off(separate):
    separate.enable(False)
    separate.lib.bench_disabled.restype = ctypes.c_double
    assert separate.lib.bench_disabled(ctypes.c_int64(1_000_000)) < 0.2
