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
from lowtide.execute.tide.turns import Turns
from lowtide.memory.budget import BudgetLike
from lowtide.plan.policy import Policy
from lowtide.tiers.open import Spill
from lowtide.tiers.slow import Slow

Program = Path | str
"""A script by its path, or a module by its name."""


class Iterations:
    """Counts and times a program's iterations: one step of each of its optimizers.

    An iteration begins where autograd first saves something, so what a program does between steps without gradients
    (loading data, evaluating, saving) is not in its time. It is one step of the tide, or, until `Turns` knows its
    end, one for each optimizer; its prediction is the sum of theirs.
    """

    def __init__(self) -> None:
        self.optimizer_steps = 0
        self._done: list[_Iteration] = []

    def add(self, *, begins: bool, took_s: float, expected: Expected | None) -> None:
        """Take note of a step of the tide and of its training's time; `begins`: an iteration began in it."""
        part = _Iteration(took_s, None if expected is None else expected.training)
        self._done.append(part if begins or not self._done else self._done.pop().with_(part))

    def stats(self) -> dict[str, object]:
        """Return the counts, times and predictions for `Tide.stats`."""
        times_s = [one.took_s for one in self._done]
        predicted = [(one.took_s, one.expected) for one in self._done if one.expected is not None]
        slowdowns = [took_s / expected.unmanaged_s for took_s, expected in predicted if expected.unmanaged_s > 0]
        last = predicted[-1][1] if slowdowns else None
        return {
            "steps": len(times_s),
            "optimizer_steps": self.optimizer_steps,
            "step_s": statistics.median(times_s) if times_s else 0.0,
            "last_step_s": times_s[-1] if times_s else 0.0,
            "predicted_unmanaged_step_s": None if last is None else last.unmanaged_s,
            "predicted_slowdown": None if last is None else last.slowdown,
            "slowdown": statistics.median(slowdowns) if slowdowns else None,
        }


@dataclass(frozen=True, slots=True)
class _Iteration:
    took_s: float
    expected: Expected | None

    def with_(self, part: _Iteration) -> _Iteration:
        """Return the iteration with one more part; a part that is not predicted leaves the whole without prediction."""
        both = None if self.expected is None or part.expected is None else self.expected.plus(part.expected)
        return _Iteration(self.took_s + part.took_s, both)


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
    on_step: Callable[[bool], None] | None = None,
    *,
    iterations: Iterations | None = None,
    on_forked_step: Callable[[], None] | None = None,
) -> Iterator[None]:
    """Manage what this thread does, in steps that end where an optimizer's step does; call `on_step` after each.

    Of several optimizers that take turns, with the last one's: see `Turns`.
    """
    pid = os.getpid()
    turns = Turns()
    begins = False
    known: set[int] = set()
    forked: list[int] = []
    begun_s = time.perf_counter()

    def after_step(optimizer: Optimizer, _args: object, _kwargs: object) -> None:
        nonlocal begun_s, begins
        if os.getpid() != pid:  # a fork: neither the budget nor the hooks are its own
            if on_forked_step is not None and os.getpid() not in forked:
                forked.append(os.getpid())
                on_forked_step()
            return
        if id(optimizer) not in known:
            known.add(id(optimizer))
            tide.know(optimizer)
            tide.know_models(models_of(optimizer))
        turn = turns.take(optimizer)
        begins |= turn.begins
        if iterations is not None:
            iterations.optimizer_steps += 1
        if not turn.ends:
            return
        saved_s = tide.first_save_s
        took_s = time.perf_counter() - (begun_s if saved_s is None else saved_s)
        tide.end_step()
        if iterations is not None:
            iterations.add(begins=begins, took_s=took_s, expected=tide.records[-1].expected)
        try:
            tide.tell_step()
            if on_step is not None:
                on_step(begins)
        finally:  # the program may go on after what a listener raised, and its next step is one, too
            begun_s, begins = time.perf_counter(), False
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
