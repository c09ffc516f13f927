"""`serve`: inference with models that are larger than memory; each call of the model is a step."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch

from lowtide.errors import BadArgument
from lowtide.execute.tide.fit import open_tide
from lowtide.execute.tide.tide import Tide
from lowtide.memory.budget import BudgetLike
from lowtide.plan.policy import Policy
from lowtide.tiers.open import Spill
from lowtide.tiers.slow import Slow


@contextmanager
def serve(
    model: torch.nn.Module,
    *,
    budget: BudgetLike,
    spill: Spill = None,
    slow: Slow = None,
    policy: str | Policy = "auto",
    verify: bool = False,
) -> Iterator[Tide]:
    """Run `model` inside `budget` bytes of tensor memory: weights that do not fit are streamed from `spill`.

    Call the model as usual: `model(x)`, `model.generate(...)`, a pipeline around it. Each call is a step. Lowtide
    observes the first call; later ones follow a plan that reads weights ahead, also for the first layers of the next
    call. Weights that fit stay in memory. The others are written to the spill once and then only read. All other
    tensors, such as the key-value cache, are inside the budget and may leave too. `slow`: as in `lowtide.fit`.
    """
    if not isinstance(model, torch.nn.Module):
        raise BadArgument(f"model has the type {type(model).__name__}: pass a torch.nn.Module")
    with (
        open_tide([model], [], budget=budget, spill=spill, slow=slow, policy=policy, verify=verify) as tide,
        tide.turning_refusals_into_errors(),
        _steps_of(tide, model),
    ):
        yield tide


def _steps_of(tide: Tide, model: torch.nn.Module) -> AbstractContextManager[None]:
    # Hooks of the model's own call: of all ways in which a program may call it, they see each.
    return _hooked(
        tide,
        lambda begin, end: [
            model.register_forward_pre_hook(begin, prepend=True),
            model.register_forward_hook(end, always_call=True),
        ],
    )


def serving(tide: Tide) -> AbstractContextManager[None]:
    """Make every outermost call of any module a step: for programs that only infer and do not name their model."""
    module = torch.nn.modules.module
    return _hooked(
        tide,
        lambda begin, end: [
            module.register_module_forward_pre_hook(begin),
            module.register_module_forward_hook(end, always_call=True),
        ],
    )


@contextmanager
def _hooked(tide: Tide, register: Callable[[Callable[..., None], Callable[..., None]], list[Any]]) -> Iterator[None]:
    calls = Calls(tide)

    def begin(_module: torch.nn.Module, _args: object) -> None:
        calls.begin()

    def end(_module: torch.nn.Module, _args: object, _result: object) -> None:
        calls.end()

    handles = register(begin, end)
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
        calls.abandon()


class Calls:
    """Counts how deep calls are nested, and makes the outermost one a step; one that raised is abandoned."""

    def __init__(self, tide: Tide) -> None:
        self._tide = tide
        self._depth = 0
        self._pid = os.getpid()
        self._raised = False  # the last step, which is still open
        self._handled: BaseException | None = None  # that the program was handling when the call began

    def begin(self) -> None:
        """Take note of a call."""
        if os.getpid() != self._pid:
            return
        if self._raised:
            self.abandon()
        self._depth += 1
        if self._depth == 1:
            self._handled = sys.exc_info()[1]
            self._tide.begin_step()

    def end(self) -> None:
        """Take note of the end of a call."""
        if os.getpid() != self._pid or self._depth == 0:
            return
        self._depth -= 1
        if self._depth > 0:
            return
        # PyTorch calls hooks while it handles what a call raised, and none may come or go meanwhile.
        self._raised = sys.exc_info()[1] is not self._handled
        self._handled = None
        if not self._raised:
            self._tide.end_step()
            self._tide.tell_step()

    def abandon(self) -> None:
        """End a step that is open because a call never came to its end, or raised."""
        if (self._depth or self._raised) and os.getpid() == self._pid:
            self._depth = 0
            self._raised = False
            self._tide.abandon_step()
