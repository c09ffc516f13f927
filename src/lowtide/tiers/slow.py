"""Slow memory that operators read and write in place: a file that is mapped, on a device of its own or imitated.

`pmem:///path` is a file on persistent memory, or a directory there; `cxl:` is memory without cores of its own, which is
how CXL memory shows, and `numa:1` the memory of another node. Without a real device, this machine's memory is
used, and operators that touch it wait (memory/native/slow.h): `?emulate=optane`, or another machine's name.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import mmap
import os
import platform
import re
import stat
import weakref
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import parse_qsl, unquote, urlsplit

from lowtide.core.machine import Machine
from lowtide.core.units import format_bytes, parse_bytes
from lowtide.errors import BadArgument
from lowtide.tiers import failures, filesystem
from lowtide.tiers.medium import ALIGN_BYTES, Files, PlainMedium

SCHEMES = ("pmem", "cxl", "numa")

_NODES = Path("/sys/devices/system/node")
_LEAST_BYTES = 1 << 20
_EXAMPLES = "'pmem:///path', 'cxl:' or 'numa:1'"
# mbind(2) has no wrapper in libc.
_MBIND = {"x86_64": 237, "aarch64": 235}
_MPOL_BIND = 2
_MOST_MAPPED = 1 << 40


@dataclass(frozen=True, slots=True, kw_only=True)
class Emulation:
    """How a device that is not there is imitated: as the slow memory of `machine`, a preset's name or a machine.

    Its rates are those of its link to that machine's memory. `scale` says how much faster this machine's memory is than
    that one's (None: that is measured), and every rate with it, so that the two are as far apart here as there.
    `cache_bytes`: what the last-level cache holds is read for nothing.
    """

    machine: str | Machine = "optane"
    scale: float | None = None
    cache_bytes: int = 0


class SlowMedium(PlainMedium):
    """One file, which ranges map in place. `emulation`: None for a device that takes its own time."""

    name = "slow"
    lossy = False

    def __init__(
        self, fd: int, *, place: str, capacity_bytes: int | None, emulation: Emulation | None, directory: Path | None
    ) -> None:
        self.place = place
        self.capacity_bytes = capacity_bytes
        self.emulation = emulation
        self._directory = directory
        self.fds: tuple[int, ...] = (fd,)
        self._finalizer = weakref.finalize(self, os.close, fd)

    @property
    def files(self) -> Files | None:
        """The file (None: closed)."""
        return Files(fds=self.fds, stripe_bytes=1 << 40, direct=False) if self.fds else None

    @property
    def directories(self) -> tuple[Path, ...]:
        """Where its file is, if it has a place on a filesystem."""
        return () if self._directory is None else (self._directory,)

    def __repr__(self) -> str:
        how = "as it comes"
        if self.emulation is not None:
            machine = self.emulation.machine
            how = f"as {machine if isinstance(machine, str) else machine.name}'s"
        return f"SlowMedium({self.place}; {how}{'' if self.fds else '; closed'})"

    def write_at(self, offset: int, data: memoryview) -> None:
        """Write all of `data` at `offset`."""
        self._check(offset)
        failures.check_room(offset, data.nbytes, capacity_bytes=self.capacity_bytes)
        while data.nbytes:
            try:
                written = os.pwrite(self.fds[0], data, offset)
            except OSError as error:
                raise failures.spill_error(error, verb="write", nbytes=data.nbytes, place=self.place) from error
            offset, data = offset + written, data[written:]

    def read_at(self, offset: int, into: memoryview) -> None:
        """Fill `into` from `offset`."""
        self._check(offset)
        while into.nbytes:
            try:
                got = os.preadv(self.fds[0], [into], offset)
            except OSError as error:
                raise failures.spill_error(error, verb="read", nbytes=into.nbytes, place=self.place) from error
            if not got:
                raise failures.short_read(got=0, nbytes=into.nbytes, place=self.place)
            offset, into = offset + got, into[got:]

    def close(self) -> None:
        """Close the file; what is mapped of it stays."""
        self.fds = ()
        self._finalizer()

    def _check(self, offset: int) -> None:
        failures.check_offset(offset)
        if not self.fds:
            raise failures.closed(self.place)


Slow = str | SlowMedium | None


def open_slow(slow: str | SlowMedium, *, capacity_bytes: int | None = None) -> SlowMedium:
    """Return the slow memory that `slow` names; `capacity_bytes`: at most so much of it."""
    failures.checked_capacity(capacity_bytes)
    if isinstance(slow, SlowMedium):
        return slow
    if not isinstance(slow, str):
        raise BadArgument(f"cannot use {slow!r} as slow memory: write {_EXAMPLES}")
    parts = urlsplit(slow)
    options = _options(slow, parts.query)
    if parts.scheme == "pmem":
        return _persistent(slow, unquote(parts.path), options, capacity_bytes)
    if parts.scheme == "cxl" and not parts.netloc and not parts.path:
        return _cxl(options, capacity_bytes)
    if parts.scheme == "numa" and re.fullmatch(r"[0-9]+", parts.path):
        return _node(int(parts.path), _emulation(options, None), capacity_bytes)
    raise BadArgument(f"cannot read {slow!r} as slow memory: write {_EXAMPLES}")


def check_slow(slow: str) -> None:
    """Refuse what `open_slow` cannot read, without opening anything."""
    parts = urlsplit(slow)
    _emulation(_options(slow, parts.query), None)
    if parts.scheme not in SCHEMES:
        raise BadArgument(f"cannot read {slow!r} as slow memory: write {_EXAMPLES}")


def _options(url: str, query: str) -> Mapping[str, str]:
    found = dict(parse_qsl(query, keep_blank_values=True))
    unknown = sorted(found.keys() - {"emulate", "scale", "cache"})
    if unknown:
        raise BadArgument(f"unknown option {unknown[0]!r} in {url!r}: known are emulate, scale and cache")
    return found


def _emulation(options: Mapping[str, str], usual: str | None) -> Emulation | None:
    """Return what is asked for; `usual` is imitated where nothing is said (None: nothing is)."""
    machine = options.get("emulate", usual or "none")
    if machine == "none":
        return None
    try:
        scale = float(options["scale"]) if "scale" in options else None
        cache_bytes = parse_bytes(options["cache"]) if "cache" in options else 0
    except ValueError as error:
        raise BadArgument(f"slow memory takes a number as scale and bytes as cache: {error}") from None
    if scale is not None and not scale > 0:
        raise BadArgument(f"slow memory cannot be {scale} times as fast: pass a scale above 0")
    return Emulation(machine=machine, scale=scale, cache_bytes=cache_bytes)


# ---- persistent memory ----


def _persistent(url: str, path_text: str, options: Mapping[str, str], capacity_bytes: int | None) -> SlowMedium:
    if not path_text.startswith("/") or urlsplit(url).netloc:
        raise BadArgument(f"cannot read {url!r} as a place on this machine: write pmem:///path")
    path = Path(path_text)
    directory = path if path.is_dir() else path.parent
    if not directory.is_dir():
        raise BadArgument(f"slow memory {path}: there is no directory {directory}")
    existed = path.exists() and not path.is_dir()
    try:
        fd = _open_there(path)
    except OSError as error:
        raise BadArgument(
            f"slow memory {path} cannot be opened for reading and writing: {error.strerror}: pass a directory or a "
            "file of yours"
        ) from error
    try:
        found = _capacity(fd, path, directory, existed=existed)
    except BaseException:
        os.close(fd)
        raise
    return SlowMedium(
        fd,
        place=f"slow memory {path}",
        capacity_bytes=found if capacity_bytes is None else min(found, capacity_bytes),
        emulation=_emulation(options, None if _is_dax(directory) else "optane"),
        directory=directory,
    )


def _open_there(path: Path) -> int:
    """Return a file that no other program uses. A new one has no name, so that nothing is ever left of it."""
    if path.is_dir():
        return os.open(path, os.O_RDWR | os.O_TMPFILE | os.O_CLOEXEC, 0o600)
    if not path.exists():
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        path.unlink()
        return fd
    fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.close(fd)
        raise OSError(error.errno, "another process uses it") from error
    return fd


def _capacity(fd: int, path: Path, directory: Path, *, existed: bool) -> int:
    status = os.fstat(fd)
    if not stat.S_ISREG(status.st_mode):
        raise BadArgument(
            f"slow memory {path} is not a file: put a filesystem with DAX on the device (fsdax), and name a place there"
        )
    nbytes = status.st_size if existed else filesystem.free_bytes([directory])
    nbytes -= nbytes % ALIGN_BYTES
    if nbytes < _LEAST_BYTES:
        raise BadArgument(
            f"slow memory {path} has {format_bytes(nbytes)}, less than the {format_bytes(_LEAST_BYTES)} that are worth "
            "using: make the file larger, or name a directory with room"
        )
    return nbytes


def _is_dax(directory: Path) -> bool:
    """Tell whether files in a directory are the device's own memory, not pages of this machine's that cache it."""
    try:
        mounts = Path("/proc/self/mounts").read_text(errors="surrogateescape").splitlines()
    except OSError:
        return False
    where, best = directory.resolve(), ("", "")
    for line in mounts:
        fields = line.split(" ")
        if where.is_relative_to(fields[1]) and len(fields[1]) >= len(best[0]):
            best = (fields[1], fields[3])
    return bool({"dax", "dax=always"} & set(best[1].split(",")))


# ---- nodes ----


def _cxl(options: Mapping[str, str], capacity_bytes: int | None) -> SlowMedium:
    without_cores = sorted(_numbers("has_memory") - _numbers("has_cpu"))
    emulation = _emulation(options, None if without_cores else "cxl")
    if emulation is None:
        if not without_cores:
            raise BadArgument(
                "there is no CXL memory here: no node has memory and no cores. Write 'cxl:' to have it imitated"
            )
        return _node(without_cores[0], None, capacity_bytes)
    return _in_memory("imitated CXL memory", capacity_bytes, emulation)


def _node(node: int, emulation: Emulation | None, capacity_bytes: int | None) -> SlowMedium:
    there = sorted(_numbers("has_memory"))
    if node not in there:
        raise BadArgument(
            f"this machine has no memory on node {node}, only on {', '.join(map(str, there)) or 'none'}: "
            "'cxl:' imitates slow memory on any machine"
        )
    found = _node_bytes(node)
    medium = _in_memory(
        f"memory of node {node}", found if capacity_bytes is None else min(found, capacity_bytes), emulation
    )
    try:
        _bind(medium.fds[0], node)
    except BaseException:
        medium.close()
        raise
    return medium


def _in_memory(place: str, capacity_bytes: int | None, emulation: Emulation | None) -> SlowMedium:
    fd = os.memfd_create("lowtide-slow", os.MFD_CLOEXEC)
    return SlowMedium(fd, place=place, capacity_bytes=capacity_bytes, emulation=emulation, directory=None)


def _numbers(name: str) -> set[int]:
    """Return the nodes of a list such as "0-1,4"."""
    try:
        text = (_NODES / name).read_text().strip()
    except OSError:
        return set()
    found: set[int] = set()
    for part in filter(None, text.split(",")):
        first, _, last = part.partition("-")
        found.update(range(int(first), int(last or first) + 1))
    return found


def _node_bytes(node: int) -> int:
    text = (_NODES / f"node{node}" / "meminfo").read_text()
    match = re.search(r"MemTotal:\s+([0-9]+) kB", text)
    return int(match[1]) * 1024 if match else 0


def _bind(fd: int, node: int) -> None:
    """Have all pages of a file in memory come from one node: the policy belongs to the file."""
    number = _MBIND.get(platform.machine())
    libc = ctypes.CDLL(None, use_errno=True)
    libc.syscall.restype = ctypes.c_long
    os.ftruncate(fd, _MOST_MAPPED)
    mapped = mmap.mmap(fd, _MOST_MAPPED)
    anchor = ctypes.c_char.from_buffer(mapped)
    mask = (ctypes.c_ulong * 16)()
    mask[node // 64] = 1 << (node % 64)
    failed = number is None or libc.syscall(
        ctypes.c_long(number),
        ctypes.c_void_p(ctypes.addressof(anchor)),
        ctypes.c_ulong(_MOST_MAPPED),
        ctypes.c_int(_MPOL_BIND),
        mask,
        ctypes.c_ulong(1024),
        ctypes.c_uint(0),
    )
    code = ctypes.get_errno() if number is not None else errno.ENOSYS
    del anchor
    mapped.close()
    os.ftruncate(fd, 0)
    if failed:
        raise BadArgument(f"memory cannot be bound to node {node}: {os.strerror(code)}: name another place")
