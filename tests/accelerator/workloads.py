"""The trainings of the exactness suite, moved to the device, and the same with what only a CPU can do replaced."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import wraps
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from tests import models
from tests.accelerator.devices import NAME
from tests.bitwise import data
from tests.bitwise.architectures import ARCHITECTURES, adamw, momentum
from tests.bitwise.huggingface import HUGGINGFACE
from tests.bitwise.loops import LOOPS
from tests.bitwise.record import Record
from tests.bitwise.workload import Workload, build

# The emulated device has no sparse tensors; the others name the CPU and have their like below.
NOT_HERE = ("sparse_gradients", "autocast_mlp", "autocast_cnn", "user_hooks")

_SOURCES = ("vectors", "sized", "regression", "pixels", "tokens")


def _autocast(module: nn.Module, batch: Callable[[int], data.Batch]) -> Workload:
    optimizer = momentum(list(module.parameters()))

    def body(index: int, batch: data.Batch, record: Record) -> None:
        inputs, targets = batch
        with torch.autocast(NAME, dtype=torch.bfloat16):
            outputs = module(inputs)
            assert outputs.dtype == torch.bfloat16
            loss = functional.cross_entropy(outputs, targets)
        loss.backward()  # type: ignore[no-untyped-call]
        record.add("loss", loss)
        record.add_gradients([module])
        optimizer.step()
        optimizer.zero_grad()

    return Workload(modules=[module], optimizers=[optimizer], batch=batch, body=body)


def autocast_mlp_here() -> Workload:
    return _autocast(models.mlp(), data.vectors(1024, 128))


def autocast_cnn_here() -> Workload:
    return _autocast(models.cnn(), data.vectors(8, 3, 32, 32))


def user_hooks_here() -> Workload:
    """The program has tensor hooks and saved-tensor hooks of its own, which move what is saved to the host."""
    module = models.mlp()
    optimizer = adamw(list(module.parameters()))

    def body(index: int, batch: data.Batch, record: Record) -> None:
        hidden = module[:6](batch[0])
        hidden.register_hook(lambda gradient: gradient * 0.5)
        with torch.autograd.graph.save_on_cpu():
            hidden = module[6:9](hidden)
        loss = functional.cross_entropy(module[9:](hidden), batch[1])
        loss.backward()  # type: ignore[no-untyped-call]
        record.add("loss", loss)
        record.add_gradients([module])
        optimizer.step()
        optimizer.zero_grad()

    return Workload(modules=[module], optimizers=[optimizer], batch=data.vectors(512, 128), body=body)


class _TwoStreams(torch.nn.Module):
    """Two branches that run on streams of their own and meet again, as some programs do."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right, self.last = models.mlp(outputs=128), models.mlp(outputs=128), models.mlp()

    def forward(self, x: Tensor) -> Tensor:
        main = torch.accelerator.current_stream()
        side = torch.Stream(device=x.device)
        side.wait_stream(main)
        x.record_stream(side)  # type: ignore[arg-type]
        torch.accelerator.set_stream(side)
        right = self.right(x)
        torch.accelerator.set_stream(main)
        left = self.left(x)
        main.wait_stream(side)
        right.record_stream(main)
        return self.last(left + right)


def two_streams() -> Workload:
    module = _TwoStreams()
    optimizer = adamw(list(module.parameters()))

    def body(index: int, batch: data.Batch, record: Record) -> None:
        loss = functional.cross_entropy(module(batch[0]), batch[1])
        loss.backward()  # type: ignore[no-untyped-call]
        record.add("loss", loss)
        record.add_gradients([module])
        optimizer.step()
        # Kept: a gradient belongs to the stream that made it, and the optimizer reads it on another.
        optimizer.zero_grad(set_to_none=False)

    return Workload(modules=[module], optimizers=[optimizer], batch=data.vectors(512, 128), body=body)


WORKLOADS: dict[str, Callable[[], Workload]] = {
    name: factory for name, factory in (ARCHITECTURES | LOOPS | HUGGINGFACE).items() if name not in NOT_HERE
} | {factory.__name__: factory for factory in (autocast_mlp_here, autocast_cnn_here, user_hooks_here, two_streams)}


@contextmanager
def data_on(device: torch.device) -> Iterator[None]:
    """Let every batch be made on the host, as always, and then be moved to the device."""

    def moved(source: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(source)
        def make(*args: Any, **options: Any) -> Callable[[int], data.Batch]:
            batch = source(*args, **options)
            return lambda index: tuple(tensor.to(device) for tensor in batch(index))

        return make

    with pytest.MonkeyPatch.context() as patch:
        for name in _SOURCES:
            if name != "vectors":  # made of `sized`
                patch.setattr(data, name, moved(getattr(data, name)))
        yield


def on_device(name: str, device: torch.device) -> Workload:
    """Return a workload whose model and data live on the device. Build and run it inside `data_on`."""
    workload = build(WORKLOADS[name])
    for module in workload.modules:
        module.to(device)
    body = workload.body

    def body_there(index: int, batch: data.Batch, record: Record) -> None:
        with torch.device(device):  # what the loop itself makes
            body(index, batch, record)

    batch = workload.batch

    def batch_there(index: int) -> data.Batch:
        return tuple(tensor.to(device) for tensor in batch(index))

    return replace(workload, body=body_there, batch=batch_there)
