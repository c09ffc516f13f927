"""A tier with a codec before it: the same bytes come back, fewer travel, and nothing is lost without a word."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from lowtide.codecs import FP16
from lowtide.errors import BadArgument, SpillCorrupted, SpillError, SpillFull
from lowtide.testing.codecs import some_values
from lowtide.testing.stores import page_aligned, some_bytes
from lowtide.tiers import (
    ALIGN_BYTES,
    Direction,
    Encoded,
    Extents,
    Fault,
    FaultKind,
    Faulty,
    FileMedium,
    NullMedium,
    ThreadStore,
    Throttle,
    open_medium,
)
from lowtide.tiers.encoded import FRAME_BYTES

MIB = 2**20


@pytest.fixture
def tier(tmp_path: Path) -> Iterator[Encoded]:
    medium = Encoded(FileMedium([tmp_path]))
    yield medium
    medium.close()


def relu(nbytes: int, *, density: float = 0.5, seed: int = 0) -> bytes:
    return np.maximum(some_values(nbytes // 4, density=2 * density, seed=seed), 0).tobytes()


def read(tier: Encoded, offset: int, nbytes: int) -> bytes:
    into = page_aligned(bytes(nbytes))
    tier.read_at(offset, into)
    return bytes(into)


def blocks(nbytes: float) -> int:
    return -(-int(nbytes) // ALIGN_BYTES) * ALIGN_BYTES


def figures(moved_bytes: int, *, given_bytes: int) -> dict[str, object]:
    return {"disk_written_bytes": moved_bytes, "disk_read_bytes": moved_bytes, "before_codec_bytes": given_bytes}


def test_what_is_written_shrinks_with_the_density(tier: Encoded) -> None:
    for seed, density in enumerate((0.0, 0.1, 0.25, 0.5)):
        content = relu(2 * MIB, density=density, seed=seed)
        kept = np.count_nonzero(np.frombuffer(content, np.float32))
        tier.reset_figures()
        tier.write_at(0, page_aligned(content))
        assert read(tier, 0, len(content)) == content
        expected = blocks(4 * kept + len(content) / 32)
        assert tier.figures() == figures(expected, given_bytes=len(content))


def test_bytes_without_zeros_travel_as_they_are(tier: Encoded) -> None:
    content = some_bytes(MIB + 5)
    tier.write_at(0, page_aligned(content))
    assert read(tier, 0, len(content)) == content
    assert tier.figures() == figures(blocks(MIB + 5), given_bytes=blocks(MIB + 5))


def test_half_precision_has_words_of_its_own(tier: Encoded) -> None:
    values = np.maximum(some_values(MIB, density=1.0), 0).astype(np.float16)
    tier.write_at(0, page_aligned(values.tobytes()))
    assert read(tier, 0, values.nbytes) == values.tobytes()
    expected = blocks(2 * np.count_nonzero(values) + values.size / 8)
    assert tier.figures()["disk_written_bytes"] == expected < 0.6 * values.nbytes


def test_the_disk_holds_only_what_is_left(tmp_path: Path, tier: Encoded) -> None:
    import os

    assert isinstance(tier.medium, FileMedium)
    tier.write_at(0, page_aligned(relu(FRAME_BYTES, density=0.1)))
    assert os.fstat(tier.medium.fds[0]).st_blocks * 512 < 0.2 * FRAME_BYTES
    assert not hasattr(tier, "fds"), "nobody goes around the codec"


def test_frames_can_be_read_in_parts_and_together(tier: Encoded) -> None:
    content = relu(2 * FRAME_BYTES + 3 * MIB) + some_bytes(77)
    tier.write_at(ALIGN_BYTES, page_aligned(content))
    across, last = (FRAME_BYTES - ALIGN_BYTES, MIB), (2 * FRAME_BYTES, 3 * MIB + 77)
    for inside, nbytes in ((0, len(content)), (MIB, 3), across, last):
        assert read(tier, ALIGN_BYTES + inside, nbytes) == content[inside : inside + nbytes]


def test_an_overlapped_frame_is_gone_and_says_so(tier: Encoded) -> None:
    old, new = relu(4 * MIB), relu(MIB, seed=1)
    tier.write_at(0, page_aligned(old))
    tier.write_at(MIB, page_aligned(new))
    assert read(tier, MIB, MIB) == new
    for offset in (0, 3 * MIB):
        with pytest.raises(SpillError, match="short read"):
            read(tier, offset, MIB)


def test_writing_nothing_overlaps_nothing(tier: Encoded) -> None:
    content = relu(2 * MIB)
    tier.write_at(0, page_aligned(content))
    tier.write_at(MIB, memoryview(b""))
    assert read(tier, 0, 2 * MIB) == content


def test_extents_in_any_order_keep_their_bytes(tier: Encoded) -> None:
    draw, extents, held = random.Random(3), Extents(None), {}
    for turn in range(120):
        if held and draw.random() < 0.45:
            extent = draw.choice(list(held))
            assert read(tier, extent.offset, extent.nbytes) == held.pop(extent)
            extents.give(extent)
        else:
            nbytes = draw.randrange(4, 300_000)
            content = (relu if draw.random() < 0.7 else some_bytes)(nbytes, seed=turn)
            extent = extents.take(len(content))
            tier.write_at(extent.offset, memoryview(content))
            held[extent] = content
    assert all(read(tier, extent.offset, extent.nbytes) == content for extent, content in held.items())


def test_a_store_over_it_returns_what_it_was_given(tmp_path: Path) -> None:
    store = ThreadStore(Encoded(FileMedium([tmp_path])), threads=3, verify=True)
    try:
        contents = [relu(9 * MIB, seed=seed) for seed in range(4)]
        puts = [store.put(memoryview(content)) for content in contents]
        for (extent, put), content in zip(puts, contents, strict=True):
            into = bytearray(extent.nbytes)
            get = store.get(extent, memoryview(into))
            assert put.wait(60)
            assert get.wait(60)
            assert get.error is None
            assert into == content
    finally:
        store.close()


def test_a_mask_that_came_back_changed_is_noticed(tmp_path: Path) -> None:
    # One bit of the middle byte: of a mask, when nearly nothing is kept.
    flip = Fault(direction=Direction.READ, nth=1, kind=FaultKind.FLIP)
    tier = Encoded(Faulty(FileMedium([tmp_path]), script=[flip]))
    try:
        tier.write_at(0, page_aligned(bytes(MIB)))
        with pytest.raises(SpillCorrupted, match="came back changed: these 32768 bytes are not a zvc4 blob"):
            read(tier, 0, MIB)
        assert read(tier, 0, MIB) == bytes(MIB)
    finally:
        tier.close()


def test_after_a_failed_write_neither_old_nor_new_bytes_are_read(tmp_path: Path) -> None:
    full = Fault(direction=Direction.WRITE, nth=2, kind=FaultKind.ENOSPC)
    tier = Encoded(Faulty(FileMedium([tmp_path]), script=[full]))
    try:
        tier.write_at(0, page_aligned(relu(MIB)))
        with pytest.raises(SpillFull):
            tier.write_at(0, page_aligned(relu(MIB, seed=1)))
        with pytest.raises(SpillError, match="short read"):
            read(tier, 0, MIB)
    finally:
        tier.close()


def test_the_capacity_counts_bytes_before_the_codec(tmp_path: Path) -> None:
    tier = open_medium(f"file+zvc://{tmp_path}", capacity_bytes=MIB)
    try:
        with pytest.raises(SpillFull):
            tier.write_at(0, page_aligned(bytes(2 * MIB)))
    finally:
        tier.close()


def test_a_lossy_codec_or_tier_is_refused(tmp_path: Path) -> None:
    disk = FileMedium([tmp_path])
    with pytest.raises(BadArgument, match="codec 'fp16' is lossy, so gradients would change"):
        Encoded(disk, codecs=[FP16])
    disk.close()
    with pytest.raises(BadArgument, match="codec 'fp16' is lossy"):
        open_medium(f"file+fp16://{tmp_path}")
    with pytest.raises(BadArgument, match="tier 'null' does not keep its data"):
        Encoded(NullMedium())
    assert list(tmp_path.iterdir()) == []


def test_urls_name_tier_and_codec(tmp_path: Path) -> None:
    tier = open_medium(f"file+zvc://{tmp_path}")
    assert isinstance(tier, Encoded)
    assert tier.directories == (tmp_path,)
    assert (tier.name, tier.lossy) == ("file", False)
    tier.close()
    with pytest.raises(BadArgument, match=r"unknown codec 'zip': choose one of zvc, .*fp16"):
        open_medium(f"file+zip://{tmp_path}")
    with pytest.raises(BadArgument, match="unknown tier 'tape'"):
        open_medium(f"tape+zvc://{tmp_path}")


def test_wrappers_around_it_pass_its_figures_on(tmp_path: Path) -> None:
    tier = Throttle(Encoded(FileMedium([tmp_path])))
    tier.write_at(0, page_aligned(bytes(MIB)))
    assert tier.figures()["disk_written_bytes"] == MIB // 32
    tier.close()
