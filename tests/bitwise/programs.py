"""Random training programs: a model, an optimizer and a loop, each drawn from what real scripts do."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from tests.bitwise.data import Batch
from tests.bitwise.record import Record
from tests.bitwise.workload import Workload

CLASSES = 10


def program(seed: int) -> Workload:
    """Return the training that a seed stands for; torch's own generator is seeded by whoever runs it."""
    rng = random.Random(seed)
    twice = rng.random() < 0.15  # backward of backward, which not every operator has
    module, make_input = _image_model(rng, twice=twice) if rng.random() < 0.3 else _token_model(rng, twice=twice)
    if rng.random() < 0.2:
        module = _Twice(module)
    if rng.random() < 0.2:
        for parameter in rng.sample(list(module.parameters()), k=2):
            parameter.requires_grad_(False)
    return _loop(rng, module, make_input, penalty=twice)


# ---- models ----


class _Residual(nn.Module):
    def __init__(self, inner: nn.Module, *, again: str) -> None:
        super().__init__()
        self.inner, self.again = inner, again

    def forward(self, x: Tensor) -> Tensor:
        if self.again == "checkpoint" and torch.is_grad_enabled():
            return x + checkpoint(self.inner, x, use_reentrant=False)  # type: ignore[no-any-return]
        if self.again == "reentrant" and torch.is_grad_enabled() and x.requires_grad:
            return x + checkpoint(self.inner, x, use_reentrant=True)  # type: ignore[no-any-return]
        return x + self.inner(x)


class _Attention(nn.Module):
    def __init__(self, width: int, heads: int, *, by_hand: bool) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.heads, self.by_hand = heads, by_hand

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        q, k, v = self.qkv(x).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        if self.by_hand:
            weights = (q @ k.transpose(-2, -1) / q.shape[-1] ** 0.5).softmax(-1)
            mixed = functional.dropout(weights, 0.1, self.training) @ v
        else:
            mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        out: Tensor = self.out(mixed.transpose(1, 2).reshape(batch, length, width))
        return out


class _Square(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return 2 * x * grad


class _Own(nn.Module):
    """Operators behind autograd's back: a function of one's own, views, writes in place, a buffer that changes."""

    seen: Tensor

    def __init__(self, width: int) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.randn(width, width) * 0.05)
        self.register_buffer("seen", torch.zeros(width, width))

    def forward(self, x: Tensor) -> Tensor:
        self.seen.mul_(0.9).add_(self.scale.detach())
        y = _Square.apply(x @ self.scale)
        y = y.clone()
        y[..., ::2] *= 0.5
        half = y.shape[-1] // 2
        y.narrow(-1, 0, half).relu_()
        first, second = y.chunk(2, dim=-1)
        joined = torch.cat([second.tanh(), first], dim=-1)
        return joined + self.seen.mean()


class _Recurrent(nn.Module):
    def __init__(self, width: int, rng: random.Random) -> None:
        super().__init__()
        kind = rng.choice([nn.LSTM, nn.GRU, nn.RNN])
        self.cell = kind(width, width, num_layers=rng.choice([1, 2]), batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        out, _ = self.cell(x)
        return out  # type: ignore[no-any-return]


class _Experts(nn.Module):
    """Which layers run depends on the data."""

    def __init__(self, width: int, count: int) -> None:
        super().__init__()
        self.choose = nn.Linear(width, count)
        self.experts = nn.ModuleList(nn.Linear(width, width) for _ in range(count))

    def forward(self, x: Tensor) -> Tensor:
        shares = self.choose(x).softmax(-1)
        best = shares.argmax(-1)
        out = torch.zeros_like(x)
        for index, expert in enumerate(self.experts):
            rows = best == index
            if bool(rows.any()):
                out[rows] = (expert(x[rows]) * shares[rows][:, index, None]).to(out.dtype)  # of autocast
        return out


class _Mean(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.mean(1)


class _Twice(nn.Module):
    """A model run on two halves of the batch, with all its weights shared."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        half = x.shape[0] // 2
        return torch.cat([self.inner(x[:half]), self.inner(x[half:])])


class _Tied(nn.Module):
    """Embedding and output share a weight."""

    def __init__(self, inner: nn.Module, width: int, vocabulary: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.inner = inner
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.inner(self.embed(x)).mean(1))[:, :CLASSES]  # type: ignore[no-any-return]


def _token_model(rng: random.Random, *, twice: bool) -> tuple[nn.Module, Callable[[int], Tensor]]:
    width, length = rng.choice([128, 192, 256]), rng.choice([8, 16])
    layers: list[nn.Module] = []
    for _ in range(rng.randrange(2, 7)):
        kind = rng.choice([0, 1, 2, 4]) if twice else rng.randrange(7)
        if kind == 0:
            inner: nn.Module = _Attention(width, 4, by_hand=twice or rng.random() < 0.5)
        elif kind == 1:
            act = rng.choice([nn.GELU, nn.SiLU, nn.ReLU, nn.Tanh])()
            inner = nn.Sequential(nn.Linear(width, 4 * width), act, nn.Dropout(0.1), nn.Linear(4 * width, width))
        elif kind == 2:
            inner = _Own(width)
        elif kind == 3:
            inner = _Recurrent(width, rng)
        elif kind == 4:
            inner = nn.utils.parametrizations.weight_norm(nn.Linear(width, width))
        elif kind == 5:
            inner = _Experts(width, 3)
        else:
            inner = nn.TransformerEncoderLayer(width, 4, 2 * width, batch_first=True, norm_first=rng.random() < 0.5)
        again = "no" if twice else rng.choice(["no", "no", "no", "checkpoint", "reentrant"])
        layers += [_Residual(inner, again=again), nn.LayerNorm(width)]
    if rng.random() < 0.5:
        vocabulary = 512
        return _Tied(nn.Sequential(*layers), width, vocabulary), lambda rows: torch.randint(vocabulary, (rows, length))
    body = nn.Sequential(*layers, _Mean(), nn.Linear(width, CLASSES))
    return body, lambda rows: torch.randn(rows, length, width)


def _image_model(rng: random.Random, *, twice: bool) -> tuple[nn.Module, Callable[[int], Tensor]]:
    channels = rng.choice([16, 24])
    layers: list[nn.Module] = [nn.Conv2d(3, channels, 3, padding=1)]
    for _ in range(rng.randrange(2, 6)):
        norm = rng.choice([nn.BatchNorm2d(channels), nn.GroupNorm(4, channels), nn.Identity()])
        inner = nn.Sequential(
            norm,
            nn.ReLU(inplace=not isinstance(norm, nn.Identity) and rng.random() < 0.5),
            nn.Conv2d(channels, channels, 3, padding=1, groups=rng.choice([1, 1, 8])),
        )
        again = "no" if twice else rng.choice(["no", "no", "checkpoint"])
        layers.append(_Residual(inner, again=again) if rng.random() < 0.6 else inner)
        if rng.random() < 0.3:
            layers.append(nn.MaxPool2d(2, stride=1, padding=1))
    layers += [nn.AdaptiveAvgPool2d(4), nn.Flatten(), nn.Linear(16 * channels, CLASSES)]
    layout = rng.choice([torch.contiguous_format, torch.channels_last])
    module = nn.Sequential(*layers).to(memory_format=layout)  # type: ignore[call-overload]
    return module, lambda rows: torch.randn(rows, 3, 20, 20).contiguous(memory_format=layout)


# ---- optimizers ----


def _optimizer(rng: random.Random, module: nn.Module) -> torch.optim.Optimizer:
    parameters = list(module.parameters())
    if rng.random() < 0.3:
        cut = len(parameters) // 2
        groups: Any = [{"params": parameters[:cut], "weight_decay": 0.01}, {"params": parameters[cut:], "lr": 2e-3}]
    else:
        groups = parameters
    form: dict[str, Any] = rng.choice([{}, {"foreach": True}, {"foreach": False}])
    fused: dict[str, Any] = rng.choice([form, {"fused": True}])
    return rng.choice(
        [
            lambda: torch.optim.AdamW(groups, lr=1e-3, amsgrad=rng.random() < 0.3, **fused),
            lambda: torch.optim.Adam(groups, lr=1e-3, **fused),
            lambda: torch.optim.SGD(groups, lr=1e-2, momentum=0.9, nesterov=rng.random() < 0.5, **fused),
            lambda: torch.optim.SGD(groups, lr=1e-2),
            lambda: torch.optim.Adagrad(groups, lr=1e-3, **form),
            lambda: torch.optim.RMSprop(groups, lr=1e-3, momentum=0.9, centered=True, **form),
            lambda: torch.optim.NAdam(groups, lr=1e-3, **form),
            lambda: torch.optim.Rprop(groups, lr=1e-3, **form),
            lambda: torch.optim.Adadelta(groups, **form),
            lambda: torch.optim.Adamax(groups, lr=1e-3, **form),
        ]
    )()


# ---- loops ----


def _loop(rng: random.Random, module: nn.Module, make_input: Callable[[int], Tensor], *, penalty: bool) -> Workload:
    rows, sizes = rng.choice([16, 32]), rng.random() < 0.25
    optimizer = _optimizer(rng, module)
    parts = rng.choice([1, 1, 1, 2])
    clips, keeps, closure = rng.random() < 0.3, rng.random() < 0.3, rng.random() < 0.15
    casts, scales = rng.random() < 0.2, rng.random() < 0.15
    hooks, averages, evaluates = rng.random() < 0.2, rng.random() < 0.2, rng.random() < 0.25
    reloads, anneals, copies = rng.random() < 0.2, rng.random() < 0.3, rng.random() < 0.15
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5) if anneals else None
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0) if scales and not closure else None
    average = torch.optim.swa_utils.AveragedModel(module) if averages else None
    if hooks:
        first = next(p for p in module.parameters() if p.requires_grad)
        first.register_hook(lambda grad: grad * 0.5)
        module.register_full_backward_hook(lambda m, into, out: None)
    kept: list[Tensor] = []

    def batch(index: int) -> Batch:
        count = rows + (4 * (index % 3) if sizes else 0)
        return make_input(count), torch.randint(CLASSES, (count,))

    def cast() -> AbstractContextManager[object]:
        return torch.autocast("cpu", dtype=torch.bfloat16) if casts else nullcontext()

    def backward(inputs: Tensor, targets: Tensor) -> Tensor:
        with cast():
            outputs = module(inputs)
            loss = functional.cross_entropy(outputs.float(), targets) / parts
        if penalty and outputs.requires_grad:
            weights = [p for p in module.parameters() if p.requires_grad]
            grads = torch.autograd.grad(loss, weights, create_graph=True, allow_unused=True)
            norms = [grad.square().sum() for grad in grads if grad is not None and grad.requires_grad]
            loss = loss + 1e-3 * sum(norms) if norms else loss
        (scaler.scale(loss) if scaler else loss).backward()
        return loss.detach()

    def body(index: int, data: Batch, record: Record) -> None:
        if closure:
            calls: list[Tensor] = []

            def evaluate() -> Tensor:
                optimizer.zero_grad()
                calls.append(backward(*data))
                return calls[-1]

            optimizer.step(evaluate)  # type: ignore[arg-type]
            record.add("loss", calls[0])
            return
        for part, (inputs, targets) in enumerate(zip(data[0].chunk(parts), data[1].chunk(parts), strict=True)):
            record.add(f"loss {part}", backward(inputs, targets))
        if scaler:
            scaler.unscale_(optimizer)
        if clips:
            record.add("norm", nn.utils.clip_grad_norm_(module.parameters(), 1.0))
        record.add_gradients([module])
        if scaler:
            scaler.step(optimizer)
            scaler.update()
        else:
            optimizer.step()
        if average is not None:
            average.update_parameters(module)
        if keeps:
            kept[:] = [next(module.parameters()).detach().clone()]
        optimizer.zero_grad(set_to_none=index % 2 == 0)

    def after(index: int, record: Record) -> None:
        if scheduler:
            scheduler.step()
        if evaluates:
            module.eval()
            with torch.no_grad():
                record.add("evaluated", module(batch(index)[0]))
            module.train()
        if reloads and index == 2:
            module.load_state_dict({k: v * 1 for k, v in module.state_dict().items()})
            optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        if copies and index == 1:
            twin = copy.deepcopy(module)
            record.add("copied", next(twin.parameters()))
        if average is not None:
            record.add("averaged", next(average.parameters()))
        for one, tensor in enumerate(kept):
            record.add(f"kept {one}", tensor)

    return Workload(modules=[module], optimizers=[optimizer], batch=batch, body=body, after=after)
