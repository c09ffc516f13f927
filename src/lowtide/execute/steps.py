"""Plans in the terms of a step's events, and which of them the running step follows.

An *event* is a save or a use of a saved tensor, numbered from the step's start. Its *signature* is a number made of
what it looks like. A step follows a plan while its events match the plan's; at the first that does not, another plan
with the same beginning takes over, and where there is none the step is reactive (R8).
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from lowtide.capture.builder import Recorded
from lowtide.core.plan import Plan


@dataclass(frozen=True, slots=True, kw_only=True)
class StepPlan:
    """Which keys leave, which are due back or gone again at which event, when each is used.

    `signature` is what each event of the step looked like; a step follows the plan only while its own events match.
    """

    signature: tuple[int, ...]
    swapped: frozenset[int] = frozenset()
    due: Mapping[int, tuple[int, ...]] = field(default_factory=dict)
    leave: Mapping[int, tuple[int, ...]] = field(default_factory=dict)
    uses: Mapping[int, tuple[int, ...]] = field(default_factory=dict)


def compile_plan(plan: Plan, recorded: Recorded, signature: Sequence[int]) -> StepPlan:
    """Return a plan over operators as one over the events of the step that was recorded."""
    trace, positions = recorded.trace, recorded.positions
    key_of = {}
    for key, save in enumerate(trace.saves):
        for use in (*save.uses, save.released_op):
            key_of[save.storage, use] = key
    swapped: set[int] = set()
    due: dict[int, list[int]] = {}
    leave: dict[int, list[int]] = {}
    for swap in plan.swaps:
        gap = swap.gap
        key = key_of[gap.storage, gap.before_op]
        save = trace.saves[key]
        if gap.before_op == (save.uses[0] if save.uses else save.released_op):
            swapped.add(key)
        else:
            leave.setdefault(bisect_left(positions, gap.after_op), []).append(key)
        if swap.fetch_op < gap.before_op:
            due.setdefault(bisect_right(positions, swap.fetch_op) - 1, []).append(key)
    return StepPlan(
        signature=tuple(signature),
        swapped=frozenset(swapped),
        due={event: tuple(keys) for event, keys in due.items()},
        leave={event: tuple(keys) for event, keys in leave.items()},
        uses=dict(enumerate(recorded.use_events)),
    )


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
    def followed(self) -> StepPlan | None:
        """The plan that the step follows, if any."""
        return self._followed

    def advance(self, signature: int) -> tuple[bool, tuple[int, ...], tuple[int, ...]]:
        """Take in the step's next event; return if the plan changed, the keys due back and those to leave again."""
        index = len(self.signature)
        self.signature.append(signature)
        plan = self._followed
        if plan is None:
            return False, (), ()
        if index < len(plan.signature) and plan.signature[index] == signature:
            return False, plan.due.get(index, ()), plan.leave.get(index, ())
        self._followed = self._other(index + 1)
        if self._followed is None:
            return True, (), ()
        due = tuple(key for event in range(index + 1) for key in self._followed.due.get(event, ()))
        return True, due, self._followed.leave.get(index, ())

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
