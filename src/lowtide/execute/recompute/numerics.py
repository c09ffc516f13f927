"""The settings that decide which kernel computes an operator, and so its last bits."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch


class Numerics(NamedTuple):
    """What a call ran under. `flushes`: numbers too small to be normal are taken as zero on this thread."""

    grad: bool
    threads: int
    onednn: bool
    deterministic: bool
    warn_only: bool
    fills_uninitialized: bool
    matmul_precision: str
    dtype: torch.dtype
    flushes: bool
    cudnn: tuple[bool, bool, bool]


def numerics() -> Numerics:
    """Return the settings now, on this thread."""
    return Numerics(
        grad=torch.is_grad_enabled(),
        threads=torch.get_num_threads(),
        onednn=torch._C._get_mkldnn_enabled(),
        deterministic=torch._C._get_deterministic_algorithms(),
        warn_only=torch._C._get_deterministic_algorithms_warn_only(),
        fills_uninitialized=torch._C._get_deterministic_fill_uninitialized_memory(),
        matmul_precision=torch.get_float32_matmul_precision(),
        dtype=torch.get_default_dtype(),
        flushes=sys.float_info.min / 2 == 0.0,  # there is no function that tells, but the processor shows it
        cudnn=(
            torch._C._get_cudnn_enabled(),
            torch._C._get_cudnn_benchmark(),
            torch._C._get_cudnn_deterministic(),
        ),
    )


@contextmanager
def running_under(wanted: Numerics) -> Iterator[None]:
    """Have the settings of a call, and those of before afterwards."""
    before = numerics()
    if wanted == before:
        yield
        return
    _set(wanted, before)
    try:
        yield
    finally:
        _set(before, wanted)


def _set(wanted: Numerics, now: Numerics) -> None:
    torch._C._set_grad_enabled(wanted.grad)
    if wanted.threads != now.threads:
        torch.set_num_threads(wanted.threads)
    if wanted.onednn != now.onednn:
        torch._C._set_mkldnn_enabled(wanted.onednn)
    if (wanted.deterministic, wanted.warn_only) != (now.deterministic, now.warn_only):
        torch._C._set_deterministic_algorithms(wanted.deterministic, warn_only=wanted.warn_only)
    if wanted.fills_uninitialized != now.fills_uninitialized:
        torch._C._set_deterministic_fill_uninitialized_memory(wanted.fills_uninitialized)
    if wanted.matmul_precision != now.matmul_precision:
        torch.set_float32_matmul_precision(wanted.matmul_precision)
    if wanted.dtype != now.dtype:
        torch.set_default_dtype(wanted.dtype)
    if wanted.flushes != now.flushes:
        torch.set_flush_denormal(wanted.flushes)
    if wanted.cudnn != now.cudnn:
        enabled, benchmark, deterministic = wanted.cudnn
        torch._C._set_cudnn_enabled(enabled)
        torch._C._set_cudnn_benchmark(benchmark)
        torch._C._set_cudnn_deterministic(deterministic)
