"""The settings that decide which kernel computes an operator, and so its last bits."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch


class Numerics(NamedTuple):
    """What a call ran under."""

    grad: bool
    threads: int
    onednn: bool
    deterministic: bool
    matmul_precision: str
    dtype: torch.dtype


def numerics() -> Numerics:
    """Return the settings now, on this thread."""
    return Numerics(
        grad=torch.is_grad_enabled(),
        threads=torch.get_num_threads(),
        onednn=torch._C._get_mkldnn_enabled(),
        deterministic=torch._C._get_deterministic_algorithms(),
        matmul_precision=torch.get_float32_matmul_precision(),
        dtype=torch.get_default_dtype(),
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
    if wanted.deterministic != now.deterministic:
        torch.use_deterministic_algorithms(wanted.deterministic)
    if wanted.matmul_precision != now.matmul_precision:
        torch.set_float32_matmul_precision(wanted.matmul_precision)
    if wanted.dtype != now.dtype:
        torch.set_default_dtype(wanted.dtype)
