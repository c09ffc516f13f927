"""Single precision stored in half: lossy, within half a unit in the last place of half precision.

2^-14 <= |x| < 65520    off by at most 2^(e - 11), where 2^e <= |x| < 2^(e + 1): a relative 2^-11 at most
|x| < 2^-14             off by at most 2^-25: below that all is zero, with its sign
|x| >= 65520            would become infinite: refused
infinities, NaN         stay what they are; which NaN it was is lost
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from lowtide.codecs.contract import Array, Bytes, Stats, bytes_to_fill, room
from lowtide.errors import BadArgument

OVERFLOW = 65520.0
"""The smallest number that half precision rounds to infinity: half a unit above the largest, 65504."""

_LEAST_EXPONENT = -14  # of a normal number; those below share its unit
_HALF_UNIT = -11  # half a unit in the last place of 1.0, as a power of two


@dataclass(frozen=True, slots=True)
class Fp16:
    """Rounds single precision to half, to nearest, ties to even."""

    name = "fp16"
    lossless = False

    def encoded_bytes(self, values: Array) -> int:
        """Return half of the bytes."""
        return _checked(values).size * 2

    def encode(self, values: Array, *, out: Bytes | None = None) -> Bytes:
        """Return `values` in half precision; refuse a number beyond its range."""
        blob = room(out, self.encoded_bytes(values))
        half = blob.view(np.float16)
        with np.errstate(over="ignore", under="ignore", invalid="ignore"):
            half[:] = values.reshape(-1)
        if np.count_nonzero(np.isinf(half)) != np.count_nonzero(np.isinf(values)):
            finite = np.abs(values[np.isfinite(values)])
            raise BadArgument(
                f"fp16 cannot hold {finite.max():g}, its range ends at {OVERFLOW:g}: scale it down or store it as it is"
            )
        return blob

    def decode(self, blob: Bytes, *, out: Array) -> None:
        """Fill `out` with the values of `blob`."""
        _checked(out)
        bytes_to_fill(out)
        if blob.nbytes != 2 * out.size:
            raise ValueError(f"{blob.nbytes} bytes are not {out.size} values in half precision")
        out.reshape(-1)[:] = blob.view(np.float16)

    def bound(self, values: Array) -> NDArray[np.float64]:
        """Return half a unit in the last place of half precision at each value; what is not finite has none."""
        finite = np.where(np.isfinite(values), values, 0).astype(np.float64)
        exponent = np.frexp(finite)[1] - 1  # frexp's mantissa lies below 1
        least = np.where(finite == 0, _LEAST_EXPONENT, np.maximum(exponent, _LEAST_EXPONENT))
        return np.where(np.isfinite(values), np.ldexp(1.0, least + _HALF_UNIT), 0.0)

    def ratio_model(self, stats: Stats) -> float:  # noqa: ARG002  # the contract's: zeros take as much as others
        """Return a half, whatever the values are."""
        return 0.5


def _checked(values: Array) -> Array:
    if values.dtype != np.float32:
        raise BadArgument(f"fp16 takes single precision, not {values.dtype}: convert it, or store it as it is")
    return values
