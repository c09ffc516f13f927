"""Inference beyond memory, before anything runs: what stays, what is read for every word, and how long that takes.

Symbols: W bytes of weights, K of the cache of keys and values, L of the largest weight, B the budget.
Weights are used in the same order in every pass, so of those that do not fit, W - (B - K - 2 L), each is read once
a pass: L bytes are in use, and L more are on their way meanwhile.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from lowtide.core.machine import Link, Machine

_DAY_S = 86400


@dataclass(frozen=True, slots=True, kw_only=True)
class Weight:
    """A tensor of a model, in memory."""

    name: str
    count: int
    nbytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Inference:
    """Generation of one word after another, for `batch` texts of `tokens` at once."""

    weights: Sequence[Weight]
    cache_bytes_per_token: int
    batch: int
    tokens: int

    @property
    def weights_bytes(self) -> int:
        """W: all weights."""
        return sum(weight.nbytes for weight in self.weights)

    @property
    def cache_bytes(self) -> int:
        """K: keys and values of all texts at their end."""
        return self.cache_bytes_per_token * self.batch * self.tokens

    @property
    def largest(self) -> Weight:
        """L: what one operator needs at once."""
        return max(self.weights, key=lambda weight: weight.nbytes)

    @property
    def floor_bytes(self) -> int:
        """The least with which a pass can run: the largest weight, and the cache, which may be away but for a part."""
        return self.largest.nbytes + self._cache_of_a_layer()

    def _cache_of_a_layer(self) -> int:
        return min(self.cache_bytes, self.largest.nbytes)

    @property
    def peak_bytes(self) -> int:
        """What it takes without a budget."""
        return self.weights_bytes + self.cache_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Served:
    """A pass inside a budget; bytes and seconds for one word of each text."""

    kept_bytes: int
    read_bytes: int
    read_s: float
    compute_s: float

    @property
    def word_s(self) -> float:
        """How long a word takes: reads and operators go on beside each other."""
        return max(self.read_s, self.compute_s)

    @property
    def read_bytes_per_day(self) -> float:
        """What a disk reads in a day of nothing else."""
        return self.read_bytes * _DAY_S / self.word_s if self.word_s else 0.0


def served(inference: Inference, machine: Machine, link: Link, *, budget_bytes: int) -> Served | None:
    """Return what a word takes inside a budget (None: one operator alone needs more)."""
    if budget_bytes < inference.floor_bytes:
        return None
    weights_bytes = inference.weights_bytes
    if inference.peak_bytes <= budget_bytes:
        kept_bytes, read_bytes = weights_bytes, 0
    else:
        kept_bytes = max(0, budget_bytes - inference.cache_bytes - 2 * inference.largest.nbytes)
        read_bytes = max(0, weights_bytes - kept_bytes)
    read_s = link.read_s(read_bytes) if read_bytes else 0.0
    operations = 2.0 * inference.batch * sum(weight.count for weight in inference.weights)
    touched_bytes = weights_bytes + inference.cache_bytes
    compute_s = max(
        operations / machine.flops_per_s if machine.flops_per_s else 0.0,
        touched_bytes / machine.memory_bytes_per_s if machine.memory_bytes_per_s else 0.0,
    )
    return Served(kept_bytes=kept_bytes, read_bytes=read_bytes, read_s=read_s, compute_s=compute_s)
