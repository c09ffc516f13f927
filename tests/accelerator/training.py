"""A chain of large activations on the device, and its gradient."""

from __future__ import annotations

import torch
from torch import Tensor

import lowtide

MIB = 1 << 20
LENGTH = 8


def chain(x: Tensor, length: int = LENGTH) -> Tensor:
    """Return a value whose graph holds `length` activations as large as `x`."""
    for _ in range(length):
        x = (x * 1.01).sin()
    return x


def start(device: torch.device) -> tuple[Tensor, Tensor]:
    """Return an input of 1 MiB and its gradient through the chain, computed without Lowtide."""
    torch.manual_seed(3)
    x = torch.randn(MIB // 4).to(device).requires_grad_()
    chain(x).sum().backward()
    assert x.grad is not None
    expected, x.grad = x.grad.cpu(), None
    return x, expected


def gradient(tide: lowtide.Tide, x: Tensor) -> Tensor:
    """Return the gradient, computed in a step of the tide."""
    with tide.step():
        chain(x).sum().backward()
    assert x.grad is not None
    found, x.grad = x.grad.cpu(), None
    return found


def tight_bytes(device: torch.device, *, activations: int = 5) -> int:
    """Return a budget with room for some of the chain's activations beside what exists."""
    return int(torch.accelerator.memory_allocated(device)) + activations * MIB
