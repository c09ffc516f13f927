"""What a codec is: three kinds, by what they map, and what each gives back.

array -> array      a value for a value, of another type: casts
array -> bytes      a blob of values, or of the bytes of any values
bytes -> bytes      a blob of a blob

A `Codec` maps an array to bytes: that is what stands before a tier and what a plan names. `chain.py` makes one of
several: "bf16+zvc2+blosc2".
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from lowtide.errors import BadArgument

if TYPE_CHECKING:
    from lowtide.codecs.kernels import Kernel

Array = NDArray[Any]
Bytes = NDArray[np.uint8]


class Exactness(StrEnum):
    """What of a value comes back.

    BITS: every bit. SIGN: whether it is above zero, which is all that a ReLU's backward looks at; other uses see other
    numbers. BOUND: a number within a bound that follows from the value and the codec.
    """

    BITS = "bits"
    SIGN = "sign"
    BOUND = "bound"

    @property
    def lossless(self) -> bool:
        """Whether every bit comes back."""
        return self is Exactness.BITS


@dataclass(frozen=True, slots=True, kw_only=True)
class Stats:
    """What a codec's ratio depends on. `density`: the share of values that are not zero."""

    density: float = 1.0

    def __post_init__(self) -> None:
        if not 0 <= self.density <= 1:
            raise BadArgument(f"a density of {self.density} is not a share: use a number from 0 to 1")


class Unencodable(BadArgument):
    """A value that a codec cannot hold within its bound: what it is in stays as it is."""


class NoRoom(BadArgument):
    """A blob that is longer than the memory it is to lie in."""


@runtime_checkable
class Codec(Protocol):
    """An encoding of an array as bytes.

    The contract, which `lowtide.testing.codecs.CodecTests` checks:

    - `decode` fills `out`, which has the shape and dtype that were encoded: a blob does not say them.
    - What comes back is what `exactness` says: the same bits; or each value within `bound` of what it was.
    - What cannot be held within the bound is refused by `encode` with `Unencodable`, never clipped.
    - No blob is longer than `max_encoded_nbytes` says of the array's bytes; one that does not fit into `out` is refused
      with `NoRoom`. What lies behind a blob in `out` may change.
    - A blob that `encode` cannot have made for `out` is refused by `decode` with `ValueError`, or decoded to something:
      a codec is not a checksum.
    - Encoding keeps no state: one codec serves any number of threads.
    """

    @property
    def name(self) -> str:
        """The codec's name in plans, URLs and messages."""

    @property
    def exactness(self) -> Exactness:
        """What comes back."""

    @property
    def kernel(self) -> Kernel | None:
        """The native functions that do all of it, for movers, which then need no GIL (None: only Python can)."""

    def max_encoded_nbytes(self, nbytes: int) -> int:
        """Return how long the blob of `nbytes` bytes can be at most, whatever they are."""

    def encode(self, values: Array, *, out: Bytes | None = None) -> Bytes:
        """Return the blob of `values`: the beginning of `out`, if that is given."""

    def decode(self, blob: Bytes, *, out: Array) -> None:
        """Fill `out` with the values of `blob`."""

    def bound(self, values: Array) -> NDArray[np.float64]:
        """Return how far each value may be from what comes back."""

    def ratio_model(self, stats: Stats) -> float:
        """Return the share of a single-precision tensor's bytes that is left, given what is known of its values."""


@runtime_checkable
class ArrayCodec(Protocol):
    """An encoding of an array as one of as many values of another type."""

    @property
    def name(self) -> str:
        """The codec's name in plans, URLs and messages."""

    @property
    def exactness(self) -> Exactness:
        """What comes back."""

    @property
    def encoded_dtype(self) -> np.dtype[Any]:
        """The type of the encoded values."""

    def encode_array(self, values: Array) -> Array:
        """Return the encoded values, in one row."""

    def decode_array(self, encoded: Array, *, out: Array) -> None:
        """Fill `out` with the values of `encoded`."""

    def bound(self, values: Array) -> NDArray[np.float64]:
        """Return how far each value may be from what comes back."""


@runtime_checkable
class ByteCodec(Protocol):
    """A lossless encoding of bytes as fewer."""

    @property
    def name(self) -> str:
        """The codec's name in plans, URLs and messages."""

    def max_encoded_nbytes(self, nbytes: int) -> int:
        """Return how long the blob of `nbytes` bytes can be at most, whatever they are."""

    def encode_bytes(self, raw: Bytes) -> Bytes:
        """Return the blob of `raw`."""

    def decode_bytes(self, blob: Bytes, *, out: Bytes) -> None:
        """Fill `out` with the bytes of `blob`, which were as many."""


def as_bytes(values: Array) -> Bytes:
    """Return the bytes of `values` in a row, copied only if they do not lie so."""
    return np.ascontiguousarray(values).reshape(-1).view(np.uint8)


def bytes_to_fill(out: Array) -> Bytes:
    """Return the bytes of `out`, to be written to."""
    if not out.flags.c_contiguous:
        raise BadArgument("cannot decode into an array with gaps: pass a contiguous one")
    return out.reshape(-1).view(np.uint8)


def placed(blob: Bytes, out: Bytes | None) -> Bytes:
    """Return `blob`, or its copy at the beginning of `out`, if that is given."""
    if out is None:
        return blob
    if out.nbytes < blob.nbytes:
        raise NoRoom(f"cannot encode into {out.nbytes} bytes: this takes {blob.nbytes}")
    out[: blob.nbytes] = blob
    return out[: blob.nbytes]


def single_precision(values: Array, name: str) -> Array:
    """Return `values`, or refuse those of another type."""
    if values.dtype != np.float32:
        raise BadArgument(f"{name} takes single precision, not {values.dtype}: convert it, or store it as it is")
    return values
