"""The verifier's view of dirty pages: which swaps write, by walking through two steps with each storage's copies."""

from __future__ import annotations

from lowtide.core.plan import Plan
from lowtide.core.trace import Reach, Trace

# What happens to a storage at one operator, in this order: it leaves before the operator writes it.
_LEAVES, _CHANGES = range(2)


def swaps_that_write(plan: Plan, trace: Trace) -> frozenset[int]:
    """Return the positions in `plan.swaps` of those that have to write in a step that follows others of its kind."""
    if trace.reach is not Reach.TOUCHED:
        return frozenset(range(len(plan.swaps)))
    writing: set[int] = set()
    for storage, events in _lives(plan, trace).items():
        block = trace.storages[storage]
        keeps_its_copies = block.first_op < 0 and block.last_op >= len(trace.ops)
        copies: set[tuple[str, str]] = set()
        for step in range(2):
            if not keeps_its_copies:
                copies.clear()
            for _, what, position in events:
                if what == _CHANGES:
                    copies.clear()
                    continue
                place = (plan.swaps[position].tier, plan.swaps[position].codec)
                if step == 1 and place not in copies:
                    writing.add(position)
                copies.add(place)
    return frozenset(writing)


def _lives(plan: Plan, trace: Trace) -> dict[int, list[tuple[int, int, int]]]:
    """Return what happens to each swapped storage in a step: when, what, and by which swap."""
    lives: dict[int, list[tuple[int, int, int]]] = {swap.gap.storage: [] for swap in plan.swaps}
    for position, swap in enumerate(plan.swaps):
        lives[swap.gap.storage].append((swap.gap.after_op, _LEAVES, position))
    changes = [(one.gap.before_op, one.gap.storage) for one in plan.recomputes]
    changes += [(index, storage) for index, op in enumerate(trace.ops) for storage in op.writes]
    for op, storage in changes:
        if storage in lives:
            lives[storage].append((op, _CHANGES, -1))
    return {storage: sorted(events) for storage, events in lives.items()}
