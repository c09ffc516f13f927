"""What a policy decides, in one language for the executor, the simulator and the verifier."""

from __future__ import annotations

from dataclasses import dataclass, field
from math import inf

from lowtide.core.machine import Machine
from lowtide.core.trace import Gap, Trace
from lowtide.errors import BadArgument

PLAN_VERSION = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class CodecCost:
    """A codec as plans see it: how fast it is, by bytes of what it encodes, and an estimate of what is left of one.

    `error_bound` is the largest relative error of a value that came back through it (0: exact).
    """

    name: str
    encode_bytes_per_s: float = inf
    decode_bytes_per_s: float = inf
    ratio: float = 1.0
    error_bound: float = 0.0

    def __post_init__(self) -> None:
        if not (self.encode_bytes_per_s > 0 and self.decode_bytes_per_s > 0 and 0 <= self.ratio < inf):
            raise BadArgument(f"codec {self.name!r} needs rates above 0 and a ratio of 0 or more")


IDENTITY = CodecCost(name="identity")


@dataclass(frozen=True, slots=True, kw_only=True)
class SampledRatio:
    """What a codec leaves of a storage, by a sample of its values."""

    storage: int
    codec: str
    ratio: float


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredTime:
    """How long an operator took with these operands in a tier that it reads in place, and all others in fast memory."""

    op: int
    tier: str
    storages: frozenset[int]
    duration_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """Everything a policy may look at."""

    trace: Trace
    machine: Machine
    budget_bytes: int
    tier: str = "spill"
    """The tier that swaps go to unless they say otherwise."""
    tiers: tuple[str, ...] = ()
    """All tiers of the executor (empty: only `tier`)."""
    codecs: tuple[CodecCost, ...] = (IDENTITY,)
    """The codecs of the executor."""
    sampled: tuple[SampledRatio, ...] = ()
    """Sampled compression ratios of single storages; for others the codec's own ratio holds."""
    max_error: float = 0.0
    """The largest relative error that a codec may make of a value (0: every bit comes back)."""
    can_recompute: bool = False
    """Whether the executor can run operators again; if not, policies that recompute swap instead."""
    watch_s: float = 0.0
    """How much longer a step takes if operators may run again, because it must be watched."""
    codec_drag: float = 0.0
    """How much longer operators take for each second that a codec works: it has no core of its own."""
    can_place: bool = False
    """Whether the executor can place storages in tiers that operators read in place."""
    measured: tuple[MeasuredTime, ...] = ()
    """Measured operator times by placement; the others follow from a roofline."""

    def addressable(self) -> tuple[str, ...]:
        """Return the tiers that a plan may have storages live in."""
        names = self.tiers or (self.tier,)
        return tuple(name for name in names if name in self.machine.addressable) if self.can_place else ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Swap:
    """Move a gap's storage to `tier`; its fast bytes are free once the copy lands.

    The write starts at the start of operator `gap.after_op`, or as soon as the link is free; the read starts at the
    start of operator `fetch_op` (`gap.after_op < fetch_op <= gap.before_op`; equal to `before_op`: fetched on demand).
    All of these may be operators of the next step (n or more), as the end of a gap may. Bytes that the tier already
    holds are not written: they are free at the start of `gap.after_op` (plan/costs/writes.py).

    Synchronous systems wait: operator `landed_op` begins only once the write has landed (`gap.after_op < landed_op <=
    gap.before_op`), operator `arrived_op` only once the read has arrived (`fetch_op <= arrived_op <= gap.before_op`).
    None: nobody waits for the write but who lacks its memory, nor for the read but `gap.before_op`.
    """

    gap: Gap
    fetch_op: int
    tier: str = "spill"
    codec: str = "identity"
    landed_op: int | None = None
    arrived_op: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Have a storage live in an addressable tier during the operators `from_op <= i < until_op`.

    Operators that touch it then do so in place. A storage that is allocated at `from_op` is allocated there. Any other
    migrates: its write starts at the start of `from_op`, or as soon as the link is free, and has landed before the
    first operator that touches it in place begins, or operator `landed_op` if that comes first (`landed_op = from_op`:
    the program waits for it from its start). If it lives on after `until_op`, it migrates back: the read starts at the
    start of `fetch_op`, after the last touch in place (None: on demand, at `until_op`). A storage that is there in
    every step lives in the tier for good if the span is all of the step.

    `nbytes`: that much of the storage, in whole pages, and the rest of it stays in fast memory (None: all of it). Those
    with the same `run` and the same operators share pages and move as one run of them.
    """

    storage: int
    tier: str
    from_op: int
    until_op: int
    fetch_op: int | None = None
    landed_op: int | None = None
    nbytes: int | None = None
    run: int | None = None

    @property
    def gap(self) -> Gap:
        """The span as one of a decision: what is in it is not in fast memory."""
        return Gap(storage=self.storage, after_op=self.from_op, before_op=self.until_op)

    @property
    def asked_op(self) -> int:
        """The operator at whose start it is asked back."""
        return self.until_op if self.fetch_op is None else self.fetch_op


@dataclass(frozen=True, slots=True, kw_only=True)
class Recompute:
    """Discard a gap's storage without a copy, and run operators again to have it back.

    Its bytes are free when operator `gap.after_op` begins. Before operator `gap.before_op` begins, the operators `ops`
    (ascending) run again for their recorded durations. What they read is in memory then, or made by an earlier one of
    them; what they make besides the storages wanted back is freed after its last use among them. All recomputations
    with one `before_op` are one: the union of their operators runs once. A gap may be a part of a trace's gap that
    ends earlier: that is how a segment is recomputed at once and kept.
    """

    gap: Gap
    ops: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class Address:
    """Where a block of fast memory lies in the step's one range of addresses, from operator `from_op` on.

    `block` is a storage, until it is freed or leaves: it has one address for each time that it is there. With n
    storages, n + i is what operator i needs beside storages. What was there before the step lies below all of that and
    has none. A backend with its own allocator may place blocks itself, and says so.
    """

    block: int
    from_op: int
    offset_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """What the planner expects of a plan. `slow_s` is what operators take longer with operands in slow memory."""

    peak_bytes: int
    step_s: float
    stall_s: float
    moved_out_bytes: int
    moved_in_bytes: int
    recompute_s: float = 0.0
    slow_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """The decisions for one step; a gap that is not named is kept.

    `trials` counts the steps the policy would have run (or simulated, if its paper does) to arrive at the plan.
    `layout` is where blocks lie, for policies that are allocators, too: the simulator follows it.
    """

    policy: str
    budget_bytes: int
    swaps: tuple[Swap, ...] = ()
    recomputes: tuple[Recompute, ...] = ()
    places: tuple[Place, ...] = ()
    layout: tuple[Address, ...] = ()
    prediction: Prediction | None = None
    notes: tuple[str, ...] = field(default=())
    trials: int = 0
