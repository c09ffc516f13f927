"""Runs a workload with and without Lowtide, and keeps what every test asks for again."""

from __future__ import annotations

import gc
import re
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

import torch

import lowtide
from lowtide.core.step_record import StepRecord
from lowtide.errors import BudgetTooSmall
from lowtide.memory.native import load
from lowtide.plan.policy import Policy
from tests.bitwise.architectures import ARCHITECTURES
from tests.bitwise.huggingface import HUGGINGFACE
from tests.bitwise.loops import LOOPS
from tests.bitwise.record import Record
from tests.bitwise.workload import Need, Workload, build, run

WORKLOADS: dict[str, Callable[[], Workload]] = {**ARCHITECTURES, **LOOPS, **HUGGINGFACE}
UNPRESSED_BYTES = 8 * 2**30
# Workloads that need memory between steps, not only inside `tide.step()`.
BEYOND_STEPS = ("backward_after_the_step", "evaluation_between_steps")
_REFUSED_ALLOCATION = re.compile(
    r"lowtide: (?P<op>\S+) asked for (?P<asked>\d+) bytes; (?P<used>\d+) bytes are in use"
    r".*the budget is (?P<budget>\d+) bytes"
)


@dataclass(slots=True)
class Outcome:
    """What a managed training computed and what it cost; the record is filled even if the training raised."""

    record: Record = field(default_factory=Record)
    stats: dict[str, Any] = field(default_factory=dict)
    steps: list[StepRecord] = field(default_factory=list)
    static_bytes: int = 0
    largest_op_bytes: int = 0
    bystander_bytes: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Refusal:
    """What `BudgetTooSmall` said. The exception itself is not kept: its traceback holds the training's tensors."""

    budget_bytes: int
    needed_bytes: int
    op: str


@cache
def stock(name: str) -> Record:
    """Return what the training computes without Lowtide."""
    return run(build(WORKLOADS[name]))


@cache
def unpressed(name: str) -> Outcome:
    """Return the training under a budget that it never reaches."""
    with tempfile.TemporaryDirectory() as spill:
        return managed(name, budget_bytes=UNPRESSED_BYTES, spill=Path(spill))


def bystander_bytes() -> int:
    """Return what tensors of other tests take in Lowtide's memory: a budget counts them, too."""
    gc.collect()
    native = load()
    memory, ranges = native.counters(), native.range_counters()
    return memory.live_bytes + ranges.away + ranges.slow


@cache
def _need_alone(name: str) -> Need:
    outcome = unpressed(name)
    static_bytes = outcome.static_bytes - outcome.bystander_bytes
    return Need(
        static_bytes=static_bytes,
        peak_bytes=outcome.stats["peak_bytes"] - outcome.bystander_bytes,
        floor_bytes=static_bytes + outcome.largest_op_bytes,
    )


def need(name: str) -> Need:
    """Return what the training takes when nothing presses, beside the tensors that are there now."""
    alone, beside = _need_alone(name), bystander_bytes()
    return replace(
        alone,
        static_bytes=alone.static_bytes + beside,
        peak_bytes=alone.peak_bytes + beside,
        floor_bytes=alone.floor_bytes + beside,
    )


def managed(
    name: str,
    *,
    budget_bytes: int,
    spill: Path,
    policy: str | Policy = "auto",
    verify: bool = False,
    recompute: bool | None = None,
    outcome: Outcome | None = None,
) -> Outcome:
    """Train under Lowtide inside a budget; nothing may be left in `spill` afterwards."""
    outcome = Outcome() if outcome is None else outcome
    outcome.bystander_bytes = bystander_bytes()
    workload = build(WORKLOADS[name])
    optimizers = workload.optimizers[0] if len(workload.optimizers) == 1 else workload.optimizers
    try:
        with lowtide.fit(
            workload.model,
            optimizers,
            budget=budget_bytes,
            spill=spill,
            policy=policy,
            verify=verify,
            recompute=recompute,
        ) as tide:
            tide.on_step(outcome.steps.append)

            def note_floor() -> None:
                # Not every step is recorded, and what is alive between steps grows with gradients and optimizer state.
                trace, stats = tide.trace(), tide.stats()
                outcome.static_bytes = max(outcome.static_bytes, int(str(stats["static_bytes"])))
                outcome.largest_op_bytes = max(outcome.largest_op_bytes, trace.floor_bytes() - trace.static_bytes)

            run(workload, step=tide.step, record=outcome.record, each=note_floor)
            outcome.stats = dict(tide.stats())
    finally:
        left = sorted(path.name for path in spill.rglob("*"))
        assert not left, f"left behind in the spill directory: {left}"
    return outcome


def managed_or_refused(name: str, *, budget_bytes: int, spill: Path) -> tuple[Outcome, Refusal | None]:
    """Train under Lowtide; return what was computed, all or until the budget was found too small."""
    outcome = Outcome()
    try:
        managed(name, budget_bytes=budget_bytes, spill=spill, outcome=outcome)
    except BudgetTooSmall as error:
        return outcome, Refusal(budget_bytes=error.budget_bytes, needed_bytes=error.needed_bytes, op=error.op)
    except torch.OutOfMemoryError as error:
        # Outside `tide.step()` the allocator's own error arrives: nobody is there to give it another name.
        numbers = _REFUSED_ALLOCATION.match(str(error))
        if name not in BEYOND_STEPS or numbers is None:
            raise
        asked, used, budget = (int(numbers[key]) for key in ("asked", "used", "budget"))
        return outcome, Refusal(budget_bytes=budget, needed_bytes=asked + used, op=numbers["op"])
    return outcome, None


def pressed(
    name: str,
    *,
    share: float,
    spill: Path,
    policy: str | Policy = "auto",
    verify: bool = False,
    recompute: bool | None = None,
) -> Outcome:
    """Train at a share of what activations add; where that is refused, at the promised budget, if that is larger."""

    def at(budget_bytes: int) -> Outcome:
        return managed(name, budget_bytes=budget_bytes, spill=spill, policy=policy, verify=verify, recompute=recompute)

    budget_bytes = need(name).budget_bytes(share)
    try:
        return at(budget_bytes)
    except BudgetTooSmall:
        if budget_bytes >= need(name).promised_bytes:
            raise
    return at(need(name).promised_bytes)
