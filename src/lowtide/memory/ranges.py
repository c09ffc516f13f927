"""Fast memory on the CPU: tensors keep their addresses, their pages leave to tiers and return.

The work is native (`memory/native`): this opens and closes it, tells what it counts, and says what its codes mean.
"""

from __future__ import annotations

import ctypes
import errno
import os
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from enum import IntEnum
from itertools import accumulate
from math import inf
from pathlib import Path
from typing import Protocol

import torch

from lowtide.codecs.contract import Codec
from lowtide.core.log import Log
from lowtide.core.order import Order
from lowtide.core.trace import Reach
from lowtide.core.units import format_bytes
from lowtide.errors import (
    BadArgument,
    BudgetTooSmall,
    CheckpointCorrupted,
    CheckpointError,
    LowtideError,
    NativeUnavailable,
    RecomputeError,
    SpillCorrupted,
    SpillError,
)
from lowtide.memory.budget import auto_bytes, memory_limits
from lowtide.memory.coders import add_coders
from lowtide.memory.foreign import Foreign
from lowtide.memory.lent import Lent
from lowtide.memory.loader_workers import LoaderWorkers
from lowtide.memory.native import Native, load
from lowtide.memory.native.bindings import (
    CORRUPTED,
    LOST,
    NOT_REMADE,
    SHORT_READ,
    SOURCE_CHANGED,
    SOURCE_CUT,
    Place,
    RangeCounters,
    SlowRates,
    Trouble,
)
from lowtide.tiers.file import create_unnamed
from lowtide.tiers.medium import ALIGN_BYTES, Engine, Medium

# What a budget that is too small is told in multiples of.
_GRAIN_BYTES = 64 << 10


@dataclass(frozen=True, slots=True, kw_only=True)
class RangeUsage:
    """Fast memory and traffic at one instant.

    `live_bytes` are the tensors' bytes in fast memory, `held_bytes` all of them, wherever they are; `reserved_bytes`
    counts kept pages too, and is what the budget bounds.
    """

    live_bytes: int
    held_bytes: int
    peak_bytes: int
    reserved_bytes: int
    peak_reserved_bytes: int
    stall_s: float
    counted: RangeCounters

    def moved_since(self, before: RangeUsage) -> bool:
        """Tell whether anything has left or come back since."""
        now, then = self.counted, before.counted
        return (now.written, now.read, now.released, now.discarded) != (
            then.written,
            then.read,
            then.released,
            then.discarded,
        )


class Closable(Protocol):
    """What is closed when no range can be there any more."""

    def close(self) -> None:
        """Close it."""
        ...


class Conversion(IntEnum):
    """From which type a tensor in a file becomes float32, or to which one from that; the numbers as in source.h."""

    NONE = 0
    FROM_BFLOAT16 = 1
    FROM_HALF = 2
    TO_BFLOAT16 = 3
    TO_HALF = 4

    def in_memory(self, file_bytes: int) -> int:
        """Return how many bytes a tensor has in memory that has so many in its file."""
        if self is Conversion.NONE:
            return file_bytes
        return file_bytes * 2 if self in (Conversion.FROM_BFLOAT16, Conversion.FROM_HALF) else file_bytes // 2


@dataclass(frozen=True, slots=True, kw_only=True)
class InFile:
    """A tensor in a file: where its bytes begin, and how many they are in memory."""

    begin: int
    nbytes: int
    conversion: Conversion = Conversion.NONE


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """A file that ranges are read from in place: its number as a tier, and the offset of each place there."""

    tier: int
    offsets: tuple[int, ...]


class SourceFile:
    """The file of a source while ranges may be there; `direct`: it is read past the page cache."""

    def __init__(self, path: Path) -> None:
        self.direct = True
        try:
            self.fd = os.open(path, os.O_RDONLY | os.O_DIRECT | os.O_CLOEXEC)
        except OSError:  # some file systems know no direct reads
            self.direct = False
            self.fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        found = os.fstat(self.fd)
        self.identity = (found.st_dev, found.st_ino)

    def close(self) -> None:
        """Close the file."""
        os.close(self.fd)


class RangeMemory:
    """Ranges under a budget, with `media` below them by name; the first is where reactive evictions go, in `order`.

    `discards`: without a copy, as far as operators can make them again. `slow`: the media that operators use in
    place, and what that costs. `codecs`: those that plans may name; `max_error`: what those that round may be off, in
    terms of the largest value of a frame of 2 MiB.
    """

    device = torch.device("cpu")
    reach = Reach.TOUCHED

    def __init__(
        self,
        media: Mapping[str, Medium],
        *,
        least_bytes: int,
        order: Order = Order.OLDEST,
        discards: bool = False,
        verify: bool = False,
        threads: int = 2,
        slow: Mapping[str, SlowRates] | None = None,
        codecs: Sequence[Codec] = (),
        max_error: float = inf,
    ) -> None:
        self.native = load()
        self.least_bytes = least_bytes
        self._media = dict(media)
        self._foreign = Foreign(self.native.is_ours)
        self._pid = os.getpid()
        self._stall_before_s = 0.0
        self._medium_error = ""
        self._write_failure = ""
        self._wanted_back = False
        self._sounding_fd: int | None = None
        self._sources: list[SourceFile] = []
        self._inherited = _take_over(self.native)
        self._slow = dict(slow or {})
        self._engines: dict[str, Engine] = {}
        for name, medium in self._media.items():
            files, engine = medium.files, medium.engine
            self.native.tier_add(
                fds=() if files is None else files.fds,
                stripe_bytes=1 if files is None else files.stripe_bytes,
                capacity_bytes=medium.capacity_bytes,
                medium=self._caller(medium) if files is None and engine is None else None,
                engine=engine,
                slow=self._slow.get(name),
            )
            if engine is not None:
                self._engines[name] = engine
                threads = max(threads, engine.threads)
        self.native.order(order, discards=discards)
        self.codecs = tuple(codecs)
        self.coders = add_coders(self.native, self.codecs, max_error=max_error)
        self.first_tier = self.native.ranges_start(least_bytes=least_bytes, verify=verify, threads=threads)
        self._lent: Lent | None = None
        self._loader_workers = LoaderWorkers(self.native.catch_faults)

    @property
    def tiers(self) -> tuple[str, ...]:
        """The names of the tiers, in the order in which native plans number them, from `first_tier` on."""
        return tuple(self._media)

    # ---- budget ----

    def open(self, budget_bytes: int) -> None:
        """Enforce a budget, over the tensors that exist already too: what does not fit leaves at once."""
        global _current
        native = self.native
        native.install()
        _current = weakref.ref(self)
        self._foreign.find(take_over=lambda tensor: native.adopt(tensor._cdata))
        self.forget_freed()
        native.reset_peaks()
        self._stall_before_s = native.counters().stall_s
        native.set_budget(budget_bytes)
        self._lent = Lent(native, most_bytes=budget_bytes // 8, is_source=self._is_source)
        self._lent.on()
        self._loader_workers.on()
        beyond_bytes = native.shrink()
        native.reset_peaks()
        if beyond_bytes > 0:
            self.take_errors()
            raise BudgetTooSmall(
                budget_bytes=budget_bytes,
                needed_bytes=budget_bytes + beyond_bytes,
                op="the first step",
                detail=self._write_failure or "tensors that exist already and cannot leave take that much",
            )

    def lift(self) -> None:
        """Enforce no budget any more."""
        self.native.set_budget(0)

    def forget_freed(self) -> None:
        """Stop counting memory of other allocators that was freed since."""
        self.native.set_foreign(self._foreign.live_bytes())

    def usage(self) -> RangeUsage:
        """Return the numbers now."""
        memory, counted = self.native.counters(), self.native.range_counters()
        return RangeUsage(
            live_bytes=memory.live_bytes,
            held_bytes=memory.live_bytes + counted.away + counted.slow,
            peak_bytes=memory.peak_live_bytes,
            reserved_bytes=memory.reserved_bytes,
            peak_reserved_bytes=memory.peak_reserved_bytes,
            stall_s=memory.stall_s - self._stall_before_s,
            counted=counted,
        )

    def held_bytes(self) -> int:
        """Return the bytes of the tensors that there are, wherever they lie."""
        return self.usage().held_bytes

    def figures(self) -> dict[str, object]:
        """Return what the media count themselves, and what went on in slow memory."""
        found = {name: value for medium in self._media.values() for name, value in medium.figures().items()}
        return found | (self._slow_figures() if self._slow else {}) | (self._codec_figures() if self.codecs else {})

    def _codec_figures(self) -> dict[str, object]:
        counted = self.native.range_counters()
        return {
            "encoded_bytes": counted.encoded,
            "decoded_bytes": counted.decoded,
            "unencoded_bytes": counted.unencoded,
        }

    def take_samples(self) -> dict[int, dict[str, float]]:
        """Return which share codecs would leave of what left while a step was logged: by serial, by name; once."""
        names = {number: name for name, number in self.coders.items()}
        found = self.native.take_samples()
        return {
            serial: {names[coder]: share for coder, share in shares.items() if coder in names}
            for serial, shares in found.items()
        }

    def _slow_figures(self) -> dict[str, object]:
        counted = self.native.range_counters()
        number = self.first_tier + self.tiers.index(next(iter(self._slow)))
        moved = self.native.tier_counters(number)
        return {
            "slow_bytes": counted.slow,
            "peak_slow_bytes": counted.peak_slow,
            "slow_held_bytes": moved.held_bytes,
            "placed_bytes": counted.placed,
            "fetched_bytes": counted.fetched,
            "born_slow_bytes": counted.born_slow,
            "compacted_bytes": counted.compacted,
            "migration_runs": moved.runs,
            "migration_run_bytes": moved.run_bytes / moved.runs if moved.runs else 0.0,
            "in_place_ops": counted.in_place,
            "slow_s": counted.charged_ns / 1e9,
        }

    # ---- sources ----

    def read_in_place(self, path: Path, places: Sequence[InFile]) -> Source:
        """Return a file whose tensors can be `refer`red to: they stay there until they are touched."""
        file = SourceFile(path)
        self._sources.append(file)
        # No two places may begin at one offset, those of tensors without bytes among them.
        offsets = [0, *accumulate(-(-max(place.nbytes, 1) // ALIGN_BYTES) * ALIGN_BYTES for place in places)]
        rows = [
            (offset, place.begin, place.nbytes, int(place.conversion))
            for offset, place in zip(offsets, places, strict=False)
        ]
        tier = self.native.source_add(file.fd, direct=file.direct, places=rows)
        _source_paths[tier] = path
        return Source(tier=tier, offsets=tuple(offsets[:-1]))

    def _is_source(self, identity: tuple[int, int]) -> bool:
        files = (*self._sources, *self._inherited)
        return any(isinstance(file, SourceFile) and file.identity == identity for file in files)

    def refer(self, tensor: torch.Tensor, source: Source, number: int) -> bool:
        """Have a tensor's bytes be those of a source's `number`-th place; False: its pages cannot leave now."""
        if tensor.untyped_storage().nbytes() < self.least_bytes:
            return False
        return self.native.refer(tensor._cdata, source.tier, source.offsets[number]) == 0

    # ---- observation ----

    @contextmanager
    def room_ahead(self) -> Iterator[None]:
        """Make room for the next block as soon as one is allocated, while the program fills that."""
        self.native.room_ahead(1)
        try:
            yield
        finally:
            self.native.room_ahead(0)

    def announce(self, on: bool) -> None:
        """Let operators bring their operands back before they run, or leave it to faults."""
        self.native.observe(2 if on else 0)
        self.native.touch(int(on))

    def observe(self, *, names: bool, log: bool) -> None:
        """Log the step that begins; `names` comes with it."""
        del names
        if log:
            self.native.log_start()

    def take_log(self) -> Log | None:
        """Stop the log and return it (None: the step was too long to log)."""
        entries = self.native.log_stop()
        return None if entries is None else Log(entries=entries, names=self.native.names())

    def forget_log(self) -> None:
        """Stop the log and forget it."""
        self.native.log_drop()

    def mark_module(self, name: str) -> None:
        """Log that this module's operators follow."""
        self.native.mark_module(name.encode())

    def serial_of(self, tensor: torch.Tensor) -> int:
        """Return the number under which the log knows a tensor's storage."""
        return self.native.serial_of_tensor(tensor._cdata)

    def place(self, tensor: torch.Tensor) -> Place | None:
        """Return where a tensor's bytes are (None: they never leave)."""
        return self.native.place(tensor._cdata)

    # ---- errors ----

    def sound(self, on: bool) -> None:
        """Refuse nothing from here on: what does not fit is mapped from a file, and `too_small` tells what it takes.

        Only where the first tier is one of files; elsewhere allocations are refused as they come.
        """
        if on and self._sounding_fd is None:
            self._sounding_fd = _unnamed_file(next(iter(self._media.values())))
        self.native.sound(self._sounding_fd if on and self._sounding_fd is not None else -1)

    @property
    def was_sounded(self) -> bool:
        """Whether something would have been refused since sounding began."""
        return self.native.sounded() > 0

    @property
    def refusals(self) -> int:
        """How many allocations were refused so far."""
        return self.native.counters().refusals

    def too_small(self, *, floor_bytes: int = 0, more_bytes: int = 0) -> BudgetTooSmall:
        """Return the error for what was refused last, or in a step that was sounded needs most.

        `floor_bytes`: the least that a recorded step needs; `more_bytes`: those that are still to come and will stay.
        """
        refusal = self.native.last_refusal()
        needed_bytes = max(refusal.live_bytes + refusal.requested_bytes + more_bytes, floor_bytes)
        return BudgetTooSmall(
            budget_bytes=refusal.budget_bytes,
            # In whole grains: small tensors come and go, and a few more of them must not be another refusal.
            needed_bytes=-(-needed_bytes // _GRAIN_BYTES) * _GRAIN_BYTES,
            op=refusal.what,
            detail=self._write_failure,
            place=refusal.where,
            step=needed_bytes > refusal.named_bytes + more_bytes,
        )

    def interruption(self) -> BaseException | None:
        """Return what a signal's handler raised while an allocation waited, once."""
        return self.native.take_interruption()

    def take_errors(self) -> tuple[LowtideError | None, str]:
        """Return what has to be raised, and what to warn of: a write that failed, whose bytes stay in memory (R4)."""
        stopped, failed = self.native.take_trouble()
        warning = "" if failed is None else self._write_text(failed)
        self._write_failure = warning or self._write_failure
        return (None if stopped is None else self._error_of(stopped)), warning

    def _write_text(self, failed: Trouble) -> str:
        place = self._place_of(failed)
        return f"writing {format_bytes(failed.nbytes)} to {place} failed: {self._reason(failed)}"

    def _reason(self, trouble: Trouble) -> str:
        """Return why a transfer failed, in the most specific words available."""
        engine = self._engine_of(trouble)
        if engine is not None:
            return engine.explain(trouble.code)
        return self._medium_error or (os.strerror(trouble.code) if trouble.code < SHORT_READ else "the medium failed")

    def _place_of(self, trouble: Trouble) -> str:
        number = trouble.tier - self.first_tier
        return f"tier '{self.tiers[number]}'" if 0 <= number < len(self.tiers) else "a tier that was open before"

    def _engine_of(self, trouble: Trouble) -> Engine | None:
        number = trouble.tier - self.first_tier
        return self._engines.get(self.tiers[number]) if 0 <= number < len(self.tiers) else None

    def _error_of(self, trouble: Trouble) -> LowtideError:
        if trouble.code == errno.ENOMEM:
            return self.too_small()
        what = f"{format_bytes(trouble.nbytes)} of a tensor" if trouble.nbytes else "some tensors"
        place = self._place_of(trouble)
        if trouble.tier in _source_paths:
            return _source_error(trouble, what, _source_paths[trouble.tier])
        if self._engine_of(trouble) is not None and trouble.code not in (CORRUPTED, NOT_REMADE, LOST):
            number = errno.EIO if trouble.code >= SHORT_READ else trouble.code
            return SpillError(number, f"{what} cannot be read back from {place}: {self._reason(trouble)}")
        match trouble.code:
            case code if code == CORRUPTED:
                return SpillCorrupted(errno.EBADMSG, f"{what} came back changed from {place}: its checksum differs")
            case code if code == SHORT_READ:
                return SpillError(errno.EIO, f"{what} came back short from {place}: the spill file was cut")
            case code if code == NOT_REMADE:
                return RecomputeError(
                    f"{what} was given up to be computed again, and an operator that had made it failed or made "
                    "something else: use a policy that does not recompute, such as 'belady', or pass recompute=False"
                )
            case code if code == LOST:
                return SpillError(errno.ESTALE, f"{what} went with {place}, which was closed")
        return SpillError(trouble.code, f"{what} cannot be read back from {place}: {self._reason(trouble)}")

    def _caller(self, medium: Medium):  # type: ignore[no-untyped-def]  # ctypes calls it
        def call(write: int, offset: int, address: int, nbytes: int) -> int:
            """Move bytes through a medium that is written in Python, on a mover's thread; return an errno."""
            try:
                view = memoryview((ctypes.c_char * nbytes).from_address(address)).cast("B")
                if write:
                    medium.write_at(offset, view)
                else:
                    medium.read_at(offset, view)
            except SpillCorrupted:
                return CORRUPTED
            except OSError as error:
                self._medium_error = str(error) if isinstance(error, SpillError) else ""
                return error.errno or errno.EIO
            except BaseException as error:  # noqa: BLE001  # a mover cannot raise: the transfer fails instead
                self._medium_error = f"{type(error).__name__}: {error}"
                return errno.EIO
            return 0

        return call

    # ---- the end ----

    def close(self) -> None:
        """Bring back what is away, lift the budget, and let nothing leave any more.

        Where there is not enough memory for all of it, the rest stays away and inside the budget, and comes back as it
        is touched, until it is freed or a later `close` finds room.
        """
        if os.getpid() != self._pid:
            return  # a forked child has no movers and no budget; the spill is its parent's
        if self._absent_bytes() > _room_bytes():
            self.linger(wanted_back=True)
            return
        self._stop()

    def _absent_bytes(self) -> int:
        """Return the bytes that fast memory would have to hold besides."""
        counted = self.usage().counted
        return counted.away + counted.slow

    def linger(self, *, wanted_back: bool = False) -> None:
        """Stay inside the budget until another memory takes the ranges over.

        `wanted_back`: that one brings everything back first where there is room for it by then.
        """
        global _lingering
        self._wanted_back = wanted_back
        _lingering = self

    def _stop(self) -> None:
        global _current
        _current = None
        native = self.native
        self._lend_no_more()
        self._loader_workers.off()
        native.touch(0)
        native.observe(0)
        native.set_budget(0)
        try:
            code = native.ranges_stop(bring_back=True)
        finally:
            native.set_foreign(0)
            native.uninstall()
            self._close_sounding()
            for medium in (*self._media.values(), *self._inherited, *self._sources):
                medium.close()
            paths = ", ".join(map(str, dict.fromkeys(_source_paths.values())))
            _source_paths.clear()
        if code in (SOURCE_CUT, SOURCE_CHANGED):
            raise CheckpointCorrupted(errno.EIO, f"tensors cannot be read: {paths} was changed while they were in use")
        if code:
            raise self._error_of(Trouble(code=code, nbytes=0, tier=self.first_tier))

    def _close_sounding(self) -> None:
        self.native.sound(-1)
        if self._sounding_fd is not None:
            os.close(self._sounding_fd)  # what is mapped of it stays
            self._sounding_fd = None

    def _lend_no_more(self) -> None:
        if self._lent is not None:
            self._lent.off()
            self._lent = None

    def give_over(self) -> tuple[Closable, ...]:
        """Leave the ranges to another memory; return the media that they may be on, which it closes from here on."""
        if self._wanted_back and self._absent_bytes() <= _room_bytes():
            self._stop()
            return ()
        self._lend_no_more()
        self._loader_workers.off()
        self._close_sounding()
        return (*self._media.values(), *self._inherited, *self._sources)


def check_available() -> None:
    """Raise `NativeUnavailable` where ranges cannot be had."""
    load()


def unavailable() -> str | None:
    """Return why ranges cannot be had (None: they can)."""
    try:
        check_available()
    except NativeUnavailable as error:
        return str(error)
    return None


# The files of sources by their numbers as tiers, for errors.
_source_paths: dict[int, Path] = {}


def _source_error(trouble: Trouble, what: str, path: Path) -> CheckpointError:
    match trouble.code:
        case code if code == SOURCE_CUT:
            return CheckpointCorrupted(errno.EIO, f"{what} cannot be read: {path} was cut while the model is in use")
        case code if code == SOURCE_CHANGED:
            return CheckpointCorrupted(
                errno.ESTALE, f"{what} cannot be read: {path} was changed while the model is in use; load it again"
            )
    reason = "it was closed" if trouble.code == LOST else os.strerror(trouble.code)
    return CheckpointError(trouble.code, f"{what} cannot be read from {path}: {reason}")


def current() -> RangeMemory | None:
    """Return the memory that large tensors are ranges of now."""
    return _current() if _current is not None else None


# A memory whose tide was closed while there was no room for all that was away, or that a model was made in.
_lingering: RangeMemory | None = None
_current: weakref.ref[RangeMemory] | None = None


def _take_over(native: Native) -> tuple[Closable, ...]:
    """Make way for another memory: one that lingers is closed, or leaves its ranges and their media to the new one."""
    global _lingering
    if not native.ranges_running():
        return ()
    if _lingering is None:
        raise BadArgument("another tide is open in this process: close it before opening a second one")
    lingering, _lingering = _lingering, None
    return lingering.give_over()


def _unnamed_file(medium: Medium) -> int | None:
    """Return a file that vanishes with its descriptor, where a tier is one of files."""
    for directory in () if medium.files is None else medium.directories:
        named: list[Path] = []
        with suppress(LowtideError, OSError):
            fd = create_unnamed(directory, named)
            if not named:
                return fd
            os.close(fd)
            named[0].unlink()
    return None


def _room_bytes() -> int:
    """Return how many bytes may come back without a limit being passed."""
    try:
        return auto_bytes()
    except BadArgument:  # next to nothing is left, or this system does not tell
        return 0 if memory_limits() else 1 << 62
