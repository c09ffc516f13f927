"""Stock PyTorch under a kernel memory limit, with the kernel's own swap: what one has without doing anything.

Needs root, a memory cgroup (version 1 or 2) and a filesystem that takes a swap file. Everything made here is removed
again.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

_V1 = Path("/sys/fs/cgroup/memory")
_V2 = Path("/sys/fs/cgroup")
_VMSTAT = Path("/proc/vmstat")


class KernelSwapUnavailable(Exception):
    """This machine does not let us limit a process and swap; the message says why."""


@contextmanager
def swap_file(directory: Path, *, nbytes: int) -> Iterator[None]:
    """Add a swap file of `nbytes` for as long as the context lasts."""
    if os.geteuid() != 0:
        raise KernelSwapUnavailable("not root: cannot add a swap file")
    path = directory / f"swap-{os.getpid()}"
    try:
        _make(path, nbytes=nbytes)
        _command("swapon", str(path))
        try:
            yield
        finally:
            _command("swapoff", str(path))
    finally:
        path.unlink(missing_ok=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryGroup:
    """A memory cgroup with a limit: `prefix` is the command that starts a process in it."""

    directory: Path
    peak: str

    @property
    def prefix(self) -> list[str]:
        return ["sh", "-c", f'echo $$ > "{self.directory / "cgroup.procs"}" && exec "$0" "$@"']

    def peak_bytes(self) -> int:
        """Return the most that the kernel has charged to the group so far: its processes' memory and page cache."""
        return int((self.directory / self.peak).read_text())


@contextmanager
def memory_group(*, nbytes: int) -> Iterator[MemoryGroup]:
    """Make a group of processes with at most `nbytes` of memory and any amount of swap."""
    directory, limit, peak = _place()
    try:
        directory.mkdir()
    except OSError as error:
        raise KernelSwapUnavailable(f"cannot make a memory cgroup: {error.strerror}") from error
    try:
        try:
            (directory / limit).write_text(str(nbytes))
        except OSError as error:
            raise KernelSwapUnavailable(f"cannot limit a memory cgroup: {error.strerror}") from error
        yield MemoryGroup(directory=directory, peak=peak)
    finally:
        with suppress(OSError):
            directory.rmdir()


@contextmanager
def memory_limit(*, nbytes: int) -> Iterator[list[str]]:
    """Yield the command prefix that starts a process with at most `nbytes` of memory and any amount of swap."""
    with memory_group(nbytes=nbytes) as group:
        yield group.prefix


def swapped_bytes() -> tuple[int, int]:
    """Return how much this machine has swapped out and in since it started."""
    counts = {name: int(value) for name, value in (line.split() for line in _VMSTAT.read_text().splitlines())}
    page_bytes = os.sysconf("SC_PAGE_SIZE")
    return counts["pswpout"] * page_bytes, counts["pswpin"] * page_bytes


def _make(path: Path, *, nbytes: int) -> None:
    try:
        with path.open("xb") as file:
            path.chmod(0o600)
            os.posix_fallocate(file.fileno(), 0, nbytes)
    except OSError as error:
        raise KernelSwapUnavailable(f"cannot make a swap file: {error.strerror}") from error
    _command("mkswap", str(path))


def _place() -> tuple[Path, str, str]:
    name = f"lowtide-benchmark-{os.getpid()}"
    if (_V1 / "memory.limit_in_bytes").exists():
        return _V1 / name, "memory.limit_in_bytes", "memory.max_usage_in_bytes"
    controllers = _V2 / "cgroup.subtree_control"
    if controllers.exists() and "memory" in controllers.read_text().split():
        return _V2 / name, "memory.max", "memory.peak"
    raise KernelSwapUnavailable("no memory cgroup that a process could be put into")


def _command(*arguments: str) -> None:
    try:
        done = subprocess.run(arguments, capture_output=True, text=True, check=False)
    except FileNotFoundError as error:
        raise KernelSwapUnavailable(f"there is no '{arguments[0]}' on this machine") from error
    if done.returncode != 0:
        reason = (done.stderr.strip().splitlines() or ["no reason given"])[-1].rsplit(": ", 1)[-1]
        raise KernelSwapUnavailable(f"'{arguments[0]}' failed: {reason}")
