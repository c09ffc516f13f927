"""A plan as a step's operators execute it: what leaves and what comes back when each of them begins.

This is what the native engine follows (`memory/native/schedule.h`): operators by name, in order; storages from before
the step by their block's serial number, those the step makes by the operator after whose begin they are allocated.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from enum import IntEnum

from lowtide.capture.builder import Recorded
from lowtide.core.plan import Place, Plan
from lowtide.core.trace import Trace
from lowtide.errors import PlanError
from lowtide.plan.costs.sweep import ends_unused


class ActionKind(IntEnum):
    """What happens to a storage; the same numbers as in schedule.h.

    PLACE: it migrates to slow memory, where operators touch it in place. LANDED: the operator waits for that. RETURN:
    it is back in fast memory before the operator begins.
    """

    LEAVE = 0
    FETCH = 1
    DISCARD = 2
    REMAKE = 3
    PLACE = 4
    LANDED = 5
    RETURN = 6


# The order of actions at one operator: free memory before taking it.
_TURNS = {
    ActionKind.LEAVE: 0,
    ActionKind.PLACE: 0,
    ActionKind.DISCARD: 1,
    ActionKind.LANDED: 2,
    ActionKind.FETCH: 3,
    ActionKind.RETURN: 4,
    ActionKind.REMAKE: 5,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Action:
    """What the begin of operator `op` sets off for a storage of the schedule; `remake`: by which of its lists.

    `codec`: what it passes through on its way to `tier`, if it leaves.
    """

    op: int
    kind: ActionKind
    storage: int
    tier: str
    remake: int = -1
    codec: str = "identity"


@dataclass(frozen=True, slots=True, kw_only=True)
class ScheduledStorage:
    """A storage, how the next step recognises it, and where it goes if memory runs out.

    `index` is its number in the trace, `serial` the number of a block from before the step; `birth` (op, k) the k-th
    large allocation after operator `op` has begun. `leaves_again`: it is worth knowing whether it changes until then.
    `begins_in`: the slow memory that it is allocated in, or is in when the step begins.
    """

    index: int
    serial: int | None
    birth: tuple[int, int] | None
    nbytes: int
    uses: tuple[int, ...]
    tier: str
    leaves_again: bool
    begins_in: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RangeSchedule:
    """One step: the names of its operators, its storages, and what to do when.

    `remakes` are the operators, ascending, that make again what an action discards.
    """

    names: tuple[str, ...]
    storages: tuple[ScheduledStorage, ...]
    actions: tuple[Action, ...]
    remakes: tuple[tuple[int, ...], ...] = ()


def compile_ranges(plan: Plan, recorded: Recorded, *, tier: str) -> RangeSchedule:
    """Return the schedule of a plan made from a recorded step; `tier`: where storages go that the plan keeps."""
    trace = recorded.trace
    end = len(trace.ops)
    touches = trace.touches()
    unused = ends_unused(trace)
    # What cannot be discarded after all is swapped instead.
    gaps = (*(swap.gap for swap in plan.swaps), *(one.gap for one in plan.recomputes))
    leaves = Counter(gap.storage for gap in (*gaps, *(place.gap for place in plan.places)))
    tier_of = {swap.gap.storage: swap.tier for swap in plan.swaps}
    begins_in = {place.storage: place.tier for place in plan.places if _begins_there(place, trace)}
    number: dict[int, int] = {}
    storages: list[ScheduledStorage] = []
    for index, block in enumerate(trace.storages):
        if block.nbytes < trace.least_bytes or not _recognised(trace, recorded, index):
            continue
        number[index] = len(storages)
        lives_on = trace.lives_on(index)
        storages.append(
            ScheduledStorage(
                index=index,
                serial=recorded.serials[index] if lives_on else None,
                birth=None if lives_on else recorded.births[index],
                nbytes=block.nbytes,
                uses=touches[index],
                tier=tier_of.get(index, tier),
                leaves_again=lives_on or leaves[index] > 1,
                begins_in=begins_in.get(index),
            )
        )
    actions = []
    for swap in plan.swaps:
        if swap.gap.storage not in number:
            continue  # from the step before, and freed in this one: the next step has another block in its place
        storage = number[swap.gap.storage]
        actions.append(
            Action(op=swap.gap.after_op % end, kind=ActionKind.LEAVE, storage=storage, tier=swap.tier, codec=swap.codec)
        )
        if unused.get(swap.gap.storage) == swap.gap.before_op:
            continue  # it is freed where it is
        # What the step made is another block in the next, where it has no name: it comes back when it is touched.
        if swap.fetch_op < (swap.gap.before_op if trace.lives_on(swap.gap.storage) else min(swap.gap.before_op, end)):
            actions.append(Action(op=swap.fetch_op % end, kind=ActionKind.FETCH, storage=storage, tier=swap.tier))
    remakes: list[tuple[int, ...]] = []
    for one in plan.recomputes:
        if one.gap.storage not in number:
            continue
        storage = number[one.gap.storage]
        away = tier_of.get(one.gap.storage, tier)
        actions.append(
            Action(op=one.gap.after_op, kind=ActionKind.DISCARD, storage=storage, tier=away, remake=len(remakes))
        )
        remakes.append(one.ops)
        if one.gap.before_op < end and unused.get(one.gap.storage) != one.gap.before_op:
            actions.append(Action(op=one.gap.before_op, kind=ActionKind.REMAKE, storage=storage, tier=away))
    actions += [
        action
        for place in plan.places
        if place.storage in number
        for action in _placed(place, number[place.storage], trace)
    ]
    # What leaves at an operator goes before what is fetched there; what is needed first is fetched first.
    actions.sort(
        key=lambda action: (action.op, _TURNS[action.kind], _next_use(storages[action.storage], action.op, end))
    )
    return RangeSchedule(
        names=tuple(op.name for op in trace.ops),
        storages=tuple(storages),
        actions=tuple(actions),
        remakes=tuple(remakes),
    )


def _is_born_there(place: Place, trace: Trace) -> bool:
    block = trace.storages[place.storage]
    return not trace.lives_on(place.storage) and block.first_op >= 0 and place.from_op == block.first_op


def _begins_there(place: Place, trace: Trace) -> bool:
    covers_start = place.from_op == 0 or place.until_op > len(trace.ops)
    return covers_start if trace.lives_on(place.storage) else _is_born_there(place, trace)


def _placed(place: Place, storage: int, trace: Trace) -> list[Action]:
    """Return what a place sets off. What is born there needs no migration, and what dies there none back."""
    if place.nbytes is not None:
        raise PlanError(
            f"the plan has {place.nbytes} bytes of storage {place.storage} in slow memory, a part of its "
            f"{trace.storages[place.storage].nbytes}: for real pages move whole, so choose another policy"
        )
    end, forever = len(trace.ops), trace.lives_on(place.storage)
    life = trace.lives()[place.storage]

    def action(op: int, kind: ActionKind) -> Action:
        return Action(op=op % end, kind=kind, storage=storage, tier=place.tier)

    found = []
    # What the step made is another block in the next, where it has no name: it comes back when it is touched there.
    nameless = not forever and place.until_op > end
    touched = any(place.from_op <= op < place.until_op for op in life.touches)
    returns = place.until_op < life.end_op or (forever and place.until_op - place.from_op < end)
    if not _is_born_there(place, trace):
        found.append(action(place.from_op, ActionKind.LEAVE if nameless and not touched else ActionKind.PLACE))
        if place.landed_op is not None:
            found.append(action(place.landed_op, ActionKind.LANDED))
    if returns and not nameless and (forever or place.until_op < end):
        if place.asked_op < place.until_op:
            found.append(action(place.asked_op, ActionKind.FETCH))
        found.append(action(place.until_op, ActionKind.RETURN))
    return found


def _recognised(trace: Trace, recorded: Recorded, storage: int) -> bool:
    return trace.lives_on(storage) or recorded.births[storage] is not None


def _next_use(storage: ScheduledStorage, op: int, end: int) -> int:
    return next((use for use in storage.uses if use >= op), storage.uses[0] + end if storage.uses else 2 * end)
