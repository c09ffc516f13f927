"""SmartPool: where every block of a repeating step goes, worked out before it runs (Zhang et al., arXiv 1903.06631).

Blocks are vertices of a graph, with an edge where lifetimes overlap. Colouring it with byte ranges, so that neighbours
do not share a byte, with the fewest bytes overall is NP-complete. SmartPool colours the largest block first, of equal
ones the longest-lived, each with the lowest range (first fit) or the tightest one (best fit) that its neighbours leave.

`addresses` makes the layout of a plan, which the simulator's memory follows (simulate/arena.py).
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np

from lowtide.core.plan import Address, Plan
from lowtide.core.trace import Gap, Trace
from lowtide.errors import BadArgument

FITS = ("first", "best")


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """Memory that is needed from operator `first_op` to operator `last_op`, both included.

    `of` is what it is for: a storage, or with n storages n + i, what operator i needs beside them.
    """

    nbytes: int
    first_op: int
    last_op: int
    of: int = -1


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """Where blocks lie in one range of addresses, in the order they were given."""

    offsets: tuple[int, ...]
    footprint_bytes: int


def colour(blocks: Sequence[Block], *, fit: str = "first") -> Layout:
    """Return an offset for every block, so that no two share a byte while both are needed."""
    if fit not in FITS:
        raise BadArgument(f"unknown fit {fit!r}: choose one of {', '.join(FITS)}")
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


def blocks_of(
    trace: Trace,
    plan: Plan | None = None,
    *,
    rounded: Callable[[int], int] = int,
    held_until: Mapping[Gap, int] | None = None,
) -> list[Block]:
    """Return the blocks of a step; a storage that a plan moves away is one block before and another one after.

    What swaps out holds its memory until its write has landed: that is before `landed_op`, or at the end of the
    operator that `held_until` names, or of the one beside which it leaves.
    """
    held = held_until or {}
    absent: dict[int, list[tuple[int, int]]] = {}
    for swap in plan.swaps if plan is not None else ():
        last_op = held.get(swap.gap, swap.gap.after_op if swap.landed_op is None else swap.landed_op - 1)
        absent.setdefault(swap.gap.storage, []).append((max(last_op, swap.gap.after_op), swap.fetch_op))
    for one in plan.recomputes if plan is not None else ():
        absent.setdefault(one.gap.storage, []).append((one.gap.after_op, one.gap.before_op))
    found = []
    for index, storage in enumerate(trace.storages):
        begin = storage.first_op
        for leaves_op, back_op in sorted(absent.get(index, ())):
            # It still holds its memory while the operator runs beside which it leaves.
            if leaves_op + 1 < back_op:
                found.append(Block(nbytes=rounded(storage.nbytes), first_op=begin, last_op=leaves_op, of=index))
                begin = back_op
        if begin <= storage.last_op:
            found.append(Block(nbytes=rounded(storage.nbytes), first_op=begin, last_op=storage.last_op, of=index))
    return found


def step_blocks(
    trace: Trace, plan: Plan | None = None, *, least_bytes: float = 0, held_until: Mapping[Gap, int] | None = None
) -> list[Block]:
    """Return the blocks that a step takes and gives back itself, with what operators need beside storages.

    `least_bytes`: not those that are smaller.
    """
    found = blocks_of(trace, plan, held_until=held_until)
    own = [block for block in found if trace.storages[block.of].first_op >= 0]
    live = [0] * (len(trace.ops) + 2)
    for storage in trace.storages:
        if storage.first_op >= 0:
            live[storage.first_op] += storage.nbytes
            live[min(storage.last_op, len(trace.ops)) + 1] -= storage.nbytes
    for index, (op, live_bytes) in enumerate(zip(trace.ops, accumulate(live), strict=False)):
        beside_bytes = op.peak_bytes - trace.static_bytes - live_bytes
        own.append(Block(nbytes=beside_bytes, first_op=index, last_op=index, of=len(trace.storages) + index))
    return [block for block in own if block.nbytes > 0 and block.nbytes >= least_bytes]


def addresses(blocks: Sequence[Block], *, fit: str = "first") -> tuple[Address, ...]:
    """Return where blocks of a step lie, as a plan says it."""
    offsets = colour(blocks, fit=fit).offsets
    return tuple(
        sorted(
            Address(block=block.of, from_op=block.first_op, offset_bytes=offset)
            for block, offset in zip(blocks, offsets, strict=True)
        )
    )


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
