"""What a plan has in each tier: one byte curve per tier, beside that of fast memory.

A storage is in its tier from the operator at which it starts to leave until it is due back. Its copy stays there after
that only if a later decision relies on it (it does not write, see writes.py).
"""

from __future__ import annotations

from collections.abc import Sequence

from lowtide.core.plan import Place, Swap
from lowtide.core.trace import Trace
from lowtide.plan.costs.curve import Curve


def tier_curves(
    trace: Trace, swaps: Sequence[Swap], places: Sequence[Place], *, written: Sequence[bool]
) -> dict[str, Curve]:
    """Return the bytes in each tier that is used, at every operator; `written` as `Writes.of` tells."""
    count = len(trace.ops)
    rows: dict[tuple[int, str, str], list[tuple[int, int, int, bool]]] = {}
    for swap, writes in zip(swaps, written, strict=False):
        nbytes, gap = trace.storages[swap.gap.storage].nbytes, swap.gap
        span = (gap.after_op, gap.before_op, nbytes, writes)
        rows.setdefault((gap.storage, swap.tier, swap.codec), []).append(span)
    for place, writes in zip(places, written[len(swaps) :], strict=True):
        nbytes = trace.storages[place.storage].nbytes if place.nbytes is None else place.nbytes
        span = (place.from_op, place.until_op, nbytes, writes)
        rows.setdefault((place.storage, place.tier, "identity"), []).append(span)
    spans: dict[str, list[tuple[int, int, int]]] = {}
    for (storage, tier, _), decisions in rows.items():
        decisions.sort()
        own = spans.setdefault(tier, [])
        for position, (begin, end, nbytes, writes) in enumerate(decisions):
            shift = count if begin >= count else 0
            own.append((begin - shift, end - shift, nbytes))
            if writes:
                continue
            if position:
                own.append((decisions[position - 1][1], begin, nbytes))
            elif trace.lives_on(storage) and decisions[-1][1] < count + begin:
                own.append((decisions[-1][1], count + begin, nbytes))
    curves = {}
    for tier, of_tier in spans.items():
        curves[tier] = Curve([0] * count)
        for begin, end, nbytes in of_tier:
            # A copy kept from the next step on is one kept from this.
            shift = count if begin >= count else 0
            curves[tier].add(begin - shift, end - shift, nbytes)
    return curves
