"""U-Net: an encoder whose layers are read again by the decoder, last first (Ronneberger et al., 2015)."""

from __future__ import annotations

from functools import partial
from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn import functional

from lowtide.errors import BadArgument
from lowtide.zoo.workload import Workload, momentum


def _pair(before: int, after: int) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(before, after, 3, padding=1, bias=False),
        nn.BatchNorm2d(after),
        nn.ReLU(inplace=True),
        nn.Conv2d(after, after, 3, padding=1, bias=False),
        nn.BatchNorm2d(after),
        nn.ReLU(inplace=True),
    )


class UNet(nn.Module):
    """Padded convolutions, so that the output has the input's size."""

    def __init__(self, *, levels: int, width: int, classes: int) -> None:
        super().__init__()
        channels = [width << level for level in range(levels + 1)]
        self.down = nn.ModuleList(_pair(a, b) for a, b in zip([3, *channels[:-2]], channels[:-1], strict=True))
        self.bottom = _pair(channels[-2], channels[-1])
        rising = list(reversed(channels))
        self.lift = nn.ModuleList(nn.ConvTranspose2d(a, b, 2, stride=2) for a, b in pairwise(rising))
        self.up = nn.ModuleList(_pair(2 * b, b) for b in rising[1:])
        self.head = nn.Conv2d(width, classes, 1)

    def forward(self, x: Tensor) -> Tensor:
        """Return the scores of every pixel."""
        skips = []
        for down in self.down:
            x = down(x)
            skips.append(x)
            x = functional.max_pool2d(x, 2)
        x = self.bottom(x)
        for lift, up in zip(self.lift, self.up, strict=True):
            x = up(torch.cat([skips.pop(), lift(x)], dim=1))
        out: Tensor = self.head(x)
        return out


def unet(*, batch: int, image: int = 256, classes: int = 2, width: int = 64, levels: int = 4) -> Workload:
    """Return a U-Net; `levels` is how often the image is halved."""
    if image % (1 << levels):
        raise BadArgument(f"image={image} cannot be halved {levels} times: pass a multiple of {1 << levels}")
    target = torch.randint(classes, (batch, image, image))
    return Workload(
        model=UNet(levels=levels, width=width, classes=classes),
        inputs=(torch.randn(batch, 3, image, image),),
        loss=partial(functional.cross_entropy, target=target),
        optimizer=momentum(),
    )
