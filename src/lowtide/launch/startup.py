"""Puts a process that a run started inside its budget, once it has torch; called before the program's first line.

A child of multiprocessing may be a loader of data as well as a rank, and which it is shows late: it gets its budget
when it makes an optimizer or runs backward.
"""

from __future__ import annotations

import atexit
import os
import sys
from collections.abc import Callable
from contextlib import ExitStack
from functools import wraps
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType, TracebackType
from typing import Any

from lowtide.errors import BadArgument, LowtideError
from lowtide.launch import escapes, notes
from lowtide.launch.python_command import read_command
from lowtide.launch.settings import Settings, settings_of

_EXIT_REFUSED = 2


def prepare() -> None:
    """Watch for torch, where a run started this process and it is one that may train."""
    settings = settings_of(os.environ)
    command = read_command(sys.orig_argv[1:])
    if settings is None or command.is_launcher or command.only_loads_a_library:
        return
    escapes.watch(escape_of(settings))
    if command.is_multiprocessing:
        _after_torch(lambda: _when_it_trains(lambda: _begin(settings)))
    else:
        _after_torch(lambda: _begin(settings))


def escape_of(settings: Settings) -> Callable[[str], None]:
    """Return what to do with a process that the budget cannot follow into: name it, or refuse it."""

    def found(reason: str) -> None:
        if settings.strict:
            raise BadArgument(f"{reason}: it could train outside the budget, which --strict forbids")
        notes.escaped(Path(settings.notes), reason)

    return found


def forked_step_of(settings: Settings) -> Callable[[], None]:
    """Return what to do in a fork that trains: name it, or refuse it."""

    def found() -> None:
        reason = f"process {os.getpid()}, a fork of {os.getppid()}, trains: a fork has no budget"
        if settings.strict:
            raise BadArgument(f"{reason}, which --strict forbids: start it with the method 'spawn'")
        notes.escaped(Path(settings.notes), reason)

    return found


def _after_torch(work: Callable[[], None]) -> None:
    """Do `work` once, at the end of the first `import torch`."""

    class Finder:
        def find_spec(self, name: str, _path: object, _target: object = None) -> ModuleSpec | None:
            if name != "torch":
                return None
            sys.meta_path.remove(self)
            spec = find_spec(name)
            if spec is not None and spec.loader is not None:
                _then(spec, work)
            return spec

    sys.meta_path.insert(0, Finder())


def _then(spec: ModuleSpec, work: Callable[[], None]) -> None:
    loader: Any = spec.loader
    execute = loader.exec_module

    def exec_module(module: ModuleType) -> None:
        del loader.exec_module
        execute(module)
        # Threads that `work` starts import torch too: to them it is whole from here on.
        spec._initializing = False  # type: ignore[attr-defined]
        work()

    loader.exec_module = exec_module


def _when_it_trains(work: Callable[[], None]) -> None:
    """Do `work` once, before the first optimizer is made or backward begins."""
    import torch

    makers = ((torch.optim.Optimizer, "__init__"), (torch.autograd, "backward"))
    before = [getattr(owner, name) for owner, name in makers]

    def then(call: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(call)
        def first(*args: Any, **kwargs: Any) -> Any:
            if getattr(torch.autograd, "backward") is not before[1]:  # noqa: B009 - typed as a function
                for (owner, name), original in zip(makers, before, strict=True):
                    setattr(owner, name, original)
                work()
            return call(*args, **kwargs)

        return first

    for (owner, name), original in zip(makers, before, strict=True):
        setattr(owner, name, then(original))


def _begin(settings: Settings) -> None:
    """Be inside the budget from here to the end of the process."""
    from multiprocessing.util import Finalize

    stack = ExitStack()
    try:
        note, stats = _enter(settings, stack)
    except LowtideError as error:
        stack.close()
        _say(str(error))
        raise SystemExit(_EXIT_REFUSED) from None
    pid, directory = os.getpid(), Path(settings.notes)
    has_left = False

    def leave(failure: tuple[type[BaseException], BaseException, TracebackType | None] | None = None) -> None:
        if os.getpid() != pid:
            return  # a fork, which has neither the budget nor anything to say of it
        atexit.unregister(leave)
        nonlocal has_left
        if has_left:
            return
        has_left = True
        figures = stats()
        try:
            stack.__exit__(*(failure or (None, None, None)))
        finally:
            if directory.is_dir():  # else the run has ended without this process
                notes.leave(directory, note, figures)

    atexit.register(leave)
    # A child of the fork server ends without atexit, but runs the finalizers of multiprocessing; ours comes last.
    Finalize(None, leave, exitpriority=-100)
    _tell_refusals(leave)


def _enter(settings: Settings, stack: ExitStack) -> tuple[notes.Note, Callable[[], dict[str, object]]]:
    from lowtide.execute.tide.script import inside
    from lowtide.launch.shown import shown
    from lowtide.memory.budget import capacity_bytes, device_count, local_ranks

    if settings.emulate is not None:
        from lowtide.emulator import enable

        enable(str(settings.capacity), preset=settings.emulate, devices=device_count(settings.budget))
    if settings.quiet:
        from lowtide.memory.native import build_quietly

        build_quietly()
    run = stack.enter_context(
        inside(
            budget=settings.budget,
            spill=settings.location,
            slow=settings.slow,
            policy=settings.policy,
            verify=settings.verify,
            recompute=settings.recompute,
            codecs=settings.codecs,
            max_error=settings.max_error,
            put_off=settings.put_off,
            serve=settings.serve,
            strict=settings.strict,
            on_forked_step=forked_step_of(settings),
            on_step=stack.enter_context(shown(settings, rank=rank())),
        )
    )
    stated = run.stats()["budget_bytes"]
    note = notes.Note(
        pid=os.getpid(),
        rank=rank(),
        command=" ".join(sys.orig_argv[1:])[:200],
        budget_bytes=stated if isinstance(stated, int) else 0,
    )
    # Ranks are checked against the machine all at once, wherever their launcher says how many there are.
    bound = capacity_bytes() if local_ranks() == 1 and settings.emulate is None else None
    notes.enter(Path(settings.notes), note, capacity_bytes=bound)
    return note, run.stats


def _tell_refusals(leave: Callable[..., None]) -> None:
    """Report an allocation that the budget refused, if the program did not catch it, in one line, not a traceback."""
    before = sys.excepthook

    def told(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        try:
            leave((kind, error, trace))
        except LowtideError as refusal:
            _say(str(refusal))
        except BaseException:  # noqa: BLE001 - the program's own error is what its user has to see
            before(kind, error, trace)
        else:
            before(kind, error, trace)

    sys.excepthook = told


def rank() -> int | None:
    """Return the number that a launcher gave this process in its job (None: it is not a rank)."""
    for name in ("RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "SLURM_PROCID"):
        if os.environ.get(name, "").isdecimal():
            return int(os.environ[name])
    return None


def _say(text: str) -> None:
    number = rank()
    where = "" if number is None else f"rank {number}: "
    sys.stderr.write(f"lowtide: {where}{' '.join(text.split())}\n")
    sys.stderr.flush()
