"""LogGP's line and its overlap of chunks, held against transfers that two threads of this machine carry out.

Slow: all is measured in turns, many times, so that all of it sees the machine in the same state. Of each time the lower
decile counts: on a busy machine the median is that of two threads that wait for a core, and the least is luck.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import queue
import statistics
import threading
import time
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from lowtide.estimate.predictors.loggp import fit_error, fit_line
from lowtide.estimate.predictors.overlap import Stage, best_chunks, pipeline_s
from lowtide.tiers.file import FileMedium
from lowtide.tiers.medium import Medium
from lowtide.tiers.wrappers import Latency, Throttle

pytestmark = pytest.mark.slow

NBYTES = 8 << 20
CHUNKS = tuple(1 << power for power in range(8))  # of 8 MiB to 64 KiB
SECONDS = 20.0

Move = Callable[[int, int], object]
"""Moves so many bytes, from an offset on, to where the next stage finds them."""


class Memory:
    """A medium of memory that was touched. Its copies do not hold the GIL."""

    name = "memory"
    lossy = False
    capacity_bytes = NBYTES

    def __init__(self) -> None:
        self.view = memoryview(mmap.mmap(-1, NBYTES))
        self.view[:] = os.urandom(NBYTES)
        self._address = _address(self.view)

    def write_at(self, offset: int, data: memoryview) -> None:
        ctypes.memmove(self._address + offset, _address(data), data.nbytes)

    def read_at(self, offset: int, into: memoryview) -> None:
        ctypes.memmove(_address(into), self._address + offset, into.nbytes)

    def close(self) -> None:
        pass


def _address(view: memoryview) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(view))


class Worker:
    """A stage: a thread that moves one chunk after the other and hands it on along its route."""

    def __init__(self, move: Move) -> None:
        self.chunks: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._move = move
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        while (chunk := self.chunks.get()) is not None:
            at, nbytes, route, ended = chunk
            self._move(at, nbytes)
            if route:
                route[0].chunks.put((at, nbytes, route[1:], ended))
            elif ended is not None:
                ended.release()

    def close(self) -> None:
        self.chunks.put(None)
        self._thread.join()


class Pipeline:
    """Two stages that `NBYTES` pass in chunks, or that work each for itself.

    `wakes`: the second is the faster one and sleeps until it is given a chunk. Waking it takes the first one's time
    (LogGP's overhead of a message), so the first is measured with somebody to wake.
    """

    def __init__(self, read: Move, write: Move, *, wakes: bool = False) -> None:
        self._first, self._second, self._sleeper = Worker(read), Worker(write), Worker(lambda at, nbytes: None)
        self._first_alone = (self._first, self._sleeper) if wakes else (self._first,)

    def overlapped_s(self, chunks: int) -> float:
        return _timed(chunks, (self._first, self._second))

    def first_s(self, chunks: int) -> float:
        return _timed(chunks, self._first_alone)

    def second_s(self, chunks: int) -> float:
        return _timed(chunks, (self._second,))

    def together_s(self, chunks: int) -> float:
        return _timed(chunks, self._first_alone, (self._second,))

    def close(self) -> None:
        for worker in (self._first, self._second, self._sleeper):
            worker.close()


def _timed(chunks: int, *routes: tuple[Worker, ...]) -> float:
    """Return the time until all chunks have passed all workers of all routes."""
    ended = threading.Semaphore(0)
    nbytes = NBYTES // chunks
    begun_s = time.perf_counter()
    for first, *others in routes:
        for at in range(0, NBYTES, nbytes):
            first.chunks.put((at, nbytes, others, ended if at + nbytes == NBYTES else None))
    for _ in routes:
        ended.acquire()
    return time.perf_counter() - begun_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """Seconds by number of chunks, for all chunks: of each stage alone, of both at once, of the pipeline."""

    first: dict[int, float]
    second: dict[int, float]
    together: dict[int, float]
    overlapped: dict[int, float]
    shared: bool

    def stages(self) -> tuple[Stage, Stage]:
        return _line(self.first)[0], _line(self.second)[0]

    def limits(self) -> tuple[Stage, ...] | None:
        """Return what limits stages that share something while both work."""
        return (_line(self.together)[0],) if self.shared else None


def _line(times_s: dict[int, float]) -> tuple[Stage, float]:
    """Return the line of one stage, and its mean relative error."""
    samples = [(NBYTES // chunks, seconds / chunks) for chunks, seconds in times_s.items()]
    latency_s, bytes_per_s = fit_line(samples)
    error = fit_error(samples, latency_s=latency_s, bytes_per_s=bytes_per_s)
    return Stage(latency_s=latency_s, bytes_per_s=bytes_per_s), error


def _measure(pipeline: Pipeline, *, shared: bool) -> Measured:
    ways = (pipeline.first_s, pipeline.second_s, pipeline.together_s, pipeline.overlapped_s)
    seen: list[dict[int, list[float]]] = [{chunks: [] for chunks in CHUNKS} for _ in ways]
    begun_s = time.perf_counter()
    while time.perf_counter() - begun_s < SECONDS:
        for chunks in CHUNKS:
            for way, times_s in zip(ways, seen, strict=True):
                times_s[chunks].append(way(chunks))
    first, second, together, overlapped = (
        {chunks: float(np.quantile(each, 0.1)) for chunks, each in times_s.items()} for times_s in seen
    )
    return Measured(first=first, second=second, together=together, overlapped=overlapped, shared=shared)


@pytest.fixture(scope="module", params=["copies", "links", "disk"])
def measured(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Measured]:
    """What pipelines of two stages take here.

    copies: two copies in memory, which share its bus and, if the machine is busy, a core.
    links: copies at the pace of links, as copy engines do them: they hardly take a core.
    disk: a read from a file, and the checksum of what was read, as a tier with `verify` takes it.
    """
    source, middle, target = Memory(), Memory(), Memory()
    slow_source = Latency(Throttle(source, read_bytes_per_s=0.75e9), read_s=1e-4)
    slow_target = Latency(Throttle(target, write_bytes_per_s=0.5e9), write_s=1e-4)
    disk = FileMedium([tmp_path_factory.mktemp("spill")])
    disk.write_at(0, source.view)

    def read_from(medium: Medium) -> Move:
        return lambda at, nbytes: medium.read_at(at, middle.view[at : at + nbytes])

    def write_to(medium: Medium) -> Move:
        return lambda at, nbytes: medium.write_at(at, middle.view[at : at + nbytes])

    if request.param == "copies":
        pipeline = Pipeline(read_from(source), write_to(target))
    elif request.param == "links":
        pipeline = Pipeline(read_from(slow_source), write_to(slow_target))
    else:
        pipeline = Pipeline(read_from(disk), lambda at, nbytes: zlib.crc32(middle.view[at : at + nbytes]), wakes=True)
    try:
        yield _measure(pipeline, shared=request.param == "copies")
    finally:
        pipeline.close()
        disk.close()


def test_a_line_fits_transfers_from_64_kib_on_within_a_tenth(measured: Measured) -> None:
    errors = [_line(times_s)[1] for times_s in (measured.first, measured.second, measured.together)]
    print("mean errors of the lines:", *(f"{error:.1%}" for error in errors))
    assert max(errors) < 0.10


def test_the_predicted_overlap_is_within_a_tenth_of_the_executed_one(measured: Measured) -> None:
    stages, limits = measured.stages(), measured.limits()
    errors = {
        chunks: pipeline_s(NBYTES, stages, chunks=chunks, together=limits) / taken_s - 1
        for chunks, taken_s in measured.overlapped.items()
    }
    print("errors by chunks:", *(f"{chunks}: {error:+.1%}" for chunks, error in errors.items()))
    assert statistics.mean(map(abs, errors.values())) < 0.10


@pytest.mark.parametrize("measured", ["links"], indirect=True)
def test_the_best_number_of_chunks_is_observed(measured: Measured) -> None:
    """With links alone: where stages share a core, or one takes nearly all the time, too little is gained to see it."""
    wanted = best_chunks(NBYTES, measured.stages(), least_bytes=NBYTES // CHUNKS[-1])
    nearest = min(CHUNKS, key=lambda chunks: max(chunks / wanted, wanted / chunks))
    observed = min(CHUNKS, key=lambda chunks: measured.overlapped[chunks])
    print(f"best: {wanted}, observed: {observed}")
    assert abs(CHUNKS.index(nearest) - CHUNKS.index(observed)) <= 1
    best_s, whole_s, smallest_s = (measured.overlapped[chunks] for chunks in (nearest, CHUNKS[0], CHUNKS[-1]))
    assert min(whole_s, smallest_s) > 1.2 * best_s
