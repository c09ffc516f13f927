"""Checkpoints without a tide: what was saved under a budget goes on without one, and the other way round."""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import Any, TypeVar

import torch

from lowtide.checkpoint.load import load_training
from lowtide.checkpoint.save import Saved, save_training
from lowtide.checkpoint.training import Training

T = TypeVar("T")
Models = torch.nn.Module | Iterable[torch.nn.Module] | None
Optimizers = torch.optim.Optimizer | Iterable[torch.optim.Optimizer] | None


def save_checkpoint(
    path: str | os.PathLike[str],
    model: Models = None,
    optimizer: Optimizers = None,
    *,
    steps: int = 0,
    gradients: bool = False,
    **objects: Any,
) -> Saved:
    """Save a training to a directory, as `Tide.save` does, where there is no tide."""
    training = Training(
        models=_listed(model, torch.nn.Module),
        optimizers=_listed(optimizer, torch.optim.Optimizer),
        objects=objects,
        steps=steps,
        gradients=gradients,
    )
    return save_training(path, training)


def load_checkpoint(
    path: str | os.PathLike[str], model: Models = None, optimizer: Optimizers = None, **objects: Any
) -> dict[str, Any]:
    """Continue from a state that `Tide.save` or `save_checkpoint` wrote; return its steps and plain values by name.

    Without an optimizer only the models are loaded, and the objects that are named.
    """
    training = Training(
        models=_listed(model, torch.nn.Module), optimizers=_listed(optimizer, torch.optim.Optimizer), objects=objects
    )
    steps, values = load_training(path, training)
    return {"steps": steps, **values}


def _listed(given: T | Iterable[T] | None, kind: type[T]) -> list[T]:
    if given is None:
        return []
    if isinstance(given, kind):
        return [given]
    return list(given) if isinstance(given, Iterable) else [given]
