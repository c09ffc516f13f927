"""Errors of Lowtide: one base class, and each error is also the builtin it specialises.

Every message says what failed, with numbers, and what to change.
"""

from __future__ import annotations

from lowtide.core.units import format_bytes


class LowtideError(Exception):
    """Base class of all errors that Lowtide raises."""


class BadArgument(LowtideError, ValueError):
    """The user passed an invalid argument; the message says what to pass instead."""


class BudgetTooSmall(LowtideError, MemoryError):
    """The budget is too small for one operator, even with every other tensor moved away.

    `device`: whose budget. `place`: where the operator is, such as "in the optimizer's step". `step`: more than the
    operator, the step that it is in needs the bytes.
    """

    def __init__(
        self,
        *,
        budget_bytes: int,
        needed_bytes: int,
        op: str,
        detail: str = "",
        device: str = "",
        place: str = "",
        step: bool = False,
    ) -> None:
        self.budget_bytes = budget_bytes
        self.needed_bytes = needed_bytes
        self.op = op
        self.detail = detail
        self.device = device
        self.place = place
        self.step = step
        remedy = "choose an optimizer with less state" if place.endswith("'s step") else "shrink the batch"
        budget = format_bytes(budget_bytes)
        if budget == format_bytes(needed_bytes):  # "2.08 GiB cannot hold 2.08 GiB" helps nobody
            budget = f"{budget} ({budget_bytes} bytes)"
        whose, where = f" of {device}" if device else "", f" {place}" if place else ""
        which = "in a step that" if step else "which"
        what = op if " " in op else f"'{op}'"  # "the first step" is not a name
        text = (
            f"budget {budget}{whose} cannot run {what}{where}, "
            f"{which} needs at least {format_bytes(needed_bytes)} ({needed_bytes} bytes) at once: "
            f"raise the budget or {remedy}"
        )
        super().__init__(f"{text} ({detail})" if detail else text)

    def __reduce__(self) -> tuple[object, ...]:
        known = (self.budget_bytes, self.needed_bytes, self.op, self.detail, self.device, self.place, self.step)
        return (_rebuild_budget_too_small, known)


def _rebuild_budget_too_small(
    budget_bytes: int, needed_bytes: int, op: str, detail: str, device: str, place: str, step: bool
) -> BudgetTooSmall:
    return BudgetTooSmall(
        budget_bytes=budget_bytes,
        needed_bytes=needed_bytes,
        op=op,
        detail=detail,
        device=device,
        place=place,
        step=step,
    )


def static_too_large(*, budget_bytes: int, static_bytes: int, device: str = "") -> BudgetTooSmall:
    """Return the error for a budget that is passed before the first step."""
    return BudgetTooSmall(
        budget_bytes=budget_bytes,
        needed_bytes=static_bytes,
        op="the first step",
        detail=f"the tensors {'there' if device else 'that exist'} take that much already",
        device=device,
    )


class SpillError(LowtideError, OSError):
    """A tier could not take or return bytes."""


class RecomputeError(LowtideError, RuntimeError):
    """A tensor that was given up to be computed again could not be."""


class SpillFull(SpillError):
    """A tier has no room left for another extent."""


class SpillCorrupted(SpillError):
    """Bytes came back from a tier with a different checksum."""


class CheckpointError(LowtideError, OSError):
    """A checkpoint could not be written or read; the previous one is unchanged."""


class CheckpointCorrupted(CheckpointError):
    """A file of a checkpoint is truncated or damaged; nothing was loaded."""


class CheckpointMismatch(LowtideError, ValueError):
    """A checkpoint belongs to a different model, optimizer or program; nothing was loaded."""


class TraceError(LowtideError, ValueError):
    """A trace, machine or plan file is damaged or of a version this Lowtide does not read."""


class PlanError(LowtideError, ValueError):
    """A plan breaks a rule that the verifier checks."""


class NativeUnavailable(LowtideError, RuntimeError):
    """The native part could not be built or loaded; the message carries the reason."""
