"""Which backend a training gets: by where its parameters are, and by what its budget names."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace

import torch

from lowtide.core.machine import Machine
from lowtide.core.order import Order
from lowtide.core.trace import least_worth_moving
from lowtide.core.units import format_bytes
from lowtide.errors import BadArgument
from lowtide.estimate.calibrate import SPILL, assumed_machine
from lowtide.estimate.links import machine_for
from lowtide.estimate.slow_memory import SLOW, with_slow_memory
from lowtide.execute.backends.protocol import Backend
from lowtide.execute.tide.encoding import open_codecs
from lowtide.memory import ranges
from lowtide.memory.budget import (
    BudgetLike,
    Budgets,
    auto_bytes,
    named_devices,
    names_accelerator,
    parse_budget,
    parse_device_budget,
)
from lowtide.memory.native.bindings import SlowRates
from lowtide.memory.ranges import RangeMemory
from lowtide.memory.slow_rates import slow_rates
from lowtide.tiers.dram import memory_bytes
from lowtide.tiers.medium import ALIGN_BYTES, Medium
from lowtide.tiers.open import Spill, open_medium
from lowtide.tiers.slow import Slow, open_slow

# Where the budget does not limit pinned memory: half of the bytes that "auto" would take, for the rest of the program
# lives in the same memory; and this much where not even that is known.
_HOST_SHARE = 2
_HOST_BYTES = 256 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenedRanges:
    """The CPU's ranges, ready for `RangeMemory.open`, and what to plan with.

    `budget_bytes`: what a tier that is memory itself leaves of the budget.
    """

    memory: RangeMemory
    machine: Machine
    spill_name: str
    budget_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Opened:
    """A backend that is ready for `Backend.open`, and what to plan with."""

    backend: Backend
    machine: Machine
    budget_bytes: int
    spill_name: str


def devices_of(models: Sequence[torch.nn.Module], budget: BudgetLike) -> tuple[torch.device | None, ...]:
    """Return where a training runs: the accelerators that its parameters are on, else that its budget names.

    (None,): on the CPU.
    """
    found = {parameter.device for model in models for parameter in model.parameters()}
    devices = sorted((device for device in found if device.type not in ("cpu", "meta")), key=str)
    if devices:
        return tuple(devices)
    if not names_accelerator(budget):
        return (None,)
    if found:
        raise BadArgument(
            "the budget is for a device, but the model is on the CPU: move it there before lowtide.fit, "
            "or state 'cpu' bytes"
        )
    current = torch.accelerator.current_accelerator(check_available=True)
    if current is None:
        raise BadArgument("the budget is for a device, but this machine has no accelerator: state 'cpu' bytes")
    named = named_devices(budget)
    if not named or (len(named) == 1 and isinstance(budget, Mapping) and "device" in budget):
        return (torch.device(current.type, torch.accelerator.current_device_index()),)
    there = [f"{current.type}:{index}" for index in range(torch.accelerator.device_count())]
    for name in named:
        if name not in there:
            raise BadArgument(f"the budget names {name}, but the devices here are {', '.join(there)}")
    return tuple(torch.device(name) for name in sorted(named))


def budgets_for(
    devices: Sequence[torch.device | None],
    models: Sequence[torch.nn.Module],
    optimizers: Sequence[torch.optim.Optimizer],
    *,
    budget: BudgetLike,
) -> list[Budgets]:
    """Return what each device may have. Memory below several devices is theirs together, and shared out.

    Each gets of it what its budget is of all budgets, in whole pages.
    """
    found = []
    for device in devices:
        held_bytes = _held_bytes(models, optimizers, device or torch.device("cpu"))
        if device is None:
            found.append(parse_budget(budget, held_bytes=held_bytes))
        else:
            found.append(_with_host_bytes(_device_budgets(budget, device, held_bytes=held_bytes)))
    total_bytes = sum(one.fast_bytes for one in found)

    def share(all_bytes: int | None, one: Budgets) -> int | None:
        if all_bytes is None or len(found) == 1:
            return all_bytes
        return all_bytes * one.fast_bytes // total_bytes // ALIGN_BYTES * ALIGN_BYTES

    return [replace(one, host_bytes=share(one.host_bytes, one), disk_bytes=share(one.disk_bytes, one)) for one in found]


def open_ranges(
    budgets: Budgets,
    *,
    spill: Spill,
    slow: Slow = None,
    order: Order = Order.OLDEST,
    discards: bool = False,
    verify: bool = False,
    codecs: Sequence[str] | None = None,
    max_error: float = 0.0,
    moves_nothing: bool = False,
    measures: bool = True,
) -> OpenedRanges:
    """Return the CPU's memory, whose tensors may leave to `spill` through `codecs`, and be used in `slow` memory.

    `max_error`: what those codecs may be off that round.

    Where memory runs out they do in `order`; `discards`: without a copy, as far as they can be made again.
    `moves_nothing`: none leaves. `measures`: the link is, unless it is known. Raises `NativeUnavailable` before it
    opens these.
    """
    ranges.check_available()
    with ExitStack() as opened:
        medium = open_medium(spill, capacity_bytes=budgets.disk_bytes)
        opened.callback(medium.close)
        if not moves_nothing:
            refuse_lossy(medium)
        fast_bytes = _beside_memory_tier(budgets.fast_bytes, medium)
        name = ", ".join(map(str, medium.directories)) or f"tier '{medium.name}'"
        machine = machine_for(medium) if measures else assumed_machine()
        media: dict[str, Medium] = {SPILL: medium}
        rates: dict[str, SlowRates] = {}
        if slow is not None:
            below = open_slow(slow, capacity_bytes=budgets.slow_bytes)
            opened.callback(below.close)
            machine = with_slow_memory(machine, below)
            media, rates = {SLOW: below, **media}, {SLOW: slow_rates(machine, SLOW, below)}
            name = f"{below.place}, {name}"
        least_bytes = least_worth_moving(fast_bytes)
        memory = RangeMemory(
            media,
            least_bytes=least_bytes,
            order=order,
            discards=discards,
            verify=verify,
            slow=rates,
            codecs=open_codecs(codecs, medium, max_error=max_error),
            max_error=max_error,
        )
        opened.pop_all()
    return OpenedRanges(memory=memory, machine=machine, spill_name=name, budget_bytes=fast_bytes)


def open_backend(
    device: torch.device | None, budgets: Budgets, *, spill: Spill, verify: bool, moves_nothing: bool
) -> Opened:
    """Return the backend for a device (None: the CPU, where pages cannot move)."""
    if device is not None:
        _check_capacity(budgets, device, is_bounded=not moves_nothing)
    medium = open_medium(spill, capacity_bytes=budgets.disk_bytes)
    name = ", ".join(map(str, medium.directories)) or f"tier '{medium.name}'"
    try:
        if not moves_nothing:
            refuse_lossy(medium)
        if memory_bytes(medium):
            raise BadArgument("a memory tier is for trainings on the CPU and on Linux: spill to a directory here")
        if device is None:
            machine, backend = machine_for(medium), _advisory(medium, verify=verify)
        else:
            machine, backend = _device_machine(device, budgets), _on_device(medium, device, budgets, verify=verify)
    except BaseException:
        medium.close()
        raise
    return Opened(backend=backend, machine=machine, budget_bytes=budgets.fast_bytes, spill_name=name)


def _beside_memory_tier(budget_bytes: int, medium: Medium) -> int:
    """Return what a tier that is memory itself leaves of a budget."""
    taken_bytes = memory_bytes(medium)
    if taken_bytes >= budget_bytes:
        raise BadArgument(
            f"the memory tier may take {format_bytes(taken_bytes)}, and the budget is {format_bytes(budget_bytes)}: "
            "state less of it, for it is a part of the budget"
        )
    return budget_bytes - taken_bytes


def refuse_lossy(medium: Medium) -> None:
    """Raise `BadArgument` for a tier that nothing can be trained with."""
    if medium.lossy:
        raise BadArgument(
            f"tier '{medium.name}' does not keep its data, so gradients would be wrong: pass a directory as spill"
        )


def _advisory(medium: Medium, *, verify: bool) -> Backend:
    from lowtide.execute.backends.advisory.backend import AdvisoryBackend

    return AdvisoryBackend(medium, verify=verify, reason=ranges.unavailable() or "it was asked for")


def _on_device(medium: Medium, device: torch.device, budgets: Budgets, *, verify: bool) -> Backend:
    from lowtide.execute.backends.accelerator.backend import AcceleratorBackend

    assert budgets.host_bytes is not None
    return AcceleratorBackend(medium, device=device, host_bytes=budgets.host_bytes, verify=verify)


def _with_host_bytes(budgets: Budgets) -> Budgets:
    if budgets.host_bytes is not None:
        return budgets
    host_bytes = _HOST_BYTES
    with suppress(BadArgument):
        host_bytes = auto_bytes() // _HOST_SHARE
    return replace(budgets, host_bytes=host_bytes)


def _device_budgets(budget: BudgetLike, device: torch.device, *, held_bytes: int) -> Budgets:
    def free_bytes() -> int:
        return int(torch.accelerator.get_memory_info(device)[0])

    budgets = parse_device_budget(budget, free_bytes=free_bytes, held_bytes=held_bytes)
    if not budgets.devices:
        return budgets
    stated = dict(budgets.devices)
    if str(device) in stated:
        return replace(budgets, fast_bytes=stated[str(device)])
    if isinstance(budget, dict) and "device" in budget:
        return budgets
    raise BadArgument(
        f"the budget names {', '.join(stated)}, but the model is on {device}: state '{device}' or 'device' bytes"
    )


def _check_capacity(budgets: Budgets, device: torch.device, *, is_bounded: bool) -> None:
    total_bytes = int(torch.accelerator.get_memory_info(device)[1])
    if is_bounded and budgets.fast_bytes > total_bytes:
        raise BadArgument(
            f"a budget of {format_bytes(budgets.fast_bytes)} is more than {device} has, {format_bytes(total_bytes)}: "
            "state less, or 'auto'"
        )


def _device_machine(device: torch.device, budgets: Budgets) -> Machine:
    from lowtide.execute.backends.accelerator.link import measure_device_link

    # The measurement must not pass the budget itself, unless a model does that is about to leave.
    used_bytes = torch.accelerator.memory_allocated(device)
    free_bytes = int(torch.accelerator.get_memory_info(device)[0])
    room_bytes = budgets.fast_bytes - (used_bytes if used_bytes < budgets.fast_bytes else 0)
    link = measure_device_link(device, room_bytes=min(room_bytes, free_bytes) // 2)
    if link is None:
        return replace(assumed_machine(), name=str(device))
    return replace(assumed_machine(), name=str(device), links={SPILL: link}, source="measured on the device")


def _held_bytes(
    models: Sequence[torch.nn.Module], optimizers: Sequence[torch.optim.Optimizer], device: torch.device
) -> int:
    """Return the bytes of the tensors that exist already: "auto" counts them in, the kernel counts them as used."""
    tensors = [tensor for model in models for tensor in (*model.parameters(), *model.buffers())]
    for optimizer in optimizers:
        tensors += [t for state in optimizer.state.values() for t in state.values() if isinstance(t, torch.Tensor)]
    sizes: dict[int, int] = {}
    for tensor in tensors:
        with suppress(RuntimeError, NotImplementedError, ValueError):  # sparse, or lazy and not there yet
            storage = tensor.untyped_storage()
            if storage.device == device:
                sizes[storage._cdata] = storage.nbytes()  # its address would bring it back
    return sum(sizes.values())
