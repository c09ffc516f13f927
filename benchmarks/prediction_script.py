"""A training script like any other: it knows nothing of Lowtide. `benchmarks/prediction.py` captures and runs it."""

from __future__ import annotations

import argparse
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional


class ConvNextBlock(nn.Module):
    """A block of ConvNeXt (Liu et al., 2022): a wide depthwise convolution, then two linear layers over channels."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.depthwise = nn.Conv2d(width, width, 7, padding=3, groups=width)
        self.norm = nn.LayerNorm(width)
        self.widen, self.narrow = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.scale = nn.Parameter(torch.full((width,), 1e-6))

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(self.depthwise(x).permute(0, 2, 3, 1))
        y = self.scale * self.narrow(functional.gelu(self.widen(y)))
        return x + y.permute(0, 3, 1, 2)


def convnext(*, depths: tuple[int, ...] = (2, 2, 4, 2), width: int = 48) -> nn.Module:
    """Return a small ConvNeXt."""
    layers: list[nn.Module] = [nn.Conv2d(3, width, 4, stride=4)]
    for stage, depth in enumerate(depths):
        if stage:
            layers.append(nn.Conv2d(width, 2 * width, 2, stride=2))
            width *= 2
        layers += [ConvNextBlock(width) for _ in range(depth)]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, 100))


class MixerBlock(nn.Module):
    """A block of the MLP-Mixer (Tolstikhin et al., 2021): linear layers over places, then over channels."""

    def __init__(self, places: int, width: int) -> None:
        super().__init__()
        self.first, self.second = nn.LayerNorm(width), nn.LayerNorm(width)
        self.places = nn.Sequential(nn.Linear(places, 2 * places), nn.GELU(), nn.Linear(2 * places, places))
        self.channels = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.places(self.first(x).transpose(1, 2)).transpose(1, 2)
        return x + self.channels(self.second(x))


class Mixer(nn.Module):
    """A small MLP-Mixer over patches of 8 x 8."""

    def __init__(self, *, image: int, width: int = 256, depth: int = 8) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, width, 8, stride=8)
        self.blocks = nn.Sequential(*(MixerBlock((image // 8) ** 2, width) for _ in range(depth)))
        self.head = nn.Linear(width, 100)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.blocks(self.patches(x).flatten(2).transpose(1, 2)).mean(1))
        return out


class Lstm(nn.Module):
    """A language model of LSTM cells, step by step."""

    def __init__(self, *, words: int = 2000, width: int = 384, depth: int = 2) -> None:
        super().__init__()
        self.embedding = nn.Embedding(words, width)
        self.cells = nn.ModuleList(nn.LSTMCell(width, width) for _ in range(depth))
        self.head = nn.Linear(width, words)

    def forward(self, text: Tensor) -> Tensor:
        states: list[tuple[Tensor, Tensor] | None] = [None] * len(self.cells)
        out = []
        for x in self.embedding(text).unbind(1):
            for k, cell in enumerate(self.cells):
                h, c = cell(x, states[k])
                x, states[k] = h, (h, c)
            out.append(self.head(x))
        return torch.stack(out, 1)


class DenseLayer(nn.Module):
    """A layer of DenseNet (Huang et al., 2017): what it makes is added to what it was given."""

    def __init__(self, before: int, growth: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.BatchNorm2d(before), nn.ReLU(), nn.Conv2d(before, 4 * growth, 1, bias=False),
            nn.BatchNorm2d(4 * growth), nn.ReLU(), nn.Conv2d(4 * growth, growth, 3, padding=1, bias=False),
        )  # fmt: skip

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat((x, self.body(x)), 1)


def densenet(*, depths: tuple[int, ...] = (4, 8, 8), growth: int = 24) -> nn.Module:
    """Return a small DenseNet."""
    width = 2 * growth
    layers: list[nn.Module] = [nn.Conv2d(3, width, 7, stride=2, padding=3), nn.BatchNorm2d(width), nn.ReLU()]
    for depth in depths:
        for _ in range(depth):
            layers.append(DenseLayer(width, growth))
            width += growth
        layers += [nn.BatchNorm2d(width), nn.ReLU(), nn.Conv2d(width, width // 2, 1), nn.AvgPool2d(2)]
        width //= 2
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, 100))


def _twice(before: int, after: int) -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(before, after, 3, padding=1), nn.BatchNorm2d(after), nn.ReLU(),
        nn.Conv2d(after, after, 3, padding=1), nn.BatchNorm2d(after), nn.ReLU(),
    )  # fmt: skip


class UNet(nn.Module):
    """A U-Net (Ronneberger et al., 2015), padded, with BatchNorm, over three levels."""

    def __init__(self, *, width: int = 24, levels: int = 3) -> None:
        super().__init__()
        widths = [width << level for level in range(levels + 1)]
        self.down = nn.ModuleList(_twice(a, b) for a, b in zip([3, *widths], widths, strict=False))
        self.up = nn.ModuleList(nn.ConvTranspose2d(2 * one, one, 2, stride=2) for one in reversed(widths[:-1]))
        self.join = nn.ModuleList(_twice(2 * one, one) for one in reversed(widths[:-1]))
        self.head = nn.Conv2d(width, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        kept = []
        for level, down in enumerate(self.down):
            x = down(functional.max_pool2d(x, 2) if level else x)
            kept.append(x)
        kept.pop()
        for up, join in zip(self.up, self.join, strict=True):
            x = join(torch.cat((kept.pop(), up(x)), 1))
        out: Tensor = self.head(x)
        return out


class Vit(nn.Module):
    """A small vision transformer (Dosovitskiy et al., 2021) over patches of 8 x 8, of PyTorch's own layers."""

    def __init__(self, *, image: int, width: int = 256, depth: int = 6, heads: int = 4) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, width, 8, stride=8)
        self.places = nn.Parameter(torch.zeros(1, (image // 8) ** 2, width))
        layer = nn.TransformerEncoderLayer(
            width, heads, 4 * width, dropout=0.1, activation="gelu", batch_first=True, norm_first=True
        )
        self.blocks = nn.TransformerEncoder(layer, depth, enable_nested_tensor=False)
        self.head = nn.Linear(width, 100)

    def forward(self, x: Tensor) -> Tensor:
        x = self.patches(x).flatten(2).transpose(1, 2) + self.places
        out: Tensor = self.head(self.blocks(x).mean(1))
        return out


Make = Callable[[int], nn.Module]
MODELS: dict[str, tuple[Make, int, int]] = {
    # name: (from the image's side or the text's length, batch, that side or length)
    "unet": (lambda _: UNet(), 4, 160),
    "densenet": (lambda _: densenet(), 16, 96),
    "convnext": (lambda _: convnext(), 16, 128),
    "lstm": (lambda _: Lstm(), 48, 48),
    "vit": (lambda size: Vit(image=size), 24, 96),
    "mixer": (lambda size: Mixer(image=size), 24, 96),
}


def main() -> None:
    """Train."""
    parser = argparse.ArgumentParser()
    parser.add_argument("model", choices=MODELS)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--batch", type=int)
    asked = parser.parse_args()
    torch.manual_seed(0)
    make, batch, size = MODELS[asked.model]
    batch = asked.batch or batch
    model = make(size)
    optimizer: torch.optim.Optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    if asked.model in ("lstm", "vit", "mixer", "convnext"):
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    for _ in range(asked.steps):
        if asked.model == "lstm":
            text = torch.randint(2000, (batch, size + 1))
            loss = functional.cross_entropy(model(text[:, :-1]).flatten(0, 1), text[:, 1:].flatten())
        elif asked.model == "unet":
            images, labels = torch.randn(batch, 3, size, size), torch.randint(2, (batch, size, size))
            loss = functional.cross_entropy(model(images), labels)
        else:
            images, labels = torch.randn(batch, 3, size, size), torch.randint(100, (batch,))
            loss = functional.cross_entropy(model(images), labels)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()


if __name__ == "__main__":
    main()
