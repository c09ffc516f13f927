"""A device's memory as its own allocator counts it, and the limit that the allocator keeps where it has one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from lowtide.errors import BadArgument

# What PyTorch's own `memory_stats` is made of: that one flattens and sorts a hundred counters on every call.
_raw_stats: Any = getattr(torch._C, "_accelerator_getDeviceStats", None)


@dataclass(slots=True, eq=False)
class Span:
    """What happens to the live bytes while something runs, as if nothing were moved meanwhile.

    `base_bytes` are those where it begins, with what was moved since; `rise_bytes` is the most beyond them. `is_alone`:
    no other thread looked at a span of its own meanwhile, so what was counted is of this one.
    """

    is_alone: bool = True
    base_bytes: int = 0
    rise_bytes: int = 0
    live_bytes: int = 0

    @property
    def peak_bytes(self) -> int:
        """The most that would have been live."""
        return self.base_bytes + self.rise_bytes


class DeviceMemory:
    """Counters of one device. Bytes are counted in the order of the program, not of the device's progress.

    `is_limited` tells whether the allocator itself refuses to pass the limit set with `limit`: through its device
    module's `set_per_process_memory_fraction`, which is the one thing of the kind that PyTorch has.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._module: Any = torch.get_device_module(device)
        self._set_fraction = getattr(self._module, "set_per_process_memory_fraction", None)
        self._set_pressure_callback = getattr(self._module, "set_pressure_callback", None)
        self._peak_bytes = 0
        self._peak_reserved_bytes = 0
        self._spans: list[Span] = []
        if _raw_stats is None or "allocated_bytes" not in _raw_stats(device.index):
            raise BadArgument(
                f"the allocator of '{device.type}' does not report its memory in torch {torch.__version__}, so no "
                "budget can be kept there: train on the CPU, or update torch"
            )

    @property
    def is_limited(self) -> bool:
        """Whether the allocator refuses to pass the limit by itself."""
        return self._set_fraction is not None

    @property
    def can_ask(self) -> bool:
        """Whether the allocator asks for room before it refuses: see Note [Who asks for room]."""
        return self._set_pressure_callback is not None

    def ask(self, callback: Callable[[int], bool] | None) -> None:
        """Have the allocator ask `callback(lacking_bytes)` before it refuses; True: try again (None: ask nobody)."""
        if self._set_pressure_callback is not None:
            self._set_pressure_callback(callback, self.device)

    @property
    def total_bytes(self) -> int:
        """The device's memory."""
        return int(torch.accelerator.get_memory_info(self.device)[1])

    @property
    def free_bytes(self) -> int:
        """What the device has left, other processes considered."""
        return int(torch.accelerator.get_memory_info(self.device)[0])

    def allocated_bytes(self) -> int:
        """Return the bytes of live tensors."""
        return int(_raw_stats(self.device.index)["allocated_bytes"]["all"]["current"])

    def reserved_bytes(self) -> int:
        """Return what the allocator holds, live or not."""
        return int(_raw_stats(self.device.index)["reserved_bytes"]["all"]["current"])

    def begin_span(self) -> Span:
        """Look at what happens to the live bytes from here on."""
        span = Span()
        self._spans.append(span)  # before anybody looks: of two at once, at least one sees the other
        if len(self._spans) > 1:
            for other in self._spans.copy():
                other.is_alone = False
        span.base_bytes = int(self._take_peaks()["allocated_bytes"]["all"]["current"])
        torch.accelerator.reset_peak_memory_stats(self.device)
        return span

    def end_span(self, span: Span) -> int:
        """Tell a span what happened; return the most that was live since the last lap."""
        peak_bytes = self.lap()
        span.live_bytes = self.allocated_bytes()
        self._spans.remove(span)
        return peak_bytes

    def lap(self) -> int:
        """Return the most that was live since the last lap or the last span's begin, and tell it to all spans."""
        peak_bytes = int(self._take_peaks()["allocated_bytes"]["all"]["peak"])
        for span in self._spans.copy():
            span.rise_bytes = max(span.rise_bytes, peak_bytes - span.base_bytes)
        torch.accelerator.reset_peak_memory_stats(self.device)
        return peak_bytes

    def moved(self, change_bytes: int) -> None:
        """Leave bytes out of the spans that were given up or taken since the last lap."""
        torch.accelerator.reset_peak_memory_stats(self.device)
        for span in self._spans.copy():
            span.base_bytes += change_bytes

    def peaks(self) -> tuple[int, int]:
        """Return the most bytes that were live, and that the allocator held, since `forget_peaks`."""
        self._take_peaks()
        return self._peak_bytes, self._peak_reserved_bytes

    def forget_peaks(self) -> None:
        """Look for peaks from here on."""
        torch.accelerator.reset_peak_memory_stats(self.device)
        self._peak_bytes = self._peak_reserved_bytes = 0

    def _take_peaks(self) -> Any:
        stats = _raw_stats(self.device.index)
        self._peak_bytes = max(self._peak_bytes, stats["allocated_bytes"]["all"]["peak"])
        self._peak_reserved_bytes = max(self._peak_reserved_bytes, stats["reserved_bytes"]["all"]["peak"])
        return stats

    def limit(self, budget_bytes: int) -> None:
        """Let the allocator itself refuse to pass `budget_bytes`, where it can and the device has more."""
        total_bytes = self.total_bytes
        if self._set_fraction is not None and budget_bytes < total_bytes:
            torch.accelerator.empty_cache()  # what the allocator keeps for later counts too
            self._set_fraction(budget_bytes / total_bytes, self.device)

    def lift_limit(self) -> None:
        """Let the allocator use the whole device again."""
        if self._set_fraction is not None:
            self._set_fraction(1.0, self.device)
