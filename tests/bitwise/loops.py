"""Training loops that are not the usual one: each does something a real script does."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from tests import models
from tests.bitwise import data
from tests.bitwise.architectures import adamw, momentum
from tests.bitwise.record import Record
from tests.bitwise.workload import Workload, supervised


def _backward(loss: Tensor, **options: Any) -> None:
    loss.backward(**options)  # type: ignore[no-untyped-call]


def accumulate_inside_a_step() -> Workload:
    module = models.mlp()
    optimizer = adamw(list(module.parameters()))

    def body(index: int, batch: data.Batch, record: Record) -> None:
        for part, (inputs, targets) in enumerate(zip(batch[0].chunk(3), batch[1].chunk(3), strict=True)):
            loss = functional.cross_entropy(module(inputs), targets) / 3
            _backward(loss)
            record.add(f"loss {part}", loss)
        record.add_gradients([module])
        optimizer.step()
        optimizer.zero_grad()

    return Workload(modules=[module], optimizers=[optimizer], batch=data.vectors(1536, 128), body=body)


def accumulate_over_steps() -> Workload:
    module = models.mlp()
    optimizer = adamw(list(module.parameters()))

    def body(index: int, batch: data.Batch, record: Record) -> None:
        loss = functional.cross_entropy(module(batch[0]), batch[1]) / 2
        _backward(loss)
        record.add("loss", loss)
        record.add_gradients([module])
        if index % 2:
            optimizer.step()
            optimizer.zero_grad(set_to_none=False)

    return Workload(modules=[module], optimizers=[optimizer], batch=data.vectors(512, 128), body=body)


def retain_graph() -> Workload:
    module = models.resnet()
    optimizer = momentum(list(module.parameters()))

    def body(index: int, batch: data.Batch, record: Record) -> None:
        outputs = module(batch[0])
        loss, penalty = functional.cross_entropy(outputs, batch[1]), outputs.square().mean()
        _backward(loss, retain_graph=True)
        record.add_gradients([module], when=" after the first backward")
        _backward(penalty)
        record.add("loss", loss)
        record.add("penalty", penalty)
        record.add_gradients([module], when=" after the second backward")
        optimizer.step()
        optimizer.zero_grad()

    return Workload(modules=[module], optimizers=[optimizer], batch=data.vectors(8, 3, 32, 32), body=body)


def double_backward() -> Workload:
    module = models.mlp(depth=5, outputs=1)
    optimizer = adamw(list(module.parameters()))

    def body(index: int, batch: data.Batch, record: Record) -> None:
        inputs = batch[0].requires_grad_()
        value = module(inputs).sum()
        (slope,) = torch.autograd.grad(value, inputs, create_graph=True)
        loss = (slope.norm(dim=1) - 1).square().mean() + value / 1000
        _backward(loss)
        record.add("slope", slope)
        record.add("loss", loss)
        record.add_gradients([module])
        optimizer.step()
        optimizer.zero_grad()

    return Workload(modules=[module], optimizers=[optimizer], batch=data.vectors(512, 128), body=body)


def gan() -> Workload:
    generator = nn.Sequential(
        nn.Linear(32, 128), nn.BatchNorm1d(128), nn.ReLU(inplace=True), models.mlp(outputs=128, depth=3)
    )
    critic = nn.Sequential(models.mlp(depth=4, outputs=64), nn.LeakyReLU(0.2, inplace=True), nn.Linear(64, 1))
    critic_optimizer, generator_optimizer = adamw(list(critic.parameters())), adamw(list(generator.parameters()))
    one_or_zero = functional.binary_cross_entropy_with_logits

    def body(index: int, batch: data.Batch, record: Record) -> None:
        real, noise = batch
        ones, zeros = torch.ones(len(real), 1), torch.zeros(len(real), 1)
        fake = generator(noise)
        critic_optimizer.zero_grad()
        critic_loss = one_or_zero(critic(real), ones) + one_or_zero(critic(fake.detach()), zeros)
        _backward(critic_loss)
        record.add("critic's loss", critic_loss)
        record.add_gradients([critic], when=" (critic's turn)")
        critic_optimizer.step()
        generator_optimizer.zero_grad()
        generator_loss = one_or_zero(critic(fake), ones)
        _backward(generator_loss)
        record.add("generator's loss", generator_loss)
        record.add_gradients([critic, generator], when=" (generator's turn)")
        generator_optimizer.step()

    def batch(index: int) -> data.Batch:
        return data.vectors(512, 128)(index)[0], data.vectors(512, 32)(100 + index)[0]

    return Workload(
        modules=[critic, generator], optimizers=[critic_optimizer, generator_optimizer], batch=batch, body=body
    )


def smaller_last_batch() -> Workload:
    shapes = [(512, 128), (512, 128), (200, 128)]
    batch = data.sized(lambda index: shapes[index % 3])
    return supervised(models.mlp(), optimizer=adamw, batch=batch, loss=functional.cross_entropy)


def alternating_shapes() -> Workload:
    batch = data.sized(lambda index: (6, 3, 40, 24) if index % 2 else (8, 3, 32, 32))
    return supervised(models.cnn(), optimizer=momentum, batch=batch, loss=functional.cross_entropy)


def evaluation_between_steps() -> Workload:
    module = models.cnn()
    workload = supervised(module, optimizer=momentum, batch=data.vectors(8, 3, 32, 32), loss=functional.cross_entropy)

    def after(index: int, record: Record) -> None:
        module.eval()
        with torch.no_grad():
            record.add("evaluation", module(data.vectors(12, 3, 32, 32)(50 + index)[0]))
        module.train()

    workload.after = after
    return workload


def evaluation_inside_a_step() -> Workload:
    module = models.Transformer()
    optimizer = adamw(list(module.parameters()))
    logits_loss = functional.cross_entropy

    def body(index: int, batch: data.Batch, record: Record) -> None:
        if index % 2:
            module.eval()
            with torch.no_grad():
                record.add("evaluation", module(batch[0]))
            module.train()
        loss = logits_loss(module(batch[0]).flatten(0, 1), batch[1].flatten())
        _backward(loss)
        record.add("loss", loss)
        record.add_gradients([module])
        optimizer.step()
        optimizer.zero_grad()

    return Workload(modules=[module], optimizers=[optimizer], batch=data.tokens(8, 64, vocabulary=256), body=body)


def stochastic_depth() -> Workload:
    return supervised(
        models.StochasticDepth(), optimizer=adamw, batch=data.vectors(512, 128), loss=functional.cross_entropy
    )


def reloaded_state() -> Workload:
    module = models.resnet()
    workload = supervised(module, optimizer=adamw, batch=data.vectors(8, 3, 32, 32), loss=functional.cross_entropy)
    (optimizer,) = workload.optimizers
    kept: list[dict[str, Any]] = []

    def after(index: int, record: Record) -> None:
        if index == 1:
            kept[:] = copy.deepcopy([module.state_dict(), optimizer.state_dict()])
        elif index == 3:
            module.load_state_dict(kept[0])
            optimizer.load_state_dict(kept[1])

    workload.after = after
    return workload


def schedule_and_clipping() -> Workload:
    module = models.Transformer()
    optimizer = adamw(list(module.parameters()))
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=1e-2, total_steps=20)

    def body(index: int, batch: data.Batch, record: Record) -> None:
        loss = functional.cross_entropy(module(batch[0]).flatten(0, 1), batch[1].flatten())
        _backward(loss)
        record.add("loss", loss)
        record.add("norm", nn.utils.clip_grad_norm_(module.parameters(), 0.5))
        record.add_gradients([module])
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        record.add("learning rate", schedule.get_last_lr())

    return Workload(modules=[module], optimizers=[optimizer], batch=data.tokens(8, 64, vocabulary=256), body=body)


def kept_activation() -> Workload:
    """The program holds some activations itself and reads them before and after backward."""
    module = models.mlp()
    optimizer = adamw(list(module.parameters()))

    def body(index: int, batch: data.Batch, record: Record) -> None:
        kept, x = {}, batch[0]
        for position, layer in enumerate(module):
            x = layer(x)
            if position in (1, 4, 9):
                kept[position] = x
        loss = functional.cross_entropy(x, batch[1])
        record.add("activation 1 before backward", kept[1])
        _backward(loss)
        for position, activation in kept.items():
            record.add(f"activation {position} after backward", activation)
        record.add("loss", loss)
        record.add_gradients([module])
        optimizer.step()
        optimizer.zero_grad()

    return Workload(modules=[module], optimizers=[optimizer], batch=data.vectors(512, 128), body=body)


def user_hooks() -> Workload:
    """The program has tensor hooks, module hooks and saved-tensor hooks of its own."""
    module = models.mlp()
    optimizer = adamw(list(module.parameters()))
    seen: list[tuple[int, ...]] = []

    def note(layer: nn.Module, inward: Any, outward: Any) -> None:
        seen.append(tuple(outward[0].shape))

    module[4].register_full_backward_hook(note)

    def pack(tensor: Tensor) -> np.ndarray[Any, Any]:
        return tensor.detach().numpy().copy()

    def unpack(array: np.ndarray[Any, Any]) -> Tensor:
        return torch.from_numpy(array.copy())

    def body(index: int, batch: data.Batch, record: Record) -> None:
        hidden = module[:6](batch[0])
        hidden.register_hook(lambda gradient: gradient * 0.5)
        with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
            hidden = module[6:9](hidden)
        loss = functional.cross_entropy(module[9:](hidden), batch[1])
        _backward(loss)
        record.add("loss", loss)
        record.add("hooks called", list(seen))
        record.add_gradients([module])
        optimizer.step()
        optimizer.zero_grad()

    return Workload(modules=[module], optimizers=[optimizer], batch=data.vectors(512, 128), body=body)


def backward_after_the_step() -> Workload:
    """Forward runs inside `tide.step()`, backward and update after it has ended."""
    module = models.mlp()
    optimizer = adamw(list(module.parameters()))
    pending: list[Tensor] = []

    def body(index: int, batch: data.Batch, record: Record) -> None:
        pending.append(functional.cross_entropy(module(batch[0]), batch[1]))

    def after(index: int, record: Record) -> None:
        loss = pending.pop()
        _backward(loss)
        record.add("loss", loss)
        record.add_gradients([module])
        optimizer.step()
        optimizer.zero_grad()

    return Workload(modules=[module], optimizers=[optimizer], batch=data.vectors(512, 128), body=body, after=after)


LOOPS: dict[str, Callable[[], Workload]] = {
    factory.__name__: factory
    for factory in (
        accumulate_inside_a_step,
        accumulate_over_steps,
        retain_graph,
        double_backward,
        gan,
        smaller_last_batch,
        alternating_shapes,
        evaluation_between_steps,
        evaluation_inside_a_step,
        stochastic_depth,
        reloaded_state,
        schedule_and_clipping,
        kept_activation,
        user_hooks,
        backward_after_the_step,
    )
}
