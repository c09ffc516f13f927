"""Records on an accelerator that are given up without a copy, and made again by running operators on the device.

Note [Made on a device]: the thread that needs a record runs operators: in backward that is autograd's thread for the
device, on the stream of the node that asks. What they make belongs to that stream, and what they read was ready on some
stream on which autograd saved or used something, so they wait for all of those (`rerun_after_compute`); as a rule there
is one, and nothing to wait for. A block that is given up is ordered after the copies that use it, as always.
"""

from __future__ import annotations

import itertools
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._pytree import tree_leaves

from lowtide.execute.backends.accelerator.guard import Guard
from lowtide.execute.backends.accelerator.host import HostTier
from lowtide.execute.backends.accelerator.memory import DeviceMemory
from lowtide.execute.backends.accelerator.pace import StreamTimes
from lowtide.execute.backends.accelerator.records import flat, same_version
from lowtide.execute.backends.accelerator.shells import Shells
from lowtide.execute.observe.operators import Operator, aside
from lowtide.execute.recompute.remakes import Clock, came_out_otherwise
from lowtide.residency.machine import Residence

_WeakRef: Any = StorageWeakRef  # untyped in torch


class Serials:
    """Numbers for storages, never used twice. A weak reference keeps a storage's address from being another's."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[Any, int]] = {}
        self._numbers = itertools.count(1)
        self._most = 1024  # known ones; beyond that, those that are gone are forgotten

    def of(self, storage: torch.UntypedStorage) -> int:
        """Return the number of a storage."""
        known = self._known.get(storage._cdata)
        if known is None:
            if len(self._known) >= self._most:
                self._forget()
            known = self._known.setdefault(storage._cdata, (_WeakRef(storage), next(self._numbers)))
        return known[1]

    def _forget(self) -> None:
        for cdata, (weak, _) in list(self._known.items()):
            if weak.expired():
                self._known.pop(cdata, None)
        self._most = max(self._most, 2 * len(self._known))


class Remaking(Shells):
    """Adds to the records' ways out and back the one without a copy: see `Remakes`."""

    def __init__(self, memory: DeviceMemory, host: HostTier, guard: Guard, *, verify: bool) -> None:
        super().__init__(memory, host, guard)
        self._verify = verify
        self._serials = Serials()
        self._reruns = StreamTimes(self.device)

    def serial(self, tensor: torch.Tensor) -> int:
        if tensor.device != self.device:
            return -1
        try:
            storage = tensor.untyped_storage()
        except (RuntimeError, NotImplementedError):  # sparse, or a wrapper
            return 0
        return self._serials.of(storage) if storage.nbytes() else 0

    def is_shared(self, tensor: torch.Tensor) -> bool:
        return not tensor.untyped_storage().resizable()

    def is_lent(self, record: int) -> bool:
        found = self._records.get(record)
        storage = found.storage if found is not None else None
        return storage is not None and not storage.resizable()

    def alias(self, tensor: torch.Tensor) -> torch.Tensor | None:
        self._copies.note_stream()  # it is ready there: see Note [Made on a device]
        with aside():
            return same_version(tensor)

    # ---- giving up and taking ----

    def discard(self, record: int) -> bool:
        with aside(), self._lock:
            found = self._records.get(record)
            if found is None or found.storage is None or not self._is_open:
                return False
            if found.state not in (Residence.RESIDENT, Residence.CLEAN) or not found.is_alone():
                return False
            if found.storage.nbytes() != found.nbytes:
                return False  # resized by its owner
            if self._verify:
                try:
                    found.checksum = _checksum(found.storage)
                except torch.OutOfMemoryError:
                    return False
            self._give_up(found)
            self._forget_copy(found)
            found.state = Residence.DISCARDED
            return True

    def adopt(self, record: int, tensor: torch.Tensor) -> bool:
        with aside(), self._lock:
            found, storage = self._records.get(record), tensor.untyped_storage()
            if found is None or found.state is not Residence.DISCARDED or storage.nbytes() != found.nbytes:
                return False
            if storage._cdata in self._by_storage or storage.device != self.device:
                return False
            if found.checksum is not None and not torch.equal(_checksum(storage), found.checksum):
                raise came_out_otherwise(found.nbytes)
            found.storage, found.cdata, found.state = storage, storage._cdata, Residence.RESIDENT
            found.checksum = None
            self._by_storage[found.cdata] = found
            self._copies.made(found)
            if self._guard.log is not None:
                self._guard.log.fetched(record, storage)
            return True

    def flat(self, record: int, dtype: torch.dtype) -> torch.Tensor | None:
        with aside(), self._lock:
            found = self._records[record]
            return self._hand_out(found, dtype, 0, (found.nbytes // dtype.itemsize,), (1,))

    # ---- calls ----

    def run(self, operator: Operator, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        operands = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        stream = self._copies.before_rerun([operand for operand in operands if operand.device == self.device])
        # A call that named no index made its result on the device that was current then, which was ours.
        current = torch.accelerator.current_device_index()
        torch.accelerator.set_device_index(self.device.index)
        try:
            return self._reruns.around(stream, lambda: self._guard.again(operator, args, kwargs))
        finally:
            torch.accelerator.set_device_index(current)

    @property
    def clock(self) -> Clock:
        return self

    def took_s(self, operator: Operator, args: tuple[Any, ...], kwargs: dict[str, Any]) -> float | None:
        return self._guard.duration_s(operator, args, kwargs)

    def ran_s(self) -> float:
        return self._reruns.total_s()

    def mark_call(self, number: int) -> None:
        self._guard.mark_call(number)


def _checksum(storage: torch.UntypedStorage) -> torch.Tensor:
    """Return the sum of a storage's bytes, as whole numbers, on the device."""
    row = flat(storage)
    return (row.view(torch.int64) if row.numel() % 8 == 0 else row).sum(dtype=torch.int64)
