"""Single precision stored in fewer bits: lossy, within half a unit in the last place of the smaller format.

To nearest, ties to even. With m bits of mantissa and 2^e <= |x| < 2^(e + 1), x is off by at most 2^(e - m - 1); below
the format's least normal number, whose exponent is l, by at most 2^(l - m - 1). What would become infinite is refused.
Infinities and NaN stay what they are (E4M3 has no infinities: refused); which NaN it was is lost.

Gist's delayed precision reduction (Jain et al., ISCA 2018) is one of these for what only the backward pass reads: a
plan encodes after the last use in forward, so forward never sees the rounding.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lowtide.codecs.contract import Array, Bytes, Exactness, Stats, as_bytes, bytes_to_fill, single_precision
from lowtide.codecs.kernels import Kernel


@dataclass(frozen=True, slots=True)
class Cast:
    """Rounds single precision to one of `exponent_bits` and `mantissa_bits`: an array for an array, and a codec."""

    name: str
    exponent_bits: int
    mantissa_bits: int
    largest: float
    """The largest finite number."""

    exactness = Exactness.BOUND

    @property
    def kernel(self) -> Kernel:
        """Its native functions."""
        return Kernel(self.name)

    @property
    def encoded_dtype(self) -> np.dtype[Any]:
        """The type of the encoded values: their bits."""
        return np.dtype(np.uint8 if self.value_bits == 8 else np.uint16)

    @property
    def value_bits(self) -> int:
        """How many bits a value takes."""
        return 1 + self.exponent_bits + self.mantissa_bits

    def max_encoded_nbytes(self, nbytes: int) -> int:
        """Return what the codes take: as much as any."""
        words, tail = divmod(nbytes, 4)
        if self.value_bits == 10:  # three in a word
            return (words // 3072 * 1024 + -(-(words % 3072) // 3)) * 4 + tail
        return words * self.value_bits // 8 + tail

    def encode(self, values: Array, *, out: Bytes | None = None) -> Bytes:
        """Return `values` in the smaller format; refuse a number beyond its range."""
        raw = as_bytes(single_precision(values, self.name))
        return self.kernel.encode(raw, out=out, most_bytes=self.max_encoded_nbytes(raw.nbytes))

    def decode(self, blob: Bytes, *, out: Array) -> None:
        """Fill `out` with the values of `blob`."""
        self.kernel.decode(blob, out=bytes_to_fill(single_precision(out, self.name)))

    def encode_array(self, values: Array) -> Array:
        """Return the codes of `values`."""
        return self.encode(values).view(self.encoded_dtype)

    def decode_array(self, encoded: Array, *, out: Array) -> None:
        """Fill `out` with the values of codes."""
        self.decode(as_bytes(encoded), out=out)

    def bound(self, values: Array) -> NDArray[np.float64]:
        """Return half a unit in the last place at each value; what is not finite has none."""
        finite = np.where(np.isfinite(values), values, 0).astype(np.float64)
        least = 2 - 2 ** (self.exponent_bits - 1)  # the exponent of the least normal number
        exponent = np.frexp(finite)[1] - 1  # frexp's mantissa lies below 1
        unit = np.where(finite == 0, least, np.maximum(exponent, least))
        return np.where(np.isfinite(values), np.ldexp(1.0, unit - self.mantissa_bits - 1), 0.0)

    def ratio_model(self, stats: Stats) -> float:  # noqa: ARG002  # zeros take as much as others
        """Return the share of the bits, whatever the values are."""
        return 1 / 3 if self.value_bits == 10 else self.value_bits / 32


FP16 = Cast("fp16", 5, 10, 65504.0)
BF16 = Cast("bf16", 8, 7, 3.3895313892515355e38)
FP10 = Cast("fp10", 5, 4, 63488.0)
FP8_E4M3 = Cast("fp8_e4m3", 4, 3, 448.0)
FP8_E5M2 = Cast("fp8_e5m2", 5, 2, 57344.0)
CASTS = (FP16, BF16, FP10, FP8_E4M3, FP8_E5M2)


@dataclass(frozen=True, slots=True)
class Signs:
    """One bit a value: whether it is above zero (Gist's binarize, for a ReLU's result that max-pooling reads).

    1 comes back for what was above zero, 0 for the rest, NaN among it: what a ReLU's backward makes of either is the
    same, to the bit.
    """

    name = "binarize"
    exactness = Exactness.SIGN

    @property
    def kernel(self) -> Kernel:
        """Its native functions."""
        return Kernel("signs")

    def max_encoded_nbytes(self, nbytes: int) -> int:
        """Return a bit a value."""
        words, tail = divmod(nbytes, 4)
        return -(-words // 8) + tail

    def encode(self, values: Array, *, out: Bytes | None = None) -> Bytes:
        """Return a bit for each of `values`."""
        raw = as_bytes(single_precision(values, self.name))
        return self.kernel.encode(raw, out=out, most_bytes=self.max_encoded_nbytes(raw.nbytes))

    def decode(self, blob: Bytes, *, out: Array) -> None:
        """Fill `out` with ones and zeros."""
        self.kernel.decode(blob, out=bytes_to_fill(single_precision(out, self.name)))

    def bound(self, values: Array) -> NDArray[np.float64]:
        """Return infinity: the number itself is lost."""
        return np.full(values.shape, np.inf)

    def ratio_model(self, stats: Stats) -> float:  # noqa: ARG002  # a bit, whatever it is of
        """Return a bit of 32."""
        return 1 / 32
