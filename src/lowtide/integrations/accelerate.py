"""Accelerate inside a budget.

model, optimizer, loader = lowtide.prepare(accelerator, model, optimizer, loader, budget="2GiB")
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any, Unpack

import torch

from lowtide.errors import BadArgument
from lowtide.execute.tide.tide import Tide
from lowtide.integrations.session import Listener, Session, TideOptions

_sessions: weakref.WeakKeyDictionary[Any, Session] = weakref.WeakKeyDictionary()


def prepare(
    accelerator: Any,
    *objects: Any,
    on_step: Listener | Iterable[Listener] | None = None,
    **options: Unpack[TideOptions],
) -> Any:
    """Return `accelerator.prepare(*objects)`, made and trained inside a budget; takes the keywords of `lowtide.fit`.

    A step ends with `optimizer.step()`. `accelerator.end_training()` closes the tide, and so does the end of the
    program; `tide_of(accelerator)` is the tide meanwhile.
    """
    if not callable(getattr(accelerator, "prepare", None)):
        raise BadArgument(f"prepare takes an accelerate.Accelerator first, and got a {type(accelerator).__name__}")
    if accelerator in _sessions:
        raise BadArgument("this accelerator has a tide: prepare everything in one call, or call end_training() before")
    session = Session(on_step=on_step, **options)
    session.open(
        [each for each in objects if isinstance(each, torch.nn.Module)],
        [each for each in objects if isinstance(each, torch.optim.Optimizer)],
    )
    _sessions[accelerator] = session
    _close_at_the_end(accelerator)
    try:
        return accelerator.prepare(*objects)
    except BaseException:
        close(accelerator)
        raise


def tide_of(accelerator: Any) -> Tide:
    """Return the tide that `prepare` opened."""
    if accelerator not in _sessions:
        raise BadArgument("this accelerator has no tide: call lowtide.prepare(accelerator, ...) first")
    return _sessions[accelerator].tide


def close(accelerator: Any) -> None:
    """Close an accelerator's tide, if it has one: `end_training` does so."""
    session = _sessions.pop(accelerator, None)
    if session is not None:
        session.close()


def _close_at_the_end(accelerator: Any) -> None:
    end = type(accelerator).end_training
    reference = weakref.ref(accelerator)

    def end_training() -> None:
        mine = reference()
        assert mine is not None
        vars(mine).pop("end_training", None)
        try:
            end(mine)
        finally:
            close(mine)

    accelerator.end_training = end_training
