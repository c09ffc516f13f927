"""What the emulator tells: totals, and a record for each kernel and copy."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineStats:
    """One copy engine since the last reset; `hidden_s` is the part of `busy_s` during which a kernel ran as well."""

    copies: int
    nbytes: int
    busy_s: float
    hidden_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Stats:
    """A device's memory now, and what it did since the last reset.

    `live_bytes` are those of tensors; `active_bytes` adds freed blocks that a stream may still be using, and is what
    the capacity bounds.
    """

    live_bytes: int
    peak_bytes: int
    active_bytes: int
    peak_active_bytes: int
    allocations: int
    out_of_memory: int
    compute_s: float
    kernels: int
    h2d: EngineStats
    d2h: EngineStats

    @property
    def copy_s(self) -> float:
        """Seconds that the engines were busy, both directions added."""
        return self.h2d.busy_s + self.d2h.busy_s

    @property
    def hidden_copy_s(self) -> float:
        """Seconds of copying during which a kernel ran as well, both directions added."""
        return self.h2d.hidden_s + self.d2h.hidden_s


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceRecord:
    """One kernel or copy: `engine` is "compute", "h2d" or "d2h"; times are seconds of the monotonic clock."""

    engine: str
    device: int
    stream: int
    name: str
    start_s: float
    end_s: float
    nbytes: int
