"""The models that are compared, in plain PyTorch, each as a chain of segments.

A segment is what the checkpointing contender recomputes: a transformer block, a residual block, a stage of VGG. All
other contenders run the same chain without noticing it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.optim import SGD, AdamW, Optimizer
from torch.utils.checkpoint import checkpoint


class Chain(nn.Module):
    """Segments in a row; with `checkpointing` each keeps only its input and is run again in backward."""

    def __init__(self, *segments: nn.Module) -> None:
        super().__init__()
        self.segments = nn.ModuleList(segments)
        self.checkpointing = False

    def forward(self, x: Tensor) -> Tensor:
        for segment in self.segments:
            x = checkpoint(segment, x, use_reentrant=False) if self.checkpointing else segment(x)
        return x


def _convolution(before: int, after: int, size: int, *, stride: int = 1) -> list[nn.Module]:
    return [nn.Conv2d(before, after, size, stride=stride, padding=size // 2, bias=False), nn.BatchNorm2d(after)]


def vgg16(*, classes: int, linear_layers: bool = False) -> nn.Module:
    """VGG-16 with BatchNorm: thirteen convolutions in five stages, then pooling and one linear layer.

    With `linear_layers` the three of the paper instead. Their 124 million parameters, with gradients and momentum,
    weigh 1.4 GiB, of which only the gradients can move.
    """
    stages: list[nn.Module] = []
    before = 3
    for width, depth in ((64, 2), (128, 2), (256, 3), (512, 3), (512, 3)):
        layers: list[nn.Module] = []
        for _ in range(depth):
            layers += [*_convolution(before, width, 3), nn.ReLU(inplace=True)]
            before = width
        stages.append(nn.Sequential(*layers, nn.MaxPool2d(2)))
    if not linear_layers:
        return Chain(*stages, nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(512, classes)))
    classifier = nn.Sequential(
        nn.Flatten(),
        nn.Linear(512 * 7 * 7, 4096),
        nn.ReLU(inplace=True),
        nn.Dropout(),
        nn.Linear(4096, 4096),
        nn.ReLU(inplace=True),
        nn.Dropout(),
        nn.Linear(4096, classes),
    )
    return Chain(*stages, classifier)


class Bottleneck(nn.Module):
    """A residual block of ResNet-50: narrow, convolve, widen, add."""

    def __init__(self, before: int, width: int, *, stride: int) -> None:
        super().__init__()
        after = 4 * width
        self.body = nn.Sequential(
            *_convolution(before, width, 1),
            nn.ReLU(inplace=True),
            *_convolution(width, width, 3, stride=stride),
            nn.ReLU(inplace=True),
            *_convolution(width, after, 1),
        )
        same = before == after and stride == 1
        self.shortcut = nn.Identity() if same else nn.Sequential(*_convolution(before, after, 1, stride=stride))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.body(x)
        out += self.shortcut(x)
        return functional.relu_(out)


class Block(nn.Module):
    """A residual block of two convolutions."""

    def __init__(self, before: int, after: int, *, stride: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            *_convolution(before, after, 3, stride=stride),
            nn.ReLU(inplace=True),
            *_convolution(after, after, 3),
        )
        same = before == after and stride == 1
        self.shortcut = nn.Identity() if same else nn.Sequential(*_convolution(before, after, 1, stride=stride))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.body(x)
        out += self.shortcut(x)
        return functional.relu_(out)


def resnet50(*, classes: int) -> nn.Module:
    """ResNet-50: a stem, sixteen bottlenecks, one linear layer."""
    stem = nn.Sequential(*_convolution(3, 64, 7, stride=2), nn.ReLU(inplace=True), nn.MaxPool2d(3, 2, padding=1))
    blocks: list[nn.Module] = []
    before = 64
    for stage, (width, depth) in enumerate(((64, 3), (128, 4), (256, 6), (512, 3))):
        for index in range(depth):
            blocks.append(Bottleneck(before, width, stride=2 if stage > 0 and index == 0 else 1))
            before = 4 * width
    head = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(before, classes))
    return Chain(stem, *blocks, head)


def resnet110(*, classes: int) -> nn.Module:
    """The deep ResNet for small images (He et al., 2016): a stem, 54 blocks of two convolutions, one linear layer."""
    stem = nn.Sequential(*_convolution(3, 16, 3), nn.ReLU(inplace=True))
    blocks: list[nn.Module] = []
    before = 16
    for stage, width in enumerate((16, 32, 64)):
        for index in range(18):
            blocks.append(Block(before, width, stride=2 if stage > 0 and index == 0 else 1))
            before = width
    return Chain(stem, *blocks, nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(before, classes)))


class TransformerBlock(nn.Module):
    """Attention and a feed-forward layer: normalised before (GPT) or after (BERT) each."""

    def __init__(self, *, width: int, heads: int, causal: bool, dropout: float) -> None:
        super().__init__()
        self.heads, self.causal, self.dropout = heads, causal, dropout
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.projection = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.widen, self.narrow = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def _attend(self, x: Tensor) -> Tensor:
        batch, tokens, width = x.shape
        q, k, v = (part.view(batch, tokens, self.heads, -1).transpose(1, 2) for part in self.qkv(x).split(width, dim=2))
        chance = self.dropout if self.training else 0.0
        y = functional.scaled_dot_product_attention(q, k, v, dropout_p=chance, is_causal=self.causal)
        return self._thinned(self.projection(y.transpose(1, 2).reshape(batch, tokens, width)))

    def _feed(self, x: Tensor) -> Tensor:
        return self._thinned(self.narrow(functional.gelu(self.widen(x))))

    def _thinned(self, x: Tensor) -> Tensor:
        return functional.dropout(x, self.dropout, self.training) if self.dropout else x

    def forward(self, x: Tensor) -> Tensor:
        if self.causal:
            x = x + self._attend(self.norm1(x))
            return x + self._feed(self.norm2(x))
        x = self.norm1(x + self._attend(x))
        out: Tensor = self.norm2(x + self._feed(x))
        return out


class LanguageModel(nn.Module):
    """Embeddings, transformer blocks and a head that shares the embedding's weight."""

    def __init__(
        self, *, vocabulary: int, width: int, depth: int, heads: int, tokens: int, causal: bool, dropout: float
    ) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.position = nn.Embedding(tokens, width)
        self.chain = Chain(
            *(TransformerBlock(width=width, heads=heads, causal=causal, dropout=dropout) for _ in range(depth))
        )
        self.norm = nn.LayerNorm(width)
        self.transform = nn.Identity() if causal else nn.Sequential(nn.Linear(width, width), nn.GELU())
        self.bias = nn.Parameter(torch.zeros(vocabulary))
        nn.init.normal_(self.embedding.weight, std=0.02)
        nn.init.normal_(self.position.weight, std=0.02)

    def forward(self, ids: Tensor) -> Tensor:
        places = torch.arange(ids.shape[1], device=ids.device)
        x = self.chain(self.embedding(ids) + self.position(places))
        return functional.linear(self.norm(self.transform(x)), self.embedding.weight, self.bias)


@dataclass(frozen=True, slots=True, kw_only=True)
class Benchmark:
    """A training to measure: how its model, optimizer, batches and loss are made."""

    title: str
    build: Callable[[], nn.Module]
    optimizer: Callable[[nn.Module], Optimizer]
    batch: Callable[[torch.Generator], tuple[Tensor, Tensor]]
    loss: Callable[[Tensor, Tensor], Tensor]
    # Gradients are set to None before forward instead of after the optimizer: they live between steps, so they count as
    # static. Both are common; PyTorch's tutorials do this one.
    zero_first: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """Sizes that can be changed from the command line, the defaults being those of the published table.

    `scale` divides the batch for a quick try; its results cannot be compared with those of the whole batch. `batch`:
    another one, of the two deep models.
    """

    vocabulary: int = 8192
    classes: int = 1000
    scale: int = 1
    batch: int = 4


def _sgd(module: nn.Module) -> Optimizer:
    return SGD(module.parameters(), lr=0.01, momentum=0.9, weight_decay=5e-4)


def _adamw(module: nn.Module) -> Optimizer:
    return AdamW(module.parameters(), lr=1e-4)


def _token_loss(logits: Tensor, targets: Tensor) -> Tensor:
    return functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=-100)


def _vision(
    title: str,
    build: Callable[[], nn.Module],
    sizes: Sizes,
    *,
    zero_first: bool = False,
    batch: int | None = None,
    side: int = 224,
) -> Benchmark:
    count = batch or max(2, 16 // sizes.scale)

    def made(source: torch.Generator) -> tuple[Tensor, Tensor]:
        images = torch.randn(count, 3, side, side, generator=source)
        return images, torch.randint(0, sizes.classes, (count,), generator=source)

    return Benchmark(
        title=f"{title}, batch {count}, {side}x{side}" + ", zero_grad() first" * zero_first,
        build=build,
        optimizer=_sgd,
        batch=made,
        loss=functional.cross_entropy,
        zero_first=zero_first,
    )


def _vgg16_linear(sizes: Sizes, *, zero_first: bool) -> Benchmark:
    title = "VGG-16 with BatchNorm and the paper's linear layers"
    return _vision(title, lambda: vgg16(classes=sizes.classes, linear_layers=True), sizes, zero_first=zero_first)


def _gpt(
    sizes: Sizes, *, depth: int = 12, width: int = 512, heads: int = 8, batch: int = 8, tokens: int = 512
) -> Benchmark:
    count = max(1, batch // sizes.scale)

    def made(source: torch.Generator) -> tuple[Tensor, Tensor]:
        ids = torch.randint(0, sizes.vocabulary, (count, tokens + 1), generator=source)
        return ids[:, :-1].contiguous(), ids[:, 1:].contiguous()

    return Benchmark(
        title=f"GPT, {depth} layers, width {width}, {tokens} tokens, batch {count}, vocabulary {sizes.vocabulary}",
        build=lambda: LanguageModel(
            vocabulary=sizes.vocabulary, width=width, depth=depth, heads=heads, tokens=tokens, causal=True, dropout=0.0
        ),
        optimizer=_adamw,
        batch=made,
        loss=_token_loss,
    )


def _bert(sizes: Sizes) -> Benchmark:
    count, tokens, vocabulary, mask = max(1, 4 // sizes.scale), 256, 30522, 103

    def batch(source: torch.Generator) -> tuple[Tensor, Tensor]:
        ids = torch.randint(0, vocabulary, (count, tokens), generator=source)
        hidden = torch.rand(count, tokens, generator=source) < 0.15
        return ids.masked_fill(hidden, mask), ids.masked_fill(~hidden, -100)

    return Benchmark(
        title=f"BERT-base encoder with its masked-word head, {tokens} tokens, batch {count}",
        build=lambda: LanguageModel(
            vocabulary=vocabulary, width=768, depth=12, heads=12, tokens=tokens, causal=False, dropout=0.1
        ),
        optimizer=_adamw,
        batch=batch,
        loss=_token_loss,
    )


MODELS: dict[str, Callable[[Sizes], Benchmark]] = {
    "vgg16": lambda sizes: _vision("VGG-16 with BatchNorm", lambda: vgg16(classes=sizes.classes), sizes),
    "vgg16_linear": lambda sizes: _vgg16_linear(sizes, zero_first=True),
    "vgg16_linear_zero_last": lambda sizes: _vgg16_linear(sizes, zero_first=False),
    "gpt": _gpt,
    # Its parameters, gradients and optimizer state weigh more than its activations: 5 GB.
    "gpt_large": lambda sizes: _gpt(sizes, depth=24, width=1024, heads=16, batch=2),
    # The same of a billion parameters: 16.5 GB.
    "gpt_1b": lambda sizes: _gpt(sizes, depth=20, width=2048, heads=16, batch=2),
    "resnet50": lambda sizes: _vision("ResNet-50", lambda: resnet50(classes=sizes.classes), sizes),
    "bert": _bert,
    # Deep and narrow, on small inputs: nearly all of their memory is activations.
    "resnet110": lambda sizes: _vision(
        "ResNet-110", lambda: resnet110(classes=sizes.classes), sizes, batch=sizes.batch, side=32
    ),
    "gpt_deep": lambda sizes: _gpt(sizes, depth=24, width=128, heads=4, batch=sizes.batch, tokens=128),
}


def set_checkpointing(module: nn.Module) -> int:
    """Let every chain recompute its segments in backward; return how many segments there are."""
    chains = [part for part in module.modules() if isinstance(part, Chain)]
    for chain in chains:
        chain.checkpointing = True
    return sum(len(chain.segments) for chain in chains)
