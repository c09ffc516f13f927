"""Records that are ranges of pages: they leave whoever holds them, and only changed bytes are written."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from lowtide.residency import events as e
from lowtide.residency.machine import Residence, Residency


def oldest(machine: Residency, need_bytes: int) -> Iterator[int]:
    return iter(machine.oldest(need_bytes))


@pytest.fixture
def machine() -> Residency:
    machine = Residency(oldest, pages=True)
    machine.on(e.Saved(7, 100, 7))
    return machine


def leave(machine: Residency, place: str = "spill") -> list[e.Command]:
    return machine.on(e.Leave((7,), place=place))


def away_and_back(machine: Residency) -> None:
    assert leave(machine) == [e.Write(7)]
    machine.on(e.Written(7, False))
    assert machine.on(e.Needed(7)) == [e.Fetch(7)]
    machine.on(e.Arrived(7))


def test_a_range_may_leave_from_the_start_whoever_holds_it(machine: Residency) -> None:
    assert machine.evictable() == machine.oldest(1) == [7]
    assert leave(machine) == [e.Write(7)]


def test_a_range_in_use_leaves_when_its_operator_ends(machine: Residency) -> None:
    assert machine.on(e.Needed(7)) == []
    assert leave(machine) == []
    assert machine.evictable() == []
    assert machine.on(e.Used(7)) == [e.Write(7)]


def test_what_was_only_read_is_given_up_without_a_write(machine: Residency) -> None:
    away_and_back(machine)
    machine.on(e.Used(7, wrote=False))
    assert machine.clean(7)
    assert leave(machine) == [e.Release(7)]


def test_what_was_written_is_written_out_again(machine: Residency) -> None:
    away_and_back(machine)
    machine.on(e.Used(7, wrote=True))
    assert not machine.clean(7)
    assert leave(machine) == [e.Write(7)]


def test_a_copy_in_one_place_is_none_in_another_and_stays_good_meanwhile(machine: Residency) -> None:
    away_and_back(machine)
    machine.on(e.Used(7, wrote=False))
    assert leave(machine, "host") == [e.Write(7)]
    machine.on(e.Written(7, False))
    machine.on(e.Needed(7))
    machine.on(e.Arrived(7))
    machine.on(e.Used(7, wrote=False))
    assert leave(machine) == [e.Release(7)]


def test_a_write_that_was_overtaken_by_a_change_leaves_no_copy(machine: Residency) -> None:
    leave(machine)
    assert machine.on(e.Needed(7)) == [e.Keep(7)]
    machine.on(e.Used(7, wrote=True))
    machine.on(e.Written(7, True))
    assert machine.where(7) is Residence.RESIDENT
    assert leave(machine) == [e.Write(7)]


def test_a_write_that_was_kept_and_not_overtaken_leaves_one(machine: Residency) -> None:
    leave(machine)
    machine.on(e.Needed(7))
    machine.on(e.Used(7, wrote=False))
    machine.on(e.Written(7, True))
    assert machine.where(7) is Residence.CLEAN
    assert leave(machine) == [e.Release(7)]


@pytest.mark.parametrize("away", [False, True])
def test_what_a_step_finds_in_a_tier_is_known(machine: Residency, away: bool) -> None:
    machine.on(e.Found(7, "spill", away))
    assert machine.where(7) is (Residence.AWAY if away else Residence.CLEAN)
    assert machine.on(e.Needed(7)) == ([e.Fetch(7)] if away else [])


def test_what_was_made_again_has_no_copy(machine: Residency) -> None:
    away_and_back(machine)
    machine.on(e.Used(7, wrote=False))
    assert machine.on(e.Forget((7,))) == [e.Discard(7)]
    assert machine.on(e.Needed(7)) == [e.Remake(7)]
    machine.on(e.Remade(7))
    machine.on(e.Used(7, wrote=False))
    assert leave(machine) == [e.Write(7)]


def test_under_pressure_clean_ranges_go_without_a_write(machine: Residency) -> None:
    away_and_back(machine)
    machine.on(e.Used(7, wrote=False))
    assert machine.on(e.Pressure(50)) == [e.Release(7)]
