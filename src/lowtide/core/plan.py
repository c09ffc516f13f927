"""What a policy decides, in one language for the executor, the simulator and the verifier."""

from __future__ import annotations

from dataclasses import dataclass, field
from math import inf

from lowtide.core.machine import Machine
from lowtide.core.trace import Gap, Trace
from lowtide.errors import BadArgument

PLAN_VERSION = 2


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
class Problem:
    """Everything a policy may look at."""

    trace: Trace
    machine: Machine
    budget_bytes: int
    tier: str = "spill"
    """The tier that swaps go to unless they say otherwise."""
    tiers: tuple[str, ...] = ()
    """All tiers that whoever executes the plan has (empty: just `tier`)."""
    codecs: tuple[CodecCost, ...] = (IDENTITY,)
    """The codecs that whoever executes the plan has."""
    can_recompute: bool = False
    """Whether who executes the plan can run operators again; a policy that recomputes swaps instead where not."""
    watch_s: float = 0.0
    """What a step takes longer if any operator is to run again, because it is watched for that."""


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


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """What the planner expects of a plan."""

    peak_bytes: int
    step_s: float
    stall_s: float
    moved_out_bytes: int
    moved_in_bytes: int
    recompute_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """The decisions for one step; a gap that is not named is kept.

    `trials` counts the steps the policy would have run (or simulated, if its paper does) to arrive at the plan.
    """

    policy: str
    budget_bytes: int
    swaps: tuple[Swap, ...] = ()
    recomputes: tuple[Recompute, ...] = ()
    prediction: Prediction | None = None
    notes: tuple[str, ...] = field(default=())
    trials: int = 0
