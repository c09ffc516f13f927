"""The pinned pool: slots never overlap, the bound holds, and fragmentation alone refuses nothing."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lowtide.errors import BadArgument
from lowtide.execute.backends.accelerator.pool import PAGE_BYTES, PinnedPool, Slot

PAGE = PAGE_BYTES


def pages(nbytes: int) -> int:
    return -(-nbytes // PAGE) * PAGE


class Chunks:
    """Makes chunks of ordinary memory, and keeps their sizes."""

    def __init__(self, *, most: int | None = None) -> None:
        self.sizes: list[int] = []
        self.most = most

    def __call__(self, nbytes: int) -> bytearray:
        if self.most is not None and sum(self.sizes) + nbytes > self.most:
            raise MemoryError
        self.sizes.append(nbytes)
        return bytearray(nbytes)


def mark(pool: PinnedPool[bytearray], slot: Slot, value: int) -> None:
    for piece in slot.pieces:
        pool.chunk(piece)[piece.offset : piece.offset + piece.nbytes] = bytes([value]) * piece.nbytes


def holds(pool: PinnedPool[bytearray], slot: Slot, value: int) -> bool:
    return all(
        pool.chunk(piece)[piece.offset : piece.offset + piece.nbytes] == bytes([value]) * piece.nbytes
        for piece in slot.pieces
    )


Step = tuple[bool, int]


@settings(deadline=None, max_examples=200)
@given(
    bound=st.integers(0, 64 * PAGE),
    chunk=st.sampled_from([PAGE, 4 * PAGE, 16 * PAGE, 1024 * PAGE]),
    steps=st.lists(st.tuples(st.booleans(), st.integers(1, 20 * PAGE)), max_size=60),
)
def test_slots_are_disjoint_and_within_the_bound_and_refused_only_when_it_is_full(
    bound: int, chunk: int, steps: list[Step]
) -> None:
    made = Chunks()
    pool = PinnedPool(bound, allocate=made, chunk_bytes=chunk)
    live: dict[int, Slot] = {}
    for number, (take, size) in enumerate(steps):
        if take:
            slot = pool.take(size)
            fits = pages(size) <= pages(bound - PAGE + 1) - sum(pages(s.nbytes) for s in live.values())
            assert (slot is not None) == fits
            if slot is not None:
                assert sum(piece.nbytes for piece in slot.pieces) == slot.nbytes == size
                assert all(piece.offset % PAGE == 0 for piece in slot.pieces)
                mark(pool, slot, number % 251)
                live[number % 251] = slot
        elif live:
            value = list(live)[size % len(live)]
            slot = live.pop(value)
            assert holds(pool, slot, value), "somebody else wrote into the slot"
            pool.give(slot)
        assert pool.used_bytes == sum(pages(slot.nbytes) for slot in live.values())
        assert pool.used_bytes <= pool.reserved_bytes <= bound
        assert pool.reserved_bytes == sum(made.sizes)
    assert all(holds(pool, slot, value) for value, slot in live.items())
    for slot in live.values():
        pool.give(slot)
    assert pool.used_bytes == 0
    if made.sizes:
        # Everything has come together again: the largest chunk is one hole.
        whole = pool.take(max(made.sizes), whole=True)
        assert whole is not None
        assert len(whole.pieces) == 1


@given(bound=st.integers(PAGE, 10**9), size=st.integers(1, 10**9))
def test_chunks_are_powers_of_two(bound: int, size: int) -> None:
    """PyTorch's pinned allocator would round anything else up, beyond the bound."""
    sizes: list[int] = []
    pool = PinnedPool(bound, allocate=sizes.append)
    pool.take(min(size, bound // PAGE * PAGE))
    assert sizes
    assert all(chunk & (chunk - 1) == 0 for chunk in sizes)
    assert sum(sizes) <= bound


def test_a_large_slot_in_a_fragmented_pool_lies_in_several_pieces() -> None:
    pool = PinnedPool(4 * PAGE, allocate=bytearray, chunk_bytes=4 * PAGE)
    slots = [pool.take(PAGE) for _ in range(4)]
    for slot in (slots[0], slots[2]):
        assert slot is not None
        pool.give(slot)
    assert pool.take(2 * PAGE, whole=True) is None
    scattered = pool.take(2 * PAGE - 7)
    assert scattered is not None
    assert [piece.nbytes for piece in scattered.pieces] == [PAGE, PAGE - 7]
    assert pool.free_bytes == 0


def test_where_the_host_refuses_to_pin_more_the_bound_is_what_there_is() -> None:
    pool = PinnedPool(64 * PAGE, allocate=Chunks(most=8 * PAGE), chunk_bytes=8 * PAGE)
    assert pool.take(8 * PAGE) is not None
    assert pool.take(PAGE) is None
    assert pool.bound_bytes == 8 * PAGE


def test_a_slot_is_given_back_once() -> None:
    pool = PinnedPool(4 * PAGE, allocate=bytearray, chunk_bytes=4 * PAGE)
    slot = pool.take(100)
    assert slot is not None
    pool.give(slot)
    with pytest.raises(BadArgument, match="not live"):
        pool.give(slot)
    with pytest.raises(BadArgument, match="more than zero"):
        pool.take(0)
