"""Synthetic batches, drawn from generators of their own so that they never disturb the global random state."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

import torch
from torch import Tensor

Batch: TypeAlias = tuple[Tensor, ...]


def generator(index: int) -> torch.Generator:
    """Return the random source of step `index`."""
    return torch.Generator().manual_seed(1000 + index)


def vectors(*shape: int, classes: int = 10) -> Callable[[int], Batch]:
    """Return a source of float inputs of `shape` with one class label each."""
    return sized(lambda index: shape, classes=classes)


def sized(shape_at: Callable[[int], tuple[int, ...]], *, classes: int = 10) -> Callable[[int], Batch]:
    """Return a source of labelled inputs whose shape depends on the step."""

    def batch(index: int) -> Batch:
        source, shape = generator(index), shape_at(index)
        return torch.randn(shape, generator=source), torch.randint(0, classes, shape[:1], generator=source)

    return batch


def regression(*shape: int) -> Callable[[int], Batch]:
    """Return a source of inputs with targets of the same shape."""

    def batch(index: int) -> Batch:
        source = generator(index)
        return torch.randn(shape, generator=source), torch.randn(shape, generator=source)

    return batch


def pixels(batch: int, side: int, *, classes: int) -> Callable[[int], Batch]:
    """Return a source of images with one label per pixel."""

    def make(index: int) -> Batch:
        source = generator(index)
        images = torch.randn(batch, 3, side, side, generator=source)
        return images, torch.randint(0, classes, (batch, side, side), generator=source)

    return make


def tokens(batch: int, length: int, *, vocabulary: int) -> Callable[[int], Batch]:
    """Return a source of token sequences, each its own target."""

    def make(index: int) -> Batch:
        ids = torch.randint(0, vocabulary, (batch, length), generator=generator(index))
        return ids, ids

    return make
