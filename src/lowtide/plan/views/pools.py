"""SmartPool: where every block of a repeating step goes, worked out before it runs (Zhang et al., arXiv 1903.06631).

Blocks are vertices of a graph, with an edge where lifetimes overlap. Colouring it with byte ranges, so that neighbours
do not share a byte, with the fewest bytes overall is NP-complete. SmartPool colours the largest block first, of equal
ones the longest-lived, each with the lowest range (first fit) or the tightest one (best fit) that its neighbours leave.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from lowtide.core.plan import Plan
from lowtide.core.trace import Trace
from lowtide.errors import BadArgument

_FITS = ("first", "best")


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """Memory that is needed from operator `first_op` to operator `last_op`, both included."""

    nbytes: int
    first_op: int
    last_op: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """Where blocks lie in one range of addresses, in the order they were given."""

    offsets: tuple[int, ...]
    footprint_bytes: int


def colour(blocks: Sequence[Block], *, fit: str = "first") -> Layout:
    """Return an offset for every block, so that no two share a byte while both are needed."""
    if fit not in _FITS:
        raise BadArgument(f"unknown fit {fit!r}: choose one of {', '.join(_FITS)}")
    order = sorted(range(len(blocks)), key=lambda k: (-blocks[k].nbytes, blocks[k].first_op - blocks[k].last_op, k))
    first = np.array([blocks[k].first_op for k in order], dtype=np.int64)
    last = np.array([blocks[k].last_op for k in order], dtype=np.int64)
    begin = np.zeros(len(order), dtype=np.int64)
    end = np.zeros(len(order), dtype=np.int64)
    offsets = [0] * len(blocks)
    footprint_bytes = 0
    for place, k in enumerate(order):
        nbytes = blocks[k].nbytes
        if nbytes > 0:
            overlaps = (first[:place] <= last[place]) & (last[:place] >= first[place])
            taken = np.stack((begin[:place][overlaps], end[:place][overlaps]), axis=1)
            offsets[k] = _hole(taken[taken[:, 0].argsort()], nbytes, tightest=fit == "best")
            footprint_bytes = max(footprint_bytes, offsets[k] + nbytes)
        begin[place], end[place] = offsets[k], offsets[k] + nbytes
    return Layout(offsets=tuple(offsets), footprint_bytes=footprint_bytes)


def _hole(taken: np.ndarray[tuple[int, ...], np.dtype[np.int64]], nbytes: int, *, tightest: bool) -> int:
    """Return where `nbytes` fit between ranges that are sorted by their beginning."""
    ends = np.maximum.accumulate(np.append(0, taken[:, 1]))
    room = taken[:, 0] - ends[:-1]
    fitting = np.flatnonzero(room >= nbytes)
    if not fitting.size:
        return int(ends[-1])
    return int(ends[fitting[room[fitting].argmin()] if tightest else fitting[0]])


def load_bytes(blocks: Iterable[Block]) -> int:
    """Return the most bytes needed at once: no layout is smaller."""
    change: dict[int, int] = {}
    for block in blocks:
        change[block.first_op] = change.get(block.first_op, 0) + block.nbytes
        change[block.last_op + 1] = change.get(block.last_op + 1, 0) - block.nbytes
    held = most = 0
    for op in sorted(change):
        held += change[op]
        most = max(most, held)
    return most


def blocks_of(trace: Trace, plan: Plan | None = None, *, rounded: Callable[[int], int] = int) -> list[Block]:
    """Return the blocks of a step; a storage that a plan moves away is one block before and another one after."""
    absent: dict[int, list[tuple[int, int]]] = {}
    for swap in plan.swaps if plan is not None else ():
        absent.setdefault(swap.gap.storage, []).append((swap.gap.after_op, swap.fetch_op))
    for one in plan.recomputes if plan is not None else ():
        absent.setdefault(one.gap.storage, []).append((one.gap.after_op, one.gap.before_op))
    found = []
    for index, storage in enumerate(trace.storages):
        begin = storage.first_op
        for leaves_op, back_op in sorted(absent.get(index, ())):
            # It still holds its memory while the operator runs beside which it leaves.
            if leaves_op + 1 < back_op:
                found.append(Block(nbytes=rounded(storage.nbytes), first_op=begin, last_op=leaves_op))
                begin = back_op
        if begin <= storage.last_op:
            found.append(Block(nbytes=rounded(storage.nbytes), first_op=begin, last_op=storage.last_op))
    return found


def repeated_segment(events: Sequence[Hashable]) -> range | None:
    """Return the longest stretch of events that is repeated right after itself (None: nothing is).

    That is how an iteration is found in a stream of allocations, frees and accesses. Of equally long ones it is the
    first.
    """
    codes: dict[Hashable, int] = {}
    stream = np.array([codes.setdefault(event, len(codes)) for event in events], dtype=np.int64)
    for length in range(len(stream) // 2, 0, -1):
        same = np.append(stream[:-length] == stream[length:], False)
        # `length` equal pairs in a row are a stretch and its repetition.
        ends = np.flatnonzero(~same)
        begins = np.append(0, ends[:-1] + 1)
        runs = np.flatnonzero(ends - begins >= length)
        if runs.size:
            start = int(begins[runs[0]])
            return range(start, start + length)
    return None
