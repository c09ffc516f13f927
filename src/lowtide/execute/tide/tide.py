"""`Tide`: what a user holds, whether the training is on one device or on several."""

from __future__ import annotations

import atexit
import os
import weakref
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from typing import Any, Self

import torch

from lowtide.checkpoint.load import load_training
from lowtide.checkpoint.save import Saved, Versions, save_training
from lowtide.checkpoint.training import Training
from lowtide.core.machine import Machine
from lowtide.core.plan import Plan
from lowtide.core.step_record import StepRecord, typical_slowdown
from lowtide.core.trace import Trace
from lowtide.errors import BadArgument, LowtideError
from lowtide.live.html import steps_html

# The steps that `_repr_html_` draws, and over which the typical slowdown is taken.
_REMEMBERED_STEPS = 240


class Tide(ABC):
    """A training run inside a budget, created by `fit`: wrap each step in `step()`, then `close()` it.

    `device`, where a method takes one, is a name such as "cuda:1"; only a training on several devices needs it.
    """

    def __init__(self) -> None:
        self._inside = False
        self._timed = False
        self._closed = True  # until everything is open: nothing to close after a failure before that
        self._pid = os.getpid()
        self._step_s: list[float] = []
        self._steps_before = 0  # those of the state that was loaded
        self._saved: dict[str, Versions] = {}
        self._listeners: dict[object, Callable[[StepRecord], object]] = {}
        self._records: deque[StepRecord] = deque(maxlen=_REMEMBERED_STEPS)

    def _opened(self) -> None:
        """Be open from here on, until `close`, at exit at the latest."""
        # Not a bound method of self: a forgotten tide may be collected; but at exit an open one is closed.
        reference = weakref.ref(self)
        self._at_exit = lambda: _close_if_alive(reference)
        atexit.register(self._at_exit)
        self._closed = False

    # ---- the loop ----

    @contextmanager
    def step(self) -> Iterator[None]:
        """Run one training step (or an evaluation pass) inside the budget."""
        self._check_open()
        if self._inside:
            raise BadArgument("tide.step() is already active: steps cannot be nested")
        try:
            self.begin_step()
            with self.turning_refusals_into_errors(), self.hooks():
                yield
        except BaseException:
            self.abandon_step()
            raise
        self.end_step()
        self.tell_step()

    @abstractmethod
    def hooks(self) -> AbstractContextManager[None]:
        """Return the context in which Lowtide manages the tensors that autograd saves, on this thread."""

    @abstractmethod
    def turning_refusals_into_errors(self) -> AbstractContextManager[None]:
        """Return a context that raises `BudgetTooSmall` for an allocation that the budget refused inside it."""

    @abstractmethod
    def know(self, optimizer: torch.optim.Optimizer) -> None:
        """Register an optimizer: traces then show the kinds of its tensors, and its gradients may leave."""

    @abstractmethod
    def know_models(self, models: Sequence[torch.nn.Module]) -> None:
        """Register models that were created later, so that traces name their layers; does not keep them alive."""

    def time_training(self) -> None:
        """Tell from the next step on when training begins in it: `first_save_s`."""
        self._timed = True

    @property
    @abstractmethod
    def first_save_s(self) -> float | None:
        """When autograd first saved something in the running step, by `time.perf_counter` (None: not yet)."""

    @abstractmethod
    def begin_step(self) -> None:
        """Start a step without managing hooks: `step()` and the script runner do that."""

    @abstractmethod
    def end_step(self) -> None:
        """End a successful step: learn from it and plan the next."""

    @abstractmethod
    def abandon_step(self) -> None:
        """End a step that raised: nothing is learnt from it."""

    def on_step(self, callback: Callable[[StepRecord], object]) -> Callable[[], None]:
        """Call `callback` with a `StepRecord` after each successful step; return a function that removes it.

        An exception in a callback is raised where the step ends, once every callback was called. The step itself is
        over by then, and the next one may begin.
        """
        if not callable(callback):
            raise BadArgument(f"on_step takes a function of one StepRecord, and got a {type(callback).__name__}")
        registration = object()
        self._listeners[registration] = callback

        def remove() -> None:
            self._listeners.pop(registration, None)

        return remove

    def tell_step(self) -> None:
        """Notify listeners of the step that `end_step` ended, for callers of `begin_step`."""
        record = self._records[-1]
        failure: BaseException | None = None
        for listener in tuple(self._listeners.values()):
            try:
                listener(record)
            except BaseException as error:  # noqa: BLE001  # raised below: the other listeners have a right to the step
                failure = failure or error
        if failure is not None:
            raise failure

    @property
    def records(self) -> tuple[StepRecord, ...]:
        """The last successful steps, oldest first."""
        return tuple(self._records)

    def _slowdown(self) -> dict[str, object]:
        """Return, for `stats`, how the steps compare with those predicted without a budget (None: not known yet)."""
        last = next((record for record in reversed(self._records) if record.expected is not None), None)
        return {
            "predicted_unmanaged_step_s": None if last is None or last.expected is None else last.expected.unmanaged_s,
            "predicted_slowdown": None if last is None else last.predicted_slowdown,
            "slowdown": typical_slowdown(self._records),
        }

    def _check_open(self) -> None:
        if self._closed:
            raise BadArgument("this tide is closed: open a new one with lowtide.fit(...)")

    # ---- saving ----

    def save(self, path: str | os.PathLike[str], *, gradients: bool = False, **objects: Any) -> Saved:
        """Save the training run to a directory, inside the budget; `load` continues from it bit for bit.

        The state consists of the models with all buffers, the optimizers, the random generators, the step count and
        the objects passed by name: anything with a state_dict() (schedulers, a GradScaler, a stateful loader, other
        models), generators, and plain values. `gradients`: also save accumulated gradients.

        The previous state stays valid until the new one is complete. Unchanged tensors are not written again.
        """
        self._check_between_steps("saved")
        models, optimizers = self._known()
        training = Training(
            models=models, optimizers=optimizers, objects=objects, steps=self.steps, gradients=gradients
        )
        with self.turning_refusals_into_errors():
            return save_training(path, training, self._saved.setdefault(os.path.realpath(path), Versions()))

    def load(self, path: str | os.PathLike[str], **objects: Any) -> dict[str, Any]:
        """Continue from a state that `save` wrote, under any budget and policy; return its plain values by name.

        Pass the objects that were passed to `save`, under the same names (None: ignore). A checkpoint that is damaged
        or belongs to another training run raises an error before anything changes.
        """
        self._check_between_steps("loaded")
        models, optimizers = self._known()
        with self.turning_refusals_into_errors():
            steps, found = load_training(path, Training(models=models, optimizers=optimizers, objects=objects))
        self._steps_before, self._step_s = steps, []
        return found

    @property
    def steps(self) -> int:
        """The number of steps done, including those of a loaded state."""
        return self._steps_before + len(self._step_s)

    @abstractmethod
    def _known(self) -> tuple[list[torch.nn.Module], list[torch.optim.Optimizer]]:
        """Return the models and optimizers of the training."""

    def _check_between_steps(self, done: str) -> None:
        self._check_open()
        if self._inside:
            raise BadArgument(f"a training is {done} between steps: leave tide.step() first")

    # ---- answers ----

    def _repr_html_(self) -> str:
        return steps_html(self.records, title=repr(self).strip("<>"))

    @abstractmethod
    def stats(self) -> dict[str, object]:
        """Return the statistics so far: bytes, seconds and counts, ready for a logger."""

    @abstractmethod
    def trace(self, device: str | None = None) -> Trace:
        """Return the last recorded step. Raises `BadArgument` before the first step has ended."""

    @abstractmethod
    def plan(self, device: str | None = None) -> Plan | None:
        """Return the latest plan, as executed (None before the first step has ended)."""

    @abstractmethod
    def machine_of(self, device: str | None = None) -> Machine:
        """Return the machine that plans are made for, with the link to the spill."""

    @abstractmethod
    def machine_seen(self, device: str | None = None) -> Machine:
        """Return the machine with the link rates observed so far, if transfers are timed."""

    @property
    def machine(self) -> Machine:
        """The machine that plans are made for, where there is one."""
        return self.machine_of()

    # ---- the end ----

    def close(self) -> None:
        """Lift the budget and remove the spill, after bringing back the tensors that live graphs need."""
        self._close(bring_back=True)

    def _close(self, *, bring_back: bool) -> None:
        if self._closed or os.getpid() != self._pid:
            return
        self._closed = True
        atexit.unregister(self._at_exit)
        self._let_go(bring_back=bring_back)

    def _exit(self) -> None:
        """Do what has to be done when the process ends while the tide is open."""
        self._close(bring_back=False)

    @abstractmethod
    def _let_go(self, *, bring_back: bool) -> None:
        """Give up everything that is open, whatever fails meanwhile."""

    def __enter__(self) -> Self:
        self._check_open()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_exception: object) -> None:
        # After an exception its traceback holds the graph, which nobody will run backward: bringing all of it back
        # would take the time, and the memory beyond the budget, for nothing.
        self._close(bring_back=kind is None)

    def __del__(self) -> None:
        if not getattr(self, "_closed", True):
            with suppress(LowtideError):
                self.close()


def _close_if_alive(reference: weakref.ref[Tide]) -> None:
    tide = reference()
    if tide is not None:
        with suppress(LowtideError):
            tide._exit()
