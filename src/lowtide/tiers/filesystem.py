"""What kind of filesystem a directory is on, and how much room it has."""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

MEMORY_FILESYSTEMS = frozenset({"tmpfs", "ramfs", "devtmpfs"})
"""Filesystems whose files are memory: spilling there frees none."""

_MOUNTS = Path("/proc/self/mountinfo")
_ESCAPE = re.compile(r"\\([0-7]{3})")


def filesystem_type(path: Path, *, mountinfo: str | None = None) -> str:
    """Return the type of the filesystem that holds `path`, such as 'ext4', or '' where the system does not tell."""
    if mountinfo is None:
        try:
            mountinfo = _MOUNTS.read_text(errors="surrogateescape")
        except OSError:
            return ""
    where = Path(os.path.realpath(path))
    found, depth = "", -1
    for line in mountinfo.splitlines():
        mount, separator, source = line.partition(" - ")
        fields = mount.split(" ")
        if not separator or len(fields) < 5:
            continue
        point = Path(_ESCAPE.sub(lambda match: chr(int(match[1], 8)), fields[4]))
        # The deepest mount point wins; of two on the same point, the later one hides the earlier.
        if where.is_relative_to(point) and len(point.parts) >= depth:
            found, depth = source.split(" ", 1)[0], len(point.parts)
    return found


def is_memory(path: Path) -> bool:
    """Return whether files under `path` are kept in memory."""
    return filesystem_type(path) in MEMORY_FILESYSTEMS


def free_bytes(directories: Sequence[Path]) -> int:
    """Return how much can be striped evenly over `directories`; those on one filesystem share its room."""
    files_on = Counter(directory.stat().st_dev for directory in directories)
    return len(directories) * min(_room_bytes(each) // files_on[each.stat().st_dev] for each in directories)


def _room_bytes(directory: Path) -> int:
    room = os.statvfs(directory)
    return room.f_bavail * room.f_frsize
