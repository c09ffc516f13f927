"""Counted operations: PyTorch's, and ours where PyTorch's are wrong."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from lowtide.capture.flops import CountFlops


def counted(layer: nn.Module, x: torch.Tensor) -> dict[str, float]:
    with CountFlops() as counter:
        layer(x).sum().backward()
    return dict(counter.counted)


@pytest.mark.parametrize("groups", [1, 2, 8])
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("needs_input", [False, True])
def test_backward_takes_what_forward_does_for_each_gradient(groups: int, transposed: bool, needs_input: bool) -> None:
    made = nn.ConvTranspose2d if transposed else nn.Conv2d
    layer = made(8, 16, 3, stride=2, padding=1, groups=groups)
    seen = counted(layer, torch.randn(2, 8, 10, 10, requires_grad=needs_input))
    gradients = 2 if needs_input else 1
    assert seen["aten::convolution_backward"] == gradients * seen["aten::convolution"] > 0


def test_without_groups_ours_is_pytorchs() -> None:
    layer, x = nn.Conv2d(3, 5, 3, padding=1, stride=2), torch.randn(2, 3, 9, 9, requires_grad=True)
    with FlopCounterMode(display=False) as torchs:
        layer(x).sum().backward()
    assert sum(counted(layer, x).values()) == torchs.get_total_flops()
