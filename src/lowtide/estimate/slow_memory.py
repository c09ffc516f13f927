"""The link to slow memory that operators use in place: imitated after a machine that has it, or measured."""

from __future__ import annotations

from dataclasses import replace

from lowtide.core.machine import Access, Link, Machine
from lowtide.errors import BadArgument
from lowtide.estimate.calibrate import measure_access, measure_link, measure_memory_bytes_per_s
from lowtide.estimate.presets import PRESETS
from lowtide.tiers.slow import Emulation, SlowMedium

SLOW = "slow"

_memory_bytes_per_s: list[float] = []  # of this machine, once it was measured


def with_slow_memory(machine: Machine, medium: SlowMedium) -> Machine:
    """Return this machine with slow memory above all tiers that it has, and what its own memory delivers."""
    fast = machine.memory_bytes_per_s or _measured_memory()
    if medium.emulation is not None:
        link = emulated_link(medium.emulation, memory_bytes_per_s=fast)
    else:
        access = measure_access(medium.fds[0], memory_bytes_per_s=fast)
        link = replace(measure_link(medium), access=access)
    link = replace(link, capacity_bytes=medium.capacity_bytes)
    return replace(machine, links={SLOW: link, **machine.links}, memory_bytes_per_s=fast)


def emulated_link(emulation: Emulation, *, memory_bytes_per_s: float) -> Link:
    """Return the link to imitated slow memory: as far below this machine's memory as it is below the other's."""
    machine = _machine_of(emulation)
    tier, link = next((tier, link) for tier, link in machine.links.items() if link.addressable)
    access = link.access
    assert access is not None, f"tier {tier!r} is addressable"
    scale = emulation.scale
    if scale is None:
        if machine.memory_bytes_per_s is None:
            raise BadArgument(f"machine {machine.name!r} does not say how fast its memory is: state a scale")
        scale = memory_bytes_per_s / machine.memory_bytes_per_s

    def scaled(rate: float | None) -> float | None:
        return None if rate is None else rate * scale

    return replace(
        link,
        write_bytes_per_s=link.write_bytes_per_s * scale,
        read_bytes_per_s=link.read_bytes_per_s * scale,
        waited_write_bytes_per_s=scaled(link.waited_write_bytes_per_s),
        waited_read_bytes_per_s=scaled(link.waited_read_bytes_per_s),
        access=Access(
            read_bytes_per_s=access.read_bytes_per_s * scale,
            write_bytes_per_s=access.write_bytes_per_s * scale,
            mixed_share=access.mixed_share,
            latency_s=access.latency_s,
            own_channel=access.own_channel,
        ),
    )


def _machine_of(emulation: Emulation) -> Machine:
    if isinstance(emulation.machine, Machine):
        found = emulation.machine
    elif emulation.machine in PRESETS:
        found = PRESETS[emulation.machine].machine
    else:
        found = None
    if found is None or not found.addressable:
        known = ", ".join(sorted(name for name, preset in PRESETS.items() if preset.machine.addressable))
        name = emulation.machine if isinstance(emulation.machine, str) else emulation.machine.name
        raise BadArgument(f"machine {name!r} has no slow memory that could be imitated: known are {known}")
    return found


def _measured_memory() -> float:
    if not _memory_bytes_per_s:
        _memory_bytes_per_s.append(measure_memory_bytes_per_s())
    return _memory_bytes_per_s[0]
