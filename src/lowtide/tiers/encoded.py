"""A medium before which a lossless codec stands: what it leaves out is never written.

A write is cut into frames of 8 MiB, as much as movers hand over at once. Each frame goes through the codec that leaves
least of it, or as it is where none saves a block, and lies at the offset it would have had. So extents are as large as
ever, and what is saved is traffic and wear: on a file, the blocks that are left out are holes.
"""

from __future__ import annotations

import errno
import mmap
import threading
from bisect import bisect_left, bisect_right, insort
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from lowtide.codecs import ZeroValue
from lowtide.codecs.contract import Bytes, Codec, NoRoom
from lowtide.errors import BadArgument, SpillCorrupted
from lowtide.tiers import failures
from lowtide.tiers.medium import ALIGN_BYTES, Medium, Releases
from lowtide.tiers.wrappers import Wrapper

FRAME_BYTES = 8 * 2**20

# A tier sees bytes, not dtypes: leaving zeros out costs next to nothing, so both common sizes of a value are tried.
ZERO_VALUE: tuple[Codec, ...] = (ZeroValue(4), ZeroValue(2))


@dataclass(frozen=True, slots=True)
class _Frame:
    """The value at `start`: `nbytes`, stored as `blob_bytes` that `codec` made (None: unencoded)."""

    start: int
    nbytes: int
    codec: Codec | None
    blob_bytes: int


class Encoded(Wrapper):
    """Writes what `codecs` leave of every frame. Training over it stays the same to the bit: lossy codecs are refused.

    The table of frames is in memory, a few words for each. What was written at once is overwritten at once, as extents
    are: of a frame that a later write overlaps, nothing can be read any more. Each thread has two buffers of 8 MiB.
    """

    def __init__(self, medium: Medium, *, codecs: Sequence[Codec] = ZERO_VALUE) -> None:
        for codec in codecs:
            check_lossless(codec)
        if medium.lossy:
            raise BadArgument(
                f"tier '{medium.name}' does not keep its data, so nothing could be decoded: leave out the codec"
            )
        super().__init__(medium)
        self._codecs = tuple(codecs)
        self._lock = threading.Lock()
        self._starts: list[int] = []
        self._frames: dict[int, _Frame] = {}
        self._buffers = threading.local()
        self._closed = False
        self.reset_figures()

    @property
    def codecs(self) -> tuple[Codec, ...]:
        """The codecs that are tried, and those of the wrapped medium."""
        return (*self._codecs, *self.medium.codecs)

    def figures(self) -> dict[str, object]:
        """Return the bytes that went to the medium and came from it, in whole blocks, and what was to be written."""
        return self.medium.figures() | {
            "disk_written_bytes": self._written_bytes,
            "disk_read_bytes": self._read_bytes,
            "before_codec_bytes": self._given_bytes,
        }

    def reset_figures(self) -> None:
        """Count from zero again, after a measurement."""
        self.medium.reset_figures()
        self._given_bytes = 0
        self._written_bytes = 0
        self._read_bytes = 0

    def close(self) -> None:
        """Close the wrapped medium."""
        self._closed = True
        self.medium.close()

    def write_at(self, offset: int, data: memoryview) -> None:
        """Write what is left of `data` at `offset`."""
        failures.check_offset(offset)
        failures.check_room(offset, data.nbytes, capacity_bytes=self.medium.capacity_bytes)
        if data.nbytes:
            # Before anything is written: where this fails, neither the old bytes nor the new ones are there.
            self._forget(offset, offset + data.nbytes)
            if isinstance(self.medium, Releases):
                self.medium.release(offset, offset + data.nbytes)
        for begin in range(0, data.nbytes, FRAME_BYTES):
            self._write(offset + begin, data[begin : begin + FRAME_BYTES])

    def read_at(self, offset: int, into: memoryview) -> None:
        """Fill `into` with what was written at `offset`."""
        failures.check_offset(offset)
        if self._closed:
            raise failures.closed(f"encoded tier '{self.name}'")
        done = 0
        while done < into.nbytes:
            frame = self._frame_at(offset + done)
            inside = offset + done - frame.start if frame is not None else 0
            if frame is None or inside >= frame.nbytes:
                raise failures.short_read(got=done, nbytes=into.nbytes, place=f"encoded tier '{self.name}'")
            part = into[done : done + frame.nbytes - inside]
            self._read(frame, inside, part)
            done += part.nbytes

    def _write(self, start: int, data: memoryview) -> None:
        values = np.frombuffer(data, np.uint8)
        frame, buffer = self._smallest(start, values)
        if buffer is None:
            self.medium.write_at(start, data)
        else:
            # Whole blocks go to the disk without a copy; old contents of the buffer are other tensors' bytes.
            buffer[frame.blob_bytes : _blocks_bytes(frame.blob_bytes)] = 0
            self.medium.write_at(start, buffer.data[: _blocks_bytes(frame.blob_bytes)])
        with self._lock:
            insort(self._starts, start)
            self._frames[start] = frame
            self._given_bytes += _blocks_bytes(frame.nbytes)
            self._written_bytes += _blocks_bytes(frame.blob_bytes)

    def _smallest(self, start: int, values: Bytes) -> tuple[_Frame, Bytes | None]:
        """Return the frame with the shortest blob, and the buffer that has it (None: the bytes as they are)."""
        best, kept = _Frame(start, values.nbytes, None, values.nbytes), None
        spare, other = self._two_buffers()
        for codec in self._codecs:
            # Less by a block, or it is not worth decoding.
            room = _blocks_bytes(best.blob_bytes) - ALIGN_BYTES
            try:
                blob = codec.encode(values, out=spare[: max(room, 0)])
            except NoRoom:
                continue
            best, kept = _Frame(start, values.nbytes, codec, blob.nbytes), spare
            spare, other = other, spare
        return best, kept

    def _read(self, frame: _Frame, inside: int, into: memoryview) -> None:
        """Fill `into` from a frame, `inside` bytes after its start."""
        if frame.codec is None:
            self.medium.read_at(frame.start + inside, into)
            read_bytes = into.nbytes
        else:
            read_bytes = _blocks_bytes(frame.blob_bytes)
            buffer = self._two_buffers()[0][:read_bytes]
            self.medium.read_at(frame.start, buffer.data)
            whole = into.nbytes == frame.nbytes
            values = np.frombuffer(into, np.uint8) if whole else np.empty(frame.nbytes, np.uint8)
            try:
                frame.codec.decode(buffer[: frame.blob_bytes], out=values)
            except ValueError as error:
                raise SpillCorrupted(
                    errno.EIO,
                    f"{frame.nbytes} bytes at {frame.start} of tier '{self.name}' came back changed: {error}: "
                    "check that disk, or spill elsewhere",
                ) from error
            if not whole:
                into[:] = values.data[inside : inside + into.nbytes]
        with self._lock:
            self._read_bytes += _blocks_bytes(read_bytes)

    def _frame_at(self, position: int) -> _Frame | None:
        """Return the last frame that starts no later than `position`."""
        with self._lock:
            index = bisect_right(self._starts, position)
            return self._frames[self._starts[index - 1]] if index else None

    def _forget(self, begin: int, end: int) -> None:
        """Forget the frames that overlap [begin, end)."""
        with self._lock:
            first = bisect_left(self._starts, begin)
            if first and begin < self._starts[first - 1] + self._frames[self._starts[first - 1]].nbytes:
                first -= 1
            last = bisect_left(self._starts, end)
            for start in self._starts[first:last]:
                del self._frames[start]
            del self._starts[first:last]

    def _two_buffers(self) -> tuple[Bytes, Bytes]:
        """Return this thread's page-aligned buffers: a blob that is used is smaller than its frame."""
        buffers: tuple[Bytes, Bytes] | None = getattr(self._buffers, "pair", None)
        if buffers is None:
            first, second = (np.frombuffer(mmap.mmap(-1, FRAME_BYTES), np.uint8) for _ in range(2))
            buffers = self._buffers.pair = (first, second)
        return buffers


def check_lossless(codec: Codec) -> None:
    """Refuse a codec that does not give every bit back."""
    if not codec.exactness.lossless:
        raise BadArgument(
            f"codec '{codec.name}' is lossy, so gradients would change: a tier takes lossless codecs only"
        )


def _blocks_bytes(nbytes: int) -> int:
    return -(-nbytes // ALIGN_BYTES) * ALIGN_BYTES
