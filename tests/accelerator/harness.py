"""Runs a training on the device with and without Lowtide."""

from __future__ import annotations

import gc
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

import torch

import lowtide
from lowtide.core.trace import Reach
from lowtide.errors import BudgetTooSmall
from lowtide.plan.policy import Policy
from tests.accelerator.devices import device, races, shake
from tests.accelerator.workloads import data_on, on_device
from tests.bitwise.record import Record
from tests.bitwise.workload import Need, run


@dataclass(slots=True)
class Outcome:
    """What a managed training computed and what it cost; `peak_bytes` is the device's own count."""

    record: Record = field(default_factory=Record)
    stats: dict[str, Any] = field(default_factory=dict)
    static_bytes: int = 0
    largest_op_bytes: int = 0
    races: tuple[str, ...] = ()


@cache
def stock(name: str) -> Record:
    """Return what the training computes on the device without Lowtide, and without jitter."""
    there = device()
    with data_on(there):
        return run(on_device(name, there))


@cache
def unpressed(name: str) -> Outcome:
    """Return the training under a budget that it never reaches."""
    with tempfile.TemporaryDirectory() as spill:
        return managed(name, budget_bytes=512 << 20, spill=Path(spill))


@cache
def need(name: str) -> Need:
    """Return what the training takes when nothing presses."""
    outcome = unpressed(name)
    return Need(
        static_bytes=outcome.static_bytes,
        peak_bytes=outcome.stats["peak_bytes"],
        floor_bytes=outcome.static_bytes + outcome.largest_op_bytes,
    )


def managed(
    name: str,
    *,
    budget_bytes: int,
    spill: Path,
    policy: str | Policy = "auto",
    recompute: bool | None = None,
    verify: bool = False,
    host_bytes: int | None = None,
    seed: int | None = None,
    watch_races: bool = False,
    knobs: Mapping[str, object] | None = None,
) -> Outcome:
    """Train on the device inside a budget; nothing may be left in `spill` afterwards."""
    there = device()
    shake(seed, races=watch_races, **(knobs or {}))
    outcome = Outcome()
    budget: dict[str, int | str] = {"device": budget_bytes}
    if host_bytes is not None:
        budget["cpu"] = host_bytes
    try:
        with data_on(there):
            workload = on_device(name, there)
            optimizers = workload.optimizers[0] if len(workload.optimizers) == 1 else workload.optimizers
            with lowtide.fit(
                workload.model,
                optimizers,
                budget=budget,
                spill=spill,
                policy=policy,
                verify=verify,
                recompute=recompute,
            ) as tide:

                def note_floor() -> None:
                    trace, stats = tide.trace(), tide.stats()
                    outcome.static_bytes = max(outcome.static_bytes, int(str(stats["static_bytes"])))
                    # With all that the program holds on the device: what is promised does not count on its leaving.
                    floor_bytes = replace(trace, reach=Reach.SAVED).floor_bytes()
                    outcome.largest_op_bytes = max(outcome.largest_op_bytes, floor_bytes - trace.static_bytes)

                run(workload, step=tide.step, record=outcome.record, each=note_floor)
                outcome.stats = dict(tide.stats())
        outcome.races = races()
    finally:
        torch.accelerator.synchronize()
        shake(None)
        left = sorted(path.name for path in spill.rglob("*"))
        assert not left, f"left behind in the spill directory: {left}"
    return outcome


def pressed(name: str, *, share: float, spill: Path, **options: Any) -> Outcome:
    """Train at a share of what activations add; where that is refused, at the promised budget, if that is larger."""
    budget_bytes = need(name).budget_bytes(share)
    try:
        return managed(name, budget_bytes=budget_bytes, spill=spill, **options)
    except BudgetTooSmall:
        if budget_bytes >= need(name).promised_bytes:
            raise
    gc.collect()
    return managed(name, budget_bytes=need(name).promised_bytes, spill=spill, **options)
