"""What moves bytes: links with a lane each way, mover threads, the codec engine; each booked in the order of time."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from heapq import heapify, heapreplace
from math import inf, isfinite

from lowtide.core.machine import Link
from lowtide.errors import BadArgument
from lowtide.simulate.agenda import Record, Trip


@dataclass(frozen=True, slots=True, kw_only=True)
class Codec:
    """An encoding as the simulator sees it: how fast, and how many bytes are left of one."""

    encode_bytes_per_s: float
    decode_bytes_per_s: float
    ratio: float = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Resources:
    """What a machine has beside its links.

    `movers`: the threads that carry transfers, one at a time each (None: as many as the links can use). `codecs`: the
    rates of the one engine that encodes before a write and decodes after a read, by the codec's name.
    """

    movers: int | None = None
    codecs: Mapping[str, Codec] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.movers is not None and self.movers < 1:
            raise BadArgument(f"{self.movers} mover threads move nothing: give 1 or more, or None")
        for name, codec in self.codecs.items():
            if not (codec.encode_bytes_per_s > 0 and codec.decode_bytes_per_s > 0 and 0 <= codec.ratio < inf):
                raise BadArgument(f"codec {name!r} needs rates above 0 and a ratio of 0 or more")


@dataclass(slots=True, eq=False, kw_only=True)
class Transfer:
    """One storage on its way. `ready_s`: when it may start at the earliest; `end_s`: when it has landed or arrived.

    `kept`: it was wanted back while it was leaving, so that its fast bytes stay when the copy lands.
    """

    record: Record
    outward: bool
    asked_s: float
    asked_op: int
    cause: str
    tier: str
    link_bytes: int
    ready_s: float
    start_s: float = inf
    end_s: float = inf
    kept: bool = False


class Wire:
    """One link: a queue each way in the order of request, and when each lane is free.

    A link that is not duplex has one lane for both directions.
    """

    __slots__ = ("flying", "in_s", "link", "out_s", "reads", "writes")

    def __init__(self, link: Link) -> None:
        self.link = link
        self.writes: deque[Transfer] = deque()
        self.reads: deque[Trip] = deque()
        self.flying: Transfer | None = None
        self.out_s = 0.0
        self.in_s = 0.0

    def book(self, transfer: Transfer, *, start_s: float) -> float:
        """Occupy a lane from `start_s` on; return when the bytes are over."""
        transfer.start_s = start_s
        if transfer.outward:
            end_s = self.out_s = start_s + self.link.write_s(transfer.link_bytes)
            self.flying = transfer
            if not self.link.duplex:
                self.in_s = end_s
        else:
            end_s = self.in_s = start_s + self.link.read_s(transfer.link_bytes)
            if not self.link.duplex:
                self.out_s = end_s
        return end_s


class Movers:
    """Threads that carry one transfer each at a time."""

    def __init__(self, count: int | None) -> None:
        self._free_s = [0.0] * count if count is not None else None
        if self._free_s is not None:
            heapify(self._free_s)

    def free_s(self) -> float:
        """Return when one is free."""
        return self._free_s[0] if self._free_s is not None else 0.0

    def take(self, until_s: float) -> None:
        """Occupy the one that is free first."""
        if self._free_s is not None:
            heapreplace(self._free_s, until_s)


class CodecEngine:
    """Encodes and decodes one storage at a time, in the order in which it is asked."""

    def __init__(self, codecs: Mapping[str, Codec]) -> None:
        self._codecs = codecs
        self._free_s = 0.0

    def known(self, name: str) -> Codec | None:
        """Return a codec (None: bytes travel as they are)."""
        if name == "identity":
            return None
        codec = self._codecs.get(name)
        if codec is None:
            names = ", ".join(["identity", *sorted(self._codecs)])
            raise BadArgument(
                f"the rate of codec {name!r} is not known: give it in Resources(codecs=...); known: {names}"
            )
        return codec

    def link_bytes(self, name: str, nbytes: int) -> int:
        """Return how many bytes travel for `nbytes`."""
        codec = self.known(name)
        return nbytes if codec is None else round(nbytes * codec.ratio)

    def encoded_s(self, name: str, nbytes: int, *, asked_s: float) -> float:
        """Return when `nbytes` are encoded."""
        codec = self.known(name)
        return asked_s if codec is None else self._work(nbytes / codec.encode_bytes_per_s, asked_s)

    def decoded_s(self, name: str, nbytes: int, *, asked_s: float) -> float:
        """Return when `nbytes` are decoded."""
        codec = self.known(name)
        return asked_s if codec is None else self._work(nbytes / codec.decode_bytes_per_s, asked_s)

    def _work(self, duration_s: float, asked_s: float) -> float:
        self._free_s = max(self._free_s, asked_s) + (duration_s if isfinite(duration_s) else inf)
        return self._free_s
