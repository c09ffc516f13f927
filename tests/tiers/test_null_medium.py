from __future__ import annotations

import pytest

from lowtide.errors import SpillFull
from lowtide.tiers import NullMedium


def test_it_says_that_it_loses_bytes() -> None:
    assert NullMedium().lossy


def test_reads_are_zeros_whatever_was_written_or_was_in_memory() -> None:
    medium = NullMedium()
    medium.write_at(0, memoryview(b"\x01" * 100))
    into = bytearray(b"\xff" * (2**20 + 5))
    medium.read_at(0, memoryview(into))
    assert into == bytes(2**20 + 5)


def test_it_can_be_full() -> None:
    with pytest.raises(SpillFull, match="8192 bytes at 4096"):
        NullMedium(capacity_bytes=8192).write_at(4096, memoryview(bytes(8192)))
