"""The verifier's view of dirty pages: which decisions write, by a walk through two steps with each storage's copies."""

from __future__ import annotations

from lowtide.core.plan import Plan
from lowtide.core.trace import Trace
from lowtide.plan.verify.places import Homes

# What happens to a storage at one operator, in this order: it leaves before the operator writes it.
_LEAVES, _CHANGES = range(2)


def decisions_that_write(plan: Plan, trace: Trace) -> frozenset[int]:
    """Return the positions in swaps and then places that have to write in a step that follows others of its kind."""
    if not trace.repeats:
        return frozenset(range(len(plan.swaps)))
    writing: set[int] = set()
    homes = Homes(plan, trace)
    ways = [(swap.tier, swap.codec) for swap in plan.swaps] + [(place.tier, "identity") for place in plan.places]
    for storage, events in _lives(plan, trace).items():
        block = trace.storages[storage]
        keeps_its_copies = block.first_op < 0 and block.last_op >= len(trace.ops)
        copies: set[tuple[str, str]] = set()
        for step in range(2):
            if not keeps_its_copies:
                copies.clear()
            for op, what, position in events:
                if what == _CHANGES:
                    home = homes.at(storage, op)
                    copies = set() if home is None else {(home.tier, "identity")}
                    continue
                if step == 1 and ways[position] not in copies:
                    writing.add(position)
                copies.add(ways[position])
    born = {
        position
        for position, place in enumerate(plan.places, start=len(plan.swaps))
        if homes.is_born_there(place) or homes.for_good(place)
    }
    return frozenset(writing - born)


def _lives(plan: Plan, trace: Trace) -> dict[int, list[tuple[int, int, int]]]:
    """Return what happens to each swapped or placed storage in a step: when, what, and by which decision."""
    lives: dict[int, list[tuple[int, int, int]]] = {}
    gaps = (*(swap.gap for swap in plan.swaps), *(place.gap for place in plan.places))
    for position, gap in enumerate(gaps):
        lives.setdefault(gap.storage, []).append((gap.after_op, _LEAVES, position))
    changes = [(one.gap.before_op, one.gap.storage) for one in plan.recomputes]
    changes += [(index, storage) for storage, ops in enumerate(trace.changes()) for index in ops]
    for op, storage in changes:
        if storage in lives:
            lives[storage].append((op, _CHANGES, -1))
    return {storage: sorted(events) for storage, events in lives.items()}
