"""Memory as a tier, for what a codec leaves: `dram+zvc:512MiB`. What it may hold is taken from the budget."""

from __future__ import annotations

import ctypes
import errno
import os
import threading

from lowtide.core.units import format_bytes, parse_bytes
from lowtide.errors import BadArgument, SpillError, SpillFull
from lowtide.tiers import failures
from lowtide.tiers.medium import ALIGN_BYTES, Medium, PlainMedium
from lowtide.tiers.wrappers import Wrapper

# fallocate(2): give the pages back, and leave the file as long as it is.
_PUNCH_HOLE = 0x01 | 0x02
_BLOCK_BYTES = 512  # what st_blocks counts in


class DramMedium(PlainMedium):
    """Holds up to `most_bytes` in pages of memory that belongs to no tensor; offsets may be anything.

    What was written stays until it is released or overwritten. A write that would pass `most_bytes` is refused as on a
    full disk.
    """

    name = "dram"
    lossy = False
    capacity_bytes: int | None = None

    def __init__(self, most_bytes: int) -> None:
        if most_bytes < ALIGN_BYTES:
            raise BadArgument(f"a memory tier of {most_bytes} bytes holds nothing: state more, as in dram+zvc:512MiB")
        self.most_bytes = most_bytes
        self._fd = os.memfd_create("lowtide-dram", os.MFD_CLOEXEC)
        self._libc = ctypes.CDLL(None, use_errno=True)
        self._lock = threading.Lock()
        self._closed = False

    def used_bytes(self) -> int:
        """Return the bytes of memory that it takes now."""
        return 0 if self._closed else os.fstat(self._fd).st_blocks * _BLOCK_BYTES

    def figures(self) -> dict[str, object]:
        """Return what it may take of the budget, and what it takes."""
        return {"dram_most_bytes": self.most_bytes, "dram_used_bytes": self.used_bytes()}

    def reset_figures(self) -> None:
        """Give back what a measurement has written."""
        os.ftruncate(self._fd, 0)

    def write_at(self, offset: int, data: memoryview) -> None:
        """Keep `data`, if there is room."""
        self._check(offset)
        pages = -(-data.nbytes // ALIGN_BYTES) * ALIGN_BYTES
        with self._lock:  # or two writes would find the same room
            self._punch(offset, pages)
            if self.used_bytes() + pages > self.most_bytes:
                raise self._full(pages)
            done = 0
            while done < data.nbytes:
                done += os.pwrite(self._fd, data[done:], offset + done)

    def _full(self, nbytes: int) -> SpillFull:
        error = SpillFull(
            f"cannot keep {format_bytes(nbytes)} in the memory tier: it has {format_bytes(self.used_bytes())} "
            f"of {format_bytes(self.most_bytes)}: state more, as in dram+zvc:512MiB, or spill to a directory"
        )
        error.errno = errno.ENOSPC
        return error

    def read_at(self, offset: int, into: memoryview) -> None:
        """Fill `into`; what was never written is an error."""
        self._check(offset)
        done = 0
        while done < into.nbytes:
            got = os.preadv(self._fd, [into[done:]], offset + done)
            if not got:
                raise failures.short_read(got=done, nbytes=into.nbytes, place="the memory tier")
            done += got

    def release(self, begin: int, end: int) -> None:
        """Give the memory of these offsets back."""
        if end > begin and not self._closed:
            with self._lock:
                self._punch(begin, -(-(end - begin) // ALIGN_BYTES) * ALIGN_BYTES)

    def close(self) -> None:
        """Give all of it back."""
        if not self._closed:
            self._closed = True
            os.close(self._fd)

    def _punch(self, begin: int, nbytes: int) -> None:
        if not nbytes:
            return
        call = self._libc.fallocate(self._fd, _PUNCH_HOLE, ctypes.c_long(begin), ctypes.c_long(nbytes))
        if call != 0:
            code = ctypes.get_errno()
            raise SpillError(code, f"the memory tier cannot give {nbytes} bytes back: {os.strerror(code)}")

    def _check(self, offset: int) -> None:
        failures.check_offset(offset)
        if self._closed:
            raise failures.closed("the memory tier")


def open_dram(url: str) -> DramMedium:
    """Return the tier of a URL such as `dram:512MiB`."""
    size = url.partition(":")[2].lstrip("/")
    if not size:
        raise BadArgument(f"{url!r} does not state its share of the budget: write dram+zvc:512MiB")
    try:
        return DramMedium(parse_bytes(size))
    except BadArgument:
        raise
    except ValueError as error:
        raise BadArgument(f"{url!r} does not state its share of the budget: {error}") from error


def memory_bytes(medium: Medium) -> int:
    """Return how much of the budget a tier may take, because it is memory itself (0: it is elsewhere)."""
    while isinstance(medium, Wrapper):
        medium = medium.medium
    return medium.most_bytes if isinstance(medium, DramMedium) else 0
