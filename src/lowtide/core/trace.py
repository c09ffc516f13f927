"""One training step as a value: operators in order, storages, every touch of them, and what autograd saved.

Symbols used throughout: an *operator* is named by its index in `Trace.ops`, a *storage* by its index in
`Trace.storages`. Views of one storage are one storage: they move together. A *touch* is an operator that reads or
writes a storage. `n` is the number of operators.

A step repeats: operator `n + i` is operator `i` of the next step, and a gap may reach past the end of its own.

All byte curves are those of the *unmanaged* step: what would be alive if nothing were ever moved. A trace that was
recorded while a policy was evicting is corrected for it when it is built, so that every policy plans from the same
facts.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from itertools import accumulate, pairwise
from types import MappingProxyType

TRACE_VERSION = 3

RANGE_BYTES = 64 << 10
"""Where pages move, smaller storages never do."""


def least_worth_moving(budget_bytes: int) -> int:
    """Return from how many bytes on a storage is worth moving: a small model in a small budget works as a large one."""
    return min(max(budget_bytes // 4096, RANGE_BYTES), 4 * RANGE_BYTES)


class Phase(StrEnum):
    """The part of a step an operator belongs to."""

    FORWARD = "forward"
    BACKWARD = "backward"
    UPDATE = "update"


class Kind(StrEnum):
    """What a storage is for."""

    PARAM = "param"
    BUFFER = "buffer"
    GRAD = "grad"
    OPTIMIZER = "optimizer"
    INPUT = "input"
    ACTIVATION = "activation"
    SCRATCH = "scratch"
    OTHER = "other"


class Reach(StrEnum):
    """Which storages the executor of a step can move, and so where their gaps lie.

    SAVED: those that autograd saved, from the time it alone holds them until it asks for them back (hooks).
    TOUCHED: all of them, between any two touches, held or not (pages). Bytes that did not change since they
    were last written out are not written again.
    HELD: those that autograd saved, as SAVED, and those that the program holds from step to step, as TOUCHED: its
    parameters, buffers, gradients and optimizer state (accelerators).
    """

    SAVED = "saved"
    TOUCHED = "touched"
    HELD = "held"


HELD_KINDS = frozenset({Kind.PARAM, Kind.BUFFER, Kind.GRAD, Kind.OPTIMIZER})
"""What a program holds from step to step, in its models and optimizers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Op:
    """One operator: when it ran, what it touched and how much memory the step needed meanwhile.

    `duration_s` is the operator's own time without waiting for transfers. `start_s` is the sum of the durations before
    it. `peak_bytes` is the highest number of live bytes between this operator's start and the next one's: its operands,
    its scratch and everything else alive. `flops` are its floating-point operations (0: not known), from which its time
    on another machine is estimated.
    """

    name: str
    phase: Phase
    start_s: float
    duration_s: float
    peak_bytes: int
    reads: tuple[int, ...] = ()
    writes: tuple[int, ...] = ()
    module: str = ""
    flops: float = 0.0

    @property
    def place(self) -> str:
        """Where in the program it is, as far as that is known: in a layer, or in the optimizer's step."""
        if self.phase is Phase.UPDATE:
            return "in the optimizer's step"
        return f"in {self.module}" if self.module else ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Storage:
    """A block of tensor memory from its allocation to its release.

    `first_op` is the operator during which it was allocated (-1: before the step), `last_op` the one during which it
    was freed (`len(ops)`: alive when the step ended). `producer` is the operator that first wrote it, if that was
    recorded; its operands are `ops[producer].reads`. `versions` counts in-place changes seen.
    """

    nbytes: int
    kind: Kind
    first_op: int
    last_op: int
    producer: int | None = None
    versions: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Save:
    """A storage that autograd saved, and when it asked for it back.

    `packed_op`: the operator that first saved it. `free_op`: the first operator at whose start only autograd held
    the storage (None: the program held it all along, so moving it frees nothing). `uses`: the operators before which
    autograd unpacked it, ascending. `released_op`: the operator at which autograd let it go. `packs`: how many
    saved tensors share the storage.
    """

    storage: int
    packed_op: int
    free_op: int | None
    uses: tuple[int, ...]
    released_op: int
    packs: int = 1


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class Gap:
    """A span in which a storage is not needed: the unit of every decision.

    The storage may leave once operator `after_op` has begun (everything before it is done with the storage) and has to
    be back when operator `before_op` begins: it can be absent during the operators `after_op <= i < before_op`.
    A `before_op` of n or more is operator `before_op - n` of the next step: the storage is away when a step begins. If
    it has an heir there (`Trace.heirs`), that is the one that is touched, or freed before it.
    """

    storage: int
    after_op: int
    before_op: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Life:
    """A storage from its allocation to its release: it is there during the operators `begin_op <= i < end_op`.

    `touches` are ascending. What the next step does to it through its heir is counted on from n. `forever`: it is there
    in every step, and its life is told as that of one step.
    """

    begin_op: int
    end_op: int
    touches: tuple[int, ...]
    forever: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Trace:
    """A recorded step. `static_bytes` were alive before it began and after it ended.

    `timed_for` is the machine that its times were predicted for (empty: they were measured where it was recorded).
    `reach` says what its executor can move; storages of fewer than `least_bytes` are not worth moving in any budget.
    """

    ops: tuple[Op, ...]
    storages: tuple[Storage, ...]
    saves: tuple[Save, ...]
    static_bytes: int
    model: str = ""
    device: str = "cpu"
    torch_version: str = ""
    reach: Reach = Reach.SAVED
    least_bytes: int = 0
    timed_for: str = ""

    @property
    def duration_s(self) -> float:
        """The step's compute time."""
        return self.ops[-1].start_s + self.ops[-1].duration_s if self.ops else 0.0

    @property
    def peak_bytes(self) -> int:
        """The unmanaged step's highest number of live bytes."""
        return max((op.peak_bytes for op in self.ops), default=self.static_bytes)

    @property
    def repeats(self) -> bool:
        """Whether the executor moves what lives on: then steps follow each other, and gaps reach into the next."""
        return self.reach is not Reach.SAVED

    def saved(self) -> frozenset[int]:
        """Return the storages that move as autograd saved them: none where pages move."""
        return frozenset() if self.reach is Reach.TOUCHED else frozenset(save.storage for save in self.saves)

    def touches(self) -> tuple[tuple[int, ...], ...]:
        """Return the operators that touch each storage, ascending.

        Where the executor moves what is saved beside what is held, an operator before which autograd asks for a storage
        touches it too.
        """
        return self._operators_by_storage(lambda op: (*op.reads, *op.writes))

    def changes(self) -> tuple[tuple[int, ...], ...]:
        """Return the operators that change each storage, ascending.

        What autograd was handed may have been changed by any code, so a use counts where `touches` counts it.
        """
        return self._operators_by_storage(lambda op: op.writes)

    def _operators_by_storage(self, named: Callable[[Op], Iterable[int]]) -> tuple[tuple[int, ...], ...]:
        found: list[set[int]] = [set() for _ in self.storages]
        for index, op in enumerate(self.ops):
            for storage in named(op):
                found[storage].add(index)
        for save in self.saves if self.reach is Reach.HELD else ():
            found[save.storage].update(use for use in save.uses if use < len(self.ops))
        return tuple(tuple(sorted(each)) for each in found)

    def lives_on(self, storage: int) -> bool:
        """Tell whether a storage is there before the step and after it: its gaps may reach into the next step."""
        block = self.storages[storage]
        return block.first_op < 0 and block.last_op >= len(self.ops)

    def _is_held(self, storage: int) -> bool:
        """Tell whether a storage moves by touches beside those that move as autograd saved them."""
        kind, is_made = self.storages[storage].kind, self.storages[storage].first_op >= 0
        return (kind is Kind.GRAD and is_made) or (kind in HELD_KINDS and self.lives_on(storage))

    def heirs(self) -> Mapping[int, int]:
        """Return the storages that the step makes and the next one frees, each with its place in that one.

        Where pages move, steps follow each other: what a step finds and frees (gradients, if `zero_grad` comes first)
        is what the step before has made and left alive. Those of one kind and size are paired in their order; a pair
        counts if the found one is freed before the made one is there, so that there is never more than one of the two.
        """
        if not self.repeats:
            return MappingProxyType({})
        made: dict[tuple[Kind, int], list[int]] = {}
        found: dict[tuple[Kind, int], list[int]] = {}
        for storage, block in enumerate(self.storages):
            if self.reach is Reach.HELD and block.kind is not Kind.GRAD:
                continue
            leaves = block.last_op >= len(self.ops)
            if leaves != (block.first_op < 0):
                (made if leaves else found).setdefault((block.kind, block.nbytes), []).append(storage)
        return MappingProxyType(
            {
                parent: heir
                for alike, parents in made.items()
                for parent, heir in zip(parents, found.get(alike, ()), strict=False)
                if self.storages[heir].last_op < self.storages[parent].first_op
            }
        )

    def lives(self) -> Mapping[int, Life]:
        """Return the life of every storage; an heir's is a part of that of the storage whose heir it is."""
        end, touches, heirs = len(self.ops), self.touches(), self.heirs()
        inherited = frozenset(heirs.values())
        found = {}
        for storage, block in enumerate(self.storages):
            if storage in inherited:
                continue
            end_op, touched = min(block.last_op + 1, end), touches[storage]
            if storage in heirs:
                end_op = end + self.storages[heirs[storage]].last_op + 1
                touched = (*touched, *(end + op for op in touches[heirs[storage]]))
            found[storage] = Life(
                begin_op=max(block.first_op, 0), end_op=end_op, touches=touched, forever=self.lives_on(storage)
            )
        return MappingProxyType(found)

    def gaps(self, kinds: Collection[Kind] | None = None) -> tuple[Gap, ...]:
        """Return every span in which a storage could be absent, ordered by storage and time.

        `kinds`: only those of storages of these kinds (None: of all). Where the executor moves what autograd saved, a
        gap of that ends at an unpack, the only point where it is asked for the storage, and begins after the last
        operator that touched it: what was unpacked for one operator may still be read by those that follow.
        """
        found = self._gaps_between_touches() if self.repeats else []
        if self.reach is not Reach.TOUCHED:
            found += self._gaps_of_saves()
        if kinds is not None:
            found = [gap for gap in found if self.storages[gap.storage].kind in kinds]
        return tuple(sorted(found))

    def _gaps_of_saves(self) -> list[Gap]:
        saves: dict[int, list[Save]] = {}
        for save in self.saves:
            saves.setdefault(save.storage, []).append(save)
        touches = self.touches()
        found = []
        for storage, group in saves.items():
            if all(save.free_op is not None for save in group):
                found.extend(_gaps_of(storage, group, touches[storage]))
        return found

    def _gaps_between_touches(self) -> list[Gap]:
        found = []
        end = len(self.ops)
        touches, heirs = self.touches(), self.heirs()
        inherited = frozenset(heirs.values())
        for storage, (block, touched) in enumerate(zip(self.storages, touches, strict=True)):
            if block.nbytes < max(self.least_bytes, 1) or storage in inherited:
                continue
            if self.reach is Reach.HELD and not self._is_held(storage):
                continue
            if not touched:
                if self.lives_on(storage):
                    found.append(Gap(storage=storage, after_op=0, before_op=end))
                continue
            # After its last touch a storage waits for its release, or for the next step. The operator that releases it
            # need not touch it: then the storage may be away while that runs, and is freed where it is.
            rest = end + touched[0] if self.lives_on(storage) else min(block.last_op + 1, end)
            if storage in heirs and touched[-1] + 1 < end:
                # The next step cannot tell it to leave: it leaves in its own.
                heir = heirs[storage]
                rest = end + (touches[heir][0] if touches[heir] else self.storages[heir].last_op + 1)
            for last, following in pairwise((*touched, rest)):
                if last + 1 < following:
                    found.append(Gap(storage=storage, after_op=last + 1, before_op=following))
        return found

    def under(self, budget_bytes: int) -> Trace:
        """Return the trace for planning page moves under a budget: only storages worth moving have gaps.

        A trace with gaps of storages that are too small to be ranges is of no runtime, and stays as it is.
        """
        if self.reach is not Reach.TOUCHED or self.least_bytes < RANGE_BYTES:
            return self
        least_bytes = max(self.least_bytes, least_worth_moving(budget_bytes))
        return self if least_bytes == self.least_bytes else replace(self, least_bytes=least_bytes)

    def floor_bytes(self) -> int:
        """Return the smallest budget that a plan can meet, every gap's storage absent all through it.

        The gaps are those that the trace has under that budget.
        """
        floor_bytes, before = self._absent_floor_bytes(), -1
        while floor_bytes > before:
            floor_bytes, before = self.under(floor_bytes)._absent_floor_bytes(), floor_bytes
        return floor_bytes

    def floor_op(self) -> Op | None:
        """Return the operator that sets the floor."""
        need = self.under(self.floor_bytes()).need_bytes()
        return self.ops[need.index(max(need))] if need else None

    def _absent_floor_bytes(self) -> int:
        return max(self.need_bytes(), default=self.static_bytes)

    def need_bytes(self) -> list[int]:
        """Return what each operator needs when every gap open at it is empty."""
        end = len(self.ops)
        change = [0] * (end + 1)
        for gap in self.gaps():
            nbytes = self.storages[gap.storage].nbytes
            change[gap.after_op] += nbytes
            change[min(gap.before_op, end)] -= nbytes
            if gap.before_op > end:
                change[0] += nbytes
                change[gap.before_op - end] -= nbytes
        return [op.peak_bytes - away for op, away in zip(self.ops, accumulate(change), strict=False)]


def _gaps_of(storage: int, saves: list[Save], touched: tuple[int, ...]) -> list[Gap]:
    """Return the gaps of one storage, whose saves all left it to autograd at some point."""
    uses = sorted({use for save in saves for use in save.uses})
    busy = sorted({*uses, *touched})
    ends = uses or [max(save.released_op for save in saves)]
    found = []
    for end in ends:
        free = max((save.free_op or 0 for save in saves if save.packed_op < end), default=end)
        before = bisect_left(busy, end)
        start = max(free, busy[before - 1] + 1) if before else free
        if start < end:
            found.append(Gap(storage=storage, after_op=start, before_op=end))
    return found
