"""What a checkpoint consists of: the one file whose replacement makes a new state the saved one."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from lowtide.checkpoint.shard import damaged
from lowtide.errors import CheckpointError

NAME = "manifest.json"
_FORMAT = "lowtide checkpoint"
_VERSION = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """A tensor: the file that its bytes are in, under which key, their digest, and what it was."""

    file: str
    key: str
    digest: str
    dtype: str
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    nbytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """A saved state: `tensors` by name, `values` with the names of tensors in them, `files` with their bytes.

    `generation` counts the saves to a directory; files carry the one that they were written in.
    """

    generation: int
    torch: str
    tensors: Mapping[str, Entry]
    values: Any
    files: Mapping[str, int]

    def to_bytes(self) -> bytes:
        """Return the file's content, which tells by itself whether it is whole."""
        tensors = {name: asdict(entry) for name, entry in self.tensors.items()}
        body = {
            "generation": self.generation,
            "torch": self.torch,
            "files": dict(self.files),
            "tensors": tensors,
            "values": self.values,
        }
        text = json.dumps(body, separators=(",", ":"))
        head = {"format": _FORMAT, "version": _VERSION, "digest": _digest(text)}
        return f"{json.dumps(head)}\n{text}\n".encode()


def read_manifest(directory: Path) -> Manifest:
    """Read the manifest of a checkpoint."""
    path = directory / NAME
    try:
        content = path.read_bytes()
    except FileNotFoundError as error:
        found = "holds no saved state" if directory.is_dir() else "does not exist"
        raise CheckpointError(
            error.errno, f"{directory} {found}: {NAME} is missing, so no complete save is there"
        ) from error
    except OSError as error:
        raise CheckpointError(error.errno, f"cannot read {path}: {error.strerror}") from error
    try:
        first, _, text = content.decode().partition("\n")
        head = json.loads(first)
        if head["format"] != _FORMAT:
            raise ValueError(f"its format is {head['format']!r}")
    except (ValueError, KeyError, TypeError) as error:
        raise damaged(path, f"it is not the manifest of a checkpoint ({error})") from error
    if head.get("version") != _VERSION:
        raise CheckpointError(
            f"{path} is of version {head.get('version')}, this Lowtide reads {_VERSION}: use a newer one"
        )
    text = text.removesuffix("\n")
    if head.get("digest") != _digest(text):
        raise damaged(path, "its digest is another")
    body = json.loads(text)
    tensors = {
        name: Entry(**{**row, "shape": tuple(row["shape"]), "stride": tuple(row["stride"])})
        for name, row in body["tensors"].items()
    }
    return Manifest(
        generation=body["generation"],
        torch=body["torch"],
        tensors=tensors,
        values=body["values"],
        files=body["files"],
    )


def _digest(text: str) -> str:
    return hashlib.sha1(text.encode(), usedforsecurity=False).hexdigest()
