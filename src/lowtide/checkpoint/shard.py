"""A safetensors file, written and read in pieces: eight bytes of header length, a JSON header, then the tensors' bytes.

No more than a piece of one tensor is ever in memory. The header's place is reserved before anything else is known of
the file, and filled in at the end, padded with blanks as the format allows.
"""

from __future__ import annotations

import hashlib
import json
import os
import struct
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from io import FileIO
from math import prod
from pathlib import Path
from typing import Any, Self

import torch

from lowtide.errors import CheckpointCorrupted, CheckpointError

PIECE_BYTES = 8 << 20
_ALIGNMENT = 4096  # of the payload: direct reads of what begins there need no copy
_MOST_HEADER_BYTES = 100_000_000  # the format's own bound

# What the format can say; others are bytes to it, and the manifest knows their type.
DTYPES = {
    torch.bool: "BOOL",
    torch.uint8: "U8",
    torch.int8: "I8",
    torch.int16: "I16",
    torch.uint16: "U16",
    torch.int32: "I32",
    torch.uint32: "U32",
    torch.int64: "I64",
    torch.uint64: "U64",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float32: "F32",
    torch.float64: "F64",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
}
# All that a table of tensors may name: what newer versions of the format can say besides, and PyTorch's own names.
TYPES = {
    **{name: dtype for dtype, name in DTYPES.items()},
    "C64": torch.complex64,
    "F8_E4M3FNUZ": torch.float8_e4m3fnuz,
    "F8_E5M2FNUZ": torch.float8_e5m2fnuz,
    **{str(dtype).removeprefix("torch."): dtype for dtype in vars(torch).values() if isinstance(dtype, torch.dtype)},
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Stored:
    """A tensor in a file: its type, a name of `TYPES`, and where its bytes are, from the file's begin.

    `stride`: of one that does not lie there in row-major order, from its first number to its last (None: it does).
    """

    dtype: str
    shape: tuple[int, ...]
    begin: int
    nbytes: int
    stride: tuple[int, ...] | None = None


def digest_of(pieces: Iterable[memoryview]) -> str:
    """Return what tells these bytes from others, by accident at least."""
    digest = hashlib.sha1(usedforsecurity=False)
    for piece in pieces:
        digest.update(piece)
    return digest.hexdigest()


class ShardWriter:
    """Writes one file, if anything is added; `names` are all that may be, with their shapes and types.

    Once it is left, all of the file is on the disk, with `nbytes`; after an exception there is none.
    """

    def __init__(self, path: Path, names: Iterable[tuple[str, torch.Tensor]]) -> None:
        self.path = path
        self.nbytes = 0
        most = {name: _header_row(tensor, 2**62, 2**62) for name, tensor in names}
        reserved = len(json.dumps(most, separators=(",", ":")).encode()) + 8
        self._payload_begin = -(-reserved // _ALIGNMENT) * _ALIGNMENT
        self._header: dict[str, Any] = {}
        self._written = 0
        self._file: FileIO | None = None

    def add(self, name: str, tensor: torch.Tensor, pieces: Iterable[memoryview]) -> None:
        """Append a tensor, whose bytes are `pieces`."""
        if self._file is None:
            self._file = FileIO(self.path, "x")
            self._file.seek(self._payload_begin)
        begin = self._written
        for piece in pieces:
            _write_all(self._file, piece)
            self._written += len(piece)
        self._header[name] = _header_row(tensor, begin, self._written)

    def _finish(self, file: FileIO) -> None:
        text = json.dumps(self._header, separators=(",", ":")).encode()
        header = text.ljust(self._payload_begin - 8)
        file.seek(0)
        _write_all(file, memoryview(struct.pack("<Q", len(header)) + header))
        os.fsync(file.fileno())
        # It is not read again soon, and memory is short.
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        self.nbytes = self._payload_begin + self._written

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_exception: object) -> None:
        if self._file is None:
            return
        try:
            if kind is None:
                self._finish(self._file)
        finally:
            self._file.close()
            if not self.nbytes:
                self.path.unlink()


class ShardReader:
    """Reads one file; `tensors` says what is in it. Raises `CheckpointCorrupted` where it is cut or damaged.

    The table of tensors is that of a safetensors file, unless it is given.
    """

    def __init__(self, path: Path, tensors: Mapping[str, Stored] | None = None) -> None:
        self.path = path
        try:
            self._file = FileIO(path, "r")
        except OSError as error:
            raise CheckpointError(error.errno, f"cannot open {path}: {error.strerror}") from error
        try:
            self.nbytes = os.fstat(self._file.fileno()).st_size
            self.tensors = dict(self._read_header() if tensors is None else tensors)
            for name, stored in self.tensors.items():
                if stored.begin + stored.nbytes > self.nbytes:
                    raise damaged(self.path, f"'{name}' reaches past its end")
        except BaseException:
            self._file.close()
            raise

    def _read_header(self) -> Iterator[tuple[str, Stored]]:
        start = self._file.read(8)
        length = struct.unpack("<Q", start)[0] if len(start) == 8 else -1
        if not 0 < length <= min(self.nbytes - 8, _MOST_HEADER_BYTES):
            raise damaged(self.path, "its header is missing or cut off")
        try:
            header = json.loads(self._file.read(length))
            rows = [(name, row) for name, row in header.items() if name != "__metadata__"]
            for name, row in rows:
                begin, end = row["data_offsets"]
                yield (
                    name,
                    Stored(dtype=row["dtype"], shape=tuple(row["shape"]), begin=8 + length + begin, nbytes=end - begin),
                )
                if type(begin) is not int or type(end) is not int:
                    raise ValueError(f"'{name}' from {begin} to {end}")
                if not 0 <= begin <= end <= self.nbytes - 8 - length:
                    raise damaged(self.path, f"'{name}' reaches past its end")
                nbytes = _nbytes(row["dtype"], row["shape"])
                if nbytes is not None and nbytes != end - begin:
                    raise damaged(self.path, f"'{name}' has {end - begin} bytes there, and {nbytes} by its shape")
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise damaged(self.path, f"its header cannot be read ({error})") from error

    def pieces(self, stored: Stored, into: memoryview) -> Iterator[memoryview]:
        """Read a tensor piece by piece: each is yielded once it is there. `into` is as large as it, or reused."""
        done = 0
        while done < stored.nbytes:
            at = done if len(into) >= stored.nbytes else 0
            piece = into[at : at + min(PIECE_BYTES, stored.nbytes - done, len(into) - at)]
            self._fill(piece, stored.begin + done)
            done += len(piece)
            yield piece

    def _fill(self, piece: memoryview, offset: int) -> None:
        while piece:
            try:
                got = os.preadv(self._file.fileno(), [piece], offset)
            except OSError as error:
                raise CheckpointError(error.errno, f"cannot read {self.path}: {error.strerror}") from error
            if got == 0:
                raise damaged(self.path, "it is cut off")
            piece, offset = piece[got:], offset + got

    def close(self) -> None:
        """Close the file; the system need not keep its pages."""
        os.posix_fadvise(self._file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_exception: object) -> None:
        self.close()


def damaged(path: Path, why: str) -> CheckpointCorrupted:
    """Return the error for a file that is not as it was written."""
    return CheckpointCorrupted(f"{path} is damaged: {why}. Nothing was loaded: use another checkpoint")


def _header_row(tensor: torch.Tensor, begin: int, end: int) -> dict[str, Any]:
    dtype = DTYPES.get(tensor.dtype)
    shape = list(tensor.shape) if dtype is not None else [tensor.numel() * tensor.element_size()]
    return {"dtype": dtype or "U8", "shape": shape, "data_offsets": [begin, end]}


def _nbytes(dtype: str, shape: Sequence[int]) -> int | None:
    """Return the bytes that a tensor takes (None: of a type that is not known)."""
    if any(type(length) is not int or length < 0 for length in shape):
        raise ValueError(f"a shape of {shape}")
    return prod(shape) * TYPES[dtype].itemsize if dtype in TYPES else None


def _write_all(file: FileIO, piece: memoryview) -> None:
    while piece:
        piece = piece[file.write(piece) :]
