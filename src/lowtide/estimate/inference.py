"""Inference beyond memory, before anything runs: what stays, what is read for every word, and how long that takes.

Symbols: W bytes of weights, K of the cache of keys and values, L of the largest weight, B the budget.
Weights are used in the same order in every pass, so of those that do not fit, W - (B - K - 2 L), each is read once
a pass: L bytes are in use, and L more are on their way meanwhile. Where K alone does not fit beside them, what is left
of it, K - (B - 2 L), is read and written once a word, too: keys and values that have grown are new tensors.
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
    cache_read_bytes: int
    cache_written_bytes: int
    read_s: float
    compute_s: float

    @property
    def word_s(self) -> float:
        """How long a word takes: reads and operators go on beside each other."""
        return max(self.read_s, self.compute_s)

    @property
    def read_bytes_per_day(self) -> float:
        """What a disk reads in a day of nothing else."""
        return self._per_day(self.read_bytes + self.cache_read_bytes)

    @property
    def written_bytes_per_day(self) -> float:
        """What is written to it meanwhile: what has left of the cache."""
        return self._per_day(self.cache_written_bytes)

    def _per_day(self, nbytes: int) -> float:
        return nbytes * _DAY_S / self.word_s if self.word_s else 0.0


def served(inference: Inference, machine: Machine, link: Link, *, budget_bytes: int) -> Served | None:
    """Return what a word takes inside a budget (None: one operator alone needs more)."""
    if budget_bytes < inference.floor_bytes:
        return None
    weights_bytes = inference.weights_bytes
    if inference.peak_bytes <= budget_bytes:
        kept_bytes, read_bytes, cache_read_bytes = weights_bytes, 0, 0
    else:
        # At the floor there is no room to read ahead, and the part of the cache that is in use has its own.
        room_bytes = max(budget_bytes - 2 * inference.largest.nbytes, 0)
        kept_bytes = min(max(0, room_bytes - inference.cache_bytes), weights_bytes)
        read_bytes = weights_bytes - kept_bytes
        cache_read_bytes = max(0, inference.cache_bytes - room_bytes)
    cache_written_bytes = cache_read_bytes
    moved_bytes = read_bytes + cache_read_bytes
    read_s = link.read_s(moved_bytes) if moved_bytes else 0.0
    if cache_written_bytes and not link.duplex:
        read_s += link.write_s(cache_written_bytes)
    operations = 2.0 * inference.batch * sum(weight.count for weight in inference.weights)
    touched_bytes = weights_bytes + inference.cache_bytes
    compute_s = max(
        operations / machine.flops_per_s if machine.flops_per_s else 0.0,
        touched_bytes / machine.memory_bytes_per_s if machine.memory_bytes_per_s else 0.0,
    )
    return Served(
        kept_bytes=kept_bytes,
        read_bytes=read_bytes,
        cache_read_bytes=cache_read_bytes,
        cache_written_bytes=cache_written_bytes,
        read_s=read_s,
        compute_s=compute_s,
    )
