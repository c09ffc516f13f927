"""A training with all that a checkpoint has to bring back: dropout, buffers, tied weights, a scheduler, a scaler."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy
import torch
from torch import Tensor, nn

WIDTH = 256  # a quarter of a MiB a layer


class Net(nn.Module):
    """Layers with dropout, running statistics, a buffer that no state dict has, and a weight with two names."""

    count: Tensor

    def __init__(self, depth: int = 4) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(depth))
        self.norm = nn.BatchNorm1d(WIDTH)
        self.drop = nn.Dropout(0.3)
        self.head = nn.Linear(WIDTH, WIDTH, bias=False)
        self.head.weight = self.layers[0].weight
        self.frozen = nn.Parameter(torch.randn(WIDTH, WIDTH), requires_grad=False)
        self.register_buffer("count", torch.zeros(()), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        self.count += 1
        for layer in self.layers:
            x = self.drop(layer(x).relu())
        return self.head(self.norm(x @ self.frozen)) * self.count.sqrt()


class Loader:
    """Batches in an order of its own, which it can take up again."""

    def __init__(self) -> None:
        self.generator = torch.Generator().manual_seed(3)
        self.given = 0

    def batch(self) -> Tensor:
        self.given += 1
        return torch.randn(32, WIDTH, generator=self.generator)

    def state_dict(self) -> dict[str, Any]:
        return {"given": self.given, "generator": self.generator.get_state()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.given = state["given"]
        self.generator.set_state(state["generator"])


class Run:
    """A training that does the same whenever it begins; `objects` are what a save is given besides."""

    def __init__(self, *, depth: int = 4, seed: int = 5, optimizer: Callable[..., Any] = torch.optim.AdamW) -> None:
        torch.manual_seed(seed)
        random.seed(seed)
        numpy.random.seed(seed)
        self.model = Net(depth)
        trained = [parameter for parameter in self.model.parameters() if parameter.requires_grad]
        self.optimizer = optimizer(trained, lr=1e-2)
        scheduler = torch.optim.lr_scheduler.MultiStepLR(self.optimizer, milestones=[2, 4, 5], gamma=0.5)
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**12, growth_interval=2)
        self.objects: dict[str, Any] = {"scheduler": scheduler, "scaler": scaler, "loader": Loader()}

    def step(self) -> None:
        objects = self.objects
        x = objects["loader"].batch() * random.random() + float(numpy.random.rand())
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = self.model(x).float().square().mean()
        objects["scaler"].scale(loss).backward()
        objects["scaler"].step(self.optimizer)
        objects["scaler"].update()
        self.optimizer.zero_grad()
        objects["scheduler"].step()

    def steps(self, count: int, step: Callable[[], AbstractContextManager[Any]] = nullcontext) -> None:
        for _ in range(count):
            with step():
                self.step()

    def digest(self) -> str:
        """Return the bits of everything that the training has made."""
        found = hashlib.blake2b(digest_size=12)
        for tensor in (*self.model.parameters(), *self.model.buffers()):
            found.update(tensor.detach().numpy().tobytes())
        for state in self.optimizer.state_dict()["state"].values():
            for key, value in sorted(state.items()):
                found.update(key.encode())
                found.update(value.numpy().tobytes() if isinstance(value, Tensor) else repr(value).encode())
        found.update(repr([group["lr"] for group in self.optimizer.param_groups]).encode())
        found.update(repr(self.objects["scaler"].state_dict()).encode())
        found.update(torch.get_rng_state().numpy().tobytes())
        found.update(repr((random.getstate(), numpy.random.get_state())).encode())
        return found.hexdigest()


def uninterrupted(steps: int, **made: Any) -> str:
    run = Run(**made)
    run.steps(steps)
    return run.digest()
