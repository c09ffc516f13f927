"""Free runs of several chunks: the same as bytes that are marked one by one, and no two that touch."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from lowtide.tiers.holes import Hole, Holes

CHUNKS = 2
CHUNK_BYTES = 24


def found(holes: Holes) -> set[Hole]:
    """Take every hole out, largest first."""
    every = set()
    while (hole := holes.largest) is not None:
        holes.remove(hole)
        every.add(hole)
    return every


def runs(free: list[list[bool]]) -> set[Hole]:
    every = set()
    for chunk, marks in enumerate(free):
        begin = None
        for offset, is_free in enumerate([*marks, False]):
            if is_free and begin is None:
                begin = offset
            elif not is_free and begin is not None:
                every.add(Hole(offset - begin, chunk, begin))
                begin = None
    return every


@given(st.lists(st.tuples(st.booleans(), st.integers(1, 9), st.integers(0, 99))))
def test_holes_are_the_free_runs_and_the_best_fit_is_the_smallest_that_is_large_enough(
    actions: list[tuple[bool, int, int]],
) -> None:
    holes, free = Holes(), [[False] * CHUNK_BYTES for _ in range(CHUNKS)]
    taken = [(chunk, offset, 6) for chunk in range(CHUNKS) for offset in range(0, CHUNK_BYTES, 6)]
    for gives, nbytes, pick in actions:
        if gives and taken:
            chunk, offset, size = taken.pop(pick % len(taken))
            joined = holes.add(chunk, offset, size)
            free[chunk][offset : offset + size] = [True] * size
            assert joined in runs(free)
        elif not gives:
            best = holes.best(nbytes)
            assert best == min((hole for hole in runs(free) if hole.nbytes >= nbytes), default=None)
            if best is not None:
                holes.cut(best, nbytes)
                free[best.chunk][best.offset : best.offset + nbytes] = [False] * nbytes
                taken.append((best.chunk, best.offset, nbytes))
    assert holes.nbytes == sum(map(sum, free))
    assert found(holes) == runs(free)
