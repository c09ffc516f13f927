"""The residency machine's part in recomputation: what is given up without a copy is made again before it is used."""

from __future__ import annotations

from collections.abc import Iterator

from lowtide.residency.events import (
    Discard,
    Drop,
    Forget,
    Held,
    Needed,
    Pressure,
    Remade,
    Remake,
    Saved,
    Sole,
    Used,
    Watch,
    Write,
    Written,
)
from lowtide.residency.machine import Residence, Residency


def all_of_them(machine: Residency, need_bytes: int) -> Iterator[int]:
    return iter(machine.evictable())


def saved(*, discards: bool) -> Residency:
    machine = Residency(all_of_them, discards=discards)
    machine.on(Saved(7, 100, 0))
    machine.on(Sole(7))
    return machine


def test_a_plan_drops_a_record_and_its_use_makes_it_again() -> None:
    machine = saved(discards=False)
    assert machine.on(Forget((0,))) == [Discard(7)]
    assert machine.where(7) is Residence.DROPPED
    assert list(machine.evictable()) == []
    assert machine.on(Needed(7)) == [Remake(7)]
    machine.on(Remade(7))
    machine.on(Used(7))
    assert machine.where(7) is Residence.RESIDENT
    machine.validate()


def test_a_record_that_somebody_holds_or_uses_is_not_dropped() -> None:
    machine = Residency(all_of_them)
    machine.on(Saved(7, 100, 0))
    assert machine.on(Forget((0,))) == []
    machine.on(Sole(7))
    machine.on(Needed(7))
    assert machine.on(Forget((0, 5))) == []


def test_a_victim_that_turns_out_to_be_held_stays_where_it_is() -> None:
    machine = saved(discards=True)
    assert machine.on(Pressure(50)) == [Discard(7)]
    assert machine.on(Held(7)) == [Watch(7)]
    assert machine.where(7) is Residence.RESIDENT
    assert machine.on(Pressure(50)) == []
    machine.on(Sole(7))
    assert machine.on(Pressure(50)) == [Discard(7)]


def test_who_cannot_run_operators_again_never_hears_of_it() -> None:
    machine = saved(discards=False)
    assert machine.on(Pressure(50)) == [Write(7)]
    machine.on(Written(7, True))
    assert machine.on(Pressure(50)) == [Drop(7)]
