"""Saving: the state is streamed to new files, and what is as it was stays in those of the state before."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch

from lowtide.checkpoint.directory import Directory, saving_to
from lowtide.checkpoint.manifest import Entry, Manifest
from lowtide.checkpoint.shard import ShardWriter, digest_of
from lowtide.checkpoint.tensor_bytes import check_storable, nbytes_of, read_in_pieces
from lowtide.checkpoint.training import Training, dtype_name, storage_of
from lowtide.checkpoint.values import Tensors, encode
from lowtide.memory.lent import lent_to_read, version_of

_SHARD_BYTES = 1 << 30
# A file of the state before is kept while at least half of it is in use, or little of it is not.
_MOST_WASTE_BYTES = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Saved:
    """What a save did, in bytes: the whole state, what was written of it, and what did not even have to be read."""

    total_bytes: int
    written_bytes: int
    unread_bytes: int


@dataclass(slots=True)
class Versions:
    """What is known of the tensors that were saved last, by name: their version and offset then, and their digest."""

    seen: dict[str, tuple[int, int, str]] = field(default_factory=dict)


def save_training(path: str | os.PathLike[str], training: Training, versions: Versions | None = None) -> Saved:
    """Save a training's state to a directory; `versions` remembers what need not be read the next time."""
    tensors: Tensors = {}
    values = encode(training.state(), "", tensors)
    for name, tensor in tensors.items():
        check_storable(name, tensor)
    with saving_to(Path(path)) as directory:
        return _Saving(directory, tensors, versions or Versions()).run(values)


class _Saving:
    """One save: entries of the manifest come together, and files with them."""

    def __init__(self, directory: Directory, tensors: Tensors, versions: Versions) -> None:
        self._directory = directory
        self._tensors = tensors
        self._versions = versions
        before = directory.before
        self._before: Mapping[str, Entry] = {} if before is None else before.tensors
        self._files: dict[str, int] = {} if before is None else dict(before.files)
        self._entries: dict[str, Entry] = {}
        self._written_bytes = 0
        self._unread_bytes = 0

    def run(self, values: object) -> Saved:
        """Write what has to be written, and make it the saved state."""
        aliases = _aliases(self._tensors)
        own = [name for name in self._tensors if name not in aliases]
        for names in _runs(own, self._tensors):
            self._write(names, again=False)
        for names in _runs(self._left_over(), self._tensors):
            self._write(names, again=True)
        for name, original in aliases.items():
            self._entries[name] = self._entries[original]
        used = {entry.file for entry in self._entries.values()}
        self._directory.commit(
            Manifest(
                generation=self._directory.generation,
                torch=torch.__version__,
                tensors={name: self._entries[name] for name in self._tensors},
                values=values,
                files={file: nbytes for file, nbytes in self._files.items() if file in used},
            )
        )
        total_bytes = sum(self._entries[name].nbytes for name in own)
        return Saved(total_bytes=total_bytes, written_bytes=self._written_bytes, unread_bytes=self._unread_bytes)

    def _write(self, names: Sequence[str], *, again: bool) -> None:
        """Write tensors to one new file, those that changed or, `again`, all."""
        with ShardWriter(self._directory.new_file(), [(name, self._tensors[name]) for name in names]) as writer:
            for name in names:
                tensor = self._tensors[name]
                if not again and self._is_seen(name, tensor):
                    continue
                with lent_to_read(tensor):
                    digest = digest_of(read_in_pieces(tensor))
                    self._versions.seen[name] = (version_of(tensor), int(tensor.storage_offset()), digest)
                    if not again and self._keeps(name, tensor, digest):
                        continue
                    writer.add(name, tensor, read_in_pieces(tensor))
                self._written_bytes += nbytes_of(tensor)
                self._entries[name] = _entry(writer.path.name, name, tensor, digest)
        if writer.nbytes:
            self._files[writer.path.name] = writer.nbytes

    def _is_seen(self, name: str, tensor: torch.Tensor) -> bool:
        """Tell whether a tensor's pages have not changed since the state before was saved; it is not read for that."""
        version, offset, digest = self._versions.seen.get(name, (0, 0, ""))
        if version == 0 or (version_of(tensor), int(tensor.storage_offset())) != (version, offset):
            return False
        if not self._keeps(name, tensor, digest):
            return False
        self._unread_bytes += nbytes_of(tensor)
        return True

    def _keeps(self, name: str, tensor: torch.Tensor, digest: str) -> bool:
        """Tell whether the state before has these bytes, and keep them there."""
        entry = self._before.get(name)
        if entry is None or replace(entry, file="", key="") != _entry("", "", tensor, digest):
            return False
        self._entries[name] = entry
        return True

    def _left_over(self) -> list[str]:
        """Return what is kept in files of which most is of no use any more."""
        used = Counter[str]()
        for entry in self._entries.values():
            used[entry.file] += entry.nbytes
        poor = {file for file, nbytes in used.items() if self._files[file] - nbytes > max(nbytes, _MOST_WASTE_BYTES)}
        return [name for name, entry in self._entries.items() if entry.file in poor]


def _entry(file: str, key: str, tensor: torch.Tensor, digest: str) -> Entry:
    return Entry(
        file=file,
        key=key,
        digest=digest,
        dtype=dtype_name(tensor),
        shape=tuple(tensor.shape),
        stride=tuple(tensor.stride()),
        nbytes=nbytes_of(tensor),
    )


def _aliases(tensors: Tensors) -> dict[str, str]:
    """Return which tensors are others under another name, such as tied weights."""
    first: dict[object, str] = {}
    found = {}
    for name, tensor in tensors.items():
        if not nbytes_of(tensor):
            continue
        own = (storage_of(tensor), int(tensor.storage_offset()), tensor.shape, tensor.stride(), tensor.dtype)
        original = first.setdefault(own, name)
        if original != name:
            found[name] = original
    return found


def _runs(names: Sequence[str], tensors: Tensors) -> Iterator[list[str]]:
    """Cut names into runs of about a file's size; no file holds tensors of two parts, which change at other times."""
    run: list[str] = []
    size = 0
    for name in names:
        if run and (size >= _SHARD_BYTES or _part(name) != _part(run[0])):
            yield run
            run, size = [], 0
        run.append(name)
        size += nbytes_of(tensors[name])
    if run:
        yield run


def _part(name: str) -> str:
    return name.partition("/")[0]
