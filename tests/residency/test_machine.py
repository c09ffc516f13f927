"""The residency machine alone: every transition by itself, then random histories over a backend that is made up."""

from __future__ import annotations

import math
from collections.abc import Iterator

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from lowtide.plan.policy import by_age
from lowtide.residency.events import (
    Arrived,
    Command,
    Discard,
    Due,
    Event,
    Fetch,
    Gone,
    Held,
    Keep,
    Leave,
    Named,
    Needed,
    NoRoom,
    Prefetch,
    Pressure,
    ReadFailed,
    Release,
    Released,
    Remade,
    Remake,
    Saved,
    Sole,
    Unmakeable,
    Used,
    Watch,
    Write,
    WriteFailed,
    Written,
)
from lowtide.residency.machine import Residence, Residency


def everything(view: Residency, need_bytes: int) -> Iterator[int]:
    """Give up what can go, lowest number first, until that is enough."""
    for record in view.evictable():
        if need_bytes <= 0:
            return
        yield record
        need_bytes -= view.nbytes(record)


def machine_with(*events: Event, swapped: frozenset[int] = frozenset()) -> Residency:
    machine = Residency(everything)
    machine.follow(swapped=swapped, uses={})
    for event in events:
        machine.on(event)
        machine.validate()
    return machine


SAVED = Saved(1, 100, 0)
GONE_OUT = (SAVED, Sole(1), Pressure(1), Written(1, resident=False))
CLEAN = (*GONE_OUT, Due((0,)), Arrived(1))


# ---- one transition each ----


def test_what_is_saved_is_resident_and_nothing_happens() -> None:
    machine = machine_with()
    assert machine.on(SAVED) == []
    assert machine.where(1) is Residence.RESIDENT


def test_a_record_that_the_plan_swaps_is_written_when_nobody_else_holds_it() -> None:
    machine = machine_with(SAVED, swapped=frozenset({0}))
    assert machine.on(Sole(1)) == [Write(1)]
    assert machine.where(1) is Residence.LEAVING


def discarding(*events: Event) -> Residency:
    machine = Residency(everything)
    machine.follow(swapped=frozenset(), uses={}, discarded=frozenset({0}))
    for event in events:
        machine.on(event)
        machine.validate()
    return machine


def test_a_record_that_the_plan_discards_is_given_up_without_a_copy_and_made_again_when_it_is_needed() -> None:
    machine = discarding(SAVED)
    assert machine.on(Sole(1)) == [Discard(1)]
    assert machine.where(1) is Residence.DISCARDED
    assert machine.on(Pressure(1)) == []
    assert machine.on(Needed(1)) == [Remake(1)]
    machine.on(Remade(1))
    assert machine.where(1) is Residence.RESIDENT
    machine.on(Used(1))
    assert machine.on(Sole(1)) == [], "its gap is over: it is not given up once more"


def test_a_record_that_was_made_with_others_stays_until_its_own_use() -> None:
    machine = discarding(SAVED, Sole(1), Remade(1))
    assert machine.on(Sole(1)) == []


def test_a_record_that_cannot_be_made_again_is_written() -> None:
    machine = discarding(SAVED, Sole(1))
    assert machine.on(Unmakeable(1)) == [Write(1)]
    assert machine.where(1) is Residence.LEAVING


def test_a_record_that_is_held_again_is_not_given_up() -> None:
    machine = discarding(SAVED, Sole(1))
    assert machine.on(Held(1)) == [Watch(1)]
    assert machine.where(1) is Residence.RESIDENT
    assert machine.on(Sole(1)) == [Discard(1)]


@pytest.mark.parametrize(("discard", "goes"), [(True, Discard(1)), (False, Write(1))])
def test_a_record_leaves_again_with_or_without_a_copy(discard: bool, goes: Command) -> None:
    machine = machine_with(SAVED)
    assert machine.on(Leave((0,), discard=discard)) == [Watch(1)]
    assert machine.on(Sole(1)) == [goes]


def test_a_record_that_is_only_held_gets_its_key_when_it_is_saved() -> None:
    machine = machine_with(Saved(1, 100, -1), swapped=frozenset({0}))
    assert machine.is_unnamed(1)
    assert machine.on(Named(1, 0)) == []
    assert not machine.is_unnamed(1)
    assert machine.record_of(0) == 1
    assert machine.record_of(-1) is None
    assert machine.on(Sole(1)) == [Write(1)]


def test_a_record_that_the_plan_keeps_is_not_written_when_nobody_else_holds_it() -> None:
    machine = machine_with(SAVED, swapped=frozenset({7}))
    assert machine.on(Sole(1)) == []
    assert machine.where(1) is Residence.RESIDENT


def test_pressure_writes_what_can_go() -> None:
    machine = machine_with(SAVED, Sole(1))
    assert machine.on(Pressure(1)) == [Write(1)]
    assert machine.where(1) is Residence.LEAVING


def test_pressure_never_writes_what_the_program_still_holds() -> None:
    machine = machine_with(SAVED)
    assert machine.on(Pressure(1)) == []


def test_pressure_never_writes_what_is_pinned() -> None:
    machine = machine_with(SAVED, Sole(1), Needed(1))
    assert machine.on(Pressure(1)) == []


def test_pressure_waits_for_what_is_leaving_instead_of_sending_more() -> None:
    machine = machine_with(SAVED, Saved(2, 100, 1), Sole(1), Sole(2), Pressure(50))
    assert machine.on(Pressure(100)) == []
    assert machine.on(Pressure(101)) == [Write(2)]


def test_pressure_releases_a_clean_record_without_a_write() -> None:
    machine = machine_with(*CLEAN)
    assert machine.where(1) is Residence.CLEAN
    assert machine.on(Pressure(1)) == [Release(1)]


def test_a_released_record_is_away() -> None:
    assert machine_with(*CLEAN, Pressure(1), Released(1)).where(1) is Residence.AWAY


def test_a_written_record_is_away_unless_it_was_kept() -> None:
    assert machine_with(SAVED, Sole(1), Pressure(1), Written(1, resident=False)).where(1) is Residence.AWAY
    assert machine_with(SAVED, Sole(1), Pressure(1), Written(1, resident=True)).where(1) is Residence.CLEAN


def test_a_failed_write_keeps_the_record_and_is_never_tried_again() -> None:
    machine = machine_with(SAVED, Sole(1), Pressure(1), WriteFailed(1))
    assert machine.where(1) is Residence.RESIDENT
    assert machine.evictable() == []
    assert machine.on(Pressure(1)) == []


def test_needing_a_resident_record_takes_nothing() -> None:
    assert machine_with(SAVED).on(Needed(1)) == []


def test_needing_a_record_that_is_away_fetches_it() -> None:
    machine = machine_with(*GONE_OUT)
    assert machine.on(Needed(1)) == [Fetch(1)]
    assert machine.where(1) is Residence.ARRIVING


def test_needing_a_record_that_is_arriving_waits_for_it() -> None:
    assert machine_with(*GONE_OUT, Due((0,))).on(Needed(1)) == [Fetch(1)]


def test_needing_a_record_that_is_leaving_keeps_it() -> None:
    machine = machine_with(SAVED, Sole(1), Pressure(1))
    assert machine.on(Needed(1)) == [Keep(1)]
    assert machine.on(Written(1, resident=True)) == []
    assert machine.where(1) is Residence.CLEAN


def test_an_arrived_record_is_clean_and_can_go_until_it_is_needed() -> None:
    machine = machine_with(*CLEAN)
    assert machine.evictable() == [1]
    assert machine.on(Needed(1)) == []
    assert machine.evictable() == []


def test_a_used_record_counts_as_never_written_because_its_user_may_have_changed_it() -> None:
    machine = machine_with(*CLEAN, Needed(1), Used(1))
    assert machine.where(1) is Residence.RESIDENT
    assert machine.on(Pressure(1)) == [Write(1)]


def test_a_record_used_while_it_leaves_stays_and_counts_as_never_written() -> None:
    machine = machine_with(SAVED, Sole(1), Pressure(1), Needed(1), Used(1))
    assert machine.on(Held(1)) == [Watch(1)]
    assert machine.where(1) is Residence.RESIDENT


def test_a_record_needed_twice_at_once_is_pinned_until_both_are_done() -> None:
    machine = machine_with(SAVED, Sole(1), Needed(1), Needed(1), Used(1))
    assert machine.on(Pressure(1)) == []
    machine.on(Used(1))
    assert machine.on(Pressure(1)) == [Write(1)]


def test_a_failed_read_leaves_the_record_away_and_the_next_need_fetches_again() -> None:
    machine = machine_with(*GONE_OUT, Needed(1), ReadFailed(1), Used(1))
    assert machine.where(1) is Residence.AWAY
    assert machine.moving_bytes() == 0
    assert machine.on(Needed(1)) == [Fetch(1)]


def test_what_is_due_is_prefetched_if_it_is_away_and_kept_if_it_is_leaving() -> None:
    machine = machine_with(*GONE_OUT, Saved(2, 100, 1), Sole(2), Pressure(100), Saved(3, 100, 2))
    assert machine.on(Due((0, 1, 2, 9))) == [Prefetch(1), Keep(2)]
    assert machine.where(1) is Residence.ARRIVING


def test_a_prefetch_without_room_is_tried_again_later_and_once() -> None:
    machine = machine_with(*GONE_OUT, Due((0,)), NoRoom(1))
    assert machine.where(1) is Residence.AWAY
    assert machine.retry_deferred() == [Prefetch(1)]
    assert machine.retry_deferred() == []


def test_a_deferred_prefetch_of_a_record_that_came_back_or_went_is_forgotten() -> None:
    machine = machine_with(*GONE_OUT, Due((0,)), NoRoom(1), Needed(1), Arrived(1), Used(1))
    assert machine.retry_deferred() == []
    machine = machine_with(*GONE_OUT, Due((0,)), NoRoom(1), Gone(1))
    assert machine.retry_deferred() == []


def test_a_record_that_turns_out_to_be_held_stays_and_is_watched() -> None:
    machine = machine_with(SAVED, Sole(1), Pressure(1))
    assert machine.on(Held(1)) == [Watch(1)]
    assert machine.where(1) is Residence.RESIDENT
    assert machine.evictable() == []
    machine.on(Sole(1))
    assert machine.evictable() == [1]


def test_a_clean_record_that_turns_out_to_be_held_stays_clean() -> None:
    machine = machine_with(*CLEAN, Pressure(1))
    assert machine.on(Held(1)) == [Watch(1)]
    assert machine.where(1) is Residence.CLEAN


def test_what_the_plan_sends_away_again_leaves_once_it_is_free() -> None:
    machine = machine_with(*CLEAN)
    assert machine.on(Leave((0,))) == [Watch(1)]
    assert machine.on(Sole(1)) == [Release(1)]


def test_a_record_needed_after_leave_does_not_leave() -> None:
    machine = machine_with(*CLEAN, Leave((0,)), Needed(1))
    assert machine.on(Sole(1)) == []
    assert machine.on(Used(1)) == []
    assert machine.on(Sole(1)) == []


def test_a_plan_taken_up_in_mid_step_sends_away_only_what_was_not_used_yet() -> None:
    machine = machine_with(SAVED, Sole(1), Saved(2, 100, 1), Sole(2))
    for _ in range(5):
        machine.tick()
    assert machine.follow(swapped=frozenset({0, 1}), uses={0: (3, 9), 1: (7,)}) == [Write(2)]


def test_a_record_that_is_gone_is_no_longer_known() -> None:
    machine = machine_with(SAVED, Sole(1), Pressure(1), Gone(1))
    assert machine.where(1) is None
    assert machine.records() == []
    assert machine.leaving_bytes() == machine.moving_bytes() == 0


@pytest.mark.parametrize(
    "event",
    [
        Sole(9),
        Needed(9),
        Used(9),
        Written(9, resident=False),
        WriteFailed(9),
        Arrived(9),
        ReadFailed(9),
        Held(9),
        Gone(9),
    ],
)
def test_events_of_a_record_that_is_gone_are_ignored(event: Event) -> None:
    assert machine_with(SAVED).on(event) == []


def test_following_a_plan_in_the_middle_of_a_step_sends_away_what_it_swaps() -> None:
    machine = machine_with(SAVED, Saved(2, 100, 1), Sole(1), Sole(2))
    assert machine.follow(swapped=frozenset({1}), uses={}) == [Write(2)]


def test_a_reactive_step_sends_nothing_away_by_itself() -> None:
    machine = machine_with(SAVED, swapped=frozenset({0}))
    machine.react()
    assert machine.on(Sole(1)) == []


def test_a_new_step_numbers_keys_afresh_and_still_knows_old_records() -> None:
    machine = machine_with(*GONE_OUT)
    machine.begin_step()
    machine.on(Saved(2, 50, 0))
    machine.validate()
    assert machine.on(Due((0,))) == []
    machine.on(Gone(1))
    machine.validate()
    assert machine.on(Sole(2)) == []
    assert machine.on(Needed(1)) == []


def test_the_next_use_is_the_first_that_is_not_past() -> None:
    machine = Residency(everything)
    machine.follow(swapped=frozenset(), uses={0: (3, 5)})
    machine.on(SAVED)
    assert machine.next_use(1) == 3
    for _ in range(4):
        machine.tick()
    assert machine.next_use(1) == 5
    for _ in range(2):
        machine.tick()
    assert math.isinf(machine.next_use(1))


def test_bytes_in_flight_count_what_nobody_waits_for() -> None:
    machine = machine_with(*GONE_OUT, Due((0,)), Saved(2, 30, 1), Sole(2), Pressure(1))
    assert machine.leaving_bytes() == 30
    assert machine.moving_bytes() == 130
    machine.on(Needed(1))
    assert machine.moving_bytes() == 30


@pytest.mark.parametrize("wanted", [Due((0,)), Needed(1)])
def test_what_is_wanted_back_while_it_leaves_is_no_room(wanted: Event) -> None:
    machine = machine_with(SAVED, Sole(1), Pressure(100))
    assert machine.where(1) is Residence.LEAVING
    assert machine.on(wanted) == [Keep(1)]
    machine.on(Saved(2, 30, 1))
    machine.on(Sole(2))
    assert machine.on(Pressure(1)) == [Write(2)]
    assert machine.leaving_bytes() == 30


def test_validate_notices_a_use_without_a_need() -> None:
    machine = Residency(everything)
    machine.on(SAVED)
    machine.on(Used(1))
    with pytest.raises(AssertionError, match="used more often"):
        machine.validate()


# ---- random histories ----


class Histories(RuleBasedStateMachine):
    """The machine over a backend whose transfers end in any order, well or not, and are reported late.

    What the backend knows is the truth; the machine learns of it only through events, as it does from real threads.
    Records are chosen by any number, modulo how many there are, so that every rule mostly has something to do.
    """

    def __init__(self) -> None:
        super().__init__()
        self.machine = Residency(everything)
        self.truth: dict[int, Residence] = {}
        self.key_of: dict[int, int] = {}
        self.held: set[int] = set()
        self.to_stay: set[int] = set()
        self.wanted: set[int] = set()
        self.watched: set[int] = set()
        self.pinned: dict[int, int] = {}
        self.finished: set[int] = set()
        self.on_tier: set[int] = set()
        self.handed_out: set[int] = set()
        self.unreported: list[Event] = []
        # What the machine was told, and must not forget.
        self.told_free: set[int] = set()
        self.told_failed: set[int] = set()
        self.told_no_room: set[int] = set()
        self.next_record = 1
        self.next_key = 0
        self.room = True

    @initialize(swapped=st.frozensets(st.integers(0, 8)))
    def begin(self, swapped: frozenset[int]) -> None:
        self.run(self.machine.follow(swapped=swapped, uses={key: (key + 4, key + 9) for key in range(9)}))

    # -- the backend --

    def run(self, commands: list[Command]) -> None:
        for command in commands:
            record = command.record
            match command:
                case Write():
                    self.check_may_leave(record)
                    assert record not in self.told_failed, "a write that failed is tried again"
                    if record in self.held or self.truth.get(record) is not Residence.RESIDENT:
                        self.tell_held(record)
                    else:
                        self.truth[record] = Residence.LEAVING
                        self.to_stay.discard(record)
                        self.wanted.discard(record)
                        self.handed_out.discard(record)
                case Release():
                    self.check_may_leave(record)
                    if record in self.held or self.truth.get(record) is not Residence.CLEAN:
                        self.tell_held(record)
                    else:
                        assert record in self.on_tier, "a record is released that the tier does not hold"
                        self.truth[record] = Residence.AWAY
                        self.machine.on(Released(record))
                case Keep():
                    self.to_stay.add(record)
                    if self.truth.get(record) is Residence.LEAVING:
                        self.wanted.add(record)
                case Prefetch():
                    self.told_no_room.discard(record)
                    if self.truth.get(record) is not Residence.AWAY:
                        continue  # under way or there already
                    if self.room:
                        self.truth[record] = Residence.ARRIVING
                    else:
                        self.told_no_room.add(record)
                        self.machine.on(NoRoom(record))
                case Watch():
                    self.watched.add(record)
                    self.told_free.discard(record)
                case Fetch():
                    raise AssertionError("a fetch comes only from a need")

    def check_may_leave(self, record: int) -> None:
        assert not self.pinned.get(record), "a pinned record leaves"
        assert record in self.told_free, "a record leaves that the program was said to hold"

    def tell_held(self, record: int) -> None:
        self.told_free.discard(record)
        self.run(self.machine.on(Held(record)))

    def settle(self) -> None:
        for record in sorted(self.watched - self.held):
            if self.truth.get(record) not in (None, Residence.AWAY):
                self.watched.discard(record)
                self.unreported.append(Sole(record))
        events, self.unreported = self.unreported, []
        for event in events:
            match event:
                case Sole(record):
                    self.told_free.add(record)
                case Held(record):
                    self.told_free.discard(record)
                case WriteFailed(record):
                    self.told_failed.add(record)
                case Gone(record):
                    self.told_no_room.discard(record)
            self.run(self.machine.on(event))
        self.machine.validate()

    def end(self, record: int, *, well: bool) -> None:
        """End a transfer; it is reported at the next settling."""
        if self.truth[record] is Residence.LEAVING:
            if not well:
                self.truth[record] = Residence.RESIDENT
                self.unreported.append(WriteFailed(record))
            elif record in self.handed_out:  # it may have been changed while it was written
                self.truth[record] = Residence.RESIDENT
                self.unreported.append(Held(record))
            else:
                self.on_tier.add(record)
                stays = record in self.wanted or record in self.held
                self.truth[record] = Residence.CLEAN if stays else Residence.AWAY
                self.unreported.append(Written(record, resident=stays))
        else:
            assert record in self.on_tier, "a record is read that was never written"
            self.truth[record] = Residence.CLEAN if well else Residence.AWAY
            self.unreported.append(Arrived(record) if well else ReadFailed(record))
        if record in self.finished:
            self.forget(record)

    def forget(self, record: int) -> None:
        del self.truth[record]
        self.unreported.append(Gone(record))

    def moving(self) -> list[int]:
        return [r for r, where in self.truth.items() if where in (Residence.LEAVING, Residence.ARRIVING)]

    def usable(self) -> list[int]:
        return [record for record in self.truth if record not in self.finished]

    # -- the program --

    @rule(nbytes=st.integers(1, 1000), held=st.booleans())
    def save(self, nbytes: int, held: bool) -> None:
        self.settle()
        record, self.next_record = self.next_record, self.next_record + 1
        self.truth[record] = Residence.RESIDENT
        self.key_of[record] = self.next_key
        if held:
            self.held.add(record)
        self.watched.add(record)
        self.run(self.machine.on(Saved(record, nbytes, self.next_key)))
        self.next_key += 1
        self.machine.tick()

    @precondition(lambda self: self.held)
    @rule(which=st.integers(0, 99))
    def let_go(self, which: int) -> None:
        self.held.discard(sorted(self.held)[which % len(self.held)])
        self.settle()

    @precondition(lambda self: self.usable())
    @rule(which=st.integers(0, 99), late_ends=st.booleans(), well=st.booleans(), pressed=st.booleans())
    def use(self, which: int, late_ends: bool, well: bool, pressed: bool) -> None:
        record = self.usable()[which % len(self.usable())]
        self.settle()
        commands = self.machine.on(Needed(record))
        self.pinned[record] = self.pinned.get(record, 0) + 1
        if late_ends and record in self.moving():
            self.end(record, well=well)  # between the machine's answer and what is done about it
        self.run([command for command in commands if isinstance(command, Keep)])
        if pressed:  # by another thread
            self.press(3000)
        while self.truth[record] in (Residence.AWAY, Residence.ARRIVING):
            if self.truth[record] is Residence.AWAY:
                self.truth[record] = Residence.ARRIVING
            self.end(record, well=True)
        if self.truth[record] is Residence.CLEAN:
            self.truth[record] = Residence.RESIDENT
        self.handed_out.add(record)
        self.held.add(record)
        self.settle()
        self.machine.on(Used(record))
        self.pinned[record] -= 1
        self.machine.tick()

    @precondition(lambda self: self.moving())
    @rule(which=st.integers(0, 99), well=st.booleans())
    def transfer_ends(self, which: int, well: bool) -> None:
        self.end(self.moving()[which % len(self.moving())], well=well)

    @rule(nbytes=st.integers(1, 3000))
    def press(self, nbytes: int) -> None:
        self.settle()
        self.run(self.machine.on(Pressure(nbytes)))

    @precondition(lambda self: self.usable())
    @rule(which=st.integers(0, 99), room=st.booleans())
    def fall_due(self, which: int, room: bool) -> None:
        self.room = room
        self.settle()
        self.run(self.machine.on(Due((self.key_of[self.usable()[which % len(self.usable())]], 99))))

    @precondition(lambda self: self.usable())
    @rule(which=st.integers(0, 99))
    def leave_again(self, which: int) -> None:
        self.settle()
        self.run(self.machine.on(Leave((self.key_of[self.usable()[which % len(self.usable())]], 99))))

    @rule(room=st.booleans())
    def retry(self, room: bool) -> None:
        self.settle()
        self.room = room
        waiting = {record for record in self.told_no_room if self.machine.where(record) is Residence.AWAY}
        commands = self.machine.retry_deferred()
        assert waiting <= {command.record for command in commands}, "a prefetch without room is forgotten"
        self.run(commands)

    @rule(swapped=st.frozensets(st.integers(0, 20), max_size=5))
    def change_plan(self, swapped: frozenset[int]) -> None:
        self.settle()
        self.run(self.machine.follow(swapped=swapped, uses={}))

    @rule()
    def next_step(self) -> None:
        self.settle()
        self.machine.begin_step()
        self.machine.react()
        self.told_no_room.clear()
        self.next_key = 0

    @precondition(lambda self: len(self.usable()) > 3)
    @rule(which=st.integers(0, 99))
    def release(self, which: int) -> None:
        record = self.usable()[which % len(self.usable())]
        self.held.discard(record)
        if record in self.moving():
            self.finished.add(record)
        else:
            self.forget(record)

    @invariant()
    def what_is_on_the_tier_only_was_written_before(self) -> None:
        away = {record for record, where in self.truth.items() if where is Residence.AWAY}
        assert away <= self.on_tier

    @invariant()
    def the_oldest_are_those_that_sorting_finds(self) -> None:
        for need_bytes in (150, 10**9):
            assert list(self.machine.oldest(need_bytes)) == by_age(self.machine, need_bytes)

    @invariant()
    def bytes_in_flight_are_those_of_the_records_that_move(self) -> None:
        leaving = {one for one in self.machine.records() if self.machine.where(one) is Residence.LEAVING}
        expected = sum(self.machine.nbytes(record) for record in leaving - self.to_stay)
        assert self.machine.leaving_bytes() == expected

    def teardown(self) -> None:
        self.settle()
        while self.moving():
            for record in self.moving():
                self.end(record, well=True)
            self.settle()  # which may send more away
        assert self.machine.moving_bytes() == 0, "the machine waits for a transfer that ended"
        assert {record: self.machine.where(record) for record in self.machine.records()} == self.truth


TestHistories = Histories.TestCase
TestHistories.settings = settings(max_examples=250, stateful_step_count=60, deadline=None)
