"""The native part as a typed Python object: what the C++ files beside this one export."""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import IntEnum
from itertools import accumulate
from pathlib import Path
from typing import NamedTuple

from lowtide.core.log import LogEntry
from lowtide.core.order import Order
from lowtide.tiers.medium import Engine

MediumCallback = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_void_p, ctypes.c_int64)
EncodeCallback = ctypes.CFUNCTYPE(ctypes.c_int64, ctypes.c_void_p, ctypes.c_int64, ctypes.c_void_p, ctypes.c_int64)
DecodeCallback = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_int64, ctypes.c_void_p, ctypes.c_int64)

SHORT_READ = 10001
SOURCE_CUT = 10005
SOURCE_CHANGED = 10006
CORRUPTED = 10002
LOST = 10003
NOT_REMADE = 10004

# The same numbers as in ranges.h.
_ORDERS = {
    Order.NOTHING: 0,
    Order.OLDEST: 1,
    Order.FURTHEST: 2,
    Order.FURTHEST_NEWEST: 3,
    Order.FURTHEST_CHEAPEST: 4,
    Order.LARGEST: 5,
    Order.LARGEST_AREA: 6,
    Order.FIRST_THAT_SUFFICES: 7,
    Order.CHEAPEST: 8,
    Order.CHEAPEST_STALE: 9,
}


class Place(IntEnum):
    """Where a range's bytes are; the same numbers as in range.h, which says how they count."""

    HERE = 0
    LEAVING = 1
    AWAY = 2
    ARRIVING = 3
    SLOW = 4


class UpdateCounters(NamedTuple):
    """Operators of optimizers that were put off, those of them that have run, faults that waited, updates to come."""

    put_off: int
    run: int
    asked: int
    waiting: int


class EndedStep(NamedTuple):
    """The plan that a step followed to its end, its operators, and where it left the plan that it began with.

    `resized`: it had the operators of a plan, and blocks of other sizes.
    """

    plan: int | None
    operators: int
    diverged_at: int | None
    resized: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Counters:
    """The allocator's numbers at one instant."""

    live_bytes: int
    reserved_bytes: int
    peak_live_bytes: int
    peak_reserved_bytes: int
    budget_bytes: int
    foreign_bytes: int
    stall_s: float
    fresh_bytes: int
    moved_bytes: int
    trimmed_bytes: int
    refusals: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RangeCounters:
    """The numbers of ranges at one instant; bytes, but for faults, touches, waits and ranges.

    `calls_again` ran again for what was `discarded`, in `again_ns`. Of what a plan discards, `trials` were swapped the
    first time, to see whether they can be made again, and `not_discarded` were swapped because they could not.

    `slow` bytes are in slow memory, in place, `peak_slow` at most; `in_place` operators touched them, which took them
    `charged_ns` longer. `placed` bytes migrated there, `fetched` back, and `born_slow` were allocated there;
    `compacted` moved within it.

    `written` and `read` are what tiers had of it. `encoded` bytes passed through a codec on their way out, `decoded`
    on their way back; `unencoded` were to and went as they were, for the codec did not shorten or could not hold them.
    Of `read`, `excerpted` bytes were read for one operator only, which used a part of a range.
    """

    leaving: int
    arriving: int
    written: int
    read: int
    released: int
    faults: int
    write_faults: int
    touches: int
    waits: int
    wait_ns: int
    beyond: int
    ranges: int
    away: int
    discarded: int
    calls_again: int
    again_ns: int
    trials: int
    not_discarded: int
    slow: int
    peak_slow: int
    charged_ns: int
    in_place: int
    placed: int
    fetched: int
    born_slow: int
    compacted: int
    encoded: int
    decoded: int
    unencoded: int
    excerpted: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SlowRates:
    """What operators and migrations pay in slow memory, in bytes per second and seconds; slow.h says how.

    All 0: the device is a real one, and takes the time that it takes.
    """

    read_bytes_per_s: float = 0.0
    write_bytes_per_s: float = 0.0
    mixed_share: float = 1.0
    latency_s: float = 0.0
    fast_bytes_per_s: float = 0.0
    migrate_out_bytes_per_s: float = 0.0
    migrate_in_bytes_per_s: float = 0.0
    waited_out_bytes_per_s: float = 0.0
    waited_in_bytes_per_s: float = 0.0
    migrate_out_latency_s: float = 0.0
    migrate_in_latency_s: float = 0.0
    cache_bytes: int = 0
    own_channel: bool = False
    duplex: bool = False


class TierCounters(NamedTuple):
    """The bytes written to a tier, read from it and held by it; of slow memory, how many runs of pages moved."""

    written_bytes: int
    read_bytes: int
    held_bytes: int
    runs: int
    run_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Trouble:
    """A transfer that failed, or an operator whose operands pass the budget: `code` is an errno or a code above."""

    code: int
    nbytes: int
    tier: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Refusal:
    """The last allocation that the budget refused, or in a step that is sounded the one that needs most.

    The names are those of a need of `named_bytes`: the same, or the first that was refused.
    """

    requested_bytes: int
    live_bytes: int
    reserved_bytes: int
    budget_bytes: int
    named_bytes: int
    op: str
    optimizer: str
    module: str

    @property
    def where(self) -> str:
        """Where it was, as far as that is known."""
        if self.optimizer:
            return f"in {self.optimizer.removesuffix('.step')}'s step"
        return f"in {self.module}" if self.module else ""

    @property
    def what(self) -> str:
        """What did not fit, in a user's words."""
        if self.optimizer:
            owner = self.optimizer.removesuffix(".step")
            return f"{owner}'s state" if self.op.endswith("_like") else f"{owner}'s update ({self.op})"
        return self.op or "a tensor made outside of operators"


class Native:
    """The loaded library. Calls that may wait drop the GIL; for the others, handing it over costs more than they do."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._quick = ctypes.PyDLL(str(path))
        self._waiting = ctypes.CDLL(str(path))
        i64, integer, pointer = ctypes.c_int64, ctypes.c_int, ctypes.c_void_p

        def quick(name: str, result: type | None, *arguments: type) -> Callable[..., int]:
            function = getattr(self._quick, name)
            function.restype, function.argtypes = result, arguments
            return function  # type: ignore[no-any-return]  # ctypes is untyped

        def waiting(name: str, result: type | None, *arguments: type) -> Callable[..., int]:
            function = getattr(self._waiting, name)
            function.restype, function.argtypes = result, arguments
            return function  # type: ignore[no-any-return]  # ctypes is untyped

        self.install = quick("lt_install", None)
        self.uninstall = waiting("lt_uninstall", None)
        self.set_budget = waiting("lt_set_budget", None, i64)
        self.set_foreign = waiting("lt_set_foreign", None, i64)
        self.trim = waiting("lt_trim", None)
        self.reset_peaks = quick("lt_reset_peaks", None)
        self._counters = quick("lt_counters", None, pointer)
        self._last_failure = quick("lt_last_failure", None, pointer, *[ctypes.c_char_p] * 3, i64)
        self._take_interruption = quick("lt_take_interruption", ctypes.py_object)
        self.is_ours = quick("lt_is_ours", integer, pointer)

        self.serial_of_tensor = quick("lt_serial_of_tensor", i64, pointer)

        self.observe = quick("lt_observe", None, integer)
        self.log_start = quick("lt_log_start", None)
        self._log_stop = quick("lt_log_stop", i64)
        self._log_copy = quick("lt_log_copy", None, pointer)
        self._log_clear = quick("lt_log_clear", None)
        self._name_count = quick("lt_name_count", i64)
        self._name = quick("lt_name", None, i64, ctypes.c_char_p, i64)
        self.mark_module = quick("lt_mark_module", None, ctypes.c_char_p)

        self._tier_add = quick("lt_tier_add", None, pointer, integer, i64, i64, MediumCallback)
        self._tier_engine = quick("lt_tier_engine", None, pointer, pointer, pointer)
        self._tier_addressable = quick("lt_tier_addressable", None, pointer, i64, integer, integer)
        self._source_add = quick("lt_source_add", integer, integer, integer, i64, pointer)
        self.refer = quick("lt_refer", integer, pointer, integer, i64)
        self.ranges_running = quick("lt_ranges_running", integer)
        self._ranges_start = quick("lt_ranges_start", integer, i64, integer, integer)
        self._ranges_stop = waiting("lt_ranges_stop", integer, integer)
        self._order = quick("lt_order", None, integer, integer)
        self.catch_faults = quick("lt_catch_faults", None)
        self.announce = quick("lt_announce", None, integer)
        self.adopt = quick("lt_adopt", i64, pointer)
        self.leave_all = waiting("lt_leave_all", None)
        self._leave = waiting("lt_leave", integer, pointer, integer, integer)
        self._coder_add = quick("lt_coder_add", integer, pointer, pointer, ctypes.c_double, integer)
        self._take_samples = quick("lt_take_samples", i64, pointer, i64)
        self.place_in = waiting("lt_place_in", integer, pointer, integer)
        self.fetch = waiting("lt_fetch", integer, pointer)
        self._place = quick("lt_place", integer, pointer)
        self.lend = quick("lt_lend", i64, pointer)
        self.lend_storage = quick("lt_lend_storage", i64, pointer)
        self.take_back = quick("lt_take_back", None, i64)
        self.lend_to_read = quick("lt_lend_to_read", i64, pointer)
        self.lend_storage_to_read = quick("lt_lend_storage_to_read", i64, pointer)
        self.unpin = quick("lt_unpin", None, i64)
        self.version = quick("lt_version", i64, pointer)
        self.settle = waiting("lt_settle", None)
        self.shrink = waiting("lt_shrink", i64)
        self._range_counters = quick("lt_range_counters", None, pointer)
        self._tier_counters = quick("lt_tier_counters", None, integer, pointer)
        self._range_meter = quick("lt_range_meter", None, pointer)
        self._take_trouble = quick("lt_take_trouble", None, pointer)
        self._plan_add = quick(
            "lt_plan_add", i64, i64, pointer, i64, pointer, pointer, pointer, i64, pointer, i64, pointer, pointer
        )
        self.step_begin = quick("lt_step_begin", None, i64)
        self._step_end = quick("lt_step_end", i64, pointer)
        self._step_waits = quick("lt_step_waits", i64, pointer, i64)
        self.step_abandon = quick("lt_step_abandon", None)
        self.check_calls = quick("lt_check_calls", None, integer)
        self._take_checked = quick("lt_take_checked", None, pointer, ctypes.c_char_p, i64)
        self.touch = quick("lt_touch", None, integer)
        self.grad_began_ns = quick("lt_grad_began_ns", i64)
        self.grad_forget = quick("lt_grad_forget", None)
        self.sound = quick("lt_sound", None, integer)
        self.sounded = quick("lt_sounded", i64)
        self.room_ahead = quick("lt_room_ahead", None, integer)
        self.take_strangers = quick("lt_take_strangers", i64)
        self.stress = quick("lt_stress", None, i64, ctypes.c_uint64)
        self._name_id = quick("lt_name_id", i64, ctypes.c_char_p)
        self.put_off = quick("lt_put_off", None, integer)
        self.run_updates = quick("lt_run_updates", integer)
        self._update_counters = quick("lt_update_counters", None, pointer)

        self._names: list[str] = []
        self._kept_tiers: list[object] = []

    def counters(self) -> Counters:
        """Return the allocator's numbers now."""
        out = (ctypes.c_int64 * 11)()
        self._counters(out)
        v = list(out)
        return Counters(
            live_bytes=v[0],
            reserved_bytes=v[1],
            peak_live_bytes=v[2],
            peak_reserved_bytes=v[3],
            budget_bytes=v[4],
            foreign_bytes=v[5],
            stall_s=v[6] / 1e9,
            fresh_bytes=v[7],
            moved_bytes=v[8],
            trimmed_bytes=v[9],
            refusals=v[10],
        )

    def last_refusal(self) -> Refusal:
        """Return the numbers of the last allocation that failed."""
        out = (ctypes.c_int64 * 5)()
        op, optimizer, module = (ctypes.create_string_buffer(256) for _ in range(3))
        self._last_failure(out, op, optimizer, module, 256)
        v = list(out)
        return Refusal(
            requested_bytes=v[0],
            live_bytes=v[1],
            reserved_bytes=v[2],
            budget_bytes=v[3],
            named_bytes=v[4],
            op=op.value.decode(),
            optimizer=optimizer.value.decode(),
            module=module.value.decode(errors="replace"),
        )

    def take_interruption(self) -> BaseException | None:
        """Return what a signal's handler raised while an allocation waited for room, once."""
        taken: object = self._take_interruption()
        return taken if isinstance(taken, BaseException) else None

    def ranges_start(self, *, least_bytes: int, verify: bool, threads: int) -> int:
        """Let ranges leave to the tiers that were added; return the number of the first."""
        return self._ranges_start(least_bytes, verify, threads)

    def tier_add(
        self,
        *,
        fds: Sequence[int] = (),
        stripe_bytes: int,
        capacity_bytes: int | None,
        medium: Callable[[int, int, int, int], int] | None = None,
        engine: Engine | None = None,
        slow: SlowRates | None = None,
    ) -> None:
        """Add a tier: files, an engine, or `medium(write, offset, address, nbytes) -> errno`.

        `slow`: one file, used in place.
        """
        callback = MediumCallback(medium) if medium is not None else MediumCallback(0)
        array = (ctypes.c_int * max(len(fds), 1))(*fds)
        capacity = -1 if capacity_bytes is None else capacity_bytes
        self._tier_add(array, len(fds), stripe_bytes, capacity, callback)
        self._kept_tiers.append(callback)  # ctypes would free it while the movers still call it
        if engine is not None:
            self._tier_engine(engine.move, engine.alive, engine.context)
        if slow is not None:
            rates = (
                slow.read_bytes_per_s,
                slow.write_bytes_per_s,
                slow.mixed_share,
                slow.latency_s,
                slow.fast_bytes_per_s,
                slow.migrate_out_bytes_per_s,
                slow.migrate_in_bytes_per_s,
                slow.waited_out_bytes_per_s,
                slow.waited_in_bytes_per_s,
                slow.migrate_out_latency_s,
                slow.migrate_in_latency_s,
            )
            self._tier_addressable(
                (ctypes.c_double * len(rates))(*rates), slow.cache_bytes, slow.own_channel, slow.duplex
            )

    def source_add(self, fd: int, *, direct: bool, places: Sequence[tuple[int, int, int, int]]) -> int:
        """Add a file that ranges can be read from in place; source.h says what a place is. Return its number."""
        rows = [value for row in places for value in row]
        return self._source_add(fd, direct, len(places), (ctypes.c_int64 * max(len(rows), 1))(*rows))

    def leave(self, tensor_address: int, tier: int, coder: int = 0) -> int:
        """Start to give a tensor's pages up, through a codec by its number; return 0, or -1 if they cannot leave."""
        return self._leave(tensor_address, tier, coder)

    def coder_add(self, addresses: tuple[int, int], *, most_error: float) -> int:
        """Add a codec by its native functions (`Kernel.addresses`), and return its number; ranges_stop forgets it.

        `most_error`: of a value, in terms of the largest of its frame (0: every bit comes back).
        """
        return self._coder_add(*addresses, most_error, 0)

    def coder_add_python(
        self,
        encode: Callable[[int, int, int, int], int],
        decode: Callable[[int, int, int, int], int],
        *,
        most_error: float,
    ) -> int:
        """Add a codec that is written in Python: called as the native functions are, on movers' threads."""
        encode_call, decode_call = EncodeCallback(encode), DecodeCallback(decode)
        self._kept_tiers += [encode_call, decode_call]  # ctypes would free them while the movers still call them
        encode_at, decode_at = (ctypes.cast(call, ctypes.c_void_p) for call in (encode_call, decode_call))
        return self._coder_add(encode_at, decode_at, most_error, 1)

    def take_samples(self) -> dict[int, dict[int, float]]:
        """Return what codecs would leave of ranges that left while the log was on: by serial and number; once."""
        most = 0
        while True:
            out = (ctypes.c_double * (3 * most))()
            count = self._take_samples(out, most)
            if count <= most:
                break
            most = count + 64
        found: dict[int, dict[int, float]] = {}
        for row in range(count):
            serial, coder, share = out[3 * row : 3 * row + 3]
            found.setdefault(int(serial), {})[int(coder)] = share
        return found

    def ranges_stop(self, *, bring_back: bool) -> int:
        """Let nothing leave any more; return an errno for what could not be read back, or 0."""
        error = self._ranges_stop(bring_back)
        self._kept_tiers.clear()
        return error

    def range_counters(self) -> RangeCounters:
        """Return the numbers of ranges now."""
        out = (ctypes.c_int64 * len(RangeCounters.__slots__))()
        self._range_counters(out)
        return RangeCounters(**dict(zip(RangeCounters.__slots__, out, strict=True)))

    def update_counters(self) -> UpdateCounters:
        """Return what the updates that were put off count."""
        values = (ctypes.c_int64 * 4)()
        self._update_counters(values)
        return UpdateCounters(*values)

    def tier_counters(self, tier: int) -> TierCounters:
        """Return a tier's numbers now."""
        out = (ctypes.c_int64 * 5)()
        self._tier_counters(tier, out)
        return TierCounters(*out)

    def range_meter(self) -> tuple[float, ...]:
        """Return bytes, transfers and nanoseconds of writes, of reads, of awaited writes and of awaited reads."""
        out = (ctypes.c_double * 12)()
        self._range_meter(out)
        return tuple(out)

    def place(self, tensor_address: int) -> Place | None:
        """Return where a tensor's bytes are (None: they are not a range's)."""
        place = self._place(tensor_address)
        return None if place < 0 else Place(place)

    def take_trouble(self) -> tuple[Trouble | None, Trouble | None]:
        """Return what stopped the program and the last write that failed, once."""
        out = (ctypes.c_int64 * 6)()
        self._take_trouble(out)
        read = Trouble(code=out[0], nbytes=out[1], tier=out[2]) if out[0] else None
        write = Trouble(code=out[3], nbytes=out[4], tier=out[5]) if out[3] else None
        return read, write

    def step_end(self) -> EndedStep:
        """End a step, and return how it went."""
        out = (ctypes.c_int64 * 3)()
        plan = self._step_end(out)
        return EndedStep(None if plan < 0 else plan, out[0], None if out[1] < 0 else out[1], bool(out[2]))

    def step_waits(self) -> list[tuple[int, int, float, float, bool]]:
        """Return the last step's waits: operator, storage of the plan, begin and end, whether without a request."""
        count = self._step_waits(None, 0)
        out = (ctypes.c_int64 * (5 * count))()
        self._step_waits(out, count)
        rows = (out[5 * row : 5 * row + 5] for row in range(count))
        return [(op, storage, begin * 1e-9, end * 1e-9, bool(asked)) for op, storage, begin, end, asked in rows]

    def take_checked(self) -> tuple[int, int, int, list[str]]:
        """Return how many calls made the same again, something else, or failed, and the names of the last two."""
        out, names = (ctypes.c_int64 * 3)(), ctypes.create_string_buffer(1 << 16)
        self._take_checked(out, names, len(names))
        return out[0], out[1], out[2], names.value.decode().split()

    def order(self, order: Order, *, discards: bool = False) -> None:
        """Set which ranges leave first from here on; `discards`: without a copy, as far as it can be made again."""
        self._order(_ORDERS[order], discards)

    def name_id(self, name: str) -> int:
        """Return the number under which the log and plans know an operator's name."""
        return self._name_id(name.encode())

    def plan_add(
        self,
        *,
        names: Sequence[int],
        storages: Sequence[tuple[int, int, int, int, int, int, int]],
        uses: Sequence[Sequence[int]],
        actions: Sequence[tuple[int, int, int, int, int, int]],
        remade: Sequence[Sequence[int]] = (),
    ) -> int:
        """Add a compiled plan and return its number; tide.cpp says what the columns of each row are."""
        begins = [0, *accumulate(len(one) for one in uses)]
        rows = [value for row in storages for value in row]
        steps = [value for row in actions for value in row]
        flat = [op for one in uses for op in one]

        def array(values: Sequence[int]) -> ctypes.Array[ctypes.c_int64]:
            return (ctypes.c_int64 * max(len(values), 1))(*values)

        return self._plan_add(
            len(names),
            array(names),
            len(storages),
            array(rows),
            array(begins),
            array(flat),
            len(actions),
            array(steps),
            len(remade),
            array([0, *accumulate(len(one) for one in remade)]),
            array([op for one in remade for op in one]),
        )

    def log_drop(self) -> None:
        """Stop the log and forget it."""
        self._log_stop()
        self._log_clear()

    def log_stop(self) -> list[LogEntry] | None:
        """Stop the log and return its entries in order (None: not all were kept)."""
        count = self._log_stop()
        if count < 0:
            self._log_clear()
            return None
        buffer = ctypes.create_string_buffer(max(count, 1) * 40)
        self._log_copy(buffer)
        self._log_clear()
        return [LogEntry._make(fields) for fields in struct.iter_unpack("<iiqqqq", buffer.raw[: count * 40])]

    def names(self) -> list[str]:
        """Return the names that log entries refer to by number."""
        out = ctypes.create_string_buffer(512)
        for index in range(len(self._names), self._name_count()):
            self._name(index, out, 512)
            self._names.append(out.value.decode())
        return self._names
