"""Zero-value compression: the words that are not zero, and a bit for every word (as in cDMA, Rhu et al., HPCA 2018).

A blob of n words of w bytes, of which k are not zero, and of t < w bytes after the last whole word:

    k * w bytes      the words that are not zero, in order
    ceil(n / 8)      one bit for each word, the lowest first: whether it is not zero
    t                the rest as it is

"Zero" means all bits are: -0.0 and every NaN are words like others, so each bit comes back. Of single precision at
density d, d + 1/32 of the bytes are left; at worst, with no zero, 1/32 is added.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lowtide.codecs.contract import Array, Bytes, Stats, as_bytes, bytes_to_fill, room
from lowtide.errors import BadArgument

_WORDS: dict[int, type[np.unsignedinteger[Any]]] = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}
# So few at a time that masks and indices stay in the cache; a multiple of 8, so that masks end at bytes.
_BLOCK_WORDS = 1 << 16


@dataclass(frozen=True, slots=True)
class ZeroValue:
    """Leaves out the words of `word_bytes` bytes that are zero: 4 for single precision, 2 for half."""

    word_bytes: int = 4

    name = "zvc"
    lossless = True

    def __post_init__(self) -> None:
        if self.word_bytes not in _WORDS:
            raise BadArgument(f"words of {self.word_bytes} bytes are not known: choose 1, 2, 4 or 8")

    def encoded_bytes(self, values: Array) -> int:
        """Return how long the blob of `values` is."""
        words, tail = self._split(as_bytes(values))
        return int(np.count_nonzero(words)) * self.word_bytes + _mask_bytes(words) + tail.nbytes

    def encode(self, values: Array, *, out: Bytes | None = None) -> Bytes:
        """Return the blob of `values`."""
        raw = as_bytes(values)
        words, tail = self._split(raw)
        blob = room(out, self.encoded_bytes(raw))
        kept, mask, end = self._parts(blob, words, tail)
        at = 0
        for begin, block in _blocks(words):
            not_zero = block != 0
            mask[begin // 8 : begin // 8 + -(-len(block) // 8)] = np.packbits(not_zero, bitorder="little")
            where = np.flatnonzero(not_zero)
            np.take(block, where, out=kept[at : at + len(where)], mode="clip")  # "raise" would copy what it takes
            at += len(where)
        end[:] = tail
        return blob

    def decode(self, blob: Bytes, *, out: Array) -> None:
        """Fill `out` with the values of `blob`; a blob whose mask and length disagree is a `ValueError`."""
        words, tail = self._split(bytes_to_fill(out))
        kept, mask, end = self._parts(blob, words, tail)
        at = 0
        for begin, block in _blocks(words):
            bits = mask[begin // 8 : begin // 8 + -(-len(block) // 8)]
            where = np.flatnonzero(np.unpackbits(bits, bitorder="little").view(np.bool_))
            if len(where) and where[-1] >= len(block):
                raise ValueError(f"the mask names word {begin + where[-1]} of {len(words)}")
            if at + len(where) > len(kept):
                raise ValueError(f"the mask names more words than the {len(kept)} that the blob has")
            block[:] = 0
            block[where] = kept[at : at + len(where)]
            at += len(where)
        if at < len(kept):
            raise ValueError(f"the mask names {at} words, the blob has {len(kept)}")
        tail[:] = end

    def bound(self, values: Array) -> NDArray[np.float64]:
        """Return zeros: every bit comes back."""
        return np.zeros(values.shape)

    def ratio_model(self, stats: Stats) -> float:
        """Return the density and a bit a word: exact for whole bytes of mask."""
        return stats.density + 1 / (8 * self.word_bytes)

    def _split(self, raw: Bytes) -> tuple[NDArray[Any], Bytes]:
        whole = raw.nbytes - raw.nbytes % self.word_bytes
        return raw[:whole].view(_WORDS[self.word_bytes]), raw[whole:]

    def _parts(self, blob: Bytes, words: NDArray[Any], tail: Bytes) -> tuple[NDArray[Any], Bytes, Bytes]:
        """Return the words that were kept, the mask and the rest of a blob; the kept ones lie first, aligned."""
        kept = blob.nbytes - _mask_bytes(words) - tail.nbytes
        if kept < 0 or kept % self.word_bytes or kept > words.nbytes:
            raise ValueError(f"{blob.nbytes} bytes cannot hold {len(words)} words of {self.word_bytes} bytes")
        end = blob.nbytes - tail.nbytes
        return blob[:kept].view(words.dtype), blob[kept:end], blob[end:]


def _mask_bytes(words: NDArray[Any]) -> int:
    return -(-len(words) // 8)


def _blocks(words: NDArray[Any]) -> Iterator[tuple[int, NDArray[Any]]]:
    for begin in range(0, len(words), _BLOCK_WORDS):
        yield begin, words[begin : begin + _BLOCK_WORDS]
