"""Tiny models, each with one habit that makes memory hard to manage.

Sizes are chosen so that activations outweigh parameters and most saved tensors lie between 64 KiB and 1 MiB.
"""

from __future__ import annotations

import math
import random
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint


def mlp(*, width: int = 128, depth: int = 8, outputs: int = 10) -> nn.Sequential:
    """Return a plain stack of linear layers and smooth activations."""
    layers: list[nn.Module] = []
    for _ in range(depth):
        layers += [nn.Linear(width, width), nn.GELU()]
    return nn.Sequential(*layers, nn.Linear(width, outputs))


def cnn(*, channels: int = 16, depth: int = 4, outputs: int = 10) -> nn.Sequential:
    """Return convolutions with BatchNorm and an in-place ReLU, which overwrites what BatchNorm returned."""
    layers: list[nn.Module] = []
    before = 3
    for _ in range(depth):
        layers += [nn.Conv2d(before, channels, 3, padding=1), nn.BatchNorm2d(channels), nn.ReLU(inplace=True)]
        before = channels
    return nn.Sequential(
        *layers, nn.MaxPool2d(2), nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(4 * channels, outputs)
    )


class Residual(nn.Module):
    """Two convolutions beside a shortcut; the sum is made in place."""

    def __init__(self, before: int, after: int, *, stride: int = 1) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(before, after, 3, stride=stride, padding=1, bias=False),
            nn.BatchNorm2d(after),
            nn.ReLU(inplace=True),
            nn.Conv2d(after, after, 3, padding=1, bias=False),
            nn.BatchNorm2d(after),
        )
        same = before == after and stride == 1
        self.shortcut = nn.Identity() if same else nn.Conv2d(before, after, 1, stride=stride, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.body(x)
        out += self.shortcut(x)
        return functional.relu_(out)


def resnet(*, channels: int = 16, outputs: int = 10) -> nn.Sequential:
    """Return a residual network of three blocks, the second of which halves the image."""
    return nn.Sequential(
        nn.Conv2d(3, channels, 3, padding=1),
        Residual(channels, channels),
        Residual(channels, 2 * channels, stride=2),
        Residual(2 * channels, 2 * channels),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(2 * channels, outputs),
    )


class DenseNet(nn.Module):
    """Every layer reads the concatenation of all before it."""

    def __init__(self, *, growth: int = 8, depth: int = 5, outputs: int = 10) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, growth, 3, padding=1)
        self.layers = nn.ModuleList(
            nn.Sequential(
                nn.BatchNorm2d(growth * (i + 1)),
                nn.ReLU(inplace=True),
                nn.Conv2d(growth * (i + 1), growth, 3, padding=1, bias=False),
            )
            for i in range(depth)
        )
        self.head = nn.Linear(growth * (depth + 1), outputs)

    def forward(self, x: Tensor) -> Tensor:
        features = [self.stem(x)]
        for layer in self.layers:
            features.append(layer(torch.cat(features, dim=1)))
        out: Tensor = self.head(torch.cat(features, dim=1).mean(dim=(2, 3)))
        return out


class Lstm(nn.Module):
    """The library's own LSTM, whose backward needs a workspace besides its operands."""

    def __init__(self, *, width: int = 64, outputs: int = 10) -> None:
        super().__init__()
        self.lstm = nn.LSTM(width, width, num_layers=5, batch_first=True)
        self.head = nn.Linear(width, outputs)

    def forward(self, x: Tensor) -> Tensor:
        states, _ = self.lstm(x)
        out: Tensor = self.head(states[:, -1])
        return out


class UnrolledLstm(nn.Module):
    """An LSTM cell in a Python loop: many small saved tensors, all of one size."""

    def __init__(self, *, width: int = 64, outputs: int = 10) -> None:
        super().__init__()
        self.cell = nn.LSTMCell(width, width)
        self.head = nn.Linear(width, outputs)

    def forward(self, x: Tensor) -> Tensor:
        hidden = cell = x.new_zeros(x.shape[0], x.shape[2])
        for t in range(x.shape[1]):
            hidden, cell = self.cell(x[:, t], (hidden, cell))
        out: Tensor = self.head(hidden)
        return out


class Block(nn.Module):
    """A transformer block that writes its attention out, so that probabilities and dropout masks are saved."""

    def __init__(self, *, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        batch, tokens, width = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(batch, tokens, self.heads, -1).transpose(1, 2).chunk(3, dim=-1)
        scores = q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1])
        mask = torch.ones(tokens, tokens, dtype=torch.bool).triu(1)
        weights = self.dropout(scores.masked_fill_(mask, -math.inf).softmax(dim=-1))
        x = x + self.dropout(self.out((weights @ v).transpose(1, 2).reshape(batch, tokens, width)))
        out: Tensor = x + self.dropout(self.mlp(self.norm2(x)))
        return out


class Transformer(nn.Module):
    """A causal language model whose output layer is its embedding."""

    def __init__(self, *, vocabulary: int = 256, width: int = 64, depth: int = 3, tokens: int = 64) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.position = nn.Parameter(torch.randn(tokens, width) * 0.02)
        self.blocks = nn.ModuleList(Block(width=width, heads=2, dropout=0.1) for _ in range(depth))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids) + self.position[: ids.shape[1]]
        for block in self.blocks:
            x = block(x)
        out: Tensor = self.head(self.norm(x))
        return out


class UNet(nn.Module):
    """Skips that are saved early and read late: the longest gaps a network has."""

    def __init__(self, *, channels: int = 8) -> None:
        super().__init__()
        self.down1, self.down2 = self._pair(3, channels), self._pair(channels, 2 * channels)
        self.bottom = self._pair(2 * channels, 4 * channels)
        self.lift2 = nn.ConvTranspose2d(4 * channels, 2 * channels, 2, stride=2)
        self.lift1 = nn.ConvTranspose2d(2 * channels, channels, 2, stride=2)
        self.up2, self.up1 = self._pair(4 * channels, 2 * channels), self._pair(2 * channels, channels)
        self.head = nn.Conv2d(channels, 2, 1)

    @staticmethod
    def _pair(before: int, after: int) -> nn.Sequential:
        return nn.Sequential(
            nn.Conv2d(before, after, 3, padding=1),
            nn.GroupNorm(2, after),
            nn.SiLU(inplace=True),
            nn.Conv2d(after, after, 3, padding=1),
            nn.ReLU(inplace=True),
        )

    def forward(self, x: Tensor) -> Tensor:
        skip1 = self.down1(x)
        skip2 = self.down2(functional.max_pool2d(skip1, 2))
        x = self.bottom(functional.avg_pool2d(skip2, 2))
        x = self.up2(torch.cat([self.lift2(x), skip2], dim=1))
        x = self.up1(torch.cat([self.lift1(x), skip1], dim=1))
        out: Tensor = self.head(x)
        return out


class Checkpointed(nn.Module):
    """Every second segment recomputes itself in backward; dropout makes it replay the random state."""

    def __init__(self, *, use_reentrant: bool, width: int = 128, depth: int = 6) -> None:
        super().__init__()
        self.use_reentrant = use_reentrant
        self.segments = nn.ModuleList(
            nn.Sequential(nn.Linear(width, width), nn.GELU(), nn.Dropout(0.1), nn.Linear(width, width), nn.Tanh())
            for _ in range(depth)
        )
        self.head = nn.Linear(width, 10)

    def forward(self, x: Tensor) -> Tensor:
        for index, segment in enumerate(self.segments):
            x = checkpoint(segment, x, use_reentrant=self.use_reentrant) if index % 2 else segment(x)
        out: Tensor = self.head(x)
        return out


class _ScaledSwish(torch.autograd.Function):
    """x * sigmoid(scale * x), saving an input, an intermediate, the output and a number."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: float) -> Tensor:
        gate = torch.sigmoid(scale * x)
        y = x * gate
        ctx.save_for_backward(x, gate, y)
        ctx.scale = scale
        ctx.shape = tuple(x.shape)
        return y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        x, gate, y = ctx.saved_tensors
        if tuple(x.shape) != ctx.shape:
            raise AssertionError(f"saved a tensor of shape {ctx.shape} and got {tuple(x.shape)} back")
        return grad * (gate + ctx.scale * y * (1 - gate)), None


class CustomFunction(nn.Module):
    """A stack of layers whose activation is a user's own `autograd.Function`."""

    def __init__(self, *, width: int = 128, depth: int = 6) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(depth))

    def forward(self, x: Tensor) -> Tensor:
        for index, layer in enumerate(self.layers):
            x = _ScaledSwish.apply(layer(x), 1.0 + index / 4)  # type: ignore[no-untyped-call]
        return x


class Views(nn.Module):
    """Slices, transposes, expansions, in-place writes through views, complex and double-precision values."""

    def __init__(self, *, width: int = 128) -> None:
        super().__init__()
        self.inner = nn.Linear(width, 2 * width)
        self.filter = nn.Parameter(torch.randn(width // 2 + 1, dtype=torch.cfloat) * 0.1 + 1.0)
        self.gain = nn.Parameter(torch.ones(1, width, dtype=torch.float64))
        self.outer = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        left, right = self.inner(x).chunk(2, dim=-1)
        mixed = left * right.sigmoid()
        mixed = mixed.clone()
        mixed[:, ::2].mul_(0.5)
        mixed.narrow(1, 0, 32).add_(left.narrow(1, 32, 32).tanh())
        spectrum = torch.fft.rfft(mixed, dim=-1) * self.filter
        x = torch.fft.irfft(spectrum, n=mixed.shape[-1], dim=-1)
        x = (x.double() * self.gain.expand(x.shape[0], -1)).float()
        x = (x.t() * x.t().abs().add_(1.0).reciprocal_()).t()
        out: Tensor = self.outer(x) * torch.where(x > 0, x, 0.1 * x)
        return out


class StochasticDepth(nn.Module):
    """Layers are left out by a Python random number: control flow changes from step to step."""

    def __init__(self, *, width: int = 128, depth: int = 10, seed: int = 5) -> None:
        super().__init__()
        self.random = random.Random(seed)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(width, width), nn.GELU()) for _ in range(depth))
        self.head = nn.Linear(width, 10)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            if self.random.random() < 0.7:
                x = x + layer(x)
        out: Tensor = self.head(x)
        return out


class Bag(nn.Module):
    """An embedding with sparse gradients, which no dense storage holds."""

    def __init__(self, *, vocabulary: int = 2048, width: int = 64) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width, sparse=True)
        self.body = nn.Sequential(nn.Linear(width, width), nn.GELU(), nn.Linear(width, 2 * width), nn.GELU())
        self.head = nn.Linear(2 * width, 10)

    def forward(self, ids: Tensor) -> Tensor:
        out: Tensor = self.head(self.body(self.embedding(ids)).mean(dim=1))
        return out
