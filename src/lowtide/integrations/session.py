"""A tide for trainers that own the loop: its steps end where an optimizer's step does."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import TypedDict, Unpack

import torch

from lowtide.core.step_record import StepRecord
from lowtide.errors import BadArgument
from lowtide.execute.tide.fit import fit
from lowtide.execute.tide.script import stepping
from lowtide.execute.tide.tide import Tide
from lowtide.memory.budget import BudgetLike
from lowtide.plan.policy import Policy
from lowtide.tiers.open import Spill
from lowtide.tiers.slow import Slow

Models = torch.nn.Module | Iterable[torch.nn.Module] | None
Optimizers = torch.optim.Optimizer | Iterable[torch.optim.Optimizer] | None
Listener = Callable[[StepRecord], object]


class TideOptions(TypedDict, total=False):
    """The keywords of `lowtide.fit`, of which only `budget` is required."""

    budget: BudgetLike
    spill: Spill
    slow: Slow
    policy: str | Policy
    verify: bool
    recompute: bool | None


class Session:
    """A tide that a framework's events open and close; closed, it keeps its last statistics."""

    def __init__(self, *, on_step: Listener | Iterable[Listener] | None = None, **options: Unpack[TideOptions]) -> None:
        if "budget" not in options:
            raise BadArgument("a budget is missing: pass one, such as budget='2GiB' or budget='auto'")
        self._options = options
        self._listeners: list[Listener] = [] if on_step is None else [on_step] if callable(on_step) else list(on_step)
        self._stack: ExitStack | None = None
        self._tide: Tide | None = None
        self._stats: dict[str, object] = {}

    @property
    def tide(self) -> Tide:
        """The tide. Raises `BadArgument` while there is none."""
        if self._tide is None:
            raise BadArgument("there is no tide yet: it is opened when the training begins")
        return self._tide

    @property
    def is_open(self) -> bool:
        """Whether a tide is open."""
        return self._stack is not None

    def stats(self) -> dict[str, object]:
        """Return `Tide.stats()`, of the last tide if none is open (empty: there was none)."""
        return self._tide.stats() if self._tide is not None and self._stack is not None else dict(self._stats)

    def records(self) -> tuple[StepRecord, ...]:
        """Return the last steps of the tide (none: there is none)."""
        return () if self._tide is None else self._tide.records

    def open(self, models: Models = None, optimizers: Optimizers = None) -> Tide:
        """Begin; a session that a failed training left open is closed first."""
        self.close()
        with ExitStack() as stack:
            self._tide = tide = stack.enter_context(fit(models, optimizers, **self._options))
            for listener in self._listeners:
                tide.on_step(listener)
            stack.enter_context(stepping(tide))
            self._stack = stack.pop_all()
        return tide

    def close(self) -> None:
        """End: lift the budget, and bring everything back."""
        if self._stack is not None and self._tide is not None:
            self._stats = self._tide.stats()
            stack, self._stack = self._stack, None
            stack.close()

    @contextmanager
    def opened(self, models: Models = None, optimizers: Optimizers = None) -> Iterator[Tide]:
        """Be open for a while; an allocation that the budget refuses raises `BudgetTooSmall`."""
        tide = self.open(models, optimizers)
        try:
            with tide.turning_refusals_into_errors():
                yield tide
        finally:
            self.close()
