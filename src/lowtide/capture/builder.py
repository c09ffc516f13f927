"""From the native log of a step to its `Trace`.

The log says what happened under whatever policy was running; the trace says what an unmanaged step would have done. So
memory given up because a tier held the bytes, and room taken for bytes that came back, leave the curve as it is; time
spent waiting for transfers is taken out, and so is the time that numbering calls took.

An *operator* of the trace is the outermost dispatched call that computes something and is not merely composed of
others: what a backend implements, below autograd. Its span reaches to the start of the next, so the durations add up
to the step. Operators of all threads are one sequence, in the order in which they began; what a thread touches belongs
to the operator that runs on it.

Note [Reach of a log]: where the executor moves what autograd saved, operands are those of the operator's own call, and
saves say when the rest is needed. Where it moves pages, every touch counts: those of calls inside the operator, and
those that only a page fault saw.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from types import MappingProxyType

from lowtide.core.log import Event, LogEntry
from lowtide.core.trace import HELD_KINDS, RANGE_BYTES, Kind, Op, Phase, Reach, Save, Storage, Trace

# How PyTorch's observer calls a dispatch mode at work.
_MODE = "PythonDispatchMode"

# What OP_BEGIN says of a call that is an operator of the trace, where it says anything.
_COMPUTES = 1

# The version of a storage that a page fault saw read: none, so that a result in the same storage is a change of it.
_NO_VERSION = -1


class Scope(IntEnum):
    """The scopes PyTorch's observer reports."""

    FUNCTION = 0
    BACKWARD = 1
    USER = 7


_GRADIENTS = 1 << 40


def gradient_key(parameter: int) -> int:
    """Return the key of the gradient that a step makes, from that of its parameter. Both are below zero."""
    return parameter - _GRADIENTS


def parameter_key(key: int) -> int | None:
    """Return the key of the parameter whose gradient has this key (None: it is not that of a gradient)."""
    return key + _GRADIENTS if key < -_GRADIENTS else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Recorded:
    """A trace, and where in it each save and use of the step fell.

    `positions[i]` is the operator that began next when the i-th pack or unpack happened. `use_events[k]` are the
    numbers i at which the storage of `trace.saves[k]` was unpacked. `needs[i]` is how far live bytes rose before the
    i-th (the last one: after all), where the log says so. `calls[op]` are the numbers of the step's calls that an
    operator consists of, where calls were numbered; `numbering_s` is what that took. `before_training_s` is the part of
    the trace before the operator that autograd followed first: loading data, evaluating, saving.

    Of an executor that moves pages there are no saves, and the first three are empty; the next step recognises a
    storage instead by `serials[storage]`, the number of its block, if it was there before the step, or by
    `births[storage]`, if the step made it: (op, k) is allocation k, counted from 0, of `trace.least_bytes` or more
    after operator `op` has begun and before the next one does (-1: before the first). None: made before the step, or
    too small to be counted.

    Of one that moves what the program holds beside what is saved, `held` are the keys of storages of the first kind,
    `ticks[op]` is the tick at which an operator begins (or the next one, if it is none), and `looks` are the step's
    ticks by what they looked like: see `execute/observe/touches.py`.
    """

    trace: Trace
    positions: tuple[int, ...]
    use_events: tuple[tuple[int, ...], ...]
    needs: tuple[int, ...] = ()
    calls: Mapping[int, Sequence[int]] = field(default_factory=dict)
    numbering_s: float = 0.0
    before_training_s: float = 0.0
    serials: tuple[int, ...] = ()
    births: tuple[tuple[int, int] | None, ...] = ()
    held: Mapping[int, int] = field(default_factory=dict)
    ticks: tuple[int, ...] = ()
    looks: tuple[int, ...] = ()


@dataclass(slots=True)
class _Block:
    """A storage. `maker` is the operator during which the step allocated it (None: it was there before the step).

    `counted`: it was allocated in the step, or is a range from before.
    """

    serial: int
    nbytes: int
    maker: int | None = None
    birth: tuple[int, int] | None = None
    last_op: int | None = None
    producer: int | None = None
    versions: int = 0
    counted: bool = False


@dataclass(slots=True)
class _Saved:
    storage: int
    packed_op: int
    free_op: int | None = None
    uses: list[int] = field(default_factory=list)
    use_events: list[int] = field(default_factory=list)
    released_op: int | None = None
    packs: int = 0


@dataclass(slots=True)
class _Running:
    name: str
    phase: Phase
    begin_ns: int
    module: str
    stall_ns: int = 0
    numbering_ns: int = 0
    peak_bytes: int = 0
    reads: dict[int, int] = field(default_factory=dict)
    writes: list[int] = field(default_factory=list)


@dataclass(slots=True)
class _Frame:
    """A call that has not returned: an operator of the trace (`op`), the mode that numbers calls, or another."""

    name: int
    begin_ns: int
    op: int | None
    phase: Phase | None
    numbers: bool = False


class _Builder:
    def __init__(
        self,
        names: Sequence[str],
        *,
        static_bytes: int,
        is_operator: Callable[[str], bool],
        reach: Reach,
        least_bytes: int,
        held: Mapping[int, int],
        gradients: Mapping[int, int],
    ) -> None:
        self.held, self.gradients = held, gradients
        self.names = names
        self.is_operator = is_operator
        self.static_bytes = static_bytes
        self.reach = reach
        self.least_bytes = least_bytes
        self.live = static_bytes
        self.blocks: list[_Block] = []
        self.block_of: dict[int, int] = {}
        self.ops: list[_Running] = []
        self.saved: dict[int, _Saved] = {}
        self.order: list[int] = []
        self.positions: list[int] = []
        self.stacks: dict[int, list[_Frame]] = {}
        self.calls: dict[int, list[int]] = {}
        self.ticks: dict[int, int] = {}
        self.module = ""
        self.early_peak = static_bytes
        self.early_touches: list[LogEntry] = []
        self.births = 0

    @property
    def next_op(self) -> int:
        return len(self.ops)

    def block(self, serial: int, nbytes: int) -> int:
        """Return the storage of a serial, which existed before the step if it was not seen yet."""
        found = self.block_of.get(serial)
        if found is None:
            found = self.block_of[serial] = len(self.blocks)
            self.blocks.append(_Block(serial=serial, nbytes=nbytes))
        return found

    def raise_peak(self) -> None:
        if self.ops:
            self.ops[-1].peak_bytes = max(self.ops[-1].peak_bytes, self.live)
        else:
            self.early_peak = max(self.early_peak, self.live)

    def feed(self, entry: LogEntry) -> None:
        match entry.kind:
            case Event.ALLOC | Event.FREE | Event.FETCH_ALLOC:
                self.memory(entry)
            case Event.OP_BEGIN | Event.OP_END:
                self.operator(entry)
            case Event.READ | Event.WRITE:
                self.operand(entry)
            case Event.PACK | Event.UNPACK | Event.SOLE | Event.GONE:
                self.autograd(entry)
            case Event.STALL:
                if self.ops:
                    self.ops[-1].stall_ns += entry.a
            case Event.MODULE:
                self.module = self.names[entry.a]
            case Event.CALL | Event.TICK:
                self.numbered(entry)
            case Event.EXISTS:
                self.blocks[self.block(entry.a, entry.b)].counted = True
            case Event.TOUCH:
                self.touch(entry)

    def memory(self, entry: LogEntry) -> None:
        if entry.kind == Event.ALLOC:
            self.block_of[entry.a] = len(self.blocks)
            self.blocks.append(
                _Block(
                    serial=entry.a,
                    nbytes=entry.b,
                    maker=self.owner(entry.thread),
                    birth=self.birth(entry.b),
                    counted=True,
                )
            )
            self.live += entry.b
            self.raise_peak()
        elif entry.kind == Event.FREE:
            self.blocks[self.block(entry.a, entry.b)].last_op = self.next_op - 1
            self.live -= entry.b
        elif (saved := self.saved.get(entry.c)) is not None:
            self.block_of[entry.a] = saved.storage

    def birth(self, nbytes: int) -> tuple[int, int] | None:
        """Return by which allocation since the last operator began a block is recognised."""
        if nbytes < self.least_bytes:
            return None
        self.births += 1
        return self.next_op - 1, self.births - 1

    def operand(self, entry: LogEntry) -> None:
        op = self.running(entry.thread) if self.reach is Reach.TOUCHED else self.listing(entry.thread)
        if op is None:
            return
        storage = self.block(entry.a, entry.c)
        if entry.kind == Event.READ:
            self.ops[op].reads.setdefault(storage, entry.b)
        else:
            self.written(op, storage, entry.b)

    def touch(self, entry: LogEntry) -> None:
        if not self.ops:
            self.early_touches.append(entry)
            return
        storage = self.block_of.get(entry.a)
        if storage is None:
            return  # the block of a storage that the trace does not know
        op = self.owner(entry.thread)
        running, block = self.ops[op], self.blocks[storage]
        fresh = block.maker == op
        if not (entry.b and fresh):
            # An operator that writes a part of an older storage needs the rest of it.
            running.reads.setdefault(storage, _NO_VERSION)
        if entry.b and storage not in running.writes:
            self.changed(op, storage, block.versions if fresh else block.versions + 1)

    def operator(self, entry: LogEntry) -> None:
        stack = self.stacks.setdefault(entry.thread, [])
        if entry.kind == Event.OP_END:
            # A range of the user's is opened inside an operator that ends before it does.
            ended = next((at for at in reversed(range(len(stack))) if stack[at].name == entry.a), None)
            if ended is not None:
                self.ended(stack[ended], stack[ended - 1] if ended else None, entry.at_ns)
                del stack[ended]
            return
        name = self.names[entry.a]
        inside = self.running(entry.thread) is not None
        phase = None
        if entry.b == Scope.BACKWARD:
            phase = Phase.BACKWARD
        elif entry.b == Scope.USER and name.startswith("Optimizer."):
            phase = Phase.UPDATE
        chosen = entry.b == Scope.FUNCTION and not inside and self.computes(entry, name)
        stack.append(_Frame(entry.a, entry.at_ns, self.next_op if chosen else None, phase))
        if chosen:
            current = next((frame.phase for frame in reversed(stack) if frame.phase is not None), Phase.FORWARD)
            self.ops.append(
                _Running(name=name, phase=current, begin_ns=entry.at_ns, module=self.module, peak_bytes=self.live)
            )
            self.births = 0
            while self.early_touches:
                self.touch(self.early_touches.pop(0))

    def computes(self, entry: LogEntry, name: str) -> bool:
        """Tell whether a call is an operator: the log may say so of its overload, else its name has to."""
        return entry.c == _COMPUTES if entry.c else self.is_operator(name)

    def numbered(self, entry: LogEntry) -> None:
        if entry.kind == Event.TICK:
            op = self.running(entry.thread)
            if op is not None:
                self.ticks[op] = entry.a
            return
        stack = self.stacks.get(entry.thread, [])
        if stack and self.names[stack[-1].name] == _MODE:
            stack[-1].numbers = True
        # As a rule one; more if this overload of the operator is composed of others.
        op = self.running(entry.thread)
        if op is not None:
            self.calls.setdefault(op, []).append(entry.a)

    def ended(self, frame: _Frame, outer: _Frame | None, at_ns: int) -> None:
        """Take note of how long the mode that numbers took beside the call it let pass."""
        if self.ops and frame.numbers:
            self.ops[-1].numbering_ns += at_ns - frame.begin_ns
        if self.ops and outer is not None and outer.numbers:
            self.ops[-1].numbering_ns -= at_ns - frame.begin_ns

    def running(self, thread: int) -> int | None:
        """Return the operator that runs on a thread."""
        return next((frame.op for frame in self.stacks.get(thread, ()) if frame.op is not None), None)

    def listing(self, thread: int) -> int | None:
        """Return the operator whose operands are being listed: only the chosen call itself, not those inside it."""
        stack = self.stacks.get(thread)
        return stack[-1].op if stack else None

    def owner(self, thread: int) -> int:
        """Return the operator that a thread's doings belong to: its own, or else the one that began last anywhere."""
        op = self.running(thread)
        return self.next_op - 1 if op is None else op

    def written(self, op: int, storage: int, version: int) -> None:
        before = self.ops[op].reads.get(storage)
        if before is not None and version <= before and self.blocks[storage].maker != op:
            return  # a view of an operand: nothing was written
        self.changed(op, storage, version)

    def changed(self, op: int, storage: int, version: int) -> None:
        block, running = self.blocks[storage], self.ops[op]
        if storage not in running.writes:
            running.writes.append(storage)
        block.versions = max(block.versions, version)
        if block.producer is None and block.maker == op:
            block.producer = op

    def autograd(self, entry: LogEntry) -> None:
        if entry.kind == Event.PACK:
            self.positions.append(self.next_op)
            saved = self.saved.get(entry.a)
            if saved is None:
                storage = self.block(entry.b, entry.c)
                saved = self.saved[entry.a] = _Saved(storage=storage, packed_op=max(self.next_op - 1, 0))
                self.order.append(entry.a)
            saved.packs += 1
            return
        saved = self.saved.get(entry.a)
        if entry.kind == Event.UNPACK:
            self.positions.append(self.next_op)
            if saved is not None:
                saved.use_events.append(len(self.positions) - 1)
                if not saved.uses or saved.uses[-1] < self.next_op:
                    saved.uses.append(self.next_op)
        elif saved is None:
            return
        elif entry.kind == Event.SOLE:
            saved.free_op = self.next_op if saved.free_op is None else saved.free_op
        else:
            saved.released_op = self.next_op
            if entry.b:  # its bytes were away: this is when an unmanaged step would have freed them
                block = self.blocks[saved.storage]
                block.last_op = self.next_op - 1
                self.live -= block.nbytes  # as it was counted when it was allocated: in whole pages

    def finish(
        self, end_ns: int, kinds: Mapping[int, Kind], *, model: str, torch_version: str, trains_from_ns: int | None
    ) -> Recorded:
        if self.ops:
            self.ops[0].peak_bytes = max(self.ops[0].peak_bytes, self.early_peak)
        kind_of = {self.block_of[serial]: kind for serial, kind in kinds.items() if serial in self.block_of}
        saved_storages = {saved.storage for saved in self.saved.values()}
        storages = tuple(
            self._storage(index, block, kind_of, index in saved_storages) for index, block in enumerate(self.blocks)
        )
        last = len(self.ops)
        saves = tuple(
            Save(
                storage=saved.storage,
                packed_op=saved.packed_op,
                free_op=None if saved.free_op is None or saved.free_op >= last else saved.free_op,
                uses=tuple(min(use, last) for use in saved.uses),
                released_op=last if saved.released_op is None else saved.released_op,
                packs=saved.packs,
            )
            for saved in (self.saved[record] for record in self.order)
        )
        trace = Trace(
            ops=self._ops(end_ns),
            storages=storages,
            saves=saves,
            static_bytes=min(self.static_bytes, self.live),
            model=model,
            torch_version=torch_version,
            reach=self.reach,
            least_bytes=self.least_bytes,
        )
        touched = self.reach is Reach.TOUCHED
        use_events = tuple(tuple(self.saved[record].use_events) for record in self.order)
        return Recorded(
            trace=trace,
            positions=tuple(self.positions),
            use_events=use_events,
            calls=self.calls,
            numbering_s=sum(op.numbering_ns for op in self.ops) / 1e9,
            before_training_s=self._before_s(trains_from_ns, trace.ops),
            serials=tuple(block.serial for block in self.blocks) if touched else (),
            births=tuple(block.birth for block in self.blocks) if touched else (),
            held={index: key for index, block in enumerate(self.blocks) if (key := self._key(block)) is not None},
            ticks=tuple(self.ticks[op] for op in range(last)) if len(self.ticks) == last else (),
        )

    def _before_s(self, at_ns: int | None, ops: Sequence[Op]) -> float:
        """Return the start, in the trace, of the operator that ran at a time (None: never)."""
        begun = sum(op.begin_ns <= at_ns for op in self.ops) if at_ns is not None else 0
        return ops[begun - 1].start_s if begun else 0.0

    def _ops(self, end_ns: int) -> tuple[Op, ...]:
        ops, start_s = [], 0.0
        for index, op in enumerate(self.ops):
            stop_ns = self.ops[index + 1].begin_ns if index + 1 < len(self.ops) else end_ns
            duration_s = max(0, stop_ns - op.begin_ns - op.stall_ns - op.numbering_ns) / 1e9
            ops.append(
                Op(
                    name=op.name,
                    phase=op.phase,
                    start_s=start_s,
                    duration_s=duration_s,
                    peak_bytes=op.peak_bytes,
                    reads=tuple(storage for storage in op.reads if self._is_operand(storage, index)),
                    writes=tuple(storage for storage in op.writes if self.blocks[storage].nbytes),
                    module=op.module,
                )
            )
            start_s += duration_s
        return tuple(ops)

    def _is_operand(self, storage: int, op: int) -> bool:
        """Tell whether an operator was given a storage: the calls inside it also read what it has made by then.

        Nothing is given by a tensor without bytes, as oneDNN's opaque ones are: they all look like the same one.
        """
        block = self.blocks[storage]
        return block.nbytes > 0 and not (self.reach is Reach.TOUCHED and block.maker == op)

    def _can_be_named(self, block: _Block) -> bool:
        """Tell whether a plan finds a storage again in the next step; what that does not have any more need not be."""
        if block.maker is None:
            return block.serial in self.held or block.last_op is not None
        return self.gradients.get(block.serial) in self.held

    def _key(self, block: _Block) -> int | None:
        if block.maker is None:
            return self.held.get(block.serial) if block.last_op is None else None
        parameter = self.gradients.get(block.serial)
        return None if parameter is None or parameter not in self.held else gradient_key(self.held[parameter])

    def _storage(self, index: int, block: _Block, kind_of: Mapping[int, Kind], saved: bool) -> Storage:
        touched = self.reach is Reach.TOUCHED
        first = -1 if block.maker is None else block.maker
        last = len(self.ops) if block.last_op is None else block.last_op
        if touched:
            # What the step made before its first operator does not live on: its gaps end with the step.
            first = first if block.maker is None else max(first, 0)
            last = max(last, 0)
        kind = kind_of.get(index)
        if kind is None:
            if first >= 0 and (saved or (touched and last > first)):
                kind = Kind.ACTIVATION
            elif first < 0:
                kind = Kind.INPUT if block.last_op is None else Kind.OTHER
            else:
                kind = Kind.SCRATCH if first == last else Kind.OTHER
        is_worth_moving = self.reach is Reach.HELD and block.nbytes >= self.least_bytes
        if kind in HELD_KINDS and is_worth_moving and not self._can_be_named(block):
            kind = Kind.OTHER  # it stays where it is: the program knows its address, for one
        # Large memory that is not a range is another allocator's: no budget counts it, and it cannot leave.
        foreign = touched and not block.counted and block.nbytes >= RANGE_BYTES
        return Storage(
            nbytes=0 if foreign else block.nbytes,
            kind=kind,
            first_op=first,
            last_op=last,
            producer=block.producer,
            versions=block.versions,
        )


def build_trace(
    entries: Iterable[LogEntry],
    names: Sequence[str],
    *,
    static_bytes: int,
    end_ns: int,
    is_operator: Callable[[str], bool],
    kinds: Mapping[int, Kind] | None = None,
    model: str = "",
    torch_version: str = "",
    reach: Reach = Reach.SAVED,
    least_bytes: int = 0,
    held: Mapping[int, int] = MappingProxyType({}),
    gradients: Mapping[int, int] = MappingProxyType({}),
    trains_from_ns: int | None = None,
) -> Recorded:
    """Return the trace of a logged step. `kinds` says what known storages (by serial) are for.

    `reach` says what its executor can move, and `least_bytes` from which size on it is worth it; `held` are the keys,
    by serial, of what the program holds that it can move, and `gradients` the serials of their parameters.
    `trains_from_ns`: when autograd followed an operator for the first time in the step (None: it followed none).
    """
    builder = _Builder(
        names,
        static_bytes=static_bytes,
        is_operator=is_operator,
        reach=reach,
        least_bytes=least_bytes,
        held=held,
        gradients=gradients,
    )
    for entry in entries:
        builder.feed(entry)
    return builder.finish(end_ns, kinds or {}, model=model, torch_version=torch_version, trains_from_ns=trains_from_ns)
