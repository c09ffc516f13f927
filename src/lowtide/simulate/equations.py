r"""The five equations of the survey's model of swapping, checked after every event of a strict simulation.

After Gao et al., "Survey on Memory Swapping Mechanism for Deep Learning Training", Journal of Software 34(12), 2023;
the wording is ours:

(1)  V_dev     <- (V_dev \ (SO u freed)) u SI u allocated    what swaps out or is freed leaves the device, what swaps in
                                                             or is allocated enters it
(2)  V_storage <- (V_storage \ SI) u SO   and the other way round for the storage below
(3)  f_mem(V_dev) <= m_dev                what is on the device fits (the survey has <; a budget may be filled)
(4)  required n V_storage = {}            when an operator begins, nothing that is required is in storage,
(5)  required = running u pred(required)  and with what runs, that is all its predecessors: what it reads, and where
                                          that has to be made again, what its makers read, back to what is on the device

Here V_storage also holds what was discarded to be made again, and the chain of (5) ends at what is on the device: a
program frees tensors that no operator reads any more. Bytes on their way in are paid for from the start of the read
(they count in (3)) but are not on the device before they have arrived (they do not count in (5)).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import accumulate

from lowtide.core.trace import Trace


class Equations:
    """An account of its own: it learns of operators and transfers only, and must arrive at the simulator's figures."""

    def __init__(self, trace: Trace, budget_bytes: int, records: Mapping[int, int]) -> None:
        """Begin with what is there before the step; `records` are storages with the bytes of each that can leave."""
        self._trace = trace
        self._budget_bytes = budget_bytes
        self._sizes = records
        self._parent = {heir: storage for storage, heir in trace.heirs().items()}
        self._unmanaged_bytes = _alive_bytes(trace)
        self._allocated: list[list[int]] = [[] for _ in trace.ops]
        self._freed: list[list[int]] = [[] for _ in trace.ops]
        for storage, block in enumerate(trace.storages):
            if 0 <= block.first_op < len(trace.ops):
                self._allocated[block.first_op].append(storage)
            if 0 <= block.last_op < len(trace.ops):
                self._freed[block.last_op].append(storage)
        self._op = -1
        self._bytes = 0
        self._alive: set[int] = set()
        # Freed just now: a write of it may still have been under way, and lands before it is released.
        self._ended: set[int] = set()
        for storage, block in enumerate(trace.storages):
            if block.first_op < 0:
                self._allocate(storage)
        self.storage: set[int] = set()
        self.coming: set[int] = set()

    @property
    def device(self) -> set[int]:
        """V_dev: what was allocated or swapped in, and neither freed nor swapped out since."""
        return self._alive - self.storage

    def _allocate(self, storage: int) -> None:
        own = self._parent.get(storage, storage)
        if own not in self._alive:
            self._alive.add(own)
            self._bytes += self._trace.storages[own].nbytes

    def _free(self, storage: int) -> None:
        own = self._parent.get(storage, storage)
        if own in self._alive:
            self._alive.remove(own)
            self._ended.add(own)
            self._bytes -= self._trace.storages[own].nbytes

    def reach(self, op: int) -> None:
        """Take in, by (1), what operators have freed up to this one, and what this one allocates."""
        self._ended = set()
        if op <= self._op:  # another step begins: what this one's operators found is there again, and nothing else
            for storage in self._freed[self._op]:
                self._free(storage)
            there = {self._parent.get(k, k) for k, block in enumerate(self._trace.storages) if block.first_op < 0}
            for storage in sorted(self._alive ^ there):
                (self._allocate if storage in there else self._free)(storage)
            self._op = -1
        while self._op < op:
            for storage in self._freed[self._op] if self._op >= 0 else ():
                self._free(storage)
            self._op += 1
            for storage in self._allocated[self._op]:
                self._allocate(storage)

    def out(self, record: int) -> None:
        """Take in that a record's fast bytes are free: its write has landed, or it was discarded."""
        there = record in self._alive | self._ended and record not in self.storage
        assert there, f"(1) storage {record} swaps out and is not on the device"
        self.storage.add(record)

    def begins_to_come(self, record: int) -> None:
        """Take in that a record's fast bytes are paid for again."""
        assert record in self.storage, f"(2) storage {record} swaps in and is not in storage"
        assert record not in self.coming, f"(2) storage {record} swaps in twice"
        self.coming.add(record)

    def back(self, record: int) -> None:
        """Take in that a record has arrived or was made again."""
        assert record in self.coming, f"(2) storage {record} has arrived and was not on its way"
        self.coming.remove(record)
        self.storage.remove(record)

    def released(self, record: int) -> None:
        """Note that autograd let a record go that is in storage: no operator needs it any more."""
        self.storage.discard(record)
        self.coming.discard(record)

    def fits(self, op: int, peak_bytes: int, live_bytes: int) -> None:
        """Check (3) while an operator runs that would need `peak_bytes` if nothing were ever absent."""
        assert self.storage <= self._alive, f"(1), (2) {self.storage - self._alive} were freed and are in storage"
        beside_bytes = peak_bytes - self._unmanaged_bytes[op]
        own = beside_bytes + self._bytes - sum(self._sizes[record] for record in self.storage - self.coming)
        assert own == live_bytes, f"(3) operator {op}: {live_bytes} bytes are counted alive and {own} are"
        assert own <= self._budget_bytes, f"(3) operator {op}: {own} bytes are alive, {self._budget_bytes} may be"

    def begins(self, op: int, unpacked: Iterable[int], *, in_place: Collection[int] = ()) -> None:
        """Check (4) and (5) for an operator that begins; what it touches `in_place` has to be in storage."""
        operands = {*self._trace.ops[op].reads, *self._trace.ops[op].writes, *unpacked}
        required = {self._parent.get(operand, operand) for operand in operands}
        assert set(in_place) <= self.storage, f"operator {op} touches {set(in_place) - self.storage} in slow memory"
        required -= set(in_place)
        assert not required & self.storage, f"(4) operator {op} needs {required & self.storage}, which are in storage"
        assert required <= self._alive, f"(5) operator {op} needs {required - self._alive}, which are not on the device"

    def run_again(self, ops: Sequence[int]) -> None:
        """Check (5) for operators that make things again, one after the other."""
        made: set[int] = set()
        for op in ops:
            required = {self._parent.get(operand, operand) for operand in self._trace.ops[op].reads}
            missing = required - made - self.device
            assert not missing, f"(5) operator {op} runs again and needs {missing}: on no device, and made by nobody"
            made |= set(self._trace.ops[op].writes)


def _alive_bytes(trace: Trace) -> list[int]:
    """Return the bytes of the storages that are alive at each operator, if nothing is ever absent."""
    change = [0] * (len(trace.ops) + 2)
    for block in trace.storages:
        change[max(block.first_op, 0)] += block.nbytes
        change[min(block.last_op, len(trace.ops)) + 1] -= block.nbytes
    return list(accumulate(change))
