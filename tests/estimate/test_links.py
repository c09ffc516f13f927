"""Which link a runtime plans with: the disk's, kept or measured once; a disk with a codec before it is another."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from lowtide.core.machine import Link, Machine
from lowtide.estimate import links
from lowtide.estimate.calibrate import SPILL, save_machine
from lowtide.testing.stores import page_aligned, some_bytes
from lowtide.tiers import Encoded, FileMedium, Medium


@pytest.fixture
def measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Medium]:
    """The media that were measured, each with a rate of its own."""
    seen: list[Medium] = []

    def measure_link(medium: Medium, *, work: Callable[[], object]) -> Link:
        work()
        medium.write_at(0, page_aligned(some_bytes(4096)))
        seen.append(medium)
        return Link(write_bytes_per_s=float(len(seen)), read_bytes_per_s=1.0)

    monkeypatch.setenv("LOWTIDE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(links, "_measured", {})
    monkeypatch.setattr(links, "measure_link", measure_link)
    return seen


def test_a_disk_is_measured_once_with_a_codec_and_once_without(tmp_path: Path, measured: list[Medium]) -> None:
    plain, encoded = FileMedium([tmp_path]), Encoded(FileMedium([tmp_path]))
    rates = [links.machine_for(medium).links[SPILL].write_bytes_per_s for medium in (plain, encoded, plain, encoded)]
    assert rates == [1.0, 2.0, 1.0, 2.0]
    assert measured == [plain, encoded]
    assert set(encoded.figures().values()) == {0}, "the training's own traffic counts"
    for medium in (plain, encoded):
        medium.close()


def test_what_was_measured_of_the_disk_is_not_taken_for_the_codec(tmp_path: Path, measured: list[Medium]) -> None:
    kept = Machine(name="m", links={SPILL: Link(write_bytes_per_s=7.0, read_bytes_per_s=7.0)}, copy_bytes_per_s=1.0)
    save_machine(kept, directories=[tmp_path])
    plain, encoded = FileMedium([tmp_path]), Encoded(FileMedium([tmp_path]))
    assert links.machine_for(plain).links[SPILL].write_bytes_per_s == 7.0
    assert links.machine_for(encoded).links[SPILL].write_bytes_per_s == 1.0
    assert measured == [encoded]
    for medium in (plain, encoded):
        medium.close()
