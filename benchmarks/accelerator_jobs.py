"""What a worker on the simulated accelerator is asked to do, and the link that it gets."""

from __future__ import annotations

from dataclasses import dataclass

from benchmarks.jobs import Job

WORKER = "benchmarks.accelerator_worker"


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """The link between device and host, each way. A rate of 0 is as fast as memory."""

    d2h_bytes_per_s: float = 0.0
    h2d_bytes_per_s: float = 0.0
    latency_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceJob(Job):
    """One training on the device `sim`, in a process of its own.

    `contender`: unmanaged, lowtide, save_on_cpu, one_block_ahead or checkpoint; or "probe": only tell what the preset
    named in `policy` makes of the link on this machine. The rates are those of `Link`.
    `recompute`: whether Lowtide may run operators again.
    """

    d2h_bytes_per_s: float = 0.0
    h2d_bytes_per_s: float = 0.0
    latency_s: float = 0.0
    capacity_bytes: int = 0
    host_bytes: int = 0
    policy: str = "auto"
    recompute: bool = False
    trace: bool = False
