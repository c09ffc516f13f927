"""What a codec is."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from lowtide.errors import BadArgument

Array = NDArray[Any]
Bytes = NDArray[np.uint8]


@dataclass(frozen=True, slots=True, kw_only=True)
class Stats:
    """What a codec's ratio depends on. `density`: the share of values that are not zero."""

    density: float = 1.0

    def __post_init__(self) -> None:
        if not 0 <= self.density <= 1:
            raise BadArgument(f"a density of {self.density} is not a share: use a number from 0 to 1")


@runtime_checkable
class Codec(Protocol):
    """An encoding of an array's values.

    The contract, which `lowtide.testing.codecs.CodecTests` checks:

    - `decode` fills `out`, which has the shape and dtype that were encoded: a blob does not say them.
    - Each value comes back within `bound` of what it was; a lossless codec's comes back as the same bits.
    - What cannot be held within the bound is refused by `encode` with `BadArgument`, never clipped.
    - A blob that `encode` cannot have made for `out` is refused by `decode` with `ValueError`.
    - Encoding keeps no state: one codec serves any number of threads.
    """

    @property
    def name(self) -> str:
        """The codec's name in plans, URLs and messages."""

    @property
    def lossless(self) -> bool:
        """Whether every bit comes back."""

    def encoded_bytes(self, values: Array) -> int:
        """Return how long the blob of `values` is, exactly."""

    def encode(self, values: Array, *, out: Bytes | None = None) -> Bytes:
        """Return the blob of `values`: the beginning of `out`, if that is given."""

    def decode(self, blob: Bytes, *, out: Array) -> None:
        """Fill `out` with the values of `blob`."""

    def bound(self, values: Array) -> NDArray[np.float64]:
        """Return how far each value may be from what comes back."""

    def ratio_model(self, stats: Stats) -> float:
        """Return the share of a single-precision tensor's bytes that is left, given what is known of its values."""


def as_bytes(values: Array) -> Bytes:
    """Return the bytes of `values` in a row, copied only if they do not lie so."""
    return np.ascontiguousarray(values).reshape(-1).view(np.uint8)


def bytes_to_fill(out: Array) -> Bytes:
    """Return the bytes of `out`, to be written to."""
    if not out.flags.c_contiguous:
        raise BadArgument("cannot decode into an array with gaps: pass a contiguous one")
    return out.reshape(-1).view(np.uint8)


def room(out: Bytes | None, nbytes: int) -> Bytes:
    """Return the first `nbytes` of `out`, or new ones."""
    if out is None:
        return np.empty(nbytes, np.uint8)
    if out.nbytes < nbytes:
        raise BadArgument(f"cannot encode into {out.nbytes} bytes: this takes {nbytes}")
    return out[:nbytes]
