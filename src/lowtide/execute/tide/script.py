"""An unmodified script inside a budget: hooks on its main thread, steps found through its optimizers."""

from __future__ import annotations

import gc
import os
import runpy
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path

import torch
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook

from lowtide.core.step_record import Expected, StepRecord
from lowtide.errors import BadArgument
from lowtide.execute.tide.cpu import CpuTide
from lowtide.execute.tide.creation import reading_in_place
from lowtide.execute.tide.fit import open_tide
from lowtide.execute.tide.serving import serving
from lowtide.execute.tide.tide import Tide
from lowtide.memory.budget import BudgetLike
from lowtide.plan.policy import Policy
from lowtide.tiers.open import Spill
from lowtide.tiers.slow import Slow

Program = Path | str
"""A script by its path, or a module by its name."""


class Iterations:
    """Counts and times a program's iterations.

    An iteration ends with the last optimizer step before some optimizer steps a second time: the two steps of a GAN are
    one iteration. It begins where autograd first saves something, so what a program does between steps without
    gradients (loading data, evaluating, saving) is not in its time.

    The tide takes each optimizer's step for a step and predicts each of them; an iteration's prediction is their sum.
    """

    def __init__(self) -> None:
        self.optimizer_steps = 0
        self._done: list[_Iteration] = []
        self._now_s = 0.0
        self._stepped: set[int] = set()
        self._parts: list[Expected | None] = []

    def add(self, optimizer: object, *, begun_s: float, ended_s: float) -> None:
        """Take note of an optimizer's step, for which the program worked from `begun_s` to `ended_s`."""
        if id(optimizer) in self._stepped:
            self._done.append(self._now())
            self._now_s = 0.0
            self._stepped.clear()
            self._parts.clear()
        self._stepped.add(id(optimizer))
        self._now_s += ended_s - begun_s
        self.optimizer_steps += 1

    def expect(self, expected: Expected | None) -> None:
        """Take note of the times predicted for the optimizer step that was added last."""
        self._parts.append(expected)

    def _now(self) -> _Iteration:
        return _Iteration(self._now_s, _sum(self._parts))

    def stats(self) -> dict[str, object]:
        """Return the counts, times and predictions for `Tide.stats`."""
        done = [*self._done, self._now()] if self._stepped else []
        times_s = [one.took_s for one in done]
        predicted = [(one.took_s, one.expected) for one in done if one.expected is not None]
        slowdowns = [took_s / expected.unmanaged_s for took_s, expected in predicted]
        last = predicted[-1][1] if predicted else None
        return {
            "steps": len(times_s),
            "optimizer_steps": self.optimizer_steps,
            "step_s": statistics.median(times_s) if times_s else 0.0,
            "last_step_s": times_s[-1] if times_s else 0.0,
            "predicted_unmanaged_step_s": None if last is None else last.unmanaged_s,
            "predicted_slowdown": None if last is None or not last.planned_s else last.planned_s / last.unmanaged_s,
            "slowdown": statistics.median(slowdowns) if slowdowns else None,
        }


@dataclass(frozen=True, slots=True)
class _Iteration:
    took_s: float
    expected: Expected | None


def _sum(parts: Sequence[Expected | None]) -> Expected | None:
    """Return the times of all parts together (None: one of them was not predicted)."""
    known = [part for part in parts if part is not None]
    if len(known) < len(parts) or not any(part.unmanaged_s > 0 for part in known):
        return None
    planned_s = [part.planned_s for part in known if part.planned_s is not None]
    return Expected(
        unmanaged_s=sum(part.unmanaged_s for part in known),
        planned_s=sum(planned_s) if len(planned_s) == len(known) else None,
    )


class Run:
    """A program inside its budget; `iterations` is None for one that does not train."""

    def __init__(self, tide: Tide, *, iterations: Iterations | None) -> None:
        self._tide = tide
        self.iterations = iterations

    def stats(self) -> dict[str, object]:
        """Return `Tide.stats()`, in the program's iterations where it trains."""
        return self._tide.stats() | (self.iterations.stats() if self.iterations is not None else {})


@contextmanager
def inside(
    *,
    budget: BudgetLike,
    spill: Spill = None,
    slow: Slow = None,
    policy: str | Policy = "auto",
    verify: bool = False,
    recompute: bool | None = None,
    codecs: Sequence[str] | None = None,
    max_error: float = 0.0,
    put_off: bool = False,
    serve: bool = False,
    strict: bool = False,
    on_forked_step: Callable[[], None] | None = None,
    on_step: Callable[[StepRecord], object] | None = None,
) -> Iterator[Run]:
    """Keep whatever this thread does inside a budget, in steps that reach from one `optimizer.step()` to the next.

    `serve`: in steps that are the outermost calls of its modules, for a program that only infers. An allocation
    refused for the budget's sake becomes `BudgetTooSmall`. `strict`: refuse to be advisory.
    `on_forked_step` is called in a fork of this process that trains, which has no budget. `on_step`: as `Tide.on_step`.
    """
    with open_tide(
        [],
        [],
        budget=budget,
        spill=spill,
        slow=slow,
        policy=policy,
        verify=verify,
        recompute=recompute,
        codecs=codecs,
        max_error=max_error,
        put_off=put_off,
    ) as tide:
        if strict and not tide.stats()["budget_exact"]:
            raise BadArgument(
                "the budget would only be counted and not enforced, which --strict forbids: the warning says why, and "
                "'lowtide doctor' what helps"
            )
        if on_step is not None:
            tide.on_step(on_step)
        run = Run(tide, iterations=None if serve else Iterations())
        steps = (
            serving(tide)
            if run.iterations is None
            else stepping(tide, iterations=run.iterations, on_forked_step=on_forked_step)
        )
        in_place = reading_in_place(tide.memory) if isinstance(tide, CpuTide) else nullcontext()
        with steps, in_place, tide.turning_refusals_into_errors():
            yield run


def run_script(
    program: Program,
    argv: list[str],
    *,
    budget: BudgetLike,
    spill: Spill = None,
    slow: Slow = None,
    policy: str | Policy = "auto",
    verify: bool = False,
    recompute: bool | None = None,
    codecs: Sequence[str] | None = None,
    max_error: float = 0.0,
    put_off: bool = False,
    serve: bool = False,
    strict: bool = False,
    on_forked_step: Callable[[], None] | None = None,
    on_step: Callable[[StepRecord], object] | None = None,
) -> dict[str, object]:
    """Run a script (or, by its name, a module) as `__main__` inside a budget, as `inside` explains.

    Return `Tide.stats()` with the script's "exit_code". What the script raises comes through.
    """
    with inside(
        budget=budget,
        spill=spill,
        slow=slow,
        policy=policy,
        verify=verify,
        recompute=recompute,
        codecs=codecs,
        max_error=max_error,
        put_off=put_off,
        serve=serve,
        strict=strict,
        on_forked_step=on_forked_step,
        on_step=on_step,
    ) as run:
        exit_code = run_as_main(program, argv)
        return run.stats() | {"exit_code": exit_code}


@contextmanager
def stepping(
    tide: Tide,
    on_step: Callable[[], None] | None = None,
    *,
    iterations: Iterations | None = None,
    on_forked_step: Callable[[], None] | None = None,
) -> Iterator[None]:
    """Manage what this thread does, in steps that end where an optimizer's step does; call `on_step` after each."""
    pid = os.getpid()
    known: set[int] = set()
    forked: list[int] = []
    begun_s = time.perf_counter()

    def after_step(optimizer: Optimizer, _args: object, _kwargs: object) -> None:
        nonlocal begun_s
        if os.getpid() != pid:  # a fork: neither the budget nor the hooks are its own
            if on_forked_step is not None and os.getpid() not in forked:
                forked.append(os.getpid())
                on_forked_step()
            return
        if iterations is not None:
            saved_s = tide.first_save_s
            iterations.add(optimizer, begun_s=begun_s if saved_s is None else saved_s, ended_s=time.perf_counter())
        if id(optimizer) not in known:
            known.add(id(optimizer))
            tide.know(optimizer)
            tide.know_models(models_of(optimizer))
        tide.end_step()
        if iterations is not None:
            iterations.expect(tide.records[-1].expected)
        try:
            tide.tell_step()
            if on_step is not None:
                on_step()
        finally:  # the program may go on after what a listener raised, and its next step is one, too
            begun_s = time.perf_counter()
            tide.begin_step()

    handle = register_optimizer_step_post_hook(after_step)
    if iterations is not None:
        tide.time_training()
    tide.begin_step()
    try:
        with tide.hooks():
            yield
    finally:
        handle.remove()
        tide.abandon_step()


def models_of(optimizer: Optimizer) -> list[torch.nn.Module]:
    """Return the outermost modules that hold parameters of an optimizer, found among all objects of the program."""
    owned = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    # Not isinstance: it asks objects for their class, and some of the program's may do anything then.
    found = [each for each in gc.get_objects() if issubclass(type(each), torch.nn.Module) and "_modules" in vars(each)]
    inner = {id(child) for module in found for child in vars(module)["_modules"].values()}
    return [
        module
        for module in found
        if id(module) not in inner and any(id(parameter) in owned for parameter in module.parameters())
    ]


def run_as_main(program: Program, argv: list[str]) -> int:
    """Run a script as `python path argv...` would, or a module as `python -m name argv...`; return its exit code."""
    before_argv, before_path = sys.argv[:], sys.path[:]
    sys.argv = [str(program), *argv]
    sys.path[0] = str(program.resolve().parent) if isinstance(program, Path) else str(Path.cwd())
    try:
        if isinstance(program, Path):
            runpy.run_path(str(program), run_name="__main__")
        else:
            runpy.run_module(program, run_name="__main__", alter_sys=True)
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
