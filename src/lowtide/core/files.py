"""Files that hold all of what was written to them, or what they held before."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path


def write_whole(path: str | os.PathLike[str], content: bytes) -> None:
    """Write a file so that a reader sees the old one or the new one, never half of it.

    A link is followed: its target is written. A device or a pipe, which is not a file, is written into.
    """
    target = Path(os.path.realpath(path))
    if target.exists() and not target.is_file():
        target.write_bytes(content)
        return
    handle, name = tempfile.mkstemp(prefix=f".{target.name}.", suffix=".tmp", dir=target.parent)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content)
            # mkstemp makes it private; a result is as readable as the one it replaces, or any that the user creates.
            os.fchmod(file.fileno(), target.stat().st_mode & 0o777 if target.exists() else 0o666 & ~_umask())
            file.flush()
            os.fsync(file.fileno())
        Path(name).replace(target)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise


def _umask() -> int:
    current = os.umask(0o022)
    os.umask(current)
    return current
