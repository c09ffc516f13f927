"""Which storages leave first when memory runs out despite a plan, or without one.

A policy names its order (`About.victims`), so that the executor can follow it natively; one that has an
order of its own has a method for it (`ChoosesVictims`), which no step on the CPU can ask.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from math import inf, isinf, log2

from lowtide.plan.policy import ChoosesVictims, Costs, Order, Policy, View, until_covered


def victims_of(policy: Policy, view: View, need_bytes: int) -> Iterator[int]:
    """Yield records to give up, best first, until `need_bytes` are covered or nothing is left."""
    if isinstance(policy, ChoosesVictims):
        return policy.victims(view, need_bytes)
    return _ORDERS[policy.about.victims](view, need_bytes)


def _nothing(_view: View, _need_bytes: int) -> Iterator[int]:
    return iter(())


def _oldest(view: View, need_bytes: int) -> Iterator[int]:
    return iter(view.oldest(need_bytes))


def _furthest(view: View, need_bytes: int) -> Iterator[int]:
    order = sorted(view.evictable(), key=lambda record: (-view.next_use(record), view.last_access(record)))
    return until_covered(order, view, need_bytes)


def _furthest_newest(view: View, need_bytes: int) -> Iterator[int]:
    order = sorted(view.evictable(), key=lambda record: (-view.next_use(record), -view.last_access(record)))
    return until_covered(order, view, need_bytes)


def _furthest_cheapest(view: View, need_bytes: int) -> Iterator[int]:
    records = view.evictable()
    now = max((view.last_access(record) for record in records), default=0)

    def order(record: int) -> tuple[float, bool, float, int]:
        use = view.next_use(record)
        # Next uses are similar if they are as far away, to a factor of the square root of two.
        band = inf if isinf(use) else round(2 * log2(max(1.0, use - now)))
        return (-band, not view.clean(record), -use, view.last_access(record))

    return until_covered(sorted(records, key=order), view, need_bytes)


def _largest(view: View, need_bytes: int) -> Iterator[int]:
    return until_covered(sorted(view.evictable(), key=view.nbytes, reverse=True), view, need_bytes)


def _largest_area(view: View, need_bytes: int) -> Iterator[int]:
    records = view.evictable()
    now = max((view.last_access(record) for record in records), default=0)
    far = max((view.next_use(record) for record in records if view.next_use(record) < inf), default=now) + 1

    def area(record: int) -> float:
        return view.nbytes(record) * (min(view.next_use(record), far) - now)

    order = sorted(records, key=lambda record: (-area(record), view.last_access(record)))
    return until_covered(order, view, need_bytes)


def _first_that_suffices(view: View, need_bytes: int) -> Iterator[int]:
    records = sorted(view.evictable(), key=view.last_access)
    alone = next((record for record in records if view.nbytes(record) >= need_bytes), None)
    return until_covered(records if alone is None else [alone], view, need_bytes)


def _cheapest(view: View, need_bytes: int) -> Iterator[int]:
    def order(record: int) -> tuple[float, int]:
        return _ratio(_cost_s(view, record), view.nbytes(record)), view.last_access(record)

    return until_covered(sorted(view.evictable(), key=order), view, need_bytes)


def _cheapest_stale(view: View, need_bytes: int) -> Iterator[int]:
    records = view.evictable()
    newest = max((view.last_access(record) for record in records), default=0)

    def order(record: int) -> tuple[float, int]:
        last = view.last_access(record)
        # Where the view knows no costs, events stand for seconds.
        stale = view.staleness_s(record) if isinstance(view, Costs) else 1.0 + newest - last
        return _ratio(_cost_s(view, record), view.nbytes(record) * stale), last

    return until_covered(sorted(records, key=order), view, need_bytes)


def _cost_s(view: View, record: int) -> float:
    return view.recompute_s(record) if isinstance(view, Costs) else 1.0


def _ratio(cost_s: float, divisor: float) -> float:
    return cost_s / divisor if divisor > 0 else inf


_ORDERS: dict[Order, Callable[[View, int], Iterator[int]]] = {
    Order.NOTHING: _nothing,
    Order.OLDEST: _oldest,
    Order.FURTHEST: _furthest,
    Order.FURTHEST_NEWEST: _furthest_newest,
    Order.FURTHEST_CHEAPEST: _furthest_cheapest,
    Order.LARGEST: _largest,
    Order.LARGEST_AREA: _largest_area,
    Order.FIRST_THAT_SUFFICES: _first_that_suffices,
    Order.CHEAPEST: _cheapest,
    Order.CHEAPEST_STALE: _cheapest_stale,
}
