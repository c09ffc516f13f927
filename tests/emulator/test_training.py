"""Training on the device gives the CPU's bits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from lowtide.emulator import Emulator
from tests import models
from tests.emulator.devices import fresh

STEPS = 3


class Sdpa(nn.Module):
    """Attention through PyTorch's own operator, which chooses its kernel by device."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.TransformerEncoderLayer(32, 2, 64, dropout=0.0, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.inner(x)
        return out


class Recurrent(nn.Module):
    """A recurrent layer, two of them deep, in both directions."""

    def __init__(self, kind: type[nn.RNNBase], **options: Any) -> None:
        super().__init__()
        self.inner = kind(16, 12, num_layers=2, bidirectional=True, dropout=0.2, **options)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.inner(x)[0]
        return out


MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...], int | None]] = {
    "mlp": (models.mlp, (64, 128), None),
    "cnn": (lambda: models.cnn(channels=8, depth=3), (4, 3, 16, 16), None),
    "resnet": (lambda: models.resnet(channels=8), (4, 3, 16, 16), None),
    "unet": (models.UNet, (2, 3, 16, 16), None),
    "lstm": (models.Lstm, (4, 6, 64), None),
    "lstm without bias": (lambda: Recurrent(nn.LSTM, bias=False), (5, 3, 16), None),
    "lstm with projection": (lambda: Recurrent(nn.LSTM, proj_size=6), (5, 3, 16), None),
    "gru": (lambda: Recurrent(nn.GRU), (5, 3, 16), None),
    "rnn": (lambda: Recurrent(nn.RNN), (5, 3, 16), None),
    "transformer with dropout": (models.Transformer, (2, 24), 256),
    "encoder layer": (Sdpa, (2, 10, 32), None),
    "checkpointed": (lambda: models.Checkpointed(use_reentrant=False), (16, 128), None),
}


def train(
    make: Callable[[], nn.Module], shape: tuple[int, ...], vocabulary: int | None, device: str
) -> dict[str, Tensor]:
    """Return losses, gradients, parameters and buffers of a short training, in host memory."""
    torch.manual_seed(3)
    model = make().to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    found: dict[str, Tensor] = {}
    for step in range(STEPS):
        generator = torch.Generator().manual_seed(step)
        if vocabulary is None:
            x = torch.randn(*shape, generator=generator)
        else:
            x = torch.randint(vocabulary, shape, generator=generator)
        torch.manual_seed(100 + step)
        with torch.device(device):
            out = model(x.to(device))
            loss = out.float().square().mean() + functional.log_softmax(out, -1)[..., 0].mean()
        loss.backward()
        found[f"loss {step}"] = loss.detach().cpu()
        for name, parameter in model.named_parameters():
            assert parameter.grad is not None
            found[f"gradient {step} {name}"] = parameter.grad.cpu()
        optimizer.step()
        optimizer.zero_grad()
    found |= {f"state {name}": value.cpu() for name, value in model.state_dict().items()}
    return found


def differences(a: dict[str, Tensor], b: dict[str, Tensor]) -> list[str]:
    assert a.keys() == b.keys()
    return [name for name in a if not torch.equal(a[name], b[name])]


@pytest.mark.parametrize("name", MODELS)
def test_training_on_the_device_is_bitwise_that_on_the_cpu(sim: Emulator, name: str) -> None:
    make, shape, vocabulary = MODELS[name]
    expected = train(make, shape, vocabulary, "cpu")
    assert differences(expected, train(make, shape, vocabulary, "sim")) == []
    # Again: by now every launch is in the cache and runs on the stream's own thread.
    assert differences(expected, train(make, shape, vocabulary, "sim")) == []
    assert sim.stats().kernels > 0


@pytest.mark.parametrize("name", ["mlp", "cnn", "lstm", "transformer with dropout"])
def test_jitter_poison_and_slowness_change_no_bit_and_no_race_is_found(sim: Emulator, name: str) -> None:
    make, shape, vocabulary = MODELS[name]
    expected = train(make, shape, vocabulary, "cpu")
    train(make, shape, vocabulary, "sim")
    for seed in range(2):
        fresh(jitter_s=2e-4, seed=seed, poison=True, races=True, slowdown=1.1, d2h_bytes_per_s=1e9, h2d_bytes_per_s=1e9)
        assert differences(expected, train(make, shape, vocabulary, "sim")) == []
        assert sim.races() == ()


@pytest.mark.parametrize("threads", [1, 2])
def test_the_device_computes_with_the_programs_number_of_threads(sim: Emulator, threads: int) -> None:
    torch.set_num_threads(threads)
    make, shape, vocabulary = MODELS["cnn"]
    expected = train(make, shape, vocabulary, "cpu")
    for _ in range(2):
        assert differences(expected, train(make, shape, vocabulary, "sim")) == []


def test_dropout_draws_the_same_numbers_after_the_same_seed(sim: Emulator) -> None:
    x = torch.ones(1000)
    torch.manual_seed(5)
    on_cpu = functional.dropout(x, 0.37)
    torch.manual_seed(5)
    on_device = functional.dropout(x.to("sim"), 0.37)
    assert torch.equal(on_cpu, on_device.cpu())


def test_autocast_and_gradient_scaling_work(sim: Emulator) -> None:
    torch.manual_seed(0)
    model = models.mlp(width=32, depth=2).to("sim")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("sim")
    x, y = torch.randn(16, 32).to("sim"), torch.randint(10, (16,)).to("sim")
    losses = []
    for _ in range(20):
        with torch.autocast("sim", dtype=torch.bfloat16):
            out = model(x)
            assert out.dtype == torch.bfloat16
            loss = functional.cross_entropy(out, y)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < losses[0]


@pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.Adam, torch.optim.RMSprop, torch.optim.Adagrad])
@pytest.mark.parametrize("foreach", [False, True])
def test_optimizers_step_as_on_the_cpu(sim: Emulator, optimizer: type[torch.optim.Optimizer], foreach: bool) -> None:
    def run(device: str) -> list[Tensor]:
        torch.manual_seed(1)
        model = models.mlp(width=16, depth=2)
        x = torch.randn(8, 16)
        model.to(device)
        steps: Any = optimizer
        stepper = steps(model.parameters(), lr=0.01, foreach=foreach)
        for _ in range(3):
            model(x.to(device)).square().mean().backward()
            stepper.step()
            stepper.zero_grad()
        return [p.detach().cpu() for p in model.parameters()]

    for a, b in zip(run("cpu"), run("sim"), strict=True):
        assert torch.equal(a, b)
