"""What a codec costs on this machine: measured, on one thread."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from lowtide.codecs.contract import Array, Codec, Stats
from lowtide.codecs.lossless import Bits

_BYTES = 8 * 2**20
_ROUNDS = 7


@dataclass(frozen=True, slots=True, kw_only=True)
class Rates:
    """How fast a codec is, in bytes of what it encodes: its cost model. `ratio`: what was left of what was measured."""

    encode_bytes_per_s: float
    decode_bytes_per_s: float
    ratio: float = 1.0

    def encode_s(self, nbytes: int) -> float:
        """Return how long it takes to encode `nbytes`."""
        return nbytes / self.encode_bytes_per_s

    def decode_s(self, nbytes: int) -> float:
        """Return how long it takes to get `nbytes` back."""
        return nbytes / self.decode_bytes_per_s

    def pays_below_bytes_per_s(self, ratio: float) -> float:
        """Return below which rate of a link a round trip is faster through the codec, each part after the other.

        n bytes take 2 n / B as they are, and n / Ce + n / Cd + 2 r n / B encoded: less where 2 s / B > 1 / Ce + 1 / Cd,
        with s = 1 - r the saved share.
        """
        saved = max(0.0, 1 - ratio)
        return 2 * saved / (1 / self.encode_bytes_per_s + 1 / self.decode_bytes_per_s)


def typical_values(codec: Codec, stats: Stats, *, nbytes: int = _BYTES) -> Array:
    """Return single precision of the density that `stats` say; for a codec of masks, a mask of it."""
    draw = np.random.default_rng(0)
    if isinstance(codec, Bits):
        return draw.integers(0, 1000, nbytes, dtype=np.uint16) < 1000 * stats.density
    values = draw.standard_normal(nbytes // 4, dtype=np.float32)
    values[draw.random(values.size, dtype=np.float32) >= stats.density] = 0
    return values


def measure(
    codec: Codec, stats: Stats, *, nbytes: int = _BYTES, clock: Callable[[], float] = time.perf_counter
) -> Rates:
    """Measure a codec on values of the density that `stats` say, in a fraction of a second."""
    values = typical_values(codec, stats, nbytes=nbytes)
    blob, back = np.empty(codec.max_encoded_nbytes(values.nbytes), np.uint8), np.empty_like(values)
    encode_s, decode_s, ratio = [], [], 1.0
    for _ in range(_ROUNDS):
        begun = clock()
        encoded = codec.encode(values, out=blob)
        between = clock()
        codec.decode(encoded, out=back)
        encode_s.append(between - begun)
        decode_s.append(clock() - between)
        ratio = encoded.nbytes / values.nbytes
    # Without the first round, which touches the memory for the first time.
    return Rates(
        encode_bytes_per_s=nbytes / statistics.median(encode_s[1:]),
        decode_bytes_per_s=nbytes / statistics.median(decode_s[1:]),
        ratio=ratio,
    )
