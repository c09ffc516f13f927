"""Plain trainings of many architectures: the loop is ordinary, the model is not."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.optim import SGD, AdamW, Optimizer

from tests import models
from tests.bitwise import data
from tests.bitwise.record import Record
from tests.bitwise.workload import Workload, supervised


def momentum(parameters: list[nn.Parameter]) -> Optimizer:
    """Return SGD with momentum, as vision models are trained."""
    return SGD(parameters, lr=0.05, momentum=0.9, weight_decay=1e-4)


def adamw(parameters: list[nn.Parameter]) -> Optimizer:
    """Return AdamW, as language models are trained."""
    return AdamW(parameters, lr=1e-3)


def per_token(logits: Tensor, ids: Tensor) -> Tensor:
    """Return the next-token loss."""
    return functional.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


def _vectors(module: nn.Module, *shape: int) -> Workload:
    return supervised(module, optimizer=adamw, batch=data.vectors(*shape), loss=functional.cross_entropy)


def _images(module: nn.Module) -> Workload:
    return supervised(module, optimizer=momentum, batch=data.vectors(8, 3, 32, 32), loss=functional.cross_entropy)


def mlp() -> Workload:
    return _vectors(models.mlp(), 512, 128)


def cnn() -> Workload:
    return _images(models.cnn())


def resnet() -> Workload:
    return _images(models.resnet())


def densenet() -> Workload:
    return _images(models.DenseNet())


def lstm() -> Workload:
    return _vectors(models.Lstm(), 32, 24, 64)


def unrolled_lstm() -> Workload:
    return _vectors(models.UnrolledLstm(), 256, 8, 64)


def transformer() -> Workload:
    return supervised(models.Transformer(), optimizer=adamw, batch=data.tokens(8, 64, vocabulary=256), loss=per_token)


def unet() -> Workload:
    return supervised(
        models.UNet(), optimizer=adamw, batch=data.pixels(4, 64, classes=2), loss=functional.cross_entropy
    )


def checkpoint() -> Workload:
    return _vectors(models.Checkpointed(use_reentrant=False), 512, 128)


def checkpoint_reentrant() -> Workload:
    return _vectors(models.Checkpointed(use_reentrant=True), 512, 128)


def custom_function() -> Workload:
    return supervised(
        models.CustomFunction(), optimizer=adamw, batch=data.regression(512, 128), loss=functional.mse_loss
    )


def views() -> Workload:
    return supervised(models.Views(), optimizer=adamw, batch=data.regression(1024, 128), loss=functional.mse_loss)


def sparse_gradients() -> Workload:
    return supervised(
        models.Bag(),
        optimizer=lambda parameters: SGD(parameters, lr=0.1),
        batch=lambda index: (data.tokens(128, 16, vocabulary=2048)(index)[0], data.vectors(128, 1)(index)[1]),
        loss=functional.cross_entropy,
    )


def channels_last() -> Workload:
    module = models.cnn().to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    plain = data.vectors(8, 3, 32, 32)

    def batch(index: int) -> data.Batch:
        images, labels = plain(index)
        return images.to(memory_format=torch.channels_last), labels

    return supervised(module, optimizer=momentum, batch=batch, loss=functional.cross_entropy)


def _autocast(module: nn.Module, *, batch: Callable[[int], data.Batch]) -> Workload:
    optimizer = momentum(list(module.parameters()))

    def body(index: int, batch: data.Batch, record: Record) -> None:
        inputs, targets = batch
        with torch.autocast("cpu", dtype=torch.bfloat16):
            outputs = module(inputs)
            assert outputs.dtype == torch.bfloat16
            loss = functional.cross_entropy(outputs, targets)
        loss.backward()  # type: ignore[no-untyped-call]
        record.add("loss", loss)
        record.add_gradients([module])
        optimizer.step()
        optimizer.zero_grad()

    return Workload(modules=[module], optimizers=[optimizer], batch=batch, body=body)


def autocast_mlp() -> Workload:
    return _autocast(models.mlp(), batch=data.vectors(1024, 128))


def autocast_cnn() -> Workload:
    return _autocast(models.cnn(), batch=data.vectors(8, 3, 32, 32))


ARCHITECTURES: dict[str, Callable[[], Workload]] = {
    factory.__name__: factory
    for factory in (
        mlp,
        cnn,
        resnet,
        densenet,
        lstm,
        unrolled_lstm,
        transformer,
        unet,
        checkpoint,
        checkpoint_reentrant,
        custom_function,
        views,
        sparse_gradients,
        channels_last,
        autocast_mlp,
        autocast_cnn,
    )
}
