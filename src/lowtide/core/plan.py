"""What a policy decides, in one language for the executor, the simulator and the verifier."""

from __future__ import annotations

from dataclasses import dataclass, field

from lowtide.core.machine import Machine
from lowtide.core.trace import Gap, Trace

PLAN_VERSION = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """Everything a policy may look at."""

    trace: Trace
    machine: Machine
    budget_bytes: int
    tier: str = "spill"


@dataclass(frozen=True, slots=True, kw_only=True)
class Swap:
    """Move a gap's storage to `tier`; its fast bytes are free once the copy lands.

    The write starts at the start of operator `gap.after_op`, or as soon as the link is free; the read starts at the
    start of operator `fetch_op` (`gap.after_op < fetch_op <= gap.before_op`; equal to `before_op`: fetched on demand).
    """

    gap: Gap
    fetch_op: int
    tier: str = "spill"
    codec: str = "identity"


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """What the planner expects of a plan."""

    peak_bytes: int
    step_s: float
    stall_s: float
    moved_out_bytes: int
    moved_in_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """The decisions for one step; a gap that is not named is kept."""

    policy: str
    budget_bytes: int
    swaps: tuple[Swap, ...] = ()
    prediction: Prediction | None = None
    notes: tuple[str, ...] = field(default=())
