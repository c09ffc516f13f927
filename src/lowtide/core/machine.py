"""What a machine can do: its links, measured or stated."""

from __future__ import annotations

from dataclasses import dataclass

MACHINE_VERSION = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """The path between fast memory and a tier. A transfer of n bytes takes `latency_s + n / bandwidth`.

    The figures are those of transfers beside a program that computes. `idle_speedup` is how many times as fast they
    are while it waits: where transfers need the cores that compute, waiting lets them go faster.
    """

    write_bytes_per_s: float
    read_bytes_per_s: float
    write_latency_s: float = 0.0
    read_latency_s: float = 0.0
    duplex: bool = False
    idle_speedup: float = 1.0

    def write_s(self, nbytes: int) -> float:
        """Return how long it takes to move `nbytes` out of fast memory."""
        return self.write_latency_s + nbytes / self.write_bytes_per_s

    def read_s(self, nbytes: int) -> float:
        """Return how long it takes to bring `nbytes` back."""
        return self.read_latency_s + nbytes / self.read_bytes_per_s

    def work_s(self, *, step_s: float, stall_s: float) -> float:
        """Return the most that the link can have done in a step that waited `stall_s`, by its time beside operators."""
        return step_s + stall_s * (self.idle_speedup - 1)

    def wait_s(self, beside_s: float) -> float:
        """Return how long a program waits for what would take `beside_s` beside its operators."""
        return beside_s / self.idle_speedup


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """A machine as the planner sees it: one fast memory and the links below it, by tier name.

    `flops_per_s` and `memory_bytes_per_s` are what its compute reaches at best (None: not known), `capacity_bytes` its
    fast memory, `page_bytes` and `page_fault_s` what a reactive pager moves at once and pays for each fault.
    """

    name: str
    links: dict[str, Link]
    copy_bytes_per_s: float = 5e9
    source: str = "assumed"
    flops_per_s: float | None = None
    memory_bytes_per_s: float | None = None
    capacity_bytes: int | None = None
    page_bytes: int = 2 << 20
    page_fault_s: float = 0.0
