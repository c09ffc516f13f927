"""Measure this machine: its links to slower tiers and its speed, and keep the result.

`loggp.py` has the model of a link that is fitted. Two transfers are under way at once, as the runtime does it; t(n) is
the time the link is taken for one of them, so plans that treat the link as exclusive add up. Pages are small ones: the
runtime's allocator puts kept pages side by side, which leaves few large ones.
"""

from __future__ import annotations

import contextlib
import json
import mmap
import os
import platform
import statistics
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from lowtide.core.encode_machine import decode_machine, encode_machine
from lowtide.core.fields import Damaged, Fields
from lowtide.core.files import write_whole
from lowtide.core.machine import MACHINE_VERSION, Access, Link, Machine
from lowtide.errors import TraceError
from lowtide.estimate.predictors.loggp import fit_line
from lowtide.tiers.medium import Medium

SPILL = "spill"

_SIZES_BYTES = (256 * 2**10, 2**20, 4 * 2**20, 8 * 2**20)
_IN_FLIGHT = 2
_ROUNDS = 6
_PATIENCE_S = 1.0
# Version 2 did not measure how much faster a link is while the program waits: worth measuring again.
_OLDEST_VERSION = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Compute:
    """How fast this machine computes: single-precision matrix products and copies within memory."""

    matmul_flop_per_s: float
    copy_bytes_per_s: float


def measure_link(
    medium: Medium,
    *,
    work: Callable[[], object] | None = None,
    clock: Callable[[], float] = time.perf_counter,
) -> Link:
    """Measure the path to `medium`, in about a second, with at most 160 MiB written at offset 0 and after.

    With `work`, something that computes, all of it is done twice: the figures are those beside it, and how much faster
    transfers are while nothing computes becomes the link's `idle_speedup`. Without O_DIRECT the figures are
    those of the page cache, which is what the first transfers will see.
    """
    idle = _measured(medium, clock=clock)
    if work is None:
        return idle
    with _repeated(work):
        beside = _measured(medium, clock=clock)
    nbytes = _SIZES_BYTES[-1]
    beside_s, idle_s = (link.write_s(nbytes) + link.read_s(nbytes) for link in (beside, idle))
    return replace(beside, idle_speedup=max(1.0, beside_s / idle_s))


def training_like() -> Callable[[], object]:
    """Return work that loads cores and memory as training does: a matrix product and a sum that no cache holds.

    It draws no random numbers: those are the program's. Its memory is in no budget: one may be kept meanwhile.
    """
    import torch

    def halves(count: int) -> torch.Tensor:
        return torch.frombuffer(mmap.mmap(-1, 4 * count), dtype=torch.float32).fill_(0.5)

    with torch.inference_mode(mode=False):
        a, out = halves(768 * 768).view(768, 768), halves(768 * 768).view(768, 768)
        source, target = halves(2 << 20), halves(2 << 20)

    def work() -> None:
        torch.mm(a, a, out=out)
        torch.add(source, source, out=target)

    return work


@contextlib.contextmanager
def _repeated(work: Callable[[], object]) -> Iterator[None]:
    """Repeat `work` on a thread of its own, from its first time to the end of the block."""
    ended, begun = threading.Event(), threading.Event()

    def repeat() -> None:
        while not ended.is_set():
            work()
            begun.set()

    with ThreadPoolExecutor(1, thread_name_prefix="lowtide-probe") as pool:
        running = pool.submit(repeat)
        try:
            while not begun.wait(0.1) and not running.done():
                pass
            yield
        finally:
            ended.set()
        running.result()


def _measured(medium: Medium, *, clock: Callable[[], float]) -> Link:
    writes: dict[int, list[float]] = {}
    reads: dict[int, list[float]] = {}
    sizes = [size for size in _SIZES_BYTES if _fits(medium, size)] or [_SIZES_BYTES[0]]
    with contextlib.ExitStack() as stack:
        # The last lane is this thread: C's library keeps the stack of each other one, 8 MiB, after its end.
        pool = stack.enter_context(ThreadPoolExecutor(_IN_FLIGHT - 1, thread_name_prefix="lowtide-probe"))
        buffers = [_pages(_SIZES_BYTES[-1]) for _ in range(_IN_FLIGHT)]

        def time_both(operation: Callable[[int, memoryview], None], size: int) -> float:
            start = clock()
            *beside, here = [(lane * _SIZES_BYTES[-1], view[:size]) for lane, view in enumerate(buffers)]
            moves = [pool.submit(operation, *move) for move in beside]
            operation(*here)
            for move in moves:
                move.result()
            return (clock() - start) / _IN_FLIGHT

        begun = clock()
        last_size, last_s = 0, 0.0
        for size in sizes * _ROUNDS:
            # A slow disk is known after its small transfers: stop before a large one that would take too long.
            expected_s = last_s * max(1.0, size / last_size) if last_size else 0.0
            if clock() - begun + expected_s > _PATIENCE_S:
                break
            start = clock()
            writes.setdefault(size, []).append(time_both(medium.write_at, size))
            reads.setdefault(size, []).append(time_both(medium.read_at, size))
            last_size, last_s = size, clock() - start
    write_latency_s, write_bytes_per_s = fit_line(_typical(writes))
    read_latency_s, read_bytes_per_s = fit_line(_typical(reads))
    return Link(
        write_bytes_per_s=write_bytes_per_s,
        read_bytes_per_s=read_bytes_per_s,
        write_latency_s=write_latency_s,
        read_latency_s=read_latency_s,
    )


def measure_compute() -> Compute:
    """Measure matrix products and copies with torch, in about half a second."""
    import torch

    side = 1024
    a, b = torch.full((side, side), 0.5), torch.full((side, side), 0.25)
    out = torch.empty(side, side)
    matmul_s = _best(lambda: torch.mm(a, b, out=out))
    source = torch.full((16 * 2**20,), 0.5)
    target = torch.empty_like(source)
    copy_s = _best(lambda: target.copy_(source))
    return Compute(matmul_flop_per_s=2 * side**3 / matmul_s, copy_bytes_per_s=source.nbytes / copy_s)


def measure_memory_bytes_per_s() -> float:
    """Measure what this machine's memory delivers at most, to a sum, a fill or a copy, in less than a second.

    The most, because a roofline bounds by it what an operator can have moved in its time.
    """
    import torch

    with torch.inference_mode(mode=False):
        source = torch.full((16 * 2**20,), 0.5, device="cpu")  # more than caches hold
        target = torch.empty_like(source)
    nbytes = source.nbytes
    return max(
        nbytes / _best(lambda: source.sum()),
        nbytes / _best(lambda: target.fill_(0.5)),
        2 * nbytes / _best(lambda: target.copy_(source)),
    )


def measure_access(fd: int, *, memory_bytes_per_s: float) -> Access:
    """Measure how fast operators read and write a file in place, over 32 MiB at its beginning, which are lost."""
    import torch

    nbytes = 32 * 2**20
    os.posix_fallocate(fd, 0, nbytes)
    with torch.inference_mode(mode=False):
        there = torch.frombuffer(mmap.mmap(fd, nbytes), dtype=torch.float32)  # unmapped when forgotten
        here = torch.full_like(there, 0.5, device="cpu")
    write_s = _best(lambda: there.copy_(here))
    read_s = _best(lambda: here.copy_(there))
    beside_s = nbytes / memory_bytes_per_s  # the half of the copy that passes through fast memory
    return Access(
        read_bytes_per_s=nbytes / max(read_s - beside_s, read_s / 2),
        write_bytes_per_s=nbytes / max(write_s - beside_s, write_s / 2),
    )


def measure_machine(medium: Medium, *, compute: Compute | None = None) -> Machine:
    """Measure the link to `medium` and, unless `compute` is given, this machine's speed."""
    compute = compute or measure_compute()
    return Machine(
        name=platform.node() or "this machine",
        links={SPILL: measure_link(medium, work=training_like())},
        copy_bytes_per_s=compute.copy_bytes_per_s,
        source="measured",
        flops_per_s=compute.matmul_flop_per_s,
        memory_bytes_per_s=2 * compute.copy_bytes_per_s,  # a copy reads and writes each byte
    )


def assumed_machine() -> Machine:
    """Return a machine with an ordinary disk, for planning where nothing was measured."""
    link = Link(write_bytes_per_s=1e9, read_bytes_per_s=1.5e9, write_latency_s=2e-4, read_latency_s=2e-4)
    return Machine(name="assumed", links={SPILL: link})


def machine_path() -> Path:
    """Return where the machine is kept: in $LOWTIDE_CACHE, else $XDG_CACHE_HOME/lowtide, else ~/.cache/lowtide."""
    cache = os.environ.get("LOWTIDE_CACHE")
    if cache:
        return Path(cache) / "machine.json"
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "lowtide" / "machine.json"


def machine_to_dict(machine: Machine) -> dict[str, Any]:
    """Return `machine` as JSON values, with the format's version."""
    return {"version": MACHINE_VERSION, **encode_machine(machine)}


def machine_from_dict(values: Mapping[str, Any]) -> Machine:
    """Return the machine that `values` describe; extra keys are ignored."""
    version = values.get("version")
    if not isinstance(version, int) or not _OLDEST_VERSION <= version <= MACHINE_VERSION:
        raise TraceError(f"machine file of version {version!r}, not {MACHINE_VERSION}: run 'lowtide probe'")
    try:
        return decode_machine(Fields(values, "the machine"), version)
    except Damaged as error:
        raise TraceError(f"machine file is damaged ({error}): run 'lowtide probe'") from error


def save_machine(
    machine: Machine, *, directories: Sequence[Path], compute: Compute | None = None, path: Path | None = None
) -> Path:
    """Keep `machine`, with the spill `directories` it was measured on, and return the file."""
    path = path or machine_path()
    path.parent.mkdir(parents=True, exist_ok=True)
    values = {
        **machine_to_dict(machine),
        "directories": [str(Path(directory).absolute()) for directory in directories],
        "compute": None if compute is None else asdict(compute),
    }
    write_whole(path, json.dumps(values, indent=2, sort_keys=True).encode())
    return path


def load_machine(*, directories: Sequence[Path] | None = None, path: Path | None = None) -> Machine | None:
    """Return the machine kept by `save_machine`, or None if there is none to use.

    With `directories`, only one that was measured on the same filesystems counts. The file is a cache: one that is
    damaged or of another version is as good as none.
    """
    try:
        values = json.loads((path or machine_path()).read_text(encoding="utf-8"))
        machine = machine_from_dict(values)
        if directories is not None and _devices(directories) != _devices(values["directories"]):
            return None
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None
    return machine


def measured_directories(*, path: Path | None = None) -> tuple[Path, ...]:
    """Return the spill directories that the machine kept by `save_machine` was measured on; none if there is none."""
    try:
        values = json.loads((path or machine_path()).read_text(encoding="utf-8"))
        return tuple(Path(directory) for directory in values["directories"])
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return ()


def _devices(directories: Sequence[Path | str]) -> list[int]:
    return sorted(Path(directory).stat().st_dev for directory in directories)


def _fits(medium: Medium, size: int) -> bool:
    capacity = medium.capacity_bytes
    return capacity is None or (_IN_FLIGHT - 1) * _SIZES_BYTES[-1] + size <= capacity


def _typical(times: Mapping[int, Sequence[float]]) -> list[tuple[int, float]]:
    """Return the median of each size, without the first round, which also lays the file out, where there are more."""
    return [(size, statistics.median(seen[1:] or seen)) for size, seen in times.items() if seen]


def _pages(nbytes: int) -> memoryview:
    """Return page-aligned memory filled with bytes that a filesystem cannot compress; it is unmapped when forgotten."""
    view = memoryview(mmap.mmap(-1, nbytes))
    view[:] = os.urandom(nbytes)
    return view


def _best(work: Callable[[], object]) -> float:
    work()
    best_s, begun = float("inf"), time.perf_counter()
    while time.perf_counter() - begun < 0.25:
        start = time.perf_counter()
        work()
        best_s = min(best_s, time.perf_counter() - start)
    return best_s
