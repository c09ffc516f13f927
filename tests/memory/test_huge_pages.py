"""Huge pages stay whole: however often blocks leave, return, are freed and put together again."""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch

from lowtide.memory.native.bindings import Place
from tests.memory.engine import KIB, MIB, Engine, address_of, filled, pattern

Opened = Callable[..., Engine]

PAGE, HUGE = 4 * KIB, 2 * MIB
_SETTING = Path("/sys/kernel/mm/transparent_hugepage/enabled")

pytestmark = pytest.mark.skipif(
    not _SETTING.exists() or "[never]" in _SETTING.read_text(), reason="this kernel gives no huge pages"
)


def huge_bytes(tensors: Sequence[torch.Tensor]) -> int:
    """The bytes of tensors that are in huge pages, by the kernel's count for each of its mappings."""
    mappings: list[tuple[int, int, int]] = []
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if found := re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line):
            mappings.append((int(found[1], 16), int(found[2], 16), 0))
        elif found := re.match(r"AnonHugePages:\s+(\d+) kB", line):
            mappings[-1] = (*mappings[-1][:2], int(found[1]) * KIB)
    total = 0
    for tensor in tensors:
        first, end = address_of(tensor), address_of(tensor) + tensor.nbytes
        for start, stop, nbytes in mappings:
            both = min(end, stop) // HUGE - -(-max(first, start) // HUGE)  # huge pages that lie in both
            total += min(nbytes, max(0, both) * HUGE)
    return total


def whole_bytes(tensor: torch.Tensor) -> int:
    """The bytes of a tensor that huge pages can hold: those between its first and last multiple of 2 MiB."""
    first, end = address_of(tensor), address_of(tensor) + tensor.nbytes
    return max(0, end // HUGE - -(-first // HUGE)) * HUGE


def present(engine: Engine, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    return [tensor for tensor in tensors if engine.place(tensor) is Place.HERE]


def test_blocks_that_take_turns_in_memory_keep_huge_pages(opened: Opened) -> None:
    engine = opened(budget=64 * MIB)
    blocks = [filled(6 * MIB + 300 * KIB, number) for number in range(16)]
    for _ in range(4):
        for block in blocks:
            block.add_(1)
    for number, block in enumerate(blocks):
        assert torch.equal(block, pattern(block.nbytes, number) + 4)
    here = present(engine, blocks)
    assert len(here) >= 8
    assert huge_bytes(here) == sum(map(whole_bytes, here))


@pytest.mark.parametrize("seed", range(3))
def test_blocks_of_all_sizes_put_together_from_pieces_keep_huge_pages(opened: Opened, seed: int) -> None:
    draw = random.Random(seed)
    engine = opened(budget=48 * MIB)
    blocks: list[torch.Tensor] = []
    for _ in range(150):
        if len(blocks) > 12:
            blocks.pop(draw.randrange(len(blocks)))
        blocks.append(filled(draw.choice((100 * KIB, 700 * KIB, 3 * MIB, 5 * MIB + 70 * KIB, 8 * MIB, 11 * MIB)), 1))
        blocks[draw.randrange(len(blocks))].add_(1)
    engine.native.settle()
    here = present(engine, blocks)
    assert sum(map(whole_bytes, here)) > 8 * MIB
    assert huge_bytes(here) == sum(map(whole_bytes, here))
    assert engine.peak <= 48 * MIB


def test_memory_from_before_has_huge_pages_when_it_is_taken_over_and_when_it_returns(opened: Opened) -> None:
    # From 32 MiB on malloc maps every block by itself.
    made = [filled(nbytes, nbytes) for nbytes in (33 * MIB + 77, 41 * MIB)]
    engine = opened(budget=100 * MIB)
    assert huge_bytes(made) == sum(map(whole_bytes, made)) > 64 * MIB
    for _ in range(2):
        engine.send_away(*made)
        assert huge_bytes(made) == 0
        for each in made:
            assert torch.equal(each, pattern(each.nbytes, each.nbytes))
        assert huge_bytes(made) == sum(map(whole_bytes, made))
    del made, each
    engine.forget_adopted()


def test_memory_from_before_has_huge_pages_that_were_kept_of_other_blocks(opened: Opened) -> None:
    made = [filled(nbytes, nbytes) for nbytes in (9 * MIB + 77, 21 * MIB, 13 * MIB)]
    engine = opened(budget=56 * MIB)
    for turn in range(3):
        engine.send_away(*made)
        passing = filled(40 * MIB, turn)  # takes all the room there is, so that what returns gets pages of its own
        assert torch.equal(passing, pattern(40 * MIB, turn))
        del passing
        for each in made:
            assert torch.equal(each, pattern(each.nbytes, each.nbytes))
    assert huge_bytes(made) == sum(map(whole_bytes, made))
    del made, each
    engine.forget_adopted()


def test_a_block_just_above_a_huge_page_costs_no_second_one(opened: Opened) -> None:
    engine = opened(budget=64 * MIB)
    block = filled(HUGE + PAGE, 1)
    assert engine.peak - engine.reserved_at_open == HUGE + PAGE
    engine.send_away(block)
    assert torch.equal(block, pattern(HUGE + PAGE, 1))
    assert engine.peak - engine.reserved_at_open <= 2 * (HUGE + PAGE)  # kept pages are not given out of turn


def test_small_blocks_find_room_where_only_huge_pages_are_kept(opened: Opened) -> None:
    engine = opened(budget=64 * MIB)
    room = engine.free_bytes // HUGE * HUGE
    large = filled(room, 1)
    del large
    reserved = engine.native.counters().reserved_bytes
    small = [filled(600 * KIB, number) for number in range(40)]
    assert engine.native.counters().reserved_bytes <= reserved + HUGE
    for number, block in enumerate(small):
        assert torch.equal(block, pattern(600 * KIB, number))
    del small, block
    again = filled(room, 2)  # small pages went back to the kernel for huge ones
    assert torch.equal(again, pattern(room, 2))
