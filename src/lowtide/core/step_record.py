"""One finished step, as everything that shows or logs a training sees it."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from statistics import median
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable


@dataclass(frozen=True, slots=True, kw_only=True)
class Expected:
    """The seconds a step should take: without a budget, and under its plan (None: the policy predicts nothing).

    `before_training_s` is the part of both before the first operator that autograd follows: a step of `lowtide run`
    begins where the last one ended, so evaluating and saving are in it.
    """

    unmanaged_s: float
    planned_s: float | None = None
    before_training_s: float = 0.0

    @property
    def slowdown(self) -> float | None:
        """The step under its plan over the one without a budget (None: there is no such prediction)."""
        if self.planned_s is None or self.unmanaged_s <= 0:
            return None
        return self.planned_s / self.unmanaged_s

    def plus(self, other: Expected) -> Expected:
        """Return the times of both together."""
        known = [one.planned_s for one in (self, other) if one.planned_s is not None]
        return Expected(
            unmanaged_s=self.unmanaged_s + other.unmanaged_s,
            planned_s=sum(known) if len(known) == 2 else None,
            before_training_s=self.before_training_s + other.before_training_s,
        )

    @property
    def training(self) -> Expected:
        """The same times of the rest of the step alone."""
        return Expected(
            unmanaged_s=self.unmanaged_s - self.before_training_s,
            planned_s=None if self.planned_s is None else self.planned_s - self.before_training_s,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRecord:
    """The figures of one step, in bytes and seconds.

    `step` counts from 1. `step_s` is the whole step, from the end of the last one under `lowtide run`. `stall_s` is the
    part of it spent waiting for transfers or for room. `peak_bytes` is the highest number of live tensor bytes in it.
    `planned`: it followed a plan to its end; a step that did not has no `expected` times.
    """

    step: int
    step_s: float
    stall_s: float
    recompute_s: float
    budget_bytes: int
    peak_bytes: int
    moved_out_bytes: int
    moved_in_bytes: int
    planned: bool = False
    expected: Expected | None = None

    @property
    def slowdown(self) -> float | None:
        """The measured step over the predicted one without a budget (None: there is no prediction)."""
        if self.expected is None or self.expected.unmanaged_s <= 0:
            return None
        return self.step_s / self.expected.unmanaged_s

    @property
    def predicted_slowdown(self) -> float | None:
        """The step that the plan predicts over the one without a budget (None: there is no prediction)."""
        return None if self.expected is None else self.expected.slowdown

    def figures(self) -> dict[str, float]:
        """Return what a logger draws over the steps, by name; a figure that is not known is left out."""
        known = {
            name: float(value)
            for name, value in asdict(self).items()
            if isinstance(value, int | float) and name not in ("step", "planned")
        }
        if self.expected is not None:
            known["predicted_unmanaged_s"] = self.expected.unmanaged_s
        for name in ("slowdown", "predicted_slowdown"):
            value = getattr(self, name)
            if value is not None:
                known[name] = value
        return known

    def as_json(self) -> dict[str, object]:
        """Return the record as one flat JSON object; unlike `figures`, every key is always there."""
        flat = {name: value for name, value in asdict(self).items() if name != "expected"}
        return flat | {
            "predicted_unmanaged_s": None if self.expected is None else self.expected.unmanaged_s,
            "predicted_s": None if self.expected is None else self.expected.planned_s,
            "slowdown": self.slowdown,
            "predicted_slowdown": self.predicted_slowdown,
        }


def typical_slowdown(records: Iterable[StepRecord]) -> float | None:
    """Return the median slowdown (None: no step has one): a step in which a program saved its model is an outlier."""
    known = [record.slowdown for record in records if record.slowdown is not None]
    return median(known) if known else None
