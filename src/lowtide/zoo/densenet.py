"""Densely connected networks: every layer reads all before it (Huang et al., 2017)."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from lowtide.errors import BadArgument
from lowtide.zoo.workload import Workload, images

_BLOCKS = {121: (6, 12, 24, 16), 169: (6, 12, 32, 32), 201: (6, 12, 48, 32)}


class DenseLayer(nn.Sequential):
    """A bottleneck that adds `growth` channels to those it reads."""

    def __init__(self, before: int, growth: int) -> None:
        super().__init__(
            nn.BatchNorm2d(before),
            nn.ReLU(inplace=True),
            nn.Conv2d(before, 4 * growth, 1, bias=False),
            nn.BatchNorm2d(4 * growth),
            nn.ReLU(inplace=True),
            nn.Conv2d(4 * growth, growth, 3, padding=1, bias=False),
        )


class DenseBlock(nn.ModuleList):
    """Layers that each read the concatenation of the block's input and all earlier outputs."""

    def forward(self, x: Tensor) -> Tensor:
        """Return everything the block made, and its input."""
        features = [x]
        for layer in self:
            features.append(layer(torch.cat(features, dim=1)))
        return torch.cat(features, dim=1)


def densenet(*, batch: int, depth: int = 121, image: int = 224, classes: int = 1000, growth: int = 32) -> Workload:
    """Return a DenseNet with bottlenecks, halved between blocks."""
    if depth not in _BLOCKS:
        raise BadArgument(f"a DenseNet cannot be {depth} deep here: choose one of {', '.join(map(str, _BLOCKS))}")
    channels = 2 * growth
    parts: list[nn.Module] = [
        nn.Conv2d(3, channels, 7, stride=2, padding=3, bias=False),
        nn.BatchNorm2d(channels),
        nn.ReLU(inplace=True),
        nn.MaxPool2d(3, stride=2, padding=1),
    ]
    for index, count in enumerate(_BLOCKS[depth]):
        if index:
            parts += [
                nn.BatchNorm2d(channels),
                nn.ReLU(inplace=True),
                nn.Conv2d(channels, channels // 2, 1, bias=False),
                nn.AvgPool2d(2),
            ]
            channels //= 2
        parts.append(DenseBlock(DenseLayer(channels + layer * growth, growth) for layer in range(count)))
        channels += count * growth
    parts += [
        nn.BatchNorm2d(channels),
        nn.ReLU(inplace=True),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(channels, classes),
    ]
    return images(nn.Sequential(*parts), batch=batch, image=image, classes=classes)
