"""The file tier: spill files that others cannot see, striped over directories, past the page cache where possible.

Striping over n files: stripe k = offset // stripe_bytes lives on file k % n, at
(k // n) * stripe_bytes + offset % stripe_bytes. With one directory, positions in the file are offsets.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import mmap
import os
import secrets
import threading
import weakref
from collections.abc import Iterator, Sequence
from pathlib import Path

from lowtide.core.units import format_bytes
from lowtide.errors import BadArgument
from lowtide.tiers import failures, filesystem
from lowtide.tiers.medium import ALIGN_BYTES, Files, PlainMedium

STRIPE_BYTES = 8 * 2**20
BOUNCE_BYTES = 2 * 2**20

_O_TMPFILE = "O_TMPFILE"
_O_DIRECT = "O_DIRECT"


class FileMedium(PlainMedium):
    """Private spill files, one in each of `directories`.

    The files have no name (O_TMPFILE, or unlinked as soon as they are created) and mode 0600, so they vanish however
    the process ends. Directories must exist: none is created, because none could be removed after `kill -9`.

    `direct` says whether the files bypass the page cache (O_DIRECT). Then `fds` take only block-aligned positions,
    lengths and memory; `write_at` and `read_at` accept any memory and length, and copy where they are not aligned.
    `notes` says what a user may want to know, such as a capacity beyond the free space.
    """

    name = "file"
    lossy = False
    align_bytes = ALIGN_BYTES
    stripe_bytes = STRIPE_BYTES

    def __init__(
        self, directories: Sequence[Path], *, capacity_bytes: int | None = None, notes: Sequence[str] = ()
    ) -> None:
        if isinstance(directories, str | os.PathLike):
            directories = (Path(directories),)
        if not directories:
            raise BadArgument("no spill directory given: pass at least one")
        self.capacity_bytes = failures.checked_capacity(capacity_bytes)
        self._directories = tuple(Path(directory).absolute() for directory in directories)
        self._owner_pid = os.getpid()
        self._bounces = threading.local()
        named: list[Path] = []
        fds: list[int] = []
        try:
            # One at a time, so that those made before a failure are known.
            fds.extend(create_unnamed(directory, named) for directory in self.directories)
            # One mode for all files, so that a reader of `fds` has one rule to follow.
            self.direct = all(_try_direct(fd, directory) for fd, directory in zip(fds, self.directories, strict=True))
            if not self.direct:
                for fd in fds:
                    _set_direct(fd, on=False)
        except BaseException:
            _release(fds, named, self._owner_pid)
            raise
        self.fds: tuple[int, ...] = tuple(fds)
        self._finalizer = weakref.finalize(self, _release, fds, named, self._owner_pid)
        self.notes = (*notes, *self._remarks())

    @property
    def directories(self) -> tuple[Path, ...]:
        """The directories, one for each file."""
        return self._directories

    @property
    def files(self) -> Files | None:
        """The files (None: closed)."""
        return Files(fds=self.fds, stripe_bytes=self.stripe_bytes, direct=self.direct) if self.fds else None

    def __repr__(self) -> str:
        mode = "direct" if self.direct else "buffered"
        return f"FileMedium({', '.join(map(str, self.directories))}; {mode}{'' if self.fds else '; closed'})"

    def write_at(self, offset: int, data: memoryview) -> None:
        """Write all of `data` at `offset`, a multiple of `align_bytes`. A forked child may only read."""
        self._check(offset)
        if os.getpid() != self._owner_pid:
            raise failures.other_process("the spill file", owner_pid=self._owner_pid)
        failures.check_room(offset, data.nbytes, capacity_bytes=self.capacity_bytes)
        for file, position, start, nbytes in self._spans(offset, data.nbytes):
            directory = self.directories[file]
            try:
                self._write(self.fds[file], position, data[start : start + nbytes])
            except OSError as error:
                left = None
                with contextlib.suppress(OSError):
                    left = filesystem.free_bytes([directory])
                raise failures.spill_error(
                    error, verb="write", nbytes=nbytes, place=f"spill directory {directory}", free_bytes=left
                ) from error

    def read_at(self, offset: int, into: memoryview) -> None:
        """Fill `into` from `offset`, a multiple of `align_bytes`."""
        self._check(offset)
        for file, position, start, nbytes in self._spans(offset, into.nbytes):
            place = f"spill directory {self.directories[file]}"
            try:
                got = self._read(self.fds[file], position, into[start : start + nbytes])
            except OSError as error:
                raise failures.spill_error(error, verb="read", nbytes=nbytes, place=place) from error
            if got < nbytes:
                raise failures.short_read(got=got, nbytes=nbytes, place=place)

    def free_bytes(self) -> int:
        """Return how many more bytes the directories have room for."""
        return filesystem.free_bytes(self.directories)

    def close(self) -> None:
        """Close the files, which frees their space. A forked child only closes its own descriptors."""
        self.fds = ()
        self._finalizer()

    def _check(self, offset: int) -> None:
        failures.check_offset(offset)
        if not self.fds:
            raise failures.closed("the spill file")

    def _spans(self, offset: int, nbytes: int) -> Iterator[tuple[int, int, int, int]]:
        """Yield (file, position in it, start in the view, length) of each run that is contiguous in a file."""
        files = len(self.fds)
        start = 0
        while start < nbytes:
            stripe, inside = divmod(offset + start, STRIPE_BYTES)
            length = nbytes - start if files == 1 else min(nbytes - start, STRIPE_BYTES - inside)
            yield stripe % files, stripe // files * STRIPE_BYTES + inside, start, length
            start += length

    def _write(self, fd: int, position: int, view: memoryview) -> None:
        body = self._body_bytes(view)
        if body:
            self._write_all(fd, position, view[:body])
        for start in range(body, view.nbytes, BOUNCE_BYTES):
            part = view[start : start + BOUNCE_BYTES]
            padded = _round_up(part.nbytes)
            bounce = self._bounce()
            bounce[: part.nbytes] = part
            # Old contents of the buffer are other tensors' bytes; the padding is defined instead.
            bounce[part.nbytes : padded] = bytes(padded - part.nbytes)
            self._write_all(fd, position + start, bounce[:padded])

    def _read(self, fd: int, position: int, view: memoryview) -> int:
        """Fill `view` and return how much of it there was to read."""
        body = self._body_bytes(view)
        if body:
            got = self._read_all(fd, position, view[:body], need=body)
            if got < body:
                return got
        for start in range(body, view.nbytes, BOUNCE_BYTES):
            part = view[start : start + BOUNCE_BYTES]
            bounce = self._bounce()
            got = self._read_all(fd, position + start, bounce[: _round_up(part.nbytes)], need=part.nbytes)
            got = min(got, part.nbytes)
            part[:got] = bounce[:got]
            if got < part.nbytes:
                return start + got
        return view.nbytes

    def _body_bytes(self, view: memoryview) -> int:
        """Return how many leading bytes of `view` can be moved without a copy."""
        if not self.direct:
            return view.nbytes
        if _address(view) % ALIGN_BYTES:
            return 0
        body = view.nbytes - view.nbytes % ALIGN_BYTES
        # A short copy of everything is cheaper than a second request for the tail.
        return 0 if body < view.nbytes <= BOUNCE_BYTES else body

    def _write_all(self, fd: int, position: int, view: memoryview) -> None:
        done = 0
        while done < view.nbytes:
            moved = self._whole(os.pwritev(fd, [view[done:]], position + done))
            if not moved:
                raise OSError(errno.EIO, f"the disk took {done} of {view.nbytes} bytes and no more")
            done += moved

    def _read_all(self, fd: int, position: int, view: memoryview, *, need: int) -> int:
        done = 0
        while done < need:
            moved = os.preadv(fd, [view[done:]], position + done)
            if done + moved >= need or not self._whole(moved):
                return done + moved
            done += self._whole(moved)
        return done

    def _whole(self, moved: int) -> int:
        """Return how much of a partial transfer counts: under O_DIRECT the next one has to start at a block."""
        return moved - moved % ALIGN_BYTES if self.direct else moved

    def _bounce(self) -> memoryview:
        """Return this thread's page-aligned buffer.

        An anonymous mmap is shared memory in Python: a fork while a direct read fills it cannot divert the bytes to the
        child's copy of the page, as may happen with private memory on older kernels.
        """
        bounce: memoryview | None = getattr(self._bounces, "view", None)
        if bounce is None:
            bounce = self._bounces.view = memoryview(mmap.mmap(-1, BOUNCE_BYTES))
        return bounce

    def _remarks(self) -> Iterator[str]:
        for directory in self.directories:
            if filesystem.is_memory(directory):
                yield f"{directory} is in memory: spilling there frees no memory; pass a directory on a disk"
        with contextlib.suppress(OSError):
            room = self.free_bytes()
            if self.capacity_bytes is not None and self.capacity_bytes > room:
                yield (
                    f"the spill may grow to {format_bytes(self.capacity_bytes)}, "
                    f"but its directories have {format_bytes(room)} free"
                )


def create_unnamed(directory: Path, named: list[Path]) -> int:
    """Return a descriptor of a new private file in `directory`; its path goes to `named` only while it has one."""
    if not directory.is_dir():
        what = "is not a directory" if directory.exists() else "does not exist"
        raise BadArgument(f"spill directory {directory} {what}: create it (mkdir -p) or pass another one")
    flags = os.O_RDWR | getattr(os, "O_CLOEXEC", 0)
    tmpfile = getattr(os, _O_TMPFILE, 0)
    if tmpfile:
        # Any refusal leads to the second way, whose error is the one to report.
        with contextlib.suppress(OSError):
            return _private(os.open(directory, flags | tmpfile, 0o600))
    path = directory / f".lowtide-{os.getpid()}-{secrets.token_hex(8)}"
    try:
        fd = os.open(path, flags | os.O_CREAT | os.O_EXCL | getattr(os, "O_NOFOLLOW", 0), 0o600)
    except OSError as error:
        raise BadArgument(
            f"cannot create a file in spill directory {directory}: {error.strerror}: "
            "make it writable or pass another one"
        ) from error
    try:
        path.unlink()
    except OSError:
        named.append(path)
    return _private(fd)


def _private(fd: int) -> int:
    # The mode given to open() passes through the umask, which may take the owner's own bits too.
    os.fchmod(fd, 0o600)
    return fd


def _set_direct(fd: int, *, on: bool) -> None:
    import fcntl  # Late, because only systems with O_DIRECT get here.

    direct: int = getattr(os, _O_DIRECT, 0)
    if not direct:
        return
    flags = fcntl.fcntl(fd, fcntl.F_GETFL)
    fcntl.fcntl(fd, fcntl.F_SETFL, flags | direct if on else flags & ~direct)


def _try_direct(fd: int, directory: Path) -> bool:
    """Switch `fd` to O_DIRECT and return whether a block really can be written and read that way.

    Recent kernels accept O_DIRECT on tmpfs but copy anyway, so memory is left buffered by name.
    """
    if not getattr(os, _O_DIRECT, 0) or filesystem.is_memory(directory):
        return False
    with mmap.mmap(-1, 2 * ALIGN_BYTES) as pages:
        pages[:ALIGN_BYTES] = b"\xa5" * ALIGN_BYTES
        with memoryview(pages) as both, both[:ALIGN_BYTES] as out, both[ALIGN_BYTES:] as back:
            try:
                _set_direct(fd, on=True)
                wrote = os.pwritev(fd, [out], 0)
                read = os.preadv(fd, [back], 0)
                works = wrote == read == ALIGN_BYTES and out == back
                os.ftruncate(fd, 0)
            except OSError as error:
                if error.errno in (errno.EINVAL, errno.EOPNOTSUPP):
                    return False
                place = f"spill directory {directory}"
                raise failures.spill_error(error, verb="write", nbytes=ALIGN_BYTES, place=place) from error
    return works


def _release(fds: list[int], named: list[Path], owner_pid: int) -> None:
    """Close the files and remove those that still have a name, unless this is a child of the process that made them."""
    while fds:
        with contextlib.suppress(OSError):
            os.close(fds.pop())
    if os.getpid() == owner_pid:
        while named:
            with contextlib.suppress(OSError):
                named.pop().unlink()


def _round_up(nbytes: int) -> int:
    return -(-nbytes // ALIGN_BYTES) * ALIGN_BYTES


def _address(view: memoryview) -> int:
    """Return where `view` starts in memory; read-only memory, whose address Python hides, counts as unaligned."""
    return 1 if view.readonly else ctypes.addressof(ctypes.c_char.from_buffer(view))
