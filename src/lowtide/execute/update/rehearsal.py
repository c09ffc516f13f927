"""What an optimizer's first update will need, found by a smaller one: its state does not exist before."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.profiler import record_function


def _unhooked(step: Callable[..., object]) -> Callable[..., object]:
    return getattr(step, "__wrapped__", step) if getattr(step, "hooked", False) else step


def rehearse(optimizer: torch.optim.Optimizer, *, least_bytes: int, refused: bool = False) -> int:
    """Update a copy of the largest parameter, which allocates and uses at once what the first update of it will.

    Return the bytes of state to come of all parameters of fewer than `least_bytes`, which never leave. Where the state
    exists, the update is rehearsed only if the step is `refused`: its refusal tells what the whole of it needs. Nothing
    happens where the optimizer is none of PyTorch's: making another one could do anything.
    """
    exists = bool(optimizer.state)
    if (exists and not refused) or type(optimizer).__module__.partition(".")[0] != "torch":
        return 0
    due = [(one, group) for group in optimizer.param_groups for one in group["params"] if one.grad is not None]
    if not due:
        return 0
    largest, group = max(due, key=lambda pair: pair[0].nbytes)
    if largest.grad.is_sparse:
        return 0
    copy = torch.nn.Parameter(torch.zeros_like(largest))
    copy.grad = torch.zeros_like(largest.grad)
    settings = {name: value for name, value in group.items() if name != "params"}
    make: Callable[..., torch.optim.Optimizer] = type(optimizer)
    twin = make([{**settings, "params": [copy]}])
    with record_function(f"Optimizer.step#{type(twin).__name__}.step"):  # as PyTorch does, but without anybody's hooks
        _unhooked(type(twin).step)(twin)
    if exists:
        return 0
    small_bytes = sum(one.nbytes for one, _ in due if one.nbytes < least_bytes)
    values = [value for value in twin.state[copy].values() if isinstance(value, Tensor)]
    return sum(small_bytes if value.shape == copy.shape else value.nbytes * len(due) for value in values)
