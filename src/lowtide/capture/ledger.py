"""Live fake storages and their holders, logged in the format of the native log.

Note [Holders]: a storage is alive while a fake storage stands for it, or autograd has it saved. What autograd saves is
not held here but described: when the last fake storage dies, only autograd holds the bytes (SOLE), and what is
unpacked later is a new fake storage that stands for the same serial.

Note [Who saves]: autograd saves an operator's operands before a dispatch mode sees the operator, and its result after.
So a save between two operators is the second one's if that reads it, unless the first one made it and keeps its result.
"""

from __future__ import annotations

import weakref
from typing import Any, NamedTuple

import torch

from lowtide.autograd.kept import KeptTensor, is_parameter
from lowtide.core.log import Event, LogEntry
from lowtide.core.trace import Reach


class Record:
    """A storage that autograd saved, from its first save to its last release."""

    __slots__ = ("number", "packs", "serial", "sole")

    def __init__(self, number: int, serial: int) -> None:
        self.number, self.serial = number, serial
        self.packs = 0
        self.sole = False


class Saved:
    """What autograd holds instead of a saved tensor: a description, by which it is made again."""

    __slots__ = ("device", "dtype", "ledger", "record", "size", "stride")

    def __init__(self, ledger: Ledger, record: Record, tensor: torch.Tensor) -> None:
        self.ledger, self.record = ledger, record
        self.size, self.stride = tuple(tensor.shape), tensor.stride()
        self.dtype, self.device = tensor.dtype, tensor.device

    def __del__(self) -> None:
        self.ledger.close_pack(self.record)


class _Packed(NamedTuple):
    """Where in the log a save since the last operator is; `maybe_result` if that operator may have made the save."""

    begin: int
    end: int
    serial: int
    maybe_result: bool


class Ledger:
    """Numbers storages by serials and logs their lives while `recording`. Saves below `least_bytes` are not logged."""

    def __init__(self, *, least_bytes: int) -> None:
        self.entries: list[LogEntry] = []
        self._lists = False
        self.names: dict[str, int] = {}
        self.recording = False
        self.paused = False
        self.static_bytes = 0
        self.gradient_serials: set[int] = set()
        self._least_bytes = least_bytes
        self._refs: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        self._serial_at: dict[int, int] = {}
        self._nbytes: dict[int, int] = {}
        self._holders: dict[int, int] = {}
        self._record_of: dict[int, Record] = {}
        self._found_sole: list[Record] = []
        self._written: set[int] = set()
        self._packed: list[_Packed] = []
        self._next = 1
        self._live_bytes = 0

    def start(self, *, reach: Reach) -> None:
        """Log from here on; what is alive now is static, and listed if the executor could move all of it."""
        self.static_bytes = self._live_bytes
        self.recording = True
        self._lists = reach is Reach.TOUCHED
        if self._lists:
            for serial, nbytes in self._nbytes.items():
                self.log(Event.EXISTS, serial, nbytes)

    @property
    def follows_touches(self) -> bool:
        """Whether the step is recorded for an executor that moves pages."""
        return self._lists

    def log(self, kind: Event, a: int = 0, b: int = 0, c: int = 0) -> None:
        """Write a line, if the step is recorded. There is no clock: times are predicted later."""
        if self.recording:
            self.entries.append(LogEntry(kind, 0, 0, a, b, c))

    def name(self, name: str) -> int:
        """Return the number of a name."""
        return self.names.setdefault(name, len(self.names))

    # ---- storages ----

    def serial_of(self, tensor: torch.Tensor) -> int:
        """Return the serial of a tensor's storage; one that was not seen yet existed before the step (0: no bytes)."""
        storage = storage_of(tensor)
        if storage is None or storage.nbytes() == 0:
            return 0
        serial = self._serial_at.get(storage._cdata)
        if serial is None:
            serial = self._adopt(storage)
            if self.recording:
                self.static_bytes += storage.nbytes()
                if self._lists:
                    self.log(Event.EXISTS, serial, storage.nbytes())
        return serial

    def read(self, tensor: torch.Tensor) -> int:
        """Log an operand of the operator that began last, and return its serial."""
        if serial := self.serial_of(tensor):
            self.log(Event.READ, serial, tensor._version, self._nbytes[serial])
        return serial

    def made(self, tensor: torch.Tensor) -> int:
        """Return the serial of what an operator returned, and log its allocation if it is new."""
        storage = storage_of(tensor)
        if storage is None or storage.nbytes() == 0:
            return 0
        serial = self._serial_at.get(storage._cdata)
        if serial is None:
            serial = self._adopt(storage)
            self.log(Event.ALLOC, serial, storage.nbytes())
        return serial

    def write(self, tensor: torch.Tensor, version: int) -> None:
        """Log a result of the operator that ends next."""
        if serial := self.made(tensor):
            self._written.add(serial)
            self.log(Event.WRITE, serial, version, self._nbytes[serial])

    def _adopt(self, storage: torch.UntypedStorage, serial: int | None = None) -> int:
        """Let a fake storage stand for `serial`, or for a new one."""
        if serial is None:
            serial = self._next
            self._next += 1
            self._nbytes[serial] = storage.nbytes()
            self._live_bytes += storage.nbytes()
        address = storage._cdata
        self._serial_at[address] = serial
        self._holders[serial] = self._holders.get(serial, 0) + 1
        self._refs[address] = weakref.ref(storage, lambda _: self._died(address))
        return serial

    def _died(self, address: int) -> None:
        serial = self._serial_at.pop(address)
        del self._refs[address]
        self._holders[serial] -= 1
        if self._holders[serial]:
            return
        record = self._record_of.get(serial)
        if record is None:
            self._free(serial)
        elif not record.sole:
            record.sole = True
            self._found_sole.append(record)

    def _free(self, serial: int) -> None:
        del self._holders[serial]
        nbytes = self._nbytes.pop(serial)
        self._live_bytes -= nbytes
        self.log(Event.FREE, serial, nbytes)

    # ---- autograd ----

    def pack(self, tensor: torch.Tensor) -> KeptTensor | Saved:
        """Take a tensor that autograd saves, as the runtime would."""
        storage = storage_of(tensor)
        if storage is None or is_parameter(tensor) or storage.nbytes() < self._least_bytes:
            return KeptTensor(tensor)
        begin = len(self.entries)
        saved = self._save(tensor)
        if self.recording:
            serial = saved.record.serial
            result = serial in self._written and _saves_result(tensor.grad_fn)
            self._packed.append(_Packed(begin=begin, end=len(self.entries), serial=serial, maybe_result=result))
        return saved

    def _save(self, tensor: torch.Tensor) -> Saved:
        serial = self.serial_of(tensor)
        record = self._record_of.get(serial)
        if record is None:
            record = self._record_of[serial] = Record(self._next, serial)
            self._next += 1
        record.packs += 1
        self.log(Event.PACK, record.number, serial, self._nbytes[serial])
        self._tell_sole()
        return Saved(self, record, tensor)

    def note_gradient(self, tensor: torch.Tensor) -> None:
        """Remember what a tensor is for, which may be gone when the step ends."""
        self.gradient_serials.add(self.serial_of(tensor))

    def unpack(self, saved: KeptTensor | Saved) -> torch.Tensor:
        """Give back a tensor that autograd saved."""
        if isinstance(saved, KeptTensor):
            return saved.get()
        self.log(Event.UNPACK, saved.record.number)
        self._tell_sole()
        self.paused = True
        try:
            tensor = torch.empty_strided(saved.size, saved.stride, dtype=saved.dtype, device=saved.device)
        finally:
            self.paused = False
        self._adopt(tensor.untyped_storage(), saved.record.serial)
        return tensor

    def close_pack(self, record: Record) -> None:
        """Note that autograd let a saved tensor go."""
        record.packs -= 1
        if record.packs:
            return
        del self._record_of[record.serial]
        self.log(Event.GONE, record.number, 0, self._nbytes[record.serial])
        if not self._holders[record.serial]:
            self._free(record.serial)

    def begin_operands(self, serials: set[int]) -> None:
        """Give the operator that begins the saves that it made; see Note [Who saves]."""
        claimed, results = [], set()
        for packed in self._packed:
            if packed.maybe_result and packed.serial not in results:
                results.add(packed.serial)  # the operator before saved its own result first
            elif packed.serial in serials:
                claimed.append(packed)
        self._packed.clear()
        self._written.clear()
        moved = [entry for packed in claimed for entry in self.entries[packed.begin : packed.end]]
        for packed in reversed(claimed):
            del self.entries[packed.begin : packed.end]
        self.entries += moved

    def _tell_sole(self) -> None:
        """Log which storages autograd alone holds: the runtime looks when something is saved or used, not before."""
        for record in self._found_sole:
            if record.packs and not self._holders[record.serial]:
                self.log(Event.SOLE, record.number)
            else:
                record.sole = False  # other code holds it again, or none at all
        self._found_sole.clear()


def storage_of(tensor: torch.Tensor) -> torch.UntypedStorage | None:
    """Return a tensor's storage (None: it has no such thing, as a sparse one)."""
    return tensor.untyped_storage() if tensor.layout is torch.strided else None


def _saves_result(node: Any) -> bool:
    """Tell whether an autograd node keeps what its forward operator returned."""
    return any(hasattr(node, f"_raw_saved_{name}") for name in ("result", "result0", "output", "out"))
