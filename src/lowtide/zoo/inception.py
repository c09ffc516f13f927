"""A network like Inception-v3: branches of convolutions side by side, concatenated (Szegedy et al., 2016)."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from lowtide.zoo.workload import Workload, images


class Unit(nn.Sequential):
    """A convolution with BatchNorm and ReLU; `kernel` is a side or (height, width)."""

    def __init__(
        self, before: int, after: int, kernel: int | tuple[int, int], *, stride: int = 1, padded: bool = True
    ) -> None:
        sides = (kernel, kernel) if isinstance(kernel, int) else kernel
        padding = (sides[0] // 2, sides[1] // 2) if padded else (0, 0)
        super().__init__(
            nn.Conv2d(before, after, sides, stride=stride, padding=padding, bias=False),
            nn.BatchNorm2d(after),
            nn.ReLU(inplace=True),
        )


class Branches(nn.ModuleList):
    """Modules that read the same input; their outputs are concatenated."""

    def forward(self, x: Tensor) -> Tensor:
        """Return the branches' outputs, side by side."""
        return torch.cat([branch(x) for branch in self], dim=1)


def _chain(before: int, *units: tuple[int, int | tuple[int, int]]) -> nn.Sequential:
    """Return padded units of stride 1, given as (channels, kernel)."""
    layers = []
    for after, kernel in units:
        layers.append(Unit(before, after, kernel))
        before = after
    return nn.Sequential(*layers)


def _pooled(before: int, after: int) -> nn.Sequential:
    return nn.Sequential(nn.AvgPool2d(3, stride=1, padding=1), Unit(before, after, 1))


def _square(before: int, pooled: int, k: int) -> Branches:
    return Branches(
        [
            _chain(before, (64 * k // 32, 1)),
            _chain(before, (48 * k // 32, 1), (64 * k // 32, 5)),
            _chain(before, (64 * k // 32, 1), (96 * k // 32, 3), (96 * k // 32, 3)),
            _pooled(before, pooled),
        ]
    )


def _factored(before: int, c: int, k: int) -> Branches:
    out = 192 * k // 32
    return Branches(
        [
            _chain(before, (out, 1)),
            _chain(before, (c, 1), (c, (1, 7)), (out, (7, 1))),
            _chain(before, (c, 1), (c, (7, 1)), (c, (1, 7)), (c, (7, 1)), (out, (1, 7))),
            _pooled(before, out),
        ]
    )


def _expanded(before: int, k: int) -> Branches:
    half = 384 * k // 32

    def split() -> Branches:
        return Branches([Unit(half, half, (1, 3)), Unit(half, half, (3, 1))])

    return Branches(
        [
            _chain(before, (320 * k // 32, 1)),
            nn.Sequential(Unit(before, half, 1), split()),
            nn.Sequential(_chain(before, (448 * k // 32, 1), (half, 3)), split()),
            _pooled(before, 192 * k // 32),
        ]
    )


def _halved(*chains: nn.Sequential) -> Branches:
    return Branches([*chains, nn.MaxPool2d(3, stride=2)])


def inception_v3(*, batch: int, image: int = 299, classes: int = 1000, width: int = 32) -> Workload:
    """Return the network; `width` is the number of channels of its first layer and scales all others."""
    k = width

    def c(channels: int) -> int:
        return channels * k // 32

    stem = nn.Sequential(
        Unit(3, c(32), 3, stride=2, padded=False),
        Unit(c(32), c(32), 3, padded=False),
        Unit(c(32), c(64), 3),
        nn.MaxPool2d(3, stride=2),
        Unit(c(64), c(80), 1, padded=False),
        Unit(c(80), c(192), 3, padded=False),
        nn.MaxPool2d(3, stride=2),
    )
    after_square = c(64) + c(64) + c(96) + c(64)
    after_first = c(64) + c(64) + c(96) + c(32)
    after_shrink = c(384) + c(96) + after_square
    after_factored = 4 * c(192)
    after_second = c(320) + c(192) + after_factored
    after_expanded = c(320) + 4 * c(384) + c(192)
    body = nn.Sequential(
        _square(c(192), c(32), k),
        _square(after_first, c(64), k),
        _square(after_square, c(64), k),
        _halved(
            nn.Sequential(Unit(after_square, c(384), 3, stride=2, padded=False)),
            nn.Sequential(_chain(after_square, (c(64), 1), (c(96), 3)), Unit(c(96), c(96), 3, stride=2, padded=False)),
        ),
        _factored(after_shrink, c(128), k),
        _factored(after_factored, c(160), k),
        _factored(after_factored, c(160), k),
        _factored(after_factored, c(192), k),
        _halved(
            nn.Sequential(Unit(after_factored, c(192), 1), Unit(c(192), c(320), 3, stride=2, padded=False)),
            nn.Sequential(
                _chain(after_factored, (c(192), 1), (c(192), (1, 7)), (c(192), (7, 1))),
                Unit(c(192), c(192), 3, stride=2, padded=False),
            ),
        ),
        _expanded(after_second, k),
        _expanded(after_expanded, k),
    )
    head = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Dropout(0.5), nn.Linear(after_expanded, classes))
    return images(nn.Sequential(stem, body, head), batch=batch, image=image, classes=classes)
