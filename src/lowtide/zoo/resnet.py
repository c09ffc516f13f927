"""Residual networks: those of basic blocks, and of bottlenecks at any depth (He et al., 2016)."""

from __future__ import annotations

from collections import OrderedDict

from torch import Tensor, nn
from torch.nn import functional

from lowtide.errors import BadArgument
from lowtide.zoo.workload import Workload, images

# The published numbers of blocks in each stage; for any other depth the third stage takes what is left.
_BASIC_STAGES = {18: (2, 2, 2, 2), 34: (3, 4, 6, 3)}
_STAGES = {50: (3, 4, 6, 3), 101: (3, 4, 23, 3), 152: (3, 8, 36, 3), 200: (3, 24, 36, 3)}


def stages(depth: int) -> tuple[int, int, int, int]:
    """Return the blocks of each stage of a ResNet of that depth: 3 layers a block, and 2 around them."""
    if depth in _STAGES:
        return _STAGES[depth]
    blocks, rest = divmod(depth - 2, 3)
    if rest or blocks < 11:
        near = 3 * max(11, blocks + (1 if rest == 2 else 0)) + 2
        raise BadArgument(f"a bottleneck ResNet cannot be {depth} deep: its depth is 3n + 2, such as {near}")
    return (3, 4, blocks - 10, 3)


class Bottleneck(nn.Module):
    """Three convolutions beside a shortcut; the middle one is narrow."""

    def __init__(self, before: int, narrow: int, *, stride: int) -> None:
        super().__init__()
        after = 4 * narrow
        self.body = nn.Sequential(
            nn.Conv2d(before, narrow, 1, bias=False),
            nn.BatchNorm2d(narrow),
            nn.ReLU(inplace=True),
            nn.Conv2d(narrow, narrow, 3, stride=stride, padding=1, bias=False),
            nn.BatchNorm2d(narrow),
            nn.ReLU(inplace=True),
            nn.Conv2d(narrow, after, 1, bias=False),
            nn.BatchNorm2d(after),
        )
        self.shortcut: nn.Module = nn.Identity()
        if before != after or stride != 1:
            self.shortcut = nn.Sequential(nn.Conv2d(before, after, 1, stride=stride, bias=False), nn.BatchNorm2d(after))

    def forward(self, x: Tensor) -> Tensor:
        """Return the sum of both ways, rectified in place."""
        out: Tensor = self.body(x)
        out += self.shortcut(x)
        return functional.relu_(out)


class Basic(nn.Module):
    """Two convolutions beside a shortcut."""

    def __init__(self, before: int, after: int, *, stride: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(before, after, 3, stride=stride, padding=1, bias=False),
            nn.BatchNorm2d(after),
            nn.ReLU(inplace=True),
            nn.Conv2d(after, after, 3, padding=1, bias=False),
            nn.BatchNorm2d(after),
        )
        self.shortcut: nn.Module = nn.Identity()
        if before != after or stride != 1:
            self.shortcut = nn.Sequential(nn.Conv2d(before, after, 1, stride=stride, bias=False), nn.BatchNorm2d(after))

    def forward(self, x: Tensor) -> Tensor:
        """Return the sum of both ways, rectified in place."""
        out: Tensor = self.body(x)
        out += self.shortcut(x)
        return functional.relu_(out)


def resnet(*, batch: int, depth: int = 50, image: int = 224, classes: int = 1000, width: int = 64) -> Workload:
    """Return a ResNet, of basic blocks at depth 18 and 34, else of bottlenecks; `width`: its first channels."""
    parts: OrderedDict[str, nn.Module] = OrderedDict(
        stem=nn.Sequential(
            nn.Conv2d(3, width, 7, stride=2, padding=3, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(inplace=True),
            nn.MaxPool2d(3, stride=2, padding=1),
        )
    )
    before = width
    basic = depth in _BASIC_STAGES
    for index, count in enumerate(_BASIC_STAGES[depth] if basic else stages(depth)):
        narrow = width << index
        blocks: list[nn.Module] = []
        for block in range(count):
            stride = 2 if index and not block else 1
            blocks.append(Basic(before, narrow, stride=stride) if basic else Bottleneck(before, narrow, stride=stride))
            before = narrow if basic else 4 * narrow
        parts[f"stage{index + 1}"] = nn.Sequential(*blocks)
    parts["head"] = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(before, classes))
    return images(nn.Sequential(parts), batch=batch, image=image, classes=classes)
