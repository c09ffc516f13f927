"""Plans in the terms of a step's events.

An *event* is a save or a use of a saved tensor, numbered from the step's start. Its *signature* is a number made of
what it looks like.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from lowtide.capture.builder import Recorded
from lowtide.core.plan import Plan, Swap
from lowtide.core.trace import Gap, Trace
from lowtide.errors import PlanError
from lowtide.plan.costs.curve import Curve
from lowtide.plan.costs.sweep import ends_unused


@dataclass(frozen=True, slots=True, kw_only=True)
class Ticks:
    """What happens to what the program holds, by ticks of the step, whose `looks` have to be those of the step's own.

    `leave`, `due` and `awaited` are as those of a `StepPlan`.
    """

    looks: tuple[int, ...]
    leave: Mapping[int, tuple[int, ...]]
    due: Mapping[int, tuple[int, ...]]
    awaited: Mapping[int, tuple[int, ...]]

    def stops(self) -> list[int]:
        """Return the ticks at which something happens, ascending."""
        return sorted({*self.leave, *self.due, *self.awaited})


@dataclass(frozen=True, slots=True, kw_only=True)
class StepPlan:
    """Which keys leave, which are due back or gone again at which event, when each is used.

    `discarded` and `forget` are like `swapped` and `leave`, for keys that are given up without a copy and made again by
    running `calls` (numbers of the step's calls); `together`: with which others each is made; `reruns`: by which calls.

    `awaited`: the keys whose transfer a synchronous plan waits for at an event, whether or not its bytes are needed.
    `stage`: the keys that are due so soon after an event that a tier further down should bring them closer.
    `needs[i]`: how much memory the step takes before its i-th event, beyond what is live (empty: not known).
    `ticks`: what happens to what the program holds (None: the plan leaves it alone).

    `signature` is what each event of the step looked like; a step follows the plan only while its own events match.
    """

    signature: tuple[int, ...]
    swapped: frozenset[int] = frozenset()
    due: Mapping[int, tuple[int, ...]] = field(default_factory=dict)
    leave: Mapping[int, tuple[int, ...]] = field(default_factory=dict)
    uses: Mapping[int, tuple[int, ...]] = field(default_factory=dict)
    discarded: frozenset[int] = frozenset()
    forget: Mapping[int, tuple[int, ...]] = field(default_factory=dict)
    calls: frozenset[int] = frozenset()
    together: Mapping[int, tuple[int, ...]] = field(default_factory=dict)
    reruns: Mapping[int, frozenset[int]] = field(default_factory=dict)
    awaited: Mapping[int, tuple[int, ...]] = field(default_factory=dict)
    stage: Mapping[int, tuple[int, ...]] = field(default_factory=dict)
    needs: tuple[int, ...] = ()
    ticks: Ticks | None = None

    def need_bytes(self, event: int) -> int | None:
        """Return what the step takes after the event (-1: before the first), if that is known."""
        return self.needs[event + 1] if event + 1 < len(self.needs) else None


# How many events before it is due a record is brought closer, where several tiers lie below one another.
_STAGE_EVENTS = 24


class _Ends:
    """Which key a gap of the trace belongs to: the one whose use or release ends it."""

    def __init__(self, trace: Trace, positions: Sequence[int]) -> None:
        self._trace = trace
        self._positions = positions
        self._known: dict[int, list[tuple[int, int]]] = {}
        self._free: dict[int, int] = {}
        for key, save in enumerate(trace.saves):
            free_op = len(trace.ops) if save.free_op is None else save.free_op
            self._free[save.storage] = max(self._free.get(save.storage, 0), free_op)
            self._known.setdefault(save.storage, []).extend((use, key) for use in (*save.uses, save.released_op))
        for known in self._known.values():
            known.sort()

    def of(self, gap: Gap) -> tuple[int, int, int | None]:
        """Return the key, the operator that ends the gap, and the event it leaves at (None: once it can).

        A decision may begin later than the gap it lies in, and end earlier.
        """
        known = self._known[gap.storage]
        end_op, key = known[bisect_left(known, (gap.before_op, -1))]
        save = self._trace.saves[key]
        first = end_op == (save.uses[0] if save.uses else save.released_op)
        event = bisect_left(self._positions, gap.after_op)
        in_time = event < len(self._positions) and self._positions[event] < end_op
        at_once = first and (gap.after_op <= self._free[gap.storage] or not in_time)
        return key, end_op, None if at_once else event


@dataclass(slots=True)
class _Going:
    """Keys that go: at once, or at an event."""

    keys: set[int] = field(default_factory=set)
    events: dict[int, list[int]] = field(default_factory=dict)

    def add(self, key: int, event: int | None) -> None:
        if event is None:
            self.keys.add(key)
        else:
            self.events.setdefault(event, []).append(key)


class Requests:
    """At which event each read is asked for: the first once its operator may begin, so that memory is there.

    Where the program has no event between that operator and the use, it is the last event before, if the plan leaves
    room for that from there on; else operators would throw out again what came too early, and the read is asked for
    with the first of those that are used at the same time. `bytes_at` are the bytes that the plan has in memory at
    every operator (None: there is room), `event_of` are the events; what is asked for at its use is not among them.
    """

    def __init__(self, plan: Plan, recorded: Recorded, bytes_at: Curve | None = None) -> None:
        self.event_of: dict[Swap, int] = {}
        self._recorded = recorded
        self._budget_bytes = plan.budget_bytes
        self._bytes_at = bytes_at
        ends = _Ends(recorded.trace, recorded.positions)
        for swap in sorted(_of_saved(plan, recorded), key=_by_request):
            key, end_op, _ = ends.of(swap.gap)
            if swap.fetch_op < end_op:
                self._place(swap, key, end_op)

    def as_plan(self, plan: Plan) -> Plan:
        """Return the plan with every read at the operator before which it is asked for: what is executed."""
        return replace(plan, swaps=tuple(replace(swap, fetch_op=self._fetch_op(swap)) for swap in plan.swaps))

    def _fetch_op(self, swap: Swap) -> int:
        if swap.gap.storage in self._recorded.held:
            return swap.fetch_op
        event = self.event_of.get(swap)
        return _due_op(swap) if event is None else min(self._recorded.positions[event], _due_op(swap))

    def _place(self, swap: Swap, key: int, end_op: int) -> None:
        """Find the event for a read whose storage, or key, is used at `end_op`."""
        positions = self._recorded.positions
        event = bisect_left(positions, swap.fetch_op)
        if event == len(positions) or positions[event] >= end_op:
            before = bisect_right(positions, swap.fetch_op) - 1
            if self._fits(swap, positions[before]):
                event = before
            elif event == len(positions) or event in self._recorded.use_events[key]:
                return
        self.event_of[swap] = event

    def _fits(self, swap: Swap, early_op: int) -> bool:
        """Tell whether a read may begin earlier than planned, and count with it if so."""
        if self._bytes_at is None or early_op >= swap.fetch_op:
            return True
        nbytes = self._recorded.trace.storages[swap.gap.storage].nbytes
        limit_bytes = self._budget_bytes - nbytes
        if self._bytes_at.earliest(early_op, swap.fetch_op, limit_bytes=limit_bytes) > early_op:
            return False
        self._bytes_at.add(early_op, swap.fetch_op, nbytes)
        return True


def compile_plan(
    plan: Plan, recorded: Recorded, signature: Sequence[int], *, requests: Requests | None = None
) -> StepPlan:
    """Return a plan over operators as one over the events of the step that was recorded.

    `requests`: when reads are asked for (None: as if there were always room). Barriers fall on the first event once the
    write or read they wait for can have been asked for. What would be made by operators that were not seen as calls is
    swapped instead.
    """
    positions = recorded.positions
    ends = _Ends(recorded.trace, positions)
    swapped, discarded = _Going(), _Going()
    event_of = (requests or Requests(plan, recorded)).event_of
    due: dict[int, list[int]] = {}
    awaited: dict[int, list[int]] = {}
    swaps = _of_saved(plan, recorded)
    for swap in sorted(swaps, key=lambda swap: (swap.gap.after_op, swap.gap)):
        key, _, event = ends.of(swap.gap)
        swapped.add(key, event)
    for swap in sorted(swaps, key=_by_request):
        key, _, _ = ends.of(swap.gap)
        if swap in event_of:
            due.setdefault(event_of[swap], []).append(key)
        for barrier_op in (swap.landed_op, swap.arrived_op):
            if barrier_op is not None and barrier_op < swap.gap.before_op:
                awaited.setdefault(bisect_left(positions, barrier_op), []).append(key)
    together: dict[int, list[int]] = {}
    calls: dict[int, set[int]] = {}
    for one in sorted(plan.recomputes, key=lambda one: (one.gap.after_op, one.gap)):
        key, _, event = ends.of(one.gap)
        if any(op not in recorded.calls for op in one.ops):
            swapped.add(key, event)
            continue
        discarded.add(key, event)
        calls.setdefault(one.gap.before_op, set()).update(number for op in one.ops for number in recorded.calls[op])
        together.setdefault(one.gap.before_op, []).append(key)
    return StepPlan(
        signature=tuple(signature),
        swapped=frozenset(swapped.keys),
        discarded=frozenset(discarded.keys),
        due=_frozen(due),
        leave=_frozen(swapped.events),
        forget=_frozen(discarded.events),
        calls=frozenset().union(*calls.values()),
        together={key: tuple(keys) for keys in together.values() for key in keys},
        reruns={key: frozenset(calls[op]) for op, keys in together.items() for key in keys},
        uses=dict(enumerate(recorded.use_events)) | _events_of_held(recorded),
        awaited=_frozen(awaited),
        stage=_staged(swapped.keys, due, recorded.use_events),
        needs=recorded.needs,
        ticks=_ticks_of(plan, recorded),
    )


def _of_saved(plan: Plan, recorded: Recorded) -> list[Swap]:
    return [swap for swap in plan.swaps if swap.gap.storage not in recorded.held]


def _ticks_of(plan: Plan, recorded: Recorded) -> Ticks | None:
    """Return what a plan does with what the program holds, each at the first tick once its operator may begin.

    What is to happen after the step's last tick does so at the first of the next one.
    """
    swaps = [swap for swap in plan.swaps if swap.gap.storage in recorded.held]
    if not swaps:
        return None
    count, end = len(recorded.trace.ops), len(recorded.looks)
    if not end or len(recorded.ticks) != count:
        raise PlanError(f"the plan moves {len(swaps)} storages that the program holds, in a step without ticks")

    unused = ends_unused(recorded.trace)

    def tick(op: int) -> int:
        return recorded.ticks[op % count] % end

    leave: dict[int, list[int]] = {}
    due: dict[int, list[int]] = {}
    awaited: dict[int, list[int]] = {}
    for swap in sorted(swaps, key=lambda swap: (swap.gap.after_op, swap.gap)):
        leave.setdefault(tick(swap.gap.after_op), []).append(recorded.held[swap.gap.storage])
    for swap in sorted(swaps, key=_by_request):
        key = recorded.held[swap.gap.storage]
        if swap.fetch_op < swap.gap.before_op and unused.get(swap.gap.storage) != swap.gap.before_op:
            due.setdefault(tick(swap.fetch_op), []).append(key)
        for barrier_op in (swap.landed_op, swap.arrived_op):
            if barrier_op is not None and barrier_op < swap.gap.before_op:
                awaited.setdefault(tick(barrier_op), []).append(key)
    return Ticks(looks=recorded.looks, leave=_frozen(leave), due=_frozen(due), awaited=_frozen(awaited))


def _events_of_held(recorded: Recorded) -> dict[int, tuple[int, ...]]:
    """Return at which events what the program holds is touched, as near as events tell."""
    touches = recorded.trace.touches() if recorded.held else ()
    return {
        key: tuple(bisect_left(recorded.positions, op) for op in touches[storage])
        for storage, key in recorded.held.items()
    }


def _by_request(swap: Swap) -> tuple[int, int, Gap]:
    """Return a swap's place among requests: by operator; at one operator, or one event, what is due first is first."""
    return swap.fetch_op, _due_op(swap), swap.gap


def _due_op(swap: Swap) -> int:
    return swap.gap.before_op if swap.arrived_op is None else swap.arrived_op


def _frozen(events: Mapping[int, Sequence[int]]) -> dict[int, tuple[int, ...]]:
    return {event: tuple(keys) for event, keys in events.items()}


def _staged(
    swapped: set[int], due: Mapping[int, Sequence[int]], use_events: Sequence[Sequence[int]]
) -> dict[int, tuple[int, ...]]:
    """Return which keys to bring closer at which event: some time before they are due, or before an unplanned use."""
    when = {key: uses[0] for key, uses in enumerate(use_events) if key in swapped and uses}
    when |= {key: event for event, keys in due.items() for key in keys}
    staged: dict[int, list[int]] = {}
    for key, event in sorted(when.items(), key=lambda item: item[1]):
        staged.setdefault(max(0, event - _STAGE_EVENTS), []).append(key)
    return _frozen(staged)
