"""Predictors held against this machine, as their papers are against theirs. Slow: they need it more or less alone."""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch.nn import functional

from lowtide.core.machine import Machine
from lowtide.estimate.calibrate import assumed_machine, measure_compute
from lowtide.estimate.predict import Shares, operator_s
from lowtide.plan.policies.accudnn import fit_lines

pytestmark = pytest.mark.slow

BATCHES = (8, 12, 16, 20, 24)


@pytest.fixture(autouse=True, scope="module")
def warm() -> None:
    """Let the processor and the kernels come up to speed, and glibc's allocator keep what it is given back.

    It asks the kernel for fresh pages each time until a block as large has been freed once.
    """
    torch.empty(30 << 20, dtype=torch.uint8)
    run, _, _ = convolution(16, 32, 56, 32)
    end_s = time.perf_counter() + 2.0
    while time.perf_counter() < end_s:
        run()


def best_s(run: Callable[[], object], repeats: int = 15) -> float:
    run()
    times_s = []
    for _ in range(repeats):
        begun_s = time.perf_counter()
        run()
        times_s.append(time.perf_counter() - begun_s)
    return min(times_s)


def convolution(batch: int, channels: int, side: int, out: int, size: int = 3) -> tuple[Callable[[], object], int, int]:
    """Return a convolution, its floating-point operations and the bytes it moves."""
    x, weight = torch.randn(batch, channels, side, side), torch.randn(out, channels, size, size)
    nbytes = 4 * (x.numel() + weight.numel() + batch * out * side * side)
    return (
        lambda: functional.conv2d(x, weight, padding=size // 2),
        2 * batch * out * side * side * channels * size * size,
        nbytes,
    )


def product(rows: int, inner: int, columns: int) -> tuple[Callable[[], object], int, int]:
    """Return a matrix product, its floating-point operations and the bytes it moves."""
    a, b = torch.randn(rows, inner), torch.randn(inner, columns)
    return lambda: a @ b, 2 * rows * inner * columns, 4 * (a.numel() + b.numel() + rows * columns)


def test_accudnns_lines_fit_the_times_of_real_layers() -> None:
    layers: list[Callable[[int], tuple[Callable[[], object], int, int]]] = [
        lambda batch: convolution(batch, 32, 56, 32),
        lambda batch: convolution(batch, 64, 28, 64),
        lambda batch: convolution(batch, 128, 14, 256),
        lambda batch: product(batch * 64, 512, 512),
        lambda batch: product(batch * 128, 256, 1024),
    ]
    measured = [[best_s(layer(batch)[0]) for layer in layers] for batch in BATCHES]
    lines = fit_lines(BATCHES, measured)
    assert lines.r2.min() > 0.98


def test_one_share_of_the_peak_predicts_layers_it_was_not_fitted_to() -> None:
    compute = measure_compute()
    machine = Machine(
        name="here",
        links=assumed_machine().links,
        flops_per_s=compute.matmul_flop_per_s,
        memory_bytes_per_s=2 * compute.copy_bytes_per_s,
    )
    # Each takes about 1.5 times as long as the one before: their order is no matter of noise.
    layers = [
        product(256, 512, 512),
        convolution(4, 32, 28, 32),
        product(512, 512, 512),
        convolution(8, 32, 40, 32),
        product(1024, 512, 640),
        convolution(8, 64, 32, 64),
        product(1024, 1024, 768),
        convolution(8, 96, 36, 80),
        product(2048, 1024, 1024),
        convolution(8, 128, 40, 128),
        product(3072, 1536, 1024),
        convolution(8, 160, 48, 160),
        product(4096, 2048, 1152),
        convolution(8, 192, 64, 176),
    ]
    taken_s = np.array([best_s(run) for run, _, _ in layers])
    ideal_s = np.array([operator_s(flops, nbytes, machine, Shares(compute=1, memory=1)) for _, flops, nbytes in layers])
    known, held_out = slice(0, None, 2), slice(1, None, 2)
    share = float(np.median(ideal_s[known] / taken_s[known]))
    predicted_s = ideal_s[held_out] / share
    errors = np.abs(predicted_s - taken_s[held_out]) / taken_s[held_out]
    assert errors.mean() < 0.30
    ranks = [np.argsort(np.argsort(values)) for values in (predicted_s, taken_s[held_out])]
    assert np.corrcoef(*ranks)[0, 1] > 0.9
