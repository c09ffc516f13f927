"""Codecs that give every bit back, of any bytes."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from lowtide.codecs.contract import Array, Bytes, Exactness, Stats, as_bytes, bytes_to_fill
from lowtide.codecs.kernels import Kernel
from lowtide.errors import BadArgument


class _Lossless:
    """What codecs have in common whose kernel takes any bytes."""

    __slots__ = ()

    exactness = Exactness.BITS

    @property
    def kernel(self) -> Kernel:
        raise NotImplementedError

    def max_encoded_nbytes(self, nbytes: int) -> int:
        raise NotImplementedError

    def encode(self, values: Array, *, out: Bytes | None = None) -> Bytes:
        """Return the blob of `values`."""
        raw = as_bytes(values)
        return self.kernel.encode(raw, out=out, most_bytes=self.max_encoded_nbytes(raw.nbytes))

    def decode(self, blob: Bytes, *, out: Array) -> None:
        """Fill `out` with the values of `blob`; one whose parts and length disagree is a `ValueError`."""
        self.kernel.decode(blob, out=bytes_to_fill(out))

    def bound(self, values: Array) -> NDArray[np.float64]:
        """Return zeros: every bit comes back."""
        return np.zeros(values.shape)


@dataclass(frozen=True, slots=True)
class ZeroValue(_Lossless):
    """Leaves out the words of `word_bytes` bytes that are zero (cDMA, Rhu et al., HPCA 2018): 4 for single precision.

    A blob of n words of w bytes, of which k are not zero, and of t < w bytes after the last whole word:

        ceil(n / 8)      one bit for each word, the lowest first: whether it is not zero
        k * w bytes      the words that are not zero, in order
        t                the rest as it is

    "Zero" means all bits are: -0.0 and every NaN are words like others. Of single precision at density d, d + 1/32 of
    the bytes are left; at worst, with no zero, 1/32 is added.
    """

    word_bytes: int = 4

    def __post_init__(self) -> None:
        if self.word_bytes not in (1, 2, 4, 8):
            raise BadArgument(f"words of {self.word_bytes} bytes are not known: choose 1, 2, 4 or 8")

    @property
    def name(self) -> str:
        """`zvc`; with the word's bytes where they are not 4."""
        return "zvc" if self.word_bytes == 4 else f"zvc{self.word_bytes}"

    @property
    def kernel(self) -> Kernel:
        """Its native functions."""
        return Kernel(f"zvc{self.word_bytes}")

    def max_encoded_nbytes(self, nbytes: int) -> int:
        """Return all words and a bit for each."""
        return nbytes + -(-(nbytes // self.word_bytes) // 8)

    def ratio_model(self, stats: Stats) -> float:
        """Return the density and a bit a word: exact for whole bytes of mask."""
        return stats.density + 1 / (8 * self.word_bytes)


@dataclass(frozen=True, slots=True)
class Bits(_Lossless):
    """Masks: eight bytes that are 0 or 1 in one. A byte for every 4096 says so; where others occur, these stay.

    So what lies behind a mask in its last page takes nothing from the rest of it.
    """

    name = "bits"

    @property
    def kernel(self) -> Kernel:
        """Its native functions."""
        return Kernel("bits")

    def max_encoded_nbytes(self, nbytes: int) -> int:
        """Return all bytes and one for each 4096."""
        return nbytes + -(-nbytes // 4096)

    def ratio_model(self, stats: Stats) -> float:
        """Return 1 and a byte for every 4096: numbers of single precision are not masks, unless all are zero."""
        return (1.0 if stats.density else 1 / 8) + 1 / 4096


@dataclass(frozen=True, slots=True)
class Packed(_Lossless):
    """Four bits instead of a float's eight of exponent, by a dictionary of 15 for every 65,536 values, and an escape.

    What training makes is within a few powers of two, zero apart, so escapes are rare and 7/8 of single precision, or
    3/4 of bfloat16 (`word_bytes` 2), are left. A block that would grow stays as it is. See native/codecs.cpp.
    """

    word_bytes: int = 4

    def __post_init__(self) -> None:
        if self.word_bytes not in (2, 4):
            raise BadArgument(f"floats of {self.word_bytes} bytes are not known: choose 2 (bfloat16) or 4")

    @property
    def name(self) -> str:
        """`pack32` or `pack16`."""
        return f"pack{8 * self.word_bytes}"

    @property
    def kernel(self) -> Kernel:
        """Its native functions."""
        return Kernel(self.name)

    def max_encoded_nbytes(self, nbytes: int) -> int:
        """Return all bytes and a block's 20 of header."""
        return nbytes + 20 * -(-(nbytes // self.word_bytes) // 65_536)

    def ratio_model(self, stats: Stats) -> float:  # noqa: ARG002  # zeros take as much as others
        """Return what is left where the dictionary holds all exponents, without headers."""
        return (8 * self.word_bytes - 4) / (8 * self.word_bytes)


@dataclass(frozen=True, slots=True)
class SparseRows(_Lossless):
    """Sparse storage, dense compute (Gist, Jain et al., ISCA 2018): rows of 256 words, so that a column is one byte.

    Five bytes for a word that is not zero, two for a row: it pays below a density of 0.8, and less than `zvc` does.
    """

    name = "ssdc"

    @property
    def kernel(self) -> Kernel:
        """Its native functions."""
        return Kernel("ssdc")

    def max_encoded_nbytes(self, nbytes: int) -> int:
        """Return five bytes a word and two a row."""
        words = nbytes // 4
        return 5 * words + 2 * -(-words // 256) + nbytes % 4

    def ratio_model(self, stats: Stats) -> float:
        """Return five quarters of the density and two bytes a row."""
        return stats.density * 5 / 4 + 2 / 1024
