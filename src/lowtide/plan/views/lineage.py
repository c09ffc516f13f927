"""How a storage can be made again: the operators to run once more, from the trace alone.

An operator can run again if it draws no random numbers, leaves nothing unset and changes nothing that others still
need: it writes what it allocates itself, or, in place, what the same recipe has made just before. What it reads from
memory must not have changed since its first run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from lowtide.core.operators import repeats
from lowtide.core.trace import Kind, Op, Phase, Trace


def replayable(op: Op) -> bool:
    """Tell whether an operator computes the same again by itself: not if it changes what it reads."""
    return not set(op.reads) & set(op.writes) and repeats(op.name)


def alive_when(trace: Trace, storage: int, op: int) -> bool:
    """Tell whether a storage is alive when operator `op` begins, in a step without decisions."""
    found = trace.storages[storage]
    return found.first_op < op <= found.last_op


class Lineage:
    """The operators that made a trace's storages."""

    def __init__(self, trace: Trace) -> None:
        self._trace = trace
        self._writers: dict[int, list[int]] = {}
        for index, op in enumerate(trace.ops):
            for storage in op.writes:
                self._writers.setdefault(storage, []).append(index)
        updates = (index for index, op in enumerate(trace.ops) if op.phase is Phase.UPDATE)
        self._end_op = next(updates, len(trace.ops))

    def producer(self, storage: int) -> int | None:
        """Return the one operator that makes the storage again, or None if none can by itself."""
        makers = self.makers(storage)
        return makers[0] if makers is not None and len(makers) == 1 else None

    def makers(self, storage: int, *, before_op: int | None = None) -> tuple[int, ...] | None:
        """Return the operators that made the storage what it is before `before_op`, or None if they cannot run again.

        The first allocates it, the others change it in place: a ReLU on the result of a normalisation.
        """
        writers = self._writers.get(storage, [])
        if before_op is not None:
            writers = [writer for writer in writers if writer < before_op]
        found = self._trace.storages[storage]
        if not writers or writers[0] != found.first_op or found.kind not in (Kind.ACTIVATION, Kind.SCRATCH, Kind.OTHER):
            return None
        for writer in writers:
            op = self._trace.ops[writer]
            foreign = any(made != storage and self._trace.storages[made].first_op != writer for made in op.writes)
            if foreign or not repeats(op.name) or (writer == writers[0] and storage in op.reads):
                return None
        return tuple(writers)

    def written_between(self, storage: int, first_op: int, before_op: int) -> bool:
        """Tell whether a storage changed after operator `first_op` had run and before `before_op`."""
        return any(first_op < writer < before_op for writer in self._writers.get(storage, ()))

    def recipe(
        self,
        storages: Iterable[int],
        *,
        available: Callable[[int], bool],
        most_ops: int = 64,
        before_op: int | None = None,
    ) -> tuple[int, ...] | None:
        """Return the operators that make `storages` again, ascending, or None if that cannot be.

        `available(storage)` tells whether a storage is in memory when they run; what is not is made again too. They
        run before `before_op` begins (None: at the end of the backward pass), and nothing they read from memory may
        have been written between their first run and then.
        """
        end = self._end_op if before_op is None else before_op
        wanted = set(storages)
        ops: set[int] = set()
        done: dict[int, int] = {}
        missing = [(storage, end) for storage in wanted]
        while missing:
            storage, until = missing.pop()
            if until <= done.get(storage, -1):
                continue
            done[storage] = until
            makers = self.makers(storage, before_op=until)
            if makers is None:
                return None
            for maker in makers:
                if maker in ops:
                    continue
                ops.add(maker)
                if len(ops) > most_ops:
                    return None
                for operand in self._trace.ops[maker].reads:
                    if operand == storage:
                        continue
                    if operand in wanted or not available(operand):
                        missing.append((operand, maker))
                    elif self.written_between(operand, maker, end):
                        return None
        return tuple(sorted(ops))
