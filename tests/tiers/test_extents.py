from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule

from lowtide.errors import BadArgument, SpillFull
from lowtide.tiers import Extent, Extents

CAPACITY = 64 * 4096


def blocks(nbytes: int, align: int = 4096) -> int:
    return max(1, -(-nbytes // align)) * align


class ExtentsMachine(RuleBasedStateMachine):
    """Any sequence of takes and gives."""

    live = Bundle("live")

    def __init__(self) -> None:
        super().__init__()
        self.extents = Extents(CAPACITY)
        self.model: dict[int, int] = {}

    @rule(target=live, nbytes=st.integers(0, 12 * 4096))
    def take(self, nbytes: int) -> Extent | None:
        try:
            extent = self.extents.take(nbytes)
        except SpillFull:
            # Refused only if really no free run is long enough.
            edges = sorted(self.model.items())
            ends = [0, *(offset + size for offset, size in edges)]
            starts = [*(offset for offset, _ in edges), CAPACITY]
            assert all(start - end < blocks(nbytes) for start, end in zip(starts, ends, strict=True))
            return None
        assert extent.nbytes == nbytes
        assert extent.offset % 4096 == 0
        self.model[extent.offset] = blocks(nbytes)
        return extent

    @rule(extent=consumes(live))
    def give(self, extent: Extent | None) -> None:
        if extent is not None:
            self.extents.give(extent)
            del self.model[extent.offset]

    @invariant()
    def no_two_overlap_and_none_passes_the_capacity(self) -> None:
        end = 0
        for offset, size in sorted(self.model.items()):
            assert offset >= end
            end = offset + size
        assert end <= self.extents.high_bytes <= CAPACITY

    @invariant()
    def used_is_exact(self) -> None:
        assert self.extents.used_bytes == sum(self.model.values())


TestExtentsMachine = ExtentsMachine.TestCase
TestExtentsMachine.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


def test_the_smallest_hole_that_fits_is_taken_and_split() -> None:
    extents = Extents(None)
    taken = [extents.take(size * 4096) for size in (4, 1, 2, 1, 3, 1)]
    for index in (0, 2, 4):
        extents.give(taken[index])
    assert extents.take(2 * 4096).offset == taken[2].offset
    assert extents.take(1 * 4096).offset == taken[4].offset
    assert extents.take(2 * 4096).offset == taken[4].offset + 4096
    assert extents.high_bytes == 12 * 4096


def test_neighbouring_holes_merge() -> None:
    extents = Extents(4 * 4096)
    taken = [extents.take(4096) for _ in range(4)]
    for index in (0, 2, 1):
        extents.give(taken[index])
    assert extents.take(3 * 4096) == Extent(0, 3 * 4096)


@given(st.permutations(range(8)))
def test_when_all_is_given_back_one_run_is_left(order: list[int]) -> None:
    extents = Extents(8 * 4096)
    taken = [extents.take(100) for _ in range(8)]
    for index in order:
        extents.give(taken[index])
    assert extents.used_bytes == 0
    assert extents.take(8 * 4096).offset == 0


def test_full_says_the_numbers() -> None:
    extents = Extents(10 * 4096)
    first = extents.take(3 * 4096)
    extents.take(4 * 4096)
    extents.give(first)
    with pytest.raises(SpillFull) as full:
        extents.take(4 * 4096)
    for part in ("16384 bytes", "16.0 KiB of 40.0 KiB are used", "largest free run is 12.0 KiB"):
        assert part in str(full.value)
    assert extents.used_bytes == 4 * 4096


def test_what_is_not_live_cannot_be_given() -> None:
    extents = Extents(None)
    extent = extents.take(100)
    for wrong in (Extent(4096, 100), Extent(extent.offset, 101)):
        with pytest.raises(BadArgument, match="not live"):
            extents.give(wrong)
    extents.give(extent)
    with pytest.raises(BadArgument, match="not live"):
        extents.give(extent)


@pytest.mark.parametrize(("capacity", "align"), [(0, 4096), (-1, 4096), (4096, 0)])
def test_impossible_shapes_are_refused(capacity: int, align: int) -> None:
    with pytest.raises(BadArgument):
        Extents(capacity, align)
    with pytest.raises(BadArgument):
        Extents(None).take(-1)


def test_other_alignments() -> None:
    extents = Extents(None, 512)
    assert [extents.take(n).offset for n in (1, 513, 1)] == [0, 512, 1536]
