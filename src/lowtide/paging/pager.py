"""A pager: addresses for a file, of which so many bytes are in memory at a time.

It is what systems of on-demand paging share, with what sets each of them apart as an option:

- *unified memory*: `Pager(nbytes, capacity_bytes=...)`. A fault brings a page, at a full memory the oldest goes;
- *prefetchers*: `Prefetch.SEQUENTIAL` (the 64 KiB around it), `RANDOM`, `TREE` (Ganguly et al., ISCA 2019; with
  `tree_evicts=True` leaves go by the tree as well) and `LEAP` (Maruf and Chowdhury, ATC 2020);
- *batched faults* (Zheng et al., HPCA 2016): `batch_faults=80, batch_s=20e-6`;
- *ETC* (Li et al., ASPLOS 2019), its proactive eviction: `free_bytes`, so that room is made before a fault needs it.
  Its throttling and its compression are not here;
- *DRAGON* (Markthub et al., SC 2018): `path` maps a file, `access` says what need not be read or written;
- *HUM* (Jung et al., PPoPP 2020): `push` has pages come beside the program, which may begin at once;
- *Kona* (Calciu et al., ASPLOS 2021): `line_bytes=64`, so that of a page only the lines that changed are written. They
  are found by a copy of the page, which takes memory as a page does;
- *Sentinel's profile* (Ren et al., HPCA 2021): `arm` protects pages, `write_counts` tells how often each was written in
  the intervals between. Reads are not seen: only writes fault on memory that is there.

Faults are served by userfaultfd, in pages of 4 KiB. A child that is forked does not have them.
"""

from __future__ import annotations

import ctypes
import os
import weakref
from dataclasses import dataclass
from enum import IntEnum, IntFlag
from pathlib import Path
from tempfile import gettempdir
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

import numpy as np

from lowtide.core.units import format_bytes
from lowtide.errors import BadArgument, NativeUnavailable, SpillError
from lowtide.paging.library import Config, load

if TYPE_CHECKING:
    import torch

PAGE_BYTES = 4096
# An instruction may need several pages at once, and a prefetcher half of memory.
LEAST_BYTES = 64 * PAGE_BYTES


class Prefetch(IntEnum):
    """What comes beside a page that was asked for; the same numbers as in native/pager.cpp."""

    NONE = 0
    SEQUENTIAL = 1
    RANDOM = 2
    TREE = 3
    LEAP = 4


class Access(IntFlag):
    """What a program promises of a file that it maps.

    READ_ONLY: nothing changes, so nothing is ever written. WRITE_ONLY: what was there before is not read. VOLATILE:
    it is not needed afterwards, so pages in memory at the end are not written.
    """

    READ_ONLY = 1
    WRITE_ONLY = 2
    VOLATILE = 4


_ANY = Access(0)


@dataclass(frozen=True, slots=True, kw_only=True)
class PagerStats:
    """What a pager has done so far, in pages unless the name says otherwise.

    `fetched` were read from the file, `fresh` came without a read, `prefetched` of both had been asked for by nobody.
    `hits` are faults that Leap had foreseen. `evicted_waiting` went while a fault waited for their room. `pushed` came
    while there was nothing to serve, `push_left` are still to come. `error` is that of a transfer that failed, or 0.
    """

    faults: int
    write_faults: int
    batches: int
    fetched: int
    fresh: int
    prefetched: int
    hits: int
    evicted: int
    written: int
    evicted_waiting: int
    pushed: int
    peak: int
    resident: int
    read_calls: int
    write_calls: int
    error: int
    push_left: int
    written_bytes: int


class Pager:
    """Memory of `nbytes`, of which `capacity_bytes` are in memory at most.

    `path`: a file whose bytes it has and keeps (None: a file without a name in `directory`, gone however the process
    ends).
    """

    def __init__(
        self,
        nbytes: int | None = None,
        *,
        capacity_bytes: int,
        path: str | Path | None = None,
        directory: str | Path | None = None,
        prefetch: Prefetch = Prefetch.NONE,
        tree_evicts: bool = False,
        access: Access = _ANY,
        batch_faults: int = 1,
        batch_s: float = 0.0,
        free_bytes: int = 0,
        line_bytes: int = 0,
    ) -> None:
        if capacity_bytes < LEAST_BYTES:
            raise BadArgument(
                f"a pager of {format_bytes(capacity_bytes)} is too small: pass at least {format_bytes(LEAST_BYTES)}"
            )
        if batch_faults < 1 or batch_s < 0 or free_bytes < 0:
            raise BadArgument("a pager needs 1 or more faults a batch, and 0 or more seconds and free bytes")
        if line_bytes and (line_bytes < 1 or PAGE_BYTES % line_bytes):
            raise BadArgument(f"lines of {line_bytes} bytes do not fill a page of {PAGE_BYTES}: pass 64")
        if Access.READ_ONLY in access and (Access.WRITE_ONLY in access or path is None):
            raise BadArgument("memory that is only read needs a file to read: pass path, and not write-only")
        fd = _open(path, directory, access)
        try:
            self.nbytes = os.fstat(fd).st_size if nbytes is None else nbytes
            if self.nbytes <= 0:
                raise BadArgument(f"a pager of {self.nbytes} bytes has nothing to page: pass nbytes")
            config = Config(
                bytes=self.nbytes,
                capacity_bytes=capacity_bytes,
                prefetch=int(prefetch),
                tree_evicts=int(tree_evicts),
                access=int(access),
                batch_faults=batch_faults,
                batch_ns=int(batch_s * 1e9),
                free_bytes=free_bytes,
                given=int(path is not None),
                line_bytes=line_bytes,
            )
            library, code = load(), ctypes.c_int()
            handle = library.lp_open(ctypes.byref(config), fd, ctypes.byref(code))
        except BaseException:
            os.close(fd)
            raise
        if not handle:
            os.close(fd)
            raise NativeUnavailable(
                f"faults cannot be served here: userfaultfd says {os.strerror(code.value)}: allow it "
                "(sysctl vm.unprivileged_userfaultfd=1), or run with CAP_SYS_PTRACE"
            )
        self._library, self._handle, self._fd = library, handle, fd
        self._pages = -(-self.nbytes // PAGE_BYTES)
        self._place = str(path) if path is not None else f"a file in {directory or gettempdir()}"
        self._finalizer = weakref.finalize(self, _close, library, handle, fd)

    @property
    def serves_kernel(self) -> bool:
        """Whether system calls may be given its memory: else they fail with EFAULT at pages that are away."""
        return bool(self._library.lp_kernel_too(self._alive()))

    def stats(self) -> PagerStats:
        """Return what it has done so far."""
        found = (ctypes.c_int64 * len(PagerStats.__slots__))()
        self._library.lp_counters(self._alive(), found)
        return PagerStats(**dict(zip(PagerStats.__slots__, found, strict=True)))

    def check(self) -> None:
        """Raise what went wrong at faults, which cannot raise: what could not be written is still in memory."""
        if code := self.stats().error:
            raise SpillError(code, f"paging failed: {os.strerror(code)}", self._place)

    def array(self, dtype: Any = np.uint8, shape: tuple[int, ...] | None = None, *, offset: int = 0) -> Any:
        """Return its memory, or a part of it, as an array of numpy's. It must not be used once the pager is closed."""
        base = self._library.lp_base(self._alive())
        kind = np.dtype(dtype)
        count = (self.nbytes - offset) // kind.itemsize if shape is None else int(np.prod(shape))
        if offset < 0 or offset + count * kind.itemsize > self.nbytes:
            raise BadArgument(
                f"{count * kind.itemsize} bytes at {offset} are more than the pager's {self.nbytes}: ask for less"
            )
        raw = (ctypes.c_char * (count * kind.itemsize)).from_address(base + offset)
        raw._pager = self  # the array keeps the pager alive
        found = np.frombuffer(raw, dtype=kind)
        return found if shape is None else found.reshape(shape)

    def tensor(self, dtype: torch.dtype, shape: tuple[int, ...], *, offset: int = 0) -> torch.Tensor:
        """Return a part of its memory as a tensor."""
        import torch

        nbytes = torch.empty(0, dtype=dtype).element_size() * int(np.prod(shape))
        return torch.from_numpy(self.array(shape=(nbytes,), offset=offset)).view(dtype).reshape(shape)

    def push(self, offset: int = 0, nbytes: int | None = None) -> None:
        """Have a part of its memory come beside the program, as far as there is room; return at once."""
        nbytes = self.nbytes - offset if nbytes is None else nbytes
        first = offset // PAGE_BYTES
        self._library.lp_push(self._alive(), first, -(-(offset + nbytes) // PAGE_BYTES) - first)

    def arm(self) -> None:
        """Have the next write of every page count: an interval ends, and another begins."""
        self._library.lp_arm(self._alive())

    def write_counts(self) -> Any:
        """Return for each page in how many intervals it was written; coming from the file begins one of its own."""
        found = np.zeros(self._pages, np.int32)
        self._library.lp_write_counts(self._alive(), found.ctypes.data)
        return found

    def close(self) -> None:
        """Write what changed, unless it is volatile, and give all memory up. Raises SpillError if that fails."""
        if not self._finalizer.alive:
            return
        self._finalizer.detach()
        if code := _close(self._library, self._handle, self._fd):
            raise SpillError(code, f"paging failed: {os.strerror(code)}", self._place)

    def _alive(self) -> int:
        if not self._finalizer.alive:
            raise BadArgument("the pager is closed: make another")
        handle: int = self._handle
        return handle

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _close(library: ctypes.CDLL, handle: int, fd: int) -> int:
    code: int = library.lp_close(handle)
    os.close(fd)
    return code


def _open(path: str | Path | None, directory: str | Path | None, access: Access) -> int:
    try:
        if path is None:
            return os.open(directory or gettempdir(), os.O_RDWR | os.O_TMPFILE | os.O_CLOEXEC, 0o600)
        flags = os.O_RDONLY if Access.READ_ONLY in access else os.O_RDWR | os.O_CREAT
        return os.open(path, flags | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise BadArgument(
            f"{path or directory} cannot be paged: {error.strerror}: name a file or directory of yours"
        ) from error
