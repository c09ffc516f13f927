"""Copies between device and host on streams of their own, in the order that order.py lays down."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial

import torch

from lowtide.execute.backends.accelerator import order as order
from lowtide.execute.backends.accelerator.host import HostCopy, HostTier
from lowtide.execute.backends.accelerator.pace import StreamTimes
from lowtide.execute.backends.accelerator.records import Record, flat
from lowtide.execute.observe import touches


class Copies:
    """Starts copies and orders them against compute; nothing here makes the host wait."""

    def __init__(self, device: torch.device, host: HostTier) -> None:
        self.device = device
        self.stalls = StreamTimes(device)
        self.out_bytes = 0
        self.back_bytes = 0
        self._host = host
        self._out = torch.Stream(device=device)
        self._back = torch.Stream(device=device)
        # Every stream on which autograd saved or used something, by number: as a rule one.
        self._compute: dict[int, torch.Stream] = {}

    def note_stream(self) -> torch.Stream:
        """Return the stream on which this thread computes; from now on copies are ordered against it."""
        stream = torch.accelerator.current_stream(self.device)
        return self._compute.setdefault(stream.stream_id, stream)

    def _note_streams(self) -> None:
        """Order copies against every stream that used what the program holds, whether or not autograd saw it."""
        for stream in touches.streams(self.device):
            self._compute.setdefault(stream.stream_id, stream)

    def copy_out(self, record: Record, copy: HostCopy) -> None:
        """Start to fill a host copy from a record's storage."""
        assert record.storage is not None, f"record {record.number} is not on the device"
        if not record.is_saved:
            self._note_streams()
        order.copy_out_after_compute(self._out, self._compute.values())
        source = flat(record.storage)
        with order.on_stream(self._out):
            for start, stop, memory in self._host.parts(copy):
                memory.copy_(source[start:stop], non_blocking=True)
        copy.filled = self._out.record_event()
        self.out_bytes += record.nbytes

    def copy_back(self, record: Record, copy: HostCopy) -> torch.UntypedStorage:
        """Start to fill a new block with a host copy; return its storage. Raises where the allocator has no room."""
        stream = self.note_stream()
        target = torch.empty(record.nbytes, dtype=torch.uint8, device=self.device)
        order.copy_back_after_compute(self._back, stream)
        if copy.filled is not None:
            order.copy_back_after_copy_out(self._back, copy.filled)
        with order.on_stream(self._back):
            for start, stop, memory in self._host.parts(copy):
                target[start:stop].copy_(memory, non_blocking=True)
        copied = self._back.record_event()
        copy.readers = [reader for reader in copy.readers if not reader.query()] + [copied]
        return self._came(record, stream, target, copied)

    def copy_back_around(self, record: Record, memory: torch.Tensor) -> torch.UntypedStorage:
        """Fill a new block from ordinary memory. The host waits for it."""
        stream = self.note_stream()
        target = torch.empty(record.nbytes, dtype=torch.uint8, device=self.device)
        target.copy_(memory)
        return self._came(record, stream, target, None)

    def _came(
        self, record: Record, stream: torch.Stream, target: torch.Tensor, copied: torch.Event | None
    ) -> torch.UntypedStorage:
        self.back_bytes += record.nbytes
        record.arrived, record.home = copied, stream.stream_id
        record.waited.clear()
        return target.untyped_storage()

    def before_use(self, record: Record, tensor: torch.Tensor) -> None:
        """Order what this thread computes next after the record's copy back, and tell the allocator its stream."""
        stream = self.note_stream()
        arrived = record.arrived
        if arrived is not None and stream.stream_id not in record.waited:
            if arrived.query():
                record.arrived = None
            else:
                self.stalls.around(stream, lambda: order.use_after_copy_back(stream, arrived))
                record.waited.add(stream.stream_id)
        if record.home is not None and record.home != stream.stream_id:
            order.share_with_stream(tensor, stream)

    def before_write(self, record: Record) -> None:
        """Order what this thread computes next after the record's copy out: it may write what that reads."""
        filled = record.copy.filled if record.copy is not None else None
        if filled is not None and not filled.query():
            stream = self.note_stream()
            self.stalls.around(stream, lambda: order.write_after_copy_out(stream, filled))

    def share(self, block: torch.Tensor) -> None:
        """Tell the allocator that any stream that computes may use a block."""
        for stream in self._compute.values():
            order.share_with_stream(block, stream)

    def before_rerun(self, operands: Iterable[torch.Tensor]) -> torch.Stream:
        """Order an operator that this thread runs again after all that may have made its operands; return its stream.

        The allocator is told which stream uses them: the program let go of some that nobody would have read again.
        """
        stream = self.note_stream()
        order.rerun_after_compute(stream, [other for other in self._compute.values() if other is not stream])
        for operand in operands:
            order.share_with_stream(operand, stream)
        return stream

    def made(self, record: Record) -> None:
        """Note that a record's block was made on this thread's stream: see `before_use`."""
        stream = self.note_stream()
        record.arrived, record.home = stream.record_event(), stream.stream_id
        record.waited = {stream.stream_id}

    def before_free(self, storage: torch.UntypedStorage, copies: Iterable[torch.Event]) -> None:
        """Order what computes next after the copies that use a block, which is about to be given up."""
        block = flat(storage)
        pending = [copy for copy in copies if not copy.query()]
        for stream in self._compute.values():
            for copy in pending:
                self.stalls.around(stream, partial(order.free_after_copy, stream, copy))
            order.free_in_order_of_stream(block, stream)

    def synchronize(self) -> None:
        """Wait until all copies are done."""
        self._out.synchronize()
        self._back.synchronize()
