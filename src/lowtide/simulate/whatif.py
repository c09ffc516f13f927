"""What if: a trace changed on paper, to be planned and simulated like a recorded one.

The primitives are those of Daydream (Zhu et al., ATC 2020): select operators, scale them, insert some, remove some. All
are pure functions: the trace given stays as it is. `resize` is ours: what half precision or an encoding does to bytes.

    faster = scale(trace, select(trace, name="convolution"), factor=0.5)
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import replace
from itertools import accumulate

from lowtide.core.trace import Op, Phase, Save, Storage, Trace
from lowtide.errors import BadArgument


def select(
    trace: Trace,
    *,
    name: str = "",
    module: str = "",
    phase: Phase | None = None,
    where: Callable[[Op], bool] | None = None,
) -> tuple[int, ...]:
    """Return the operators whose name and module contain these texts, of a phase, and for which `where` holds."""
    return tuple(
        index
        for index, op in enumerate(trace.ops)
        if name in op.name
        and module in op.module
        and (phase is None or op.phase is phase)
        and (where is None or where(op))
    )


def scale(trace: Trace, ops: Collection[int], *, factor: float) -> Trace:
    """Return the trace with these operators taking `factor` times as long."""
    if not 0 <= factor < float("inf"):
        raise BadArgument(f"factor {factor} is negative: give 0 or more")
    chosen = _known(trace, ops)
    return _timed(
        trace,
        [
            replace(op, duration_s=op.duration_s * factor) if index in chosen else op
            for index, op in enumerate(trace.ops)
        ],
    )


def resize(trace: Trace, storages: Collection[int], *, factor: float) -> Trace:
    """Return the trace with these storages `factor` times as large, and the memory of operators changed by that."""
    if not 0 <= factor < float("inf"):
        raise BadArgument(f"factor {factor} is negative: give 0 or more")
    for storage in storages:
        if not 0 <= storage < len(trace.storages):
            raise BadArgument(f"storage {storage} does not exist: the trace has {len(trace.storages)} storages")
    chosen = set(storages)
    changed = tuple(
        replace(block, nbytes=round(block.nbytes * factor)) if index in chosen else block
        for index, block in enumerate(trace.storages)
    )
    more = [new.nbytes - old.nbytes for new, old in zip(changed, trace.storages, strict=True)]
    static_bytes = sum(
        nbytes
        for nbytes, block in zip(more, trace.storages, strict=True)
        if block.first_op < 0 and block.last_op >= len(trace.ops)
    )
    extra = _alive(trace, more)
    ops = tuple(replace(op, peak_bytes=op.peak_bytes + nbytes) for op, nbytes in zip(trace.ops, extra, strict=True))
    return replace(trace, ops=ops, storages=changed, static_bytes=trace.static_bytes + static_bytes)


def insert(trace: Trace, new: Sequence[Op], *, before: int) -> Trace:
    """Return the trace with new operators before operator `before` (the number of operators: at the end).

    They may read and write the trace's storages. Their `peak_bytes` is what they need beside what is alive there; their
    `start_s` is not looked at.
    """
    if not 0 <= before <= len(trace.ops):
        raise BadArgument(f"there is no place before operator {before}: the trace has {len(trace.ops)} operators")
    count = len(new)
    beside = _beside_bytes(trace, before)
    inserted = [replace(op, peak_bytes=op.peak_bytes + beside) for op in new]
    ops = [*trace.ops[:before], *inserted, *trace.ops[before:]]
    # What ended during the operator before stays so; what begins or is due at `before` moves behind the new ones.
    return _renumbered(trace, ops, lambda op: op + count if op >= before else op)


def remove(trace: Trace, ops: Iterable[int]) -> Trace:
    """Return the trace without these operators.

    A storage that only they touched goes with them, and its bytes leave the memory of the others; the save of such a
    storage goes too. What others read stays: it is allocated at the next operator that is left, and has no producer.
    """
    gone = _known(trace, ops)
    kept = [index for index in range(len(trace.ops)) if index not in gone]
    touched = {storage for index in kept for storage in (*trace.ops[index].reads, *trace.ops[index].writes)}
    made = {storage for index in gone for storage in trace.ops[index].writes}
    lost = {
        storage
        for storage in made - touched
        if trace.storages[storage].first_op in gone
        and not any(save.storage == storage and set(save.uses) - gone for save in trace.saves)
    }
    less = _alive(trace, [-block.nbytes if index in lost else 0 for index, block in enumerate(trace.storages)])
    place = _places(len(trace.ops), kept)
    new_number = {
        storage: number for number, storage in enumerate(s for s in range(len(trace.storages)) if s not in lost)
    }
    left = [
        replace(
            trace.ops[index],
            peak_bytes=trace.ops[index].peak_bytes + less[index],
            reads=tuple(new_number[storage] for storage in trace.ops[index].reads),
            writes=tuple(new_number[storage] for storage in trace.ops[index].writes),
        )
        for index in kept
    ]
    storages = tuple(
        _moved_storage(block, place, end=len(kept), orphan=block.producer in gone)
        for index, block in enumerate(trace.storages)
        if index not in lost
    )
    saves = tuple(
        replace(
            _moved_save(save, place, uses=[use for use in save.uses if use not in gone]),
            storage=new_number[save.storage],
        )
        for save in trace.saves
        if save.storage not in lost
    )
    return _timed(replace(trace, storages=storages, saves=saves), left)


# ---- the arithmetic of indices ----


def _known(trace: Trace, ops: Iterable[int]) -> set[int]:
    chosen = set(ops)
    for op in chosen:
        if not 0 <= op < len(trace.ops):
            raise BadArgument(f"operator {op} does not exist: the trace has {len(trace.ops)} operators")
    return chosen


def _timed(trace: Trace, ops: Sequence[Op]) -> Trace:
    """Return the trace with these operators, one after the other."""
    starts = accumulate((op.duration_s for op in ops), initial=0.0)
    return replace(trace, ops=tuple(replace(op, start_s=start_s) for op, start_s in zip(ops, starts, strict=False)))


def _alive(trace: Trace, nbytes: Sequence[int]) -> list[int]:
    """Return what these bytes of the storages add up to at each operator."""
    change = [0] * (len(trace.ops) + 2)
    for block, more in zip(trace.storages, nbytes, strict=True):
        change[max(block.first_op, 0)] += more
        change[min(block.last_op, len(trace.ops)) + 1] -= more
    return list(accumulate(change))[: len(trace.ops)]


def _beside_bytes(trace: Trace, before: int) -> int:
    """Return the bytes of the storages alive between two operators, with what the step holds beside them."""
    alive = _alive(trace, [block.nbytes for block in trace.storages])
    base = min((op.peak_bytes - held for op, held in zip(trace.ops, alive, strict=True)), default=trace.static_bytes)
    spanning = sum(block.nbytes for block in trace.storages if block.first_op < before <= block.last_op)
    return base + spanning


def _renumbered(trace: Trace, ops: Sequence[Op], place: Callable[[int], int]) -> Trace:
    storages = tuple(
        replace(
            block,
            first_op=place(block.first_op),
            last_op=place(block.last_op),
            producer=None if block.producer is None else place(block.producer),
        )
        for block in trace.storages
    )
    saves = tuple(
        replace(
            save,
            packed_op=place(save.packed_op),
            free_op=None if save.free_op is None else place(save.free_op),
            uses=tuple(place(use) for use in save.uses),
            released_op=place(save.released_op),
        )
        for save in trace.saves
    )
    return _timed(replace(trace, storages=storages, saves=saves), ops)


def _places(count: int, kept: Sequence[int]) -> list[int]:
    """Return, for every operator and the end, how many of those kept come before it."""
    left = set(kept)
    return list(accumulate((index in left for index in range(count)), initial=0))


def _moved_storage(block: Storage, place: Sequence[int], *, end: int, orphan: bool) -> Storage:
    first_op = block.first_op if block.first_op < 0 else min(place[block.first_op], end)
    # A storage that was freed during a removed operator is freed during the one before it.
    last_op = end if block.last_op >= len(place) - 1 else place[block.last_op + 1] - 1
    producer = None if orphan or block.producer is None else place[block.producer]
    return replace(block, first_op=first_op, last_op=max(last_op, first_op), producer=producer)


def _moved_save(save: Save, place: Sequence[int], *, uses: Sequence[int]) -> Save:
    return replace(
        save,
        packed_op=place[max(save.packed_op, 0)],
        free_op=None if save.free_op is None else place[save.free_op],
        uses=tuple(place[use] for use in uses),
        released_op=place[min(save.released_op, len(place) - 1)],
    )
