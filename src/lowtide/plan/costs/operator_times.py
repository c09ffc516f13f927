"""How long an operator takes with some of its operands in slow memory: the one place that every clock asks.

Where it was measured (`Problem.measured`, the table of AutoTM's profile), that is the answer. Elsewhere a roofline is.
Symbols: d the operator's time with all operands in fast memory, F and B the machine's peaks, f its floating-point
operations, n the bytes it moves, of which n' stay in fast memory, T the time it is busy with those in a tier
(`Access.access_s`):

    computes:  f / F >= n / B             t = max(d, n' / B + T)
    moves:     otherwise                  t = max(d, d n' / n + T)

That is where the tier shares the channels of fast memory. Where it has its own, the two parts of the sum pass beside
each other, and an operator that moves memory saves what fast memory would have taken for the bytes that are away:
t = max(f / F, d - (n - n') / B, T).

An operator moves all bytes of a storage it touches, but no more than fast memory can deliver in d: a view of a large
storage is smaller than that, which a trace does not say.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import cached_property

from lowtide.core.plan import Place, Problem
from lowtide.core.trace import Life, Op

# They return room, or a part of a table whose other rows they never touch.
_ALLOCATE = frozenset({"aten::empty_like", "aten::empty_strided", "aten::new_empty", "aten::new_empty_strided"})
_GATHER = frozenset({"aten::embedding", "aten::index_select", "aten::gather", "aten::index"})

Operands = Mapping[int, tuple[str, int]]
"""Storages that an operator finds in slow memory: the tier, and how many of their bytes are there."""


class OperatorTimes:
    """The operators of one problem, ready to be priced for many placements."""

    def __init__(self, problem: Problem) -> None:
        self._trace = problem.trace
        self._machine = problem.machine
        self._sizes = [storage.nbytes for storage in problem.trace.storages]
        self._measured = {(one.op, one.tier, one.storages): one.duration_s for one in problem.measured}
        self._known: dict[tuple[int, tuple[tuple[int, tuple[str, int]], ...]], float] = {}

    @cached_property
    def _lives(self) -> Mapping[int, Life]:
        return self._trace.lives()

    @cached_property
    def _heirs(self) -> Mapping[int, int]:
        return self._trace.heirs()

    def of(self, index: int, slow: Operands) -> float:
        """Return the time of an operator with these operands in slow memory; others that are named do not matter."""
        op = self._trace.ops[index]
        own = tuple(sorted((storage, where) for storage, where in slow.items() if storage in {*op.reads, *op.writes}))
        if not own:
            return op.duration_s
        known = self._known.get((index, own))
        if known is None:
            known = self._known[index, own] = self._time(index, op, dict(own))
        return known

    def all(self, places: Iterable[Place]) -> list[float]:
        """Return the time of every operator under a plan's places."""
        slow: dict[int, dict[int, tuple[str, int]]] = {}
        lives, heirs, count = self._lives, self._heirs, len(self._trace.ops)
        for place in places:
            nbytes = self._sizes[place.storage] if place.nbytes is None else place.nbytes
            life = lives[place.storage]
            touches = (*life.touches, *(count + op for op in life.touches)) if life.forever else life.touches
            for op in touches:
                if place.from_op <= op < place.until_op:
                    inherited = op >= count and not life.forever
                    name = heirs[place.storage] if inherited else place.storage
                    slow.setdefault(op % count, {})[name] = (place.tier, nbytes)
        times = [op.duration_s for op in self._trace.ops]
        for index, operands in slow.items():
            times[index] = self.of(index, operands)
        return times

    def _time(self, index: int, op: Op, slow: Operands) -> float:
        tiers = {tier for tier, _ in slow.values()}
        if len(tiers) == 1 and all(nbytes >= self._sizes[storage] for storage, (_, nbytes) in slow.items()):
            measured = self._measured.get((index, next(iter(tiers)), frozenset(slow)))
            if measured is not None:
                return measured
        read, written = self._bytes(op)
        total = sum(read.values()) + sum(written.values())
        if not total:
            return op.duration_s
        shared_s, beside_s, away = 0.0, 0.0, 0.0
        for tier in sorted(tiers):
            access = self._machine.links[tier].access
            assert access is not None, f"tier {tier!r} is not addressable"
            # The share of each operand that is there.
            parts = {s: nbytes / max(1, self._sizes[s]) for s, (name, nbytes) in slow.items() if name == tier}
            reads = sum(read.get(s, 0.0) * part for s, part in parts.items())
            writes = sum(written.get(s, 0.0) * part for s, part in parts.items())
            access_s = access.access_s(read_bytes=reads, written_bytes=writes, operands=len(parts))
            away += reads + writes
            if access.own_channel:
                beside_s = max(beside_s, access_s)
            else:
                shared_s += access_s
        kept = max(0.0, total - away)
        compute_s = 0.0 if self._machine.flops_per_s is None else op.flops / self._machine.flops_per_s
        peak = self._machine.memory_bytes_per_s
        if peak is not None and compute_s >= total / peak:
            return max(op.duration_s, kept / peak + shared_s, beside_s)
        if shared_s or peak is None:  # nothing is faster on the same channels
            return max(op.duration_s, op.duration_s * kept / total + shared_s, beside_s)
        return max(compute_s, op.duration_s - away / peak, beside_s)

    def _bytes(self, op: Op) -> tuple[dict[int, float], dict[int, float]]:
        """Return the bytes that an operator reads and writes of each operand."""
        if op.name in _ALLOCATE:
            return {}, {}
        written = {storage: float(self._sizes[storage]) for storage in op.writes}
        read = {storage: float(self._sizes[storage]) for storage in op.reads}
        if op.name in _GATHER:
            most = sum(written.values())
            read = {storage: min(nbytes, most) for storage, nbytes in read.items()}
        total, peak = sum(read.values()) + sum(written.values()), self._machine.memory_bytes_per_s
        if peak is not None and total > op.duration_s * peak:
            scale = op.duration_s * peak / total
            read = {storage: nbytes * scale for storage, nbytes in read.items()}
            written = {storage: nbytes * scale for storage, nbytes in written.items()}
        return read, written
