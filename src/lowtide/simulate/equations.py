r"""The five equations of the survey's model of swapping, checked after every event of a strict simulation.

After Gao et al., "Survey on Memory Swapping Mechanism for Deep Learning Training", Journal of Software 34(12), 2023;
the wording is ours:

(1)  V_dev     <- (V_dev \ SO) u SI       what swaps out leaves the device, what swaps in enters it
(2)  V_storage <- (V_storage \ SI) u SO   and the other way round for the storage below
(3)  f_mem(V_dev) <= m_dev                what is on the device fits (the survey has <; a budget may be filled)
(4)  required(op) n V_storage = {}        when an operator begins, nothing it needs is in storage,
(5)  required(op) <= V_dev                and all of it is on the device.

Here V_storage also holds what was discarded to be made again. Bytes on their way in are paid for from the start of the
read (they count in (3)) but are not on the device before they have arrived (they do not count in (5)).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

from lowtide.core.trace import Trace


class Equations:
    """An account of its own: it learns of transfers only, and must arrive at the simulator's figures."""

    def __init__(self, trace: Trace, budget_bytes: int, records: Mapping[int, int]) -> None:
        """Begin with everything on the device; `records` are storages with the bytes of each that can leave."""
        self._trace = trace
        self._budget_bytes = budget_bytes
        self._sizes = records
        self._records = frozenset(records)
        self._parent = {heir: storage for storage, heir in trace.heirs().items()}
        self.device: set[int] = set(self._records)
        self.storage: set[int] = set()
        self.coming: set[int] = set()

    def out(self, record: int) -> None:
        """Take in that a record's fast bytes are free: its write has landed, or it was discarded."""
        assert record in self.device, f"(1) storage {record} swaps out and is not on the device"
        assert record not in self.storage, f"(2) storage {record} swaps out and is in storage already"
        self.device.remove(record)
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
        self.device.add(record)

    def released(self, record: int) -> None:
        """Take in that autograd let a record go that is in storage: nobody needs it any more."""
        self.storage.discard(record)
        self.coming.discard(record)
        self.device.add(record)

    def fits(self, op: int, peak_bytes: int, live_bytes: int) -> None:
        """Check (3) while an operator runs that would need `peak_bytes` if nothing were ever absent."""
        assert not self.device & self.storage, f"(1) {self.device & self.storage} are on the device and in storage"
        assert self.device | self.storage == self._records, "(1), (2) a storage is neither on the device nor in storage"
        own = peak_bytes - sum(self._sizes[record] for record in self.storage - self.coming)
        assert own == live_bytes, f"(3) operator {op}: {live_bytes} bytes are counted alive and {own} are"
        assert own <= self._budget_bytes, f"(3) operator {op}: {own} bytes are alive, {self._budget_bytes} may be"

    def begins(self, op: int, unpacked: Iterable[int], *, in_place: Collection[int] = ()) -> None:
        """Check (4) and (5) for an operator that begins; what it touches `in_place` has to be in storage."""
        operands = {*self._trace.ops[op].reads, *self._trace.ops[op].writes, *unpacked}
        required = {self._parent.get(operand, operand) for operand in operands} & self._records
        assert set(in_place) <= self.storage, f"operator {op} touches {set(in_place) - self.storage} in slow memory"
        required -= set(in_place)
        assert not required & self.storage, f"(4) operator {op} needs {required & self.storage}, which are in storage"
        assert required <= self.device, f"(5) operator {op} needs {required - self.device}, which are not on the device"
