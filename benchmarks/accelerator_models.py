"""The two trainings that are compared on the simulated accelerator, sized for seconds a step on one core.

The shapes are those of benchmarks/models.py, narrower and smaller: what decides here is the ratio of bytes to compute,
and that activations outweigh parameters as they do in the trainings that swapping is for.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor
from torch.nn import functional
from torch.optim import SGD, AdamW

from benchmarks.models import MODELS as LARGE
from benchmarks.models import Benchmark, LanguageModel, Sizes, vgg16

_WIDTH, _DEPTH, _HEADS, _TOKENS = 256, 12, 4, 256
_SIDE = 224


def _gpt(sizes: Sizes) -> Benchmark:
    count = max(1, 8 // sizes.scale)

    def batch(source: torch.Generator) -> tuple[Tensor, Tensor]:
        ids = torch.randint(0, sizes.vocabulary, (count, _TOKENS + 1), generator=source)
        return ids[:, :-1].contiguous(), ids[:, 1:].contiguous()

    return replace(
        LARGE["gpt"](sizes),
        title=f"GPT, {_DEPTH} layers, width {_WIDTH}, {_TOKENS} tokens, batch {count}, vocabulary {sizes.vocabulary}",
        build=lambda: LanguageModel(
            vocabulary=sizes.vocabulary,
            width=_WIDTH,
            depth=_DEPTH,
            heads=_HEADS,
            tokens=_TOKENS,
            causal=True,
            dropout=0.0,
        ),
        optimizer=lambda module: AdamW(module.parameters(), lr=1e-4),
        batch=batch,
    )


def _vgg16(sizes: Sizes) -> Benchmark:
    count = max(2, 8 // sizes.scale)

    def batch(source: torch.Generator) -> tuple[Tensor, Tensor]:
        images = torch.randn(count, 3, _SIDE, _SIDE, generator=source)
        labels = torch.randint(0, sizes.classes, (count,), generator=source)
        return images.to(memory_format=torch.channels_last), labels

    return Benchmark(
        title=f"VGG-16 with BatchNorm, batch {count}, {_SIDE}x{_SIDE}, channels last",
        build=lambda: vgg16(classes=sizes.classes).to(memory_format=torch.channels_last),
        optimizer=lambda module: SGD(module.parameters(), lr=0.01, momentum=0.9, weight_decay=5e-4),
        batch=batch,
        loss=functional.cross_entropy,
    )


MODELS: dict[str, Callable[[Sizes], Benchmark]] = {"gpt": _gpt, "vgg16": _vgg16}
