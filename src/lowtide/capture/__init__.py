"""From a training step to a `Trace`: run it once unmanaged and write down what happened, or do not run it at all."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lowtide.capture.training import Training
from lowtide.core.machine import Machine
from lowtide.core.trace import Trace
from lowtide.core.units import format_bytes
from lowtide.errors import BadArgument

if TYPE_CHECKING:
    import torch

__all__ = ["Training", "capture_model", "capture_script", "capture_step"]

_UNMANAGED: dict[str, Any] = {
    "budget": 1 << 60,
    "spill": "null:",
    "policy": "keep_all",
    "verify": False,
    "moves_nothing": True,
}


def capture_step(
    step: Callable[[], object],
    *,
    model: torch.nn.Module | None = None,
    optimizer: torch.optim.Optimizer | None = None,
    steps: int = 2,
    device: str | None = None,
) -> Trace:
    """Return the trace of `step`, a function that runs one whole training step, called `steps` times.

    The second call is the one to plan from: only then do gradients and optimizer state exist as they will from there
    on. Floating-point operations are not counted: `capture.flops` can, in a run of its own. `device`: which, such as
    "cuda:1", of a model that is on several.
    """
    from lowtide.execute.fit import open_tide

    models = [] if model is None else [model]
    optimizers = [] if optimizer is None else [optimizer]
    with open_tide(models, optimizers, **_UNMANAGED) as tide:
        for _ in range(steps):
            with tide.step():
                step()
        return tide.trace(device)


def capture_model(
    name: str,
    *,
    batch: int,
    fake: bool = False,
    machine: Machine | None = None,
    steps: int = 2,
    dtype: str = "float32",
    **sizes: Any,
) -> Trace:
    """Return the trace of a model of `lowtide.zoo`, by running it or, if `fake`, without executing it.

    With `machine`, operator times are those predicted for it; without, those measured here (executed) or predicted
    for the preset "cpu" (fake). Either way the trace knows its floating-point operations.
    """
    from lowtide import zoo
    from lowtide.capture.fake import LEAST_BYTES, capture_fake
    from lowtide.capture.flops import with_flops
    from lowtide.estimate.predict import retime

    def training() -> Training:
        return zoo.build(name, batch=batch, dtype=dtype, **sizes).training()

    faked = capture_fake(training, machine=machine)
    if fake:
        return replace(faked, model=name)
    if not faked.saves:
        raise BadArgument(
            f"model {name!r} saves no tensor of {format_bytes(LEAST_BYTES)} or more at this size, so there is nothing "
            "to record by running it: raise the batch, or capture it without executing"
        )
    made = training()
    trace = capture_step(made.step, model=made.model, optimizer=made.optimizer, steps=steps)
    trace = with_flops(trace, ((op.name, op.flops) for op in faked.ops if op.flops))
    return replace(trace if machine is None else retime(trace, machine), model=name)


def capture_script(path: Path, argv: list[str], *, steps: int = 2) -> Trace:
    """Return the trace of an unmodified script's training step; it is stopped after `steps` optimizer steps.

    One more step, if the script has one, counts floating-point operations: counting slows operators down.
    """
    from lowtide.capture.flops import CountFlops, with_flops
    from lowtide.execute.fit import open_tide
    from lowtide.execute.script import run_as_main, stepping

    class Enough(BaseException):
        """Ends the script; not an Exception, so that the script's own handlers let it pass."""

    done = 0
    trace: Trace | None = None
    unrecorded: BadArgument | None = None
    ended_by_itself = False
    counter = CountFlops()

    def after_step() -> None:
        nonlocal done, trace, unrecorded
        done += 1
        if done == steps:
            try:
                trace = tide.trace()
            except BadArgument as error:
                unrecorded = error
                raise Enough from error
            counter.__enter__()  # type: ignore[no-untyped-call]  # torch leaves modes untyped
        elif done > steps:
            raise Enough

    with open_tide([], [], **_UNMANAGED) as tide:
        try:
            with stepping(tide, after_step):
                try:
                    run_as_main(path, argv)
                finally:
                    if trace is not None:
                        counter.__exit__(None, None, None)  # type: ignore[no-untyped-call]
        except Enough:
            pass
        except Exception as error:
            if trace is None:
                raise
            counter.counted.clear()  # a script may not bear being counted; its trace was taken before
            warnings.warn(
                f"lowtide: the step after the recorded one raised {type(error).__name__}: {error}; the trace has no "
                "flops, so its operators' times cannot be put on another machine",
                RuntimeWarning,
                stacklevel=2,
            )
        else:
            ended_by_itself = True
        if not done:
            raise BadArgument(f"{path.name} ended without an optimizer step: there is no training step to record")
        if unrecorded is not None:
            raise BadArgument(f"there is nothing to plan in {path.name}: {unrecorded}")
        found = trace or tide.trace()
        if ended_by_itself:
            warnings.warn(
                f"lowtide: {path.name} ended before a step in which floating-point operations could be counted, so its "
                "times cannot be put on another machine: record fewer steps of it, or let it run longer",
                RuntimeWarning,
                stacklevel=2,
            )
        return with_flops(found, counter.counted)
