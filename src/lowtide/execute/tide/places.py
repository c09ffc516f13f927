"""Where in a program an allocation was refused, read from the error's traceback."""

from __future__ import annotations

from collections.abc import Iterable
from inspect import CO_OPTIMIZED
from traceback import walk_tb
from types import FrameType

import torch

from lowtide.errors import BudgetTooSmall


def located(refusal: BaseException, error: BaseException, models: Iterable[torch.nn.Module]) -> BaseException:
    """Return a refusal that says where it happened: in an optimizer's step, or in a layer by its name."""
    place = place_of(error, models)
    if not place or not isinstance(refusal, BudgetTooSmall) or refusal.place:
        return refusal
    return BudgetTooSmall(
        budget_bytes=refusal.budget_bytes,
        needed_bytes=refusal.needed_bytes,
        op=refusal.op,
        detail=refusal.detail,
        device=refusal.device,
        place=place,
        step=refusal.step,
    )


def place_of(error: BaseException, models: Iterable[torch.nn.Module]) -> str:
    """Return where an error arose: "in AdamW's step", "in layers.3", or nothing where its frames do not tell."""
    owners = [_self_of(frame) for frame, _ in walk_tb(error.__traceback__)]
    for owner in owners:
        if isinstance(owner, torch.optim.Optimizer):
            return f"in {type(owner).__name__}'s step"
    modules = [owner for owner in owners if isinstance(owner, torch.nn.Module)]
    if not modules:
        return ""
    names = {id(module): name for model in models for name, module in model.named_modules()}
    return f"in {names.get(id(modules[-1])) or type(modules[-1]).__name__}"


def _self_of(frame: FrameType) -> object:
    """Return the object whose method a frame runs, if it is one.

    Before Python 3.13 a frame keeps the copy of its locals that is made on request. The error is among them, and
    holds the frame: a circle, and with it every tensor of the failed step.
    """
    if not frame.f_code.co_flags & CO_OPTIMIZED or "self" not in frame.f_code.co_varnames:
        return None
    values = frame.f_locals
    owner = values.get("self")
    if type(values) is dict:
        values.clear()
    return owner
