"""The time left in an epoch, found without the program's help."""

from __future__ import annotations

import gc

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from lowtide.live.epochs import EpochClock


def loader(batches: int) -> DataLoader[tuple[torch.Tensor, ...]]:
    return DataLoader(TensorDataset(torch.zeros(batches * 2, 3)), batch_size=2)


def test_the_time_left_is_that_of_the_batches_left() -> None:
    clock, told = EpochClock(), []
    for number, _ in enumerate(loader(10)):
        told.append(clock.left_s(now_s=3.0 * number))
    # The first batch begins the clock; after the last one nothing is left to tell.
    assert told[0] is None
    assert told[1:-1] == pytest.approx([3.0 * left for left in range(8, 0, -1)])
    assert told[-1] is None


def test_the_loader_that_feeds_the_steps_is_the_one_that_counts() -> None:
    resting = iter(loader(1000))
    next(resting)
    clock, told = EpochClock(), []
    for number, _ in enumerate(loader(4)):
        told.append(clock.left_s(now_s=float(number)))
    assert told[1:3] == pytest.approx([2.0, 1.0])
    del resting


def test_the_next_epoch_has_a_clock_of_its_own() -> None:
    clock, now_s, told = EpochClock(), 0.0, []
    for pace_s in (1.0, 5.0):
        for _ in loader(4):
            told.append(clock.left_s(now_s))
            now_s += pace_s
        gc.collect()
    assert told[1:3] == pytest.approx([2.0, 1.0])
    assert told[6] == pytest.approx(5.0), "by the pace of this epoch alone"


def test_a_loader_without_a_length_has_no_end() -> None:
    class Endless(IterableDataset[int]):
        def __iter__(self):  # type: ignore[no-untyped-def]
            return iter(range(5))

    clock = EpochClock()
    assert [clock.left_s(float(number)) for number, _ in enumerate(DataLoader(Endless()))] == [None] * 5


def test_a_program_without_a_loader_is_searched_ever_more_seldom(monkeypatch: pytest.MonkeyPatch) -> None:
    searches = []
    monkeypatch.setattr("lowtide.live.epochs._iterators", lambda: searches.append(1) or [])
    clock = EpochClock()
    for number in range(1000):
        assert clock.left_s(float(number)) is None
    assert 5 <= len(searches) <= 12
