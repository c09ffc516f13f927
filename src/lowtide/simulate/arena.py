"""Memory of one range of addresses whose blocks lie where the plan says (SmartPool, Layrub)."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from lowtide.core.plan import Address
from lowtide.estimate.predictors.allocators import Allocator, Rules
from lowtide.simulate.recording import OwnedBlock


@dataclass(frozen=True, slots=True, kw_only=True)
class Followed:
    """How a step went in such a memory.

    `reserved_bytes`: its highest address, and what blocks took that have no address, or did not find theirs free: those
    go behind the others, by best fit. `placed`, `displaced`: how many found theirs free, and how many did not.
    """

    reserved_bytes: int
    placed: int
    displaced: int


def follow(blocks: Iterable[OwnedBlock], layout: Sequence[Address]) -> Followed:
    """Return what becomes of a layout when a step takes and gives back its blocks at these moments."""
    waiting: dict[int, list[int]] = {}
    for address in sorted(layout, reverse=True):
        waiting.setdefault(address.block, []).append(address.offset_bytes)
    last = {address.block: address.offset_bytes for address in sorted(layout)}
    behind = Allocator(Rules())
    taken: list[tuple[int, int]] = []
    of: dict[int, tuple[int, int]] = {}
    highest = placed = displaced = 0
    for _, nbytes, number, owner in blocks:
        if nbytes < 0:
            if number in of:
                taken.remove(of.pop(number))
            else:
                behind.free(number)
            continue
        offset = waiting[owner].pop() if waiting.get(owner) else last.get(owner)
        span = None if offset is None else (offset, offset + nbytes)
        if span is not None and _free(taken, span):
            insort(taken, span)
            of[number] = span
            highest = max(highest, span[1])
            placed += 1
        else:
            displaced += span is not None
            behind.allocate(number, nbytes)
    return Followed(reserved_bytes=highest + behind.peak_reserved_bytes, placed=placed, displaced=displaced)


def _free(taken: Sequence[tuple[int, int]], span: tuple[int, int]) -> bool:
    """Tell whether no byte of a span is in one of those taken, which are in order and share none."""
    after = bisect_left(taken, span)
    return (after == len(taken) or taken[after][0] >= span[1]) and (after == 0 or taken[after - 1][1] <= span[0])
