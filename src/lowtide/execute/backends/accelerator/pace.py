"""How far the host may be ahead of the device, and how long the device was at what it was given."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import TypeVar

import torch

T = TypeVar("T")


class RunAhead:
    """Bounds how far the host is ahead: at most `most` saves and uses whose kernels the device has not reached.

    A host far ahead of its device decides on stale news: copies that ended long ago look unfinished, and host memory
    that is about to be free looks taken. The bound is far enough that the device never runs out of work.
    """

    def __init__(self, most: int = 64) -> None:
        self._most = most
        self._reached: deque[torch.Event] = deque()

    def step(self, stream: torch.Stream) -> None:
        """Note one save or use; waits for the device if it is too far behind."""
        self._reached.append(stream.record_event())
        with suppress(IndexError):  # another of autograd's threads was faster
            while self._reached[0].query():
                self._reached.popleft()
            while len(self._reached) > self._most:
                self._reached.popleft().synchronize()

    def forget(self) -> None:
        """Start over."""
        self._reached.clear()


class StreamTimes:
    """Times what compute streams are given: by events before and after each, read when the device has passed them."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._open: deque[tuple[torch.Event, torch.Event]] = deque()
        self._total_s = 0.0

    def around(self, stream: torch.Stream, queue: Callable[[], T]) -> T:
        """Queue something on a stream, a wait or an operator, and time it."""
        before = torch.Event(device=self._device, enable_timing=True)
        after = torch.Event(device=self._device, enable_timing=True)
        before.record(stream)
        queued = queue()
        after.record(stream)
        self._open.append((before, after))
        return queued

    def add(self, seconds: float) -> None:
        """Count a wait of the host that left the device without work."""
        self._total_s += seconds

    def total_s(self) -> float:
        """Return the seconds of all that has ended."""
        while self._open and self._open[0][1].query():
            before, after = self._open.popleft()
            self._total_s += max(0.0, before.elapsed_time(after) / 1e3)
        return self._total_s
