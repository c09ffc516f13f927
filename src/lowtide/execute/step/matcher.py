"""Which of the known plans the running step follows.

A step follows a plan while its events match the plan's; at the first that does not, another plan with the same
beginning takes over, and where there is none the step is reactive (R8).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from lowtide.residency.schedule import StepPlan


class Turn(NamedTuple):
    """What one event of the step brings: another plan to follow, keys due back, to leave or forget, to wait for."""

    changed: bool = False
    due: tuple[int, ...] = ()
    leave: tuple[int, ...] = ()
    forget: tuple[int, ...] = ()
    awaited: tuple[int, ...] = ()


class Matcher:
    """Follows a step's events through the known plans."""

    def __init__(self) -> None:
        self._plans: list[StepPlan] = []
        self._followed: StepPlan | None = None
        self.signature: list[int] = []

    def add(self, plan: StepPlan, *, most: int = 64) -> None:
        """Know one more plan; it replaces one of the same signature, and the least recently followed beyond `most`."""
        self._plans = [plan, *(known for known in self._plans if known.signature != plan.signature)][:most]

    def begin(self) -> StepPlan | None:
        """Start a step; return the plan to follow: the one followed last, until events say otherwise."""
        self.signature = []
        self._followed = self._plans[0] if self._plans else None
        return self._followed

    @property
    def plans(self) -> Sequence[StepPlan]:
        """All known plans, the one that was followed last first."""
        return self._plans

    @property
    def followed(self) -> StepPlan | None:
        """The plan that the step follows, if any."""
        return self._followed

    def advance(self, signature: int) -> Turn:
        """Take in the step's next event; return what it brings."""
        index = len(self.signature)
        self.signature.append(signature)
        plan = self._followed
        if plan is None:
            return Turn()
        if index < len(plan.signature) and plan.signature[index] == signature:
            return Turn(
                due=plan.due.get(index, ()),
                leave=plan.leave.get(index, ()),
                forget=plan.forget.get(index, ()),
                awaited=plan.awaited.get(index, ()),
            )
        self._followed = self._other(index + 1)
        if self._followed is None:
            return Turn(changed=True)
        due = tuple(key for event in range(index + 1) for key in self._followed.due.get(event, ()))
        return Turn(changed=True, due=due, leave=self._followed.leave.get(index, ()))

    def finish(self) -> StepPlan | None:
        """End a step; return the plan it followed to its end, which is the first to be tried in the next one."""
        plan = self._followed
        if plan is None or len(plan.signature) != len(self.signature):
            exact = [known for known in self._plans if list(known.signature) == self.signature]
            plan = exact[0] if exact else None
        if plan is not None:
            self._plans.remove(plan)
            self._plans.insert(0, plan)
        return plan

    def _other(self, length: int) -> StepPlan | None:
        seen = tuple(self.signature[:length])
        return next((plan for plan in self._plans if plan.signature[:length] == seen), None)
