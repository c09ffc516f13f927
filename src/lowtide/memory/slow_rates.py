"""What the native part needs to know of slow memory, from the machine that plans are made for."""

from __future__ import annotations

from lowtide.core.machine import Machine
from lowtide.memory.native.bindings import SlowRates
from lowtide.tiers.slow import SlowMedium


def slow_rates(machine: Machine, tier: str, medium: SlowMedium) -> SlowRates:
    """Return what operators and migrations are charged in a tier: nothing where the device takes its own time."""
    if medium.emulation is None:
        return SlowRates()
    link = machine.links[tier]
    access = link.access
    assert access is not None, f"tier {tier!r} is addressable"
    return SlowRates(
        read_bytes_per_s=access.read_bytes_per_s,
        write_bytes_per_s=access.write_bytes_per_s,
        mixed_share=access.mixed_share,
        latency_s=access.latency_s,
        fast_bytes_per_s=machine.memory_bytes_per_s or 0.0,
        migrate_out_bytes_per_s=link.write_bytes_per_s,
        migrate_in_bytes_per_s=link.read_bytes_per_s,
        waited_out_bytes_per_s=link.waited_write_bytes_per_s or 0.0,
        waited_in_bytes_per_s=link.waited_read_bytes_per_s or 0.0,
        migrate_out_latency_s=link.write_latency_s,
        migrate_in_latency_s=link.read_latency_s,
        cache_bytes=medium.emulation.cache_bytes,
        own_channel=access.own_channel,
        duplex=link.duplex,
    )
