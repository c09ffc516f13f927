"""Several codecs in a row: arrays for arrays first, then at most one that makes bytes, then bytes for bytes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lowtide.codecs.contract import (
    Array,
    ArrayCodec,
    ByteCodec,
    Bytes,
    Codec,
    Exactness,
    Stats,
    as_bytes,
    bytes_to_fill,
    placed,
)
from lowtide.codecs.kernels import Kernel
from lowtide.errors import BadArgument

AnyCodec = Codec | ArrayCodec | ByteCodec

_LENGTH_BYTES = 8


@dataclass(frozen=True, slots=True)
class Chain:
    """An array through `arrays`, `blob` (None: its bytes as they are) and `tails`; one of the three at least.

    Before the blob of each byte codec come 8 bytes that say how long it was before.
    """

    arrays: tuple[ArrayCodec, ...] = ()
    blob: Codec | None = None
    tails: tuple[ByteCodec, ...] = ()

    @property
    def name(self) -> str:
        """The parts' names, joined by a plus."""
        parts = (*self.arrays, *((self.blob,) if self.blob is not None else ()), *self.tails)
        return "+".join(part.name for part in parts)

    @property
    def exactness(self) -> Exactness:
        """That of the part that loses most."""
        found = [part.exactness for part in (*self.arrays, *((self.blob,) if self.blob is not None else ()))]
        return next((one for one in (Exactness.SIGN, Exactness.BOUND) if one in found), Exactness.BITS)

    @property
    def kernel(self) -> Kernel | None:
        """None: no kernel does all of it."""
        return None

    def max_encoded_nbytes(self, nbytes: int) -> int:
        """Return what the parts make of each other's most."""
        for part in self.arrays:
            nbytes = nbytes // 4 * part.encoded_dtype.itemsize
        if self.blob is not None:
            nbytes = self.blob.max_encoded_nbytes(nbytes)
        for tail in self.tails:
            nbytes = tail.max_encoded_nbytes(nbytes) + _LENGTH_BYTES
        return nbytes

    def encode(self, values: Array, *, out: Bytes | None = None) -> Bytes:
        """Return what the last part makes."""
        for part in self.arrays:
            values = part.encode_array(values)
        if not self.tails and self.blob is not None:
            return self.blob.encode(values, out=out)
        blob = as_bytes(values) if self.blob is None else self.blob.encode(values)
        for tail in self.tails:
            length = np.array([blob.nbytes], np.uint64).view(np.uint8)
            blob = np.concatenate([length, tail.encode_bytes(blob)])
        return placed(blob, out)

    def decode(self, blob: Bytes, *, out: Array) -> None:
        """Fill `out`, the last part first."""
        bytes_to_fill(out)
        most = self._most_before_tails(out.nbytes)
        for depth, tail in enumerate(reversed(self.tails), start=1):
            limit = most[len(self.tails) - depth]
            if blob.nbytes < _LENGTH_BYTES:
                raise ValueError(f"{blob.nbytes} bytes are too few for a {self.name} blob")
            length = int(blob[:_LENGTH_BYTES].view(np.uint64)[0])
            if length > limit:
                raise ValueError(f"a {self.name} blob of {out.nbytes} bytes cannot have held {length}")
            shorter, blob = blob[_LENGTH_BYTES:], np.empty(length, np.uint8)
            tail.decode_bytes(shorter, out=blob)
        encoded = [np.empty(out.size, part.encoded_dtype) for part in self.arrays]
        inner: Array = encoded[-1] if encoded else out
        if self.blob is not None:
            self.blob.decode(blob, out=inner)
        elif blob.nbytes != inner.nbytes:
            raise ValueError(f"{blob.nbytes} bytes are not {inner.nbytes} of a {self.name} blob")
        else:
            bytes_to_fill(inner)[:] = blob
        before = [out, *encoded]
        for at in reversed(range(len(self.arrays))):
            self.arrays[at].decode_array(encoded[at], out=before[at])

    def _most_before_tails(self, nbytes: int) -> list[int]:
        inner = Chain(self.arrays, self.blob).max_encoded_nbytes(nbytes)
        found = [inner]
        for tail in self.tails[:-1]:
            found.append(tail.max_encoded_nbytes(found[-1]) + _LENGTH_BYTES)
        return found

    def bound(self, values: Array) -> NDArray[np.float64]:
        """Return the bound of the one part that rounds; `chained` takes no second."""
        lossy = [
            part
            for part in (*self.arrays, *((self.blob,) if self.blob is not None else ()))
            if not part.exactness.lossless
        ]
        return lossy[0].bound(values) if lossy else np.zeros(values.shape)

    def ratio_model(self, stats: Stats) -> float:
        """Return what is left before the byte codecs: what those leave is measured, not modelled."""
        left = 1.0
        for part in self.arrays:
            left *= part.encoded_dtype.itemsize / 4
        return left * (self.blob.ratio_model(stats) if self.blob is not None else 1.0)


def chained(parts: Sequence[AnyCodec]) -> Codec:
    """Return one codec of several; a single one that makes bytes by itself is returned as it is."""
    arrays: list[ArrayCodec] = []
    blob: Codec | None = None
    tails: list[ByteCodec] = []
    for at, part in enumerate(parts):
        last = at + 1 == len(parts)
        follows: Any = None if last else parts[at + 1]
        if isinstance(part, ByteCodec):
            tails.append(part)
        elif blob is not None or tails:
            raise BadArgument(f"codec '{part.name}' takes an array, and the codec before it makes bytes: put it first")
        elif isinstance(part, ArrayCodec) and not last and not isinstance(follows, ByteCodec):
            arrays.append(part)
        else:
            assert isinstance(part, Codec)
            blob = part
    if sum(not part.exactness.lossless for part in (*arrays, *((blob,) if blob is not None else ()))) > 1:
        raise BadArgument(f"{'+'.join(part.name for part in parts)} rounds twice: keep one of its lossy codecs")
    if blob is not None and not arrays and not tails:
        return blob
    return Chain(tuple(arrays), blob, tuple(tails))
