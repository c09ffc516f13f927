"""The U-Net of latent diffusion models (Rombach et al., 2022): residual blocks, and attention to a prompt."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional

from lowtide.zoo.workload import Workload, adam


class Residual(nn.Module):
    """Two convolutions beside a shortcut; the time is added between them."""

    def __init__(self, before: int, after: int, *, time: int) -> None:
        super().__init__()
        self.norm1, self.conv1 = nn.GroupNorm(32, before), nn.Conv2d(before, after, 3, padding=1)
        self.time = nn.Linear(time, after)
        self.norm2, self.conv2 = nn.GroupNorm(32, after), nn.Conv2d(after, after, 3, padding=1)
        self.shortcut: nn.Module = nn.Identity() if before == after else nn.Conv2d(before, after, 1)

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        """Return the sum of both ways."""
        y = self.conv1(functional.silu(self.norm1(x))) + self.time(functional.silu(time))[:, :, None, None]
        out: Tensor = self.shortcut(x) + self.conv2(functional.silu(self.norm2(y)))
        return out


class Attention(nn.Module):
    """Attention of the image's points to themselves, or to the words of a prompt."""

    def __init__(self, width: int, context: int, *, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.q = nn.Linear(width, width, bias=False)
        self.k, self.v = nn.Linear(context, width, bias=False), nn.Linear(context, width, bias=False)
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor, context: Tensor) -> Tensor:
        """Return a mixture of the context for each point."""
        q, k, v = (
            each.unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for each in (self.q(x), self.k(context), self.v(context))
        )
        mixed = functional.scaled_dot_product_attention(q, k, v)
        out: Tensor = self.out(mixed.transpose(1, 2).flatten(2))
        return out


class Transformer(nn.Module):
    """Points attend to each other and to the prompt, then pass a gated layer, each beside a shortcut."""

    def __init__(self, width: int, context: int, *, heads: int) -> None:
        super().__init__()
        self.norm = nn.GroupNorm(32, width)
        self.enter, self.leave = nn.Conv2d(width, width, 1), nn.Conv2d(width, width, 1)
        self.norm1, self.norm2, self.norm3 = nn.LayerNorm(width), nn.LayerNorm(width), nn.LayerNorm(width)
        self.itself, self.prompt = Attention(width, width, heads=heads), Attention(width, context, heads=heads)
        self.gated, self.down = nn.Linear(width, 8 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor, context: Tensor) -> Tensor:
        """Return the image after attention."""
        points = self.enter(self.norm(x)).flatten(2).transpose(1, 2)
        y = self.norm1(points)
        points = points + self.itself(y, y)
        points = points + self.prompt(self.norm2(points), context)
        value, gate = self.gated(self.norm3(points)).chunk(2, dim=-1)
        points = points + self.down(value * functional.gelu(gate))
        out: Tensor = x + self.leave(points.transpose(1, 2).reshape(x.shape))
        return out


class Stage(nn.Module):
    """A residual block, with attention behind it where `context` is given."""

    def __init__(self, before: int, after: int, *, time: int, context: int | None, heads: int) -> None:
        super().__init__()
        self.residual = Residual(before, after, time=time)
        self.attention = None if context is None else Transformer(after, context, heads=heads)

    def forward(self, x: Tensor, time: Tensor, context: Tensor) -> Tensor:
        """Return the image after the block."""
        x = self.residual(x, time)
        return x if self.attention is None else self.attention(x, context)


class DiffusionUnet(nn.Module):
    """The noise in a latent image, given its time and a prompt; every level halves the image."""

    def __init__(self, *, width: int, levels: int, blocks: int, context: int, heads: int, channels: int) -> None:
        super().__init__()
        widths = [width * min(2**level, 4) for level in range(levels)]
        time = 4 * width
        self.width = width
        self.embed = nn.Sequential(nn.Linear(width, time), nn.SiLU(), nn.Linear(time, time))
        self.enter = nn.Conv2d(channels, width, 3, padding=1)
        stage = partial(Stage, time=time, heads=heads)
        self.down, self.up = nn.ModuleList(), nn.ModuleList()
        self.shrink, self.grow = nn.ModuleList(), nn.ModuleList()
        skips, before = [width], width
        for level, after in enumerate(widths):
            seen = context if level < levels - 1 else None
            for _ in range(blocks):
                self.down.append(stage(before, after, context=seen))
                before = after
                skips.append(after)
            if level < levels - 1:
                self.shrink.append(nn.Conv2d(after, after, 3, stride=2, padding=1))
                skips.append(after)
        self.middle = nn.ModuleList([stage(before, before, context=context), stage(before, before, context=None)])
        for level, after in reversed(list(enumerate(widths))):
            seen = context if level < levels - 1 else None
            for _ in range(blocks + 1):
                self.up.append(stage(before + skips.pop(), after, context=seen))
                before = after
            if level:
                self.grow.append(nn.Conv2d(after, after, 3, padding=1))
        self.levels, self.blocks = levels, blocks
        self.leave = nn.Sequential(nn.GroupNorm(32, before), nn.SiLU(), nn.Conv2d(before, channels, 3, padding=1))

    def forward(self, x: Tensor, at: Tensor, prompt: Tensor) -> Tensor:
        """Return the noise."""
        rates = 10000.0 ** (-torch.arange(self.width // 2, device=x.device).float() / (self.width // 2))
        angles = at[:, None].float() * rates
        time = self.embed(torch.cat((angles.cos(), angles.sin()), dim=-1).to(x.dtype))
        x = self.enter(x)
        seen = [x]
        down, up = iter(self.down), iter(self.up)
        for level in range(self.levels):
            for _ in range(self.blocks):
                x = next(down)(x, time, prompt)
                seen.append(x)
            if level < self.levels - 1:
                x = self.shrink[level](x)
                seen.append(x)
        for stage in self.middle:
            x = stage(x, time, prompt)
        for level in range(self.levels):
            for _ in range(self.blocks + 1):
                x = next(up)(torch.cat((x, seen.pop()), dim=1), time, prompt)
            if level < self.levels - 1:
                x = self.grow[level](functional.interpolate(x, scale_factor=2.0))
        out: Tensor = self.leave(x)
        return out


def sd_unet(
    *,
    batch: int,
    image: int = 64,
    width: int = 320,
    levels: int = 4,
    blocks: int = 2,
    context: int = 768,
    words: int = 77,
    heads: int = 8,
    channels: int = 4,
) -> Workload:
    """Return the U-Net of Stable Diffusion 1, which learns a latent image's noise; `image` is the latent's side."""
    model = DiffusionUnet(width=width, levels=levels, blocks=blocks, context=context, heads=heads, channels=channels)
    noise = torch.randn(batch, channels, image, image)
    return Workload(
        model=model,
        inputs=(
            torch.randn(batch, channels, image, image),
            torch.randint(1000, (batch,)),
            torch.randn(batch, words, context),
        ),
        loss=partial(functional.mse_loss, target=noise),
        optimizer=adam(),
    )
