"""Memory as a tier: it takes what is left of bytes, gives back what is overwritten, and no more than it may."""

from __future__ import annotations

import numpy as np
import pytest

from lowtide.errors import BadArgument, SpillFull
from lowtide.tiers import Encoded, FileMedium, open_medium
from lowtide.tiers.dram import DramMedium, memory_bytes

MIB = 2**20


def zeros_and_ones(nbytes: int, density: float) -> memoryview:
    values = np.zeros(nbytes // 4, np.float32)
    values[: int(density * values.size)] = np.random.default_rng(0).standard_normal(int(density * values.size))
    return memoryview(values.view(np.uint8)).cast("B")


def test_it_takes_what_the_codec_leaves_and_gives_back_what_is_overwritten() -> None:
    dram = DramMedium(16 * MIB)
    tier = Encoded(dram)
    tier.write_at(0, zeros_and_ones(8 * MIB, 0.5))
    first = dram.used_bytes()
    assert first == pytest.approx(8 * MIB * (0.5 + 1 / 32), rel=0.01)
    tier.write_at(0, zeros_and_ones(8 * MIB, 0.1))
    assert dram.used_bytes() == pytest.approx(8 * MIB * (0.1 + 1 / 32), rel=0.01), "the longer blob's end is given back"
    back = bytearray(8 * MIB)
    tier.read_at(0, memoryview(back))
    assert back == zeros_and_ones(8 * MIB, 0.1)
    assert tier.figures()["dram_used_bytes"] == dram.used_bytes()
    tier.close()
    assert dram.used_bytes() == 0


def test_no_more_is_kept_than_it_may_take() -> None:
    dram = DramMedium(4 * MIB)
    tier = Encoded(dram)
    tier.write_at(0, zeros_and_ones(6 * MIB, 0.5))
    with pytest.raises(SpillFull, match=r"it has 3\.\d+ MiB of 4\.00 MiB: state more"):
        tier.write_at(8 * MIB, zeros_and_ones(6 * MIB, 0.5))
    assert dram.used_bytes() <= 4 * MIB
    tier.write_at(8 * MIB, zeros_and_ones(6 * MIB, 0.01))
    dram.release(0, 6 * MIB)
    tier.write_at(16 * MIB, zeros_and_ones(6 * MIB, 0.5))


def test_what_a_measurement_has_written_is_given_back() -> None:
    dram = DramMedium(4 * MIB)
    tier = Encoded(dram)
    tier.write_at(0, zeros_and_ones(MIB, 1.0))
    assert dram.used_bytes() > 0
    tier.reset_figures()
    assert dram.used_bytes() == 0


def test_sizes_have_to_be_stated_and_to_hold_something() -> None:
    with pytest.raises(BadArgument, match="does not state its share"):
        open_medium("dram+zvc:")
    with pytest.raises(BadArgument, match="holds nothing"):
        DramMedium(100)


def test_what_a_tier_takes_of_the_budget_is_known_through_its_codec(tmp_path: object) -> None:
    tier = open_medium("dram+pack32:2MiB")
    assert memory_bytes(tier) == 2 * MIB
    tier.close()
    disk = FileMedium([tmp_path])  # type: ignore[list-item]
    assert memory_bytes(disk) == 0
    disk.close()
