"""How fast copies between a device and pinned host memory are, measured with a few of them."""

from __future__ import annotations

import statistics

import torch

from lowtide.core.machine import Link
from lowtide.estimate.predictors.loggp import fit_line
from lowtide.execute.backends.accelerator.order import on_stream

_SIZES_BYTES = (64 << 10, 256 << 10, 1 << 20, 4 << 20)
_ROUNDS = 3


def measure_device_link(device: torch.device, *, room_bytes: int) -> Link | None:
    """Return the link to host memory, using at most `room_bytes` of the device; None if that is too little to tell."""
    sizes = [size for size in _SIZES_BYTES if size <= room_bytes]
    if len(sizes) < 2:
        return None
    host = torch.empty(sizes[-1], dtype=torch.uint8, device="cpu", pin_memory=True)
    there = torch.empty(sizes[-1], dtype=torch.uint8, device=device)
    stream = torch.Stream(device=device)
    stream.wait_event(torch.accelerator.current_stream(device).record_event())
    write_latency_s, write_bytes_per_s = fit_line(_times(stream, sizes, source=there, target=host))
    read_latency_s, read_bytes_per_s = fit_line(_times(stream, sizes, source=host, target=there))
    stream.synchronize()
    return Link(
        write_bytes_per_s=write_bytes_per_s,
        read_bytes_per_s=read_bytes_per_s,
        write_latency_s=write_latency_s,
        read_latency_s=read_latency_s,
        duplex=True,
    )


def _times(
    stream: torch.Stream, sizes: list[int], *, source: torch.Tensor, target: torch.Tensor
) -> list[tuple[int, float]]:
    found: dict[int, list[float]] = {}
    for size in sizes * _ROUNDS:
        begin, end = (torch.Event(device=stream.device, enable_timing=True) for _ in range(2))
        with on_stream(stream):
            begin.record(stream)
            target[:size].copy_(source[:size], non_blocking=True)
            end.record(stream)
        end.synchronize()
        found.setdefault(size, []).append(max(begin.elapsed_time(end) / 1e3, 1e-9))
    return [(size, statistics.median(times)) for size, times in found.items()]
