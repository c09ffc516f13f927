"""`fit`: from what a user writes to a tide on the devices that the training is on."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from typing import TypeVar

import torch

from lowtide import registry
from lowtide.errors import BadArgument
from lowtide.execute.tide.cpu import CpuTide
from lowtide.execute.tide.device import DeviceTide
from lowtide.execute.tide.fleet import Fleet
from lowtide.execute.tide.opening import budgets_for, devices_of, open_backend, open_ranges
from lowtide.execute.tide.tide import Tide
from lowtide.memory import ranges
from lowtide.memory.budget import BudgetLike, Budgets, check_ranks
from lowtide.plan.policy import ChoosesVictims, Policy
from lowtide.tiers.medium import Medium
from lowtide.tiers.open import Spill
from lowtide.tiers.slow import Slow

T = TypeVar("T")


def fit(
    model: torch.nn.Module | Iterable[torch.nn.Module] | None = None,
    optimizer: torch.optim.Optimizer | Iterable[torch.optim.Optimizer] | None = None,
    *,
    budget: BudgetLike,
    spill: Spill = None,
    slow: Slow = None,
    policy: str | Policy = "auto",
    verify: bool = False,
    recompute: bool | None = None,
    codecs: Sequence[str] | None = None,
    max_error: float = 0.0,
    put_off: bool = False,
) -> Tide:
    """Train inside `budget` bytes of tensor memory; tensors that do not fit go to `spill` and return in time.

    `budget`: bytes as an int or a text such as "2GiB", "auto", or one for each tier, {"cpu": "2GiB", "disk":
    "40GiB"}. For a model on an accelerator, of its memory: {"device": "6GiB", "cpu": "8GiB", "disk": "100GiB"}; for one
    on several, that much on each, or {"cuda:0": "6GiB", "cuda:1": "10GiB", ...}: "cpu" and "disk" are for all of them.
    `spill`: a directory, a list of them (striped) or a tier URL. `slow`: memory that operators use in place, in
    addition to the budget: "pmem:///path", "cxl:" or "numa:1"; budget={"cpu": ..., "slow": ...} limits it. `policy`: a
    registered name or an object. `verify`: keep a checksum of every tensor that leaves, and check it when the tensor
    returns. `recompute`: whether the policy may run operators again instead of moving bytes (None: if it can; with
    torch.compile it swaps instead). `codecs`: those that plans may use for swaps, on the CPU (None: the default ones;
    an empty list: none). `max_error`: how far backward's activations may be off, relative to the largest nearby value
    (0: exact; otherwise training is not bit-identical). `put_off`: on the CPU, postpone updates of state that does not
    fit until it is next used, with the same bits. `model` and `optimizer` (one, several or none) are not changed;
    traces and reports use them to tell parameters from activations.
    """
    models = _as_list(model, torch.nn.Module, "model", "a torch.nn.Module")
    optimizers = _as_list(optimizer, torch.optim.Optimizer, "optimizer", "a torch.optim.Optimizer")
    return open_tide(
        models,
        optimizers,
        budget=budget,
        spill=spill,
        slow=slow,
        policy=policy,
        verify=verify,
        recompute=recompute,
        codecs=codecs,
        max_error=max_error,
        put_off=put_off,
    )


def open_tide(
    models: Sequence[torch.nn.Module],
    optimizers: Sequence[torch.optim.Optimizer],
    *,
    budget: BudgetLike,
    spill: Spill,
    policy: str | Policy,
    verify: bool,
    slow: Slow = None,
    recompute: bool | None = None,
    moves_nothing: bool = False,
    codecs: Sequence[str] | None = None,
    max_error: float = 0.0,
    put_off: bool = False,
) -> Tide:
    """Return a tide for a training, as `fit` explains; `moves_nothing`: it only watches."""
    registry.policy(policy)  # nothing is opened for one that does not exist
    devices = devices_of(models, budget)
    budgets = budgets_for(devices, models, optimizers, budget=budget)
    if not moves_nothing:
        for device, one in zip(devices, budgets, strict=True):
            check_ranks(one.fast_bytes if device is None else one.host_bytes or 0)
    if len(devices) > 1 and isinstance(spill, Medium):
        raise BadArgument(
            f"tier '{spill.name}' is open already and cannot be shared by {len(devices)} devices: "
            "pass the directory or the tier's URL as spill"
        )
    if devices == (None,) and ranges.unavailable() is None:
        return _on_pages(
            models,
            optimizers,
            budgets[0],
            spill=spill,
            slow=slow,
            policy=registry.policy(policy),
            verify=verify,
            recompute=recompute,
            codecs=codecs,
            max_error=max_error,
            put_off=put_off,
            moves_nothing=moves_nothing,
        )
    if codecs or max_error:
        raise BadArgument(
            "codecs are for trainings on the CPU and on Linux: leave codecs= and max_error= out, or put one before "
            "the spill, as in file+zvc:///fast/disk"
        )
    if put_off:
        raise BadArgument("updates are put off on the CPU and on Linux: leave put_off= out here")
    if slow is not None:
        raise BadArgument("slow memory is for trainings on the CPU and on Linux: leave slow= out here")
    with ExitStack() as opened:
        tides = []
        for device, budgets_there in zip(devices, budgets, strict=True):
            backend = open_backend(device, budgets_there, spill=spill, verify=verify, moves_nothing=moves_nothing)
            tides.append(
                DeviceTide(
                    models,
                    optimizers,
                    backend,
                    policy=registry.policy(policy),
                    recompute=recompute,
                    moves_nothing=moves_nothing,
                )
            )
            opened.callback(tides[-1].close)
        tide = tides[0] if len(tides) == 1 else Fleet(tides)
        opened.pop_all()
    return tide


def _on_pages(
    models: Sequence[torch.nn.Module],
    optimizers: Sequence[torch.optim.Optimizer],
    budgets: Budgets,
    *,
    spill: Spill,
    slow: Slow,
    policy: Policy,
    verify: bool,
    recompute: bool | None,
    codecs: Sequence[str] | None,
    max_error: float,
    put_off: bool,
    moves_nothing: bool,
) -> Tide:
    if isinstance(policy, ChoosesVictims):
        raise BadArgument(
            f"policy {policy.name!r} chooses victims itself, which happens without Python on the CPU: "
            "have it name an order in about.victims"
        )
    about = policy.about
    discards = about.discards_victims and (about.recomputes if recompute is None else recompute)
    opened = open_ranges(
        budgets,
        spill=spill,
        slow=slow,
        order=about.victims,
        discards=discards,
        verify=verify,
        codecs=codecs,
        max_error=max_error,
        moves_nothing=moves_nothing,
    )
    return CpuTide(
        models,
        optimizers,
        opened.memory,
        machine=opened.machine,
        budget_bytes=opened.budget_bytes,
        spill_name=opened.spill_name,
        policy=policy,
        recompute=recompute,
        max_error=max_error,
        put_off=put_off,
        moves_nothing=moves_nothing,
    )


def _as_list(given: T | Iterable[T] | None, kind: type[T], name: str, what: str) -> list[T]:
    if given is None:
        return []
    if isinstance(given, kind):
        return [given]
    items = list(given) if isinstance(given, Iterable) else [given]
    for item in items:
        if not isinstance(item, kind):
            raise BadArgument(f"{name} has the type {type(item).__name__}: pass {what}, a list of them or None")
    return items
