"""From a training step to a `Trace`: run it once unmanaged and write down what happened."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lowtide.core.trace import Trace
from lowtide.errors import BadArgument

if TYPE_CHECKING:
    import torch

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
) -> Trace:
    """Return the trace of `step`, a function that runs one whole training step, called `steps` times.

    The second call is the one to plan from: only then do gradients and optimizer state exist as they will from there
    on.
    """
    from lowtide.execute.tide import Tide

    models = [] if model is None else [model]
    optimizers = [] if optimizer is None else [optimizer]
    with Tide(models, optimizers, **_UNMANAGED) as tide:
        for _ in range(steps):
            with tide.step():
                step()
        return tide.trace()


def capture_script(path: Path, argv: list[str], *, steps: int = 2) -> Trace:
    """Return the trace of an unmodified script's training step; it is stopped after `steps` optimizer steps."""
    from lowtide.execute.script import run_as_main, stepping
    from lowtide.execute.tide import Tide

    class Enough(BaseException):
        """Ends the script; not an Exception, so that the script's own handlers let it pass."""

    left = steps

    def count() -> None:
        nonlocal left
        left -= 1
        if left <= 0:
            raise Enough

    with Tide([], [], **_UNMANAGED) as tide:
        try:
            with stepping(tide, count):
                run_as_main(path, argv)
        except Enough:
            pass
        if left == steps:
            raise BadArgument(f"{path.name} ended without an optimizer step: there is no training step to record")
        return tide.trace()
