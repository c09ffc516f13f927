"""A checkpoint's directory: a save adds files beside those of the state before, and the manifest's renaming ends it.

Note [Whole or not at all]: files of a new state have names that no state before had. They and the directory are on the
disk before the manifest that names them replaces the old one, which `rename` does at once. Until then the old manifest
and its files are as they were; what a save that was killed has left is removed by the next one.
"""

from __future__ import annotations

import errno
import fcntl
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from lowtide.checkpoint.manifest import NAME, Manifest, read_manifest
from lowtide.core.units import format_bytes
from lowtide.errors import CheckpointError

_FILE = re.compile(r"state-\d{6}-\d{5}\.safetensors")
_NEW = f"{NAME}.new"


class Directory:
    """The directory during a save; `before` is the state that it holds (None: no complete one)."""

    def __init__(self, path: Path, before: Manifest | None) -> None:
        self.path = path
        self.before = before
        self.generation = 1 if before is None else before.generation + 1
        self._files = 0

    def new_file(self) -> Path:
        """Return the path of one more file of the new state."""
        self._files += 1
        return self.path / f"state-{self.generation:06d}-{self._files:05d}.safetensors"

    def commit(self, manifest: Manifest) -> None:
        """Make the new state the saved one; its files are complete."""
        _sync_directory(self.path)
        new = self.path / _NEW
        with new.open("wb", buffering=0) as file:
            content = memoryview(manifest.to_bytes())
            while content:
                content = content[file.write(content) :]
            os.fsync(file.fileno())
        os.replace(new, self.path / NAME)  # noqa: PTH105  # one call that tests stop at
        _sync_directory(self.path)
        self.before = manifest

    @property
    def committed(self) -> bool:
        """Whether the new state is the saved one."""
        return self.before is not None and self.before.generation == self.generation

    def look_again(self) -> None:
        """Learn which state is the saved one after an error: the manifest may have been replaced before it."""
        self.before = read_manifest(self.path) if (self.path / NAME).exists() else None

    def tidy(self) -> None:
        """Remove what belongs to no saved state."""
        kept = set() if self.before is None else set(self.before.files)
        for file in self.path.iterdir():
            if (_FILE.fullmatch(file.name) and file.name not in kept) or file.name == _NEW:
                file.unlink()


@contextmanager
def saving_to(path: Path) -> Iterator[Directory]:
    """Open the directory for saving; after an error it holds a whole state, and the error says which."""
    try:
        path.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    except OSError as error:
        raise CheckpointError(error.errno, f"cannot save to {path}: {error.strerror}") from error
    directory = None
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise CheckpointError(error.errno, f"{path} is in use: another process is saving there") from error
        directory = Directory(path, read_manifest(path) if (path / NAME).exists() else None)
        directory.tidy()
        yield directory
        directory.tidy()
    except BaseException as error:
        if directory is not None:
            with suppress(OSError, CheckpointError):  # which of the files are needed is not known without a manifest
                directory.look_again()
                directory.tidy()
        if isinstance(error, OSError) and not isinstance(error, CheckpointError):
            raise _failed(path, error, directory) from error
        raise
    finally:
        os.close(descriptor)


def _failed(path: Path, error: OSError, directory: Directory | None) -> CheckpointError:
    if directory is None or directory.before is None:
        kept = "no state was saved there before"
    elif directory.committed:
        kept = "the new state is there and whole, but may be lost in a power failure"
    else:
        total = format_bytes(sum(directory.before.files.values()))
        kept = f"the state that was saved there before ({total}) is still there"
    full = error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
    remedy = ". Make room on the disk, or save elsewhere" if full else ""
    return CheckpointError(error.errno, f"saving to {path} failed: {error.strerror or error}; {kept}{remedy}")


def _sync_directory(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
