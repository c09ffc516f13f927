"""The course of a step, executed or predicted: busy times of each resource, memory, and waits.

The executor and the simulator both answer with a `Timeline`; reports draw it and tests compare the two.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

TIMELINE_VERSION = 2


class Lane(StrEnum):
    """A resource."""

    COMPUTE = "compute"
    RECOMPUTE = "recompute"
    OUT = "out"
    IN = "in"
    STALL = "stall"


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """One thing done: on which lane, from when to when, for which operator or storage.

    `op` is the operator that ran, was recomputed or waited, or at whose start a transfer was asked for. `storage` is
    what was transferred or waited for (None: an operator, or a wait for memory). `cause` says why in one word:
    "plan" or "pressure" for what leaves, "prefetch" or "demand" for what comes back, "room", "landing" or "arrival"
    for a wait.
    """

    lane: Lane
    start_s: float
    end_s: float
    op: int
    storage: int | None = None
    nbytes: int = 0
    tier: str = ""
    cause: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeline:
    """One step on one machine under one policy. `memory` are the moments at which live bytes changed, ascending.

    `compute_s` is the time of the step's own operators, `slow_s` what they take longer with operands in slow memory,
    `recompute_s` the time of those run again, `stall_s` what is left of `step_s`. `tiers` are the bytes in each tier
    that the step uses, as `memory` those in fast memory. `reserved_peak_bytes` is the peak through an allocator model
    (equal to `peak_bytes` without one). `trials` counts the steps that were run before this one to arrive at its plan.
    """

    policy: str
    machine: str
    model: str
    budget_bytes: int
    step_s: float
    compute_s: float
    recompute_s: float
    stall_s: float
    peak_bytes: int
    reserved_peak_bytes: int
    moved_out_bytes: int
    moved_in_bytes: int
    spans: tuple[Span, ...] = ()
    memory: tuple[tuple[float, int], ...] = ()
    notes: tuple[str, ...] = ()
    trials: int = 0
    slow_s: float = 0.0
    tiers: Mapping[str, tuple[tuple[float, int], ...]] = field(default_factory=dict)
