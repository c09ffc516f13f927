"""An unmodified script inside a budget: hooks on its main thread, steps found through its optimizers."""

from __future__ import annotations

import runpy
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook

from lowtide.execute.tide.fit import open_tide
from lowtide.execute.tide.tide import Tide
from lowtide.memory.budget import BudgetLike
from lowtide.plan.policy import Policy
from lowtide.tiers.open import Spill


def run_script(
    path: Path,
    argv: list[str],
    *,
    budget: BudgetLike,
    spill: Spill = None,
    policy: str | Policy = "auto",
    verify: bool = False,
    recompute: bool | None = None,
) -> dict[str, object]:
    """Run a script as `__main__` inside a budget; return `Tide.stats()` with the script's "exit_code".

    What the script raises comes through, except that an allocation refused for the budget's sake becomes
    `BudgetTooSmall`. A step reaches from one `optimizer.step()` to the next.
    """
    with open_tide([], [], budget=budget, spill=spill, policy=policy, verify=verify, recompute=recompute) as tide:
        with stepping(tide), tide.turning_refusals_into_errors():
            exit_code = run_as_main(path, argv)
        return tide.stats() | {"exit_code": exit_code}


@contextmanager
def stepping(tide: Tide, on_step: Callable[[], None] | None = None) -> Iterator[None]:
    """Manage what this thread does, in steps that end where an optimizer's step does; call `on_step` after each."""

    def after_step(optimizer: Optimizer, _args: object, _kwargs: object) -> None:
        tide.know(optimizer)
        tide.end_step()
        if on_step is not None:
            on_step()
        tide.begin_step()

    handle = register_optimizer_step_post_hook(after_step)
    tide.begin_step()
    try:
        with tide.hooks():
            yield
    finally:
        handle.remove()
        tide.abandon_step()


def run_as_main(path: Path, argv: list[str]) -> int:
    """Run a script as `python path argv...` would; return its exit code."""
    before_argv, before_path = sys.argv[:], sys.path[:]
    sys.argv = [str(path), *argv]
    sys.path[0] = str(path.resolve().parent)
    try:
        runpy.run_path(str(path), run_name="__main__")
    except SystemExit as exit_:
        return _exit_code(exit_)
    finally:
        sys.argv, sys.path[:] = before_argv, before_path
        torch.set_grad_enabled(True)
    return 0


def _exit_code(exit_: SystemExit) -> int:
    if exit_.code is None:
        return 0
    if isinstance(exit_.code, int):
        return exit_.code
    print(exit_.code, file=sys.stderr)
    return 1
