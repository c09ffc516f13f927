"""Programs that look at, change or lend what a plan on pages discards and computes again: as stock, to the bit."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import lowtide
from tests.bitwise.discard_all import DiscardAll

WIDTH, BATCH, STEPS = 256, 512, 5  # an activation takes half a mebibyte
Loss = Callable[[nn.Sequential, torch.Tensor, int], torch.Tensor]


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU()) for _ in range(6)))


def train(loss_of: Loss, spill: Path | None) -> tuple[list[bytes], dict[str, object]]:
    """Return the parameters after some steps, and the figures; `spill`: with all discarded that can be."""
    net = model()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    torch.manual_seed(1)
    tide = None
    if spill is not None:
        # Half of the activations and gradients fit beside the parameters.
        budget_bytes = 8 * WIDTH * WIDTH * 6 + 6 * BATCH * WIDTH * 4
        tide = lowtide.fit(net, optimizer, budget=budget_bytes, spill=spill, policy=DiscardAll(once=True))
    with tide or nullcontext():
        for number in range(STEPS):
            with tide.step() if tide is not None else nullcontext():
                loss_of(net, torch.randn(BATCH, WIDTH), number).backward()
                optimizer.step()
                optimizer.zero_grad()
        stats = {} if tide is None else dict(tide.stats())
    return [parameter.detach().numpy().tobytes() for parameter in net.parameters()], stats


def activations(net: nn.Sequential, x: torch.Tensor) -> list[torch.Tensor]:
    found = []
    for layer in net:
        x = layer(x)
        found.append(x)
    return found


def listed(net: nn.Sequential, x: torch.Tensor, number: int) -> torch.Tensor:
    """Read an early activation after forward, by an access that no operator announces."""
    found = activations(net, x)
    seen = found[1].detach()[:2].tolist()
    return found[-1].square().mean() * (1 + seen[0][0] + number)


def seen_by_numpy(net: nn.Sequential, x: torch.Tensor, number: int) -> torch.Tensor:
    found = activations(net, x)
    return found[-1].square().mean() * float(found[1].detach().numpy().sum() + number)


def seen_by_another_thread(net: nn.Sequential, x: torch.Tensor, number: int) -> torch.Tensor:
    """Read it there without an operator: a step with operators on several threads is not planned."""
    found = activations(net, x)
    view, seen = found[1].detach(), []
    thread = threading.Thread(target=lambda: seen.extend(view.tolist()))
    thread.start()
    thread.join()
    return found[-1].square().mean() * (1 + seen[0][0] + number)


def only_seen_in_some_steps(net: nn.Sequential, x: torch.Tensor, number: int) -> torch.Tensor:
    found = activations(net, x)
    scale = float(found[2].detach().mean()) if number % 2 else 1.0
    return found[-1].square().mean() * scale


def input_refilled_through_dlpack(net: nn.Sequential, x: torch.Tensor, number: int) -> torch.Tensor:
    """A borrower refills what the first activation is made from, between forward and backward."""
    x = x.clone()
    borrowed = np.from_dlpack(x)
    y = nn.functional.gelu(x) * net[0][0].weight[0]
    loss = net(y).square().mean() + number
    borrowed[:] = 7.0
    return loss


def input_refilled_by_an_operator(net: nn.Sequential, x: torch.Tensor, number: int) -> torch.Tensor:
    x = x.clone()
    y = nn.functional.gelu(x)  # nothing that needs a gradient: autograd does not save x
    loss = net(y * net[0][0].weight[0]).square().mean() + number
    x.fill_(7.0)
    return loss


def dropped_out(net: nn.Sequential, x: torch.Tensor, number: int) -> torch.Tensor:
    for layer in net:
        x = nn.functional.dropout(layer(x), 0.3)
    return x.square().mean() + number


def other_formulas(net: nn.Sequential, x: torch.Tensor, number: int) -> torch.Tensor:
    """Operators whose backward is another one where a dispatch mode is on."""
    y = net[:3](x)
    y = y.masked_fill(y > 0.05, net[0][0].bias[0])
    product = (1 + 0.001 * y).prod(dim=1)
    return net[3:](y).square().mean() * product.mean() + number


def double_backward(net: nn.Sequential, x: torch.Tensor, number: int) -> torch.Tensor:
    x.requires_grad_()
    loss = net(x).square().mean()
    (grad,) = torch.autograd.grad(loss, x, create_graph=True)
    return loss + (grad.square().sum() + number)


def differentiated_by_functions(net: nn.Sequential, x: torch.Tensor, number: int) -> torch.Tensor:
    grad = torch.func.grad(lambda value: nn.functional.gelu(value @ value.T).square().mean())(x[:, :64])
    return net(x + grad.sum(1, keepdim=True)).square().mean() + number


LOSSES = [
    listed,
    seen_by_numpy,
    seen_by_another_thread,
    only_seen_in_some_steps,
    input_refilled_through_dlpack,
    input_refilled_by_an_operator,
    dropped_out,
    other_formulas,
    double_backward,
    differentiated_by_functions,
]


@pytest.mark.parametrize("loss_of", LOSSES, ids=lambda loss_of: loss_of.__name__)
def test_programs_with_discarded_pages_are_exact(loss_of: Loss, tmp_path: Path) -> None:
    expected, _ = train(loss_of, None)
    found, stats = train(loss_of, tmp_path)
    assert found == expected
    assert int(str(stats["discarded_bytes"])) > 0, "nothing was given up: this test shows nothing"
    assert stats["peak_reserved_bytes"] <= stats["budget_bytes"]
