"""From a training step to a `Trace`, under a tide that moves nothing: of a function, of a script, of a zoo model."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from lowtide import zoo
from lowtide.capture.fake import LEAST_BYTES, capture_fake
from lowtide.capture.flops import CountFlops, with_flops
from lowtide.capture.training import Training
from lowtide.core.machine import Machine
from lowtide.core.trace import Reach, Trace
from lowtide.errors import BadArgument
from lowtide.estimate.predict import retime
from lowtide.execute.tide.fit import open_tide
from lowtide.execute.tide.script import run_as_main, stepping
from lowtide.execute.tide.tide import Tide

_UNMANAGED: dict[str, Any] = {
    "budget": 1 << 60,
    "spill": "null:",
    "policy": "keep_all",
    "verify": False,
    "moves_nothing": True,
}
# The first step has the start of the program in it, the second still makes what later ones find.
_SETTLED_STEP = 3


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
    reach: Reach = Reach.SAVED,
    least_bytes: int = LEAST_BYTES,
    **sizes: Any,
) -> Trace:
    """Return the trace of a model of `lowtide.zoo`, by running it or, if `fake`, without executing it.

    With `machine`, operator times are those predicted for it; without, those measured here (executed) or predicted
    for the preset "cpu" (fake). Either way the trace knows its floating-point operations. `reach`: what the executor of
    a step that is not executed here could move, of `least_bytes` or more; a step that is says so itself.
    """

    def training() -> Training:
        return zoo.build(name, batch=batch, dtype=dtype, **sizes).training()

    faked = capture_fake(training, machine=machine, reach=reach, least_bytes=least_bytes)
    if fake:
        return replace(faked, model=name)
    made = training()
    trace = capture_step(made.step, model=made.model, optimizer=made.optimizer, steps=steps)
    trace = with_flops(trace, ((op.name, op.flops) for op in faked.ops if op.flops))
    return replace(trace if machine is None else retime(trace, machine), model=name)


class _Enough(BaseException):
    """Ends a script; not an Exception, so that the script's own handlers let it pass."""


class _Steps:
    """The iterations of a script: takes the trace of a typical one of `steps`, counts operations in the next."""

    def __init__(self, tide: Tide, steps: int) -> None:
        self._tide = tide
        self._steps = steps
        self._settled: list[Trace] = []
        self.done = 0
        self.trace: Trace | None = None
        self.unrecorded: BadArgument | None = None
        self.counter = CountFlops()

    def after_step(self, begins: bool) -> None:
        """Take note of a step; raise `_Enough` once there is nothing more to learn. `begins`: an iteration, too."""
        self.done += begins
        if self.trace is not None:
            raise _Enough
        if self.done >= min(self._steps, _SETTLED_STEP):
            try:
                self._settled.append(self._tide.trace())
            except BadArgument as error:
                self.unrecorded = error
                raise _Enough from error
        if self.done == self._steps:
            self.trace = typical(self._settled)
            self.counter.__enter__()  # type: ignore[no-untyped-call]  # torch leaves modes untyped

    def end(self) -> None:
        """Stop counting."""
        if self.trace is not None:
            self.counter.__exit__(None, None, None)  # type: ignore[no-untyped-call]


def typical(traces: Sequence[Trace]) -> Trace:
    """Return, of the traces with the operators of the last one, the one of median duration: a step may be disturbed."""
    names = [op.name for op in traces[-1].ops]
    alike = sorted((one for one in traces if [op.name for op in one.ops] == names), key=lambda one: one.duration_s)
    return alike[(len(alike) - 1) // 2]


def capture_script(path: Path, argv: list[str], *, steps: int = 3) -> Trace:
    """Return the trace of an unmodified script's training step; it is stopped after `steps` iterations.

    The first of them has the start of the program in it, the second still makes what later ones find; of those from the
    third on, the one of median duration is kept. One more step, if the script has one, counts floating-point
    operations: counting slows operators down.
    """
    uncounted = f"{path.name} ended before a step to count them in: record fewer steps of it, or let it run longer"
    with open_tide([], [], **_UNMANAGED) as tide:
        seen = _Steps(tide, steps)
        try:
            with stepping(tide, seen.after_step):
                try:
                    run_as_main(path, argv)
                finally:
                    seen.end()
        except _Enough:
            uncounted = ""
        except Exception as error:
            if seen.trace is None:
                raise
            seen.counter.counted.clear()  # a script may not bear being counted; its trace was taken before
            uncounted = f"the step after the recorded one raised {type(error).__name__}: {error}"
        if not seen.done:
            raise BadArgument(f"{path.name} ended without an optimizer step: there is no training step to record")
        if seen.unrecorded is not None:
            raise BadArgument(f"there is nothing to plan in {path.name}: {seen.unrecorded}")
        trace = seen.trace or tide.trace()
        if uncounted:
            warnings.warn(
                "lowtide: the trace has no floating-point operations, so its operators' times cannot be put on another "
                f"machine: {uncounted}",
                RuntimeWarning,
                stacklevel=2,
            )
        return replace(with_flops(trace, seen.counter.counted), model=path.name)
