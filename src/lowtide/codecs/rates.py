"""What a codec costs on this machine: measured, on one thread."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from lowtide.codecs.contract import Codec, Stats

_BYTES = 8 * 2**20  # what the movers hand over at once
_ROUNDS = 7


@dataclass(frozen=True, slots=True, kw_only=True)
class Rates:
    """How fast a codec is, in bytes of what it encodes: its cost model."""

    encode_bytes_per_s: float
    decode_bytes_per_s: float

    def encode_s(self, nbytes: int) -> float:
        """Return how long it takes to encode `nbytes`."""
        return nbytes / self.encode_bytes_per_s

    def decode_s(self, nbytes: int) -> float:
        """Return how long it takes to get `nbytes` back."""
        return nbytes / self.decode_bytes_per_s

    def pays_below_bytes_per_s(self, ratio: float) -> float:
        """Return below which rate of a link both directions are faster through the codec, one after the other.

        Writing n bytes takes n / w as they are and n / encode + ratio * n / w encoded.
        """
        return max(0.0, 1 - ratio) * min(self.encode_bytes_per_s, self.decode_bytes_per_s)


def measure(codec: Codec, stats: Stats, *, clock: Callable[[], float] = time.perf_counter) -> Rates:
    """Measure a codec on single-precision values of the density that `stats` say, in a fraction of a second."""
    draw = np.random.default_rng(0)
    values = draw.standard_normal(_BYTES // 4, dtype=np.float32)
    values[draw.random(values.size) >= stats.density] = 0
    blob, back = np.empty(2 * _BYTES, np.uint8), np.empty_like(values)
    encode_s, decode_s = [], []
    for _ in range(_ROUNDS):
        begun = clock()
        encoded = codec.encode(values, out=blob)
        between = clock()
        codec.decode(encoded, out=back)
        encode_s.append(between - begun)
        decode_s.append(clock() - between)
    # Without the first round, which touches the memory for the first time.
    return Rates(
        encode_bytes_per_s=_BYTES / statistics.median(encode_s[1:]),
        decode_bytes_per_s=_BYTES / statistics.median(decode_s[1:]),
    )
