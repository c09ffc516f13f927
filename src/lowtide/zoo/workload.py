"""What a training needs besides a loop: a model, a batch, a loss and an optimizer."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from lowtide.capture.training import Training


class Workload(NamedTuple):
    """A model with one batch. `loss` takes the model's output; `optimizer` makes one from parameters."""

    model: nn.Module
    inputs: tuple[Tensor, ...]
    loss: Callable[[Any], Tensor]
    optimizer: Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]

    def training(self) -> Training:
        """Return the training step on this batch, to run or to capture."""
        optimizer = self.optimizer(self.model.parameters())

        def step() -> None:
            self.loss(self.model(*self.inputs)).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            optimizer.zero_grad()

        return Training(step=step, model=self.model, optimizer=optimizer)


def momentum() -> Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]:
    """Return what makes the optimizer that the image models were published with."""
    return partial(torch.optim.SGD, lr=0.01, momentum=0.9)


def adam() -> Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]:
    """Return what makes the optimizer that transformers are trained with."""
    return partial(torch.optim.AdamW, lr=1e-4)


def images(model: nn.Module, *, batch: int, image: int, classes: int) -> Workload:
    """Return the classification of a batch of square images."""
    labels = torch.randint(classes, (batch,))
    return Workload(
        model=model,
        inputs=(torch.randn(batch, 3, image, image),),
        loss=partial(functional.cross_entropy, target=labels),
        optimizer=momentum(),
    )


def word_loss(target: Tensor) -> Callable[[Tensor], Tensor]:
    """Return the cross entropy of (batch, tokens, vocabulary) scores against `target`."""
    return lambda scores: functional.cross_entropy(scores.flatten(0, 1), target.flatten())
