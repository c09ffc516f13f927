"""The native page engine as its tests use it: opened under a budget, with media that can be held, failed and read."""

from __future__ import annotations

import ctypes
import gc
import mmap
import multiprocessing
import os
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import torch

from lowtide.memory.native import Native, load
from lowtide.memory.native.bindings import Place, SlowRates
from lowtide.memory.ranges import RangeMemory
from lowtide.tiers import FileMedium, PlainMedium
from lowtide.tiers.medium import Medium
from lowtide.tiers.slow import SlowMedium, open_slow

KIB, MIB = 2**10, 2**20
PATIENCE_S = 60.0  # far more than anything takes: a test that waits so long hangs


class HeldMedium(PlainMedium):
    """A medium in Python whose transfers wait at a gate and fail on demand; it knows what was moved."""

    name = "held"
    lossy = False
    capacity_bytes: int | None = None

    def __init__(self) -> None:
        self.store = mmap.mmap(-1, 2**30)  # sparse: memory is taken where bytes are written
        self.may_write, self.may_read = threading.Event(), threading.Event()
        self.may_write.set()
        self.may_read.set()
        self.writing, self.reading = threading.Semaphore(0), threading.Semaphore(0)
        self.write_errno = self.read_errno = 0
        self.writes: list[tuple[int, int]] = []
        self.reads: list[tuple[int, int]] = []

    def write_at(self, offset: int, data: memoryview) -> None:
        """Keep the bytes once the gate is open."""
        self.writing.release()
        assert self.may_write.wait(PATIENCE_S)
        if self.write_errno:
            raise OSError(self.write_errno, os.strerror(self.write_errno))
        self.writes.append((offset, len(data)))
        self.store[offset : offset + len(data)] = bytes(data)

    def read_at(self, offset: int, into: memoryview) -> None:
        """Give the bytes back once the gate is open."""
        self.reading.release()
        assert self.may_read.wait(PATIENCE_S)
        if self.read_errno:
            raise OSError(self.read_errno, os.strerror(self.read_errno))
        self.reads.append((offset, len(into)))
        into[:] = self.store[offset : offset + len(into)]

    def close(self) -> None:
        """Let everybody go on."""
        self.may_write.set()
        self.may_read.set()


class Engine:
    """A memory of ranges with what tests ask of it; `close` checks that nothing is left."""

    def __init__(
        self,
        *media: Medium,
        budget: int = 64 * MIB,
        least: int = 64 * KIB,
        verify: bool = False,
        threads: int = 2,
        announcing: bool = True,
        slow: SlowRates | None = None,
    ) -> None:
        gc.collect()
        self.native: Native = load()
        named = {f"{medium.name}{number or ''}": medium for number, medium in enumerate(media)}
        in_place = {name: slow or SlowRates() for name, medium in named.items() if isinstance(medium, SlowMedium)}
        self.memory = RangeMemory(named, least_bytes=least, verify=verify, threads=threads, slow=in_place)
        self.media = media
        try:
            self.memory.open(budget)
        except BaseException:
            self.memory.close()
            raise
        self.native.trim()
        self.memory.announce(announcing)
        self.native.reset_peaks()
        self.reserved_at_open = self.native.counters().reserved_bytes
        self.ranges_at_open = self.counted.ranges
        self.open = True

    @property
    def counted(self) -> Any:
        """The ranges' counters."""
        return self.native.range_counters()

    @property
    def peak(self) -> int:
        """The most bytes that were reserved."""
        return self.native.counters().peak_reserved_bytes

    @property
    def free_bytes(self) -> int:
        """What is left of the budget once kept pages are given back."""
        self.native.trim()
        counters = self.native.counters()
        return counters.budget_bytes - counters.reserved_bytes

    def tier_used(self, number: int = 0) -> int:
        """The bytes that a tier holds."""
        return self.native.tier_counters(self.memory.first_tier + number)[2]

    def place(self, tensor: torch.Tensor) -> Place | None:
        """Where a tensor's bytes are."""
        return self.memory.place(tensor)

    def start_leaving(self, tensor: torch.Tensor, tier: int = 0) -> bool:
        """Let a tensor's pages leave; False if they may not."""
        return self.native.leave(tensor._cdata, self.memory.first_tier + tier) == 0

    def send_away(self, *tensors: torch.Tensor, tier: int = 0) -> None:
        """Have the pages of tensors away."""
        for tensor in tensors:
            assert self.start_leaving(tensor, tier)
        self.native.settle()
        for tensor in tensors:
            assert self.place(tensor) is Place.AWAY

    def wait_for_waits(self, waits: int) -> None:
        """Go on once as many waits for pages have begun."""
        until = time.monotonic() + PATIENCE_S
        while self.counted.waits < waits:
            assert time.monotonic() < until, "nobody waits"
            os.sched_yield()

    def forget_adopted(self) -> None:
        """See that nothing is reserved of what was adopted, and is freed by now."""
        gc.collect()
        self.memory.forget_freed()
        self.native.settle()
        self.native.trim()
        assert self.counted.ranges <= self.ranges_at_open
        self.reserved_at_open = self.native.counters().reserved_bytes

    def close(self, *, left: int = 0) -> None:
        """Close, and see that nothing is left but `left` ranges of the test."""
        if not self.open:
            return
        self.open = False
        gc.collect()
        self.native.settle()
        counted, used = self.counted, [self.tier_used(number) for number in range(len(self.media))]
        foreign = self.native.counters().foreign_bytes
        self.memory.close()
        assert (counted.leaving, counted.arriving) == (0, 0)
        if left:
            return
        assert used == [0] * len(self.media), "slots of a tier belong to nobody"
        self.native.trim()
        assert self.native.counters().reserved_bytes == self.reserved_at_open - foreign


def pattern(nbytes: int, seed: int = 0) -> torch.Tensor:
    """Return bytes that differ in every word, and from other seeds' bytes; not in a range of the engine's."""
    words = np.arange(nbytes // 8 + 1, dtype=np.uint64)
    words += np.uint64(seed << 32)
    words *= np.uint64(0x9E3779B97F4A7C15)
    return torch.from_numpy(words.view(np.uint8)[:nbytes])


def filled(nbytes: int, seed: int = 0) -> torch.Tensor:
    """Return a tensor of the engine's with `pattern` in it."""
    made = torch.empty(nbytes, dtype=torch.uint8)
    made.copy_(pattern(nbytes, seed))
    return made


def address_of(tensor: torch.Tensor) -> int:
    """Return a tensor's address without pinning it, as a library in C has it."""
    return torch._C.TensorBase.data_ptr(tensor)


def raw_array(tensor: torch.Tensor) -> np.ndarray:
    """Return an array over a tensor's memory whose accesses nobody announces."""
    return torch._C.TensorBase.numpy(tensor)


def peek(tensor: torch.Tensor, offset: int = 0) -> int:
    """Read a byte through the bare address."""
    return ctypes.c_ubyte.from_address(address_of(tensor) + offset).value


def poke(tensor: torch.Tensor, value: int, offset: int = 0) -> None:
    """Write a byte through the bare address."""
    ctypes.c_ubyte.from_address(address_of(tensor) + offset).value = value


def files(directory: Path, **settings: Any) -> FileMedium:
    """Return a spill file in `directory`."""
    return FileMedium([directory], **settings)


def slow_memory(**settings: Any) -> SlowMedium:
    """Return slow memory that is this machine's own, and charges nothing."""
    medium = open_slow("cxl:", **settings)
    medium.emulation = None
    return medium


# ---- other processes ----


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """How another process ended, and what it sent and wrote."""

    exit_code: int | None
    value: Any
    stderr: str


def in_fresh_process(body: Callable[..., Any], *arguments: Any, patience_s: float = PATIENCE_S) -> Outcome:
    """Run `body` in a process that never had an engine; its result comes back. Ended if it hangs (exit code None)."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.memory.engine"])
    ours, theirs = context.Pipe()
    with tempfile.TemporaryFile() as errors:
        process = context.Process(target=_run, args=(theirs, os.getpid(), errors.fileno(), body, arguments))
        process.start()
        theirs.close()
        value = None
        if ours.poll(patience_s):
            try:
                value = ours.recv()
            except EOFError:
                value = None
        process.join(patience_s)
        exit_code = process.exitcode
        if exit_code is None:
            process.kill()
            process.join()
        errors.seek(0)
        return Outcome(exit_code=exit_code, value=value, stderr=errors.read().decode(errors="replace"))


def _run(answer: Connection, parent: int, errors: int, body: Callable[..., Any], arguments: Sequence[Any]) -> None:
    with Path(f"/proc/{parent}/fd/{errors}").open("r+b") as file:
        os.dup2(file.fileno(), 2)
    try:
        answer.send(body(*arguments))
    except BaseException:
        traceback.print_exc()
        raise


def in_fork(body: Callable[[], Any]) -> Callable[[], Any]:
    """Fork; return a function that waits for what `body` gives in the child (None: it died)."""
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe(duplex=False)
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            theirs.send(body())
            code = 0
        except BaseException:  # noqa: BLE001  # the child must end here, whatever happened
            traceback.print_exc()
        finally:
            os._exit(code)
    theirs.close()

    def result() -> Any:
        value = None
        hangs = not ours.poll(PATIENCE_S)
        if hangs:
            os.kill(pid, 9)
        else:
            try:
                value = ours.recv()
            except EOFError:
                value = None
        os.waitpid(pid, 0)
        ours.close()
        assert not hangs, "the child hangs"
        return value

    return result
