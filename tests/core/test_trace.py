from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

from hypothesis import given, settings

from lowtide.core.trace import Gap, Kind, Phase, Reach, Save, Storage, Trace
from lowtide.testing.traces import Step, make_trace, touched_traces, traces, training_trace


def one_storage(*saves: Save, count: int = 20, reads: dict[int, tuple[int, ...]] | None = None) -> Trace:
    touched = reads or {}
    steps = [Step(name=f"op{k}", phase=Phase.FORWARD, duration_s=1.0, reads=touched.get(k, ())) for k in range(count)]
    storages = [Storage(nbytes=10, kind=Kind.ACTIVATION, first_op=0, last_op=count)]
    return make_trace(steps, storages, saves, static_bytes=5)


SAVE = Save(storage=0, packed_op=1, free_op=3, uses=(8, 15), released_op=16)


def gap(after_op: int, before_op: int) -> Gap:
    return Gap(storage=0, after_op=after_op, before_op=before_op)


def test_gaps_lie_between_the_hold_of_the_program_and_the_uses() -> None:
    assert one_storage(SAVE).gaps() == (gap(3, 8), gap(9, 15))


def test_a_gap_begins_after_the_last_operator_that_touches_the_storage() -> None:
    # Unpacked before operator 8, still read by the same node at 9 and 11.
    assert one_storage(SAVE, reads={9: (0,), 11: (0,)}).gaps() == (gap(3, 8), gap(12, 15))


def test_consecutive_uses_leave_no_gap() -> None:
    assert one_storage(replace(SAVE, uses=(8, 9))).gaps() == (gap(3, 8),)


def test_a_storage_that_the_program_holds_has_no_gap() -> None:
    assert one_storage(replace(SAVE, free_op=None)).gaps() == ()
    other = replace(SAVE, packed_op=2, free_op=None, uses=(18,))
    assert one_storage(SAVE, other).gaps() == ()


def test_a_save_that_is_never_used_is_a_gap_until_its_release() -> None:
    assert one_storage(replace(SAVE, uses=())).gaps() == (gap(3, 16),)


def test_two_saves_of_one_storage_share_their_uses() -> None:
    other = Save(storage=0, packed_op=2, free_op=5, uses=(11,), released_op=12)
    assert one_storage(SAVE, other).gaps() == (gap(5, 8), gap(9, 11), gap(12, 15))


def test_the_floor_counts_every_gap_as_empty() -> None:
    trace = one_storage(SAVE)
    assert trace.peak_bytes == 15
    assert trace.floor_bytes() == 15
    quiet = replace(
        trace, ops=tuple(replace(op, peak_bytes=100 if index == 5 else 50) for index, op in enumerate(trace.ops))
    )
    assert quiet.floor_bytes() == 90
    floor_op = quiet.floor_op()
    assert floor_op is not None
    assert floor_op.name == "op5"


def test_an_empty_trace_needs_what_is_static() -> None:
    trace = Trace(ops=(), storages=(), saves=(), static_bytes=7)
    assert trace.floor_bytes() == trace.peak_bytes == 7
    assert trace.floor_op() is None
    assert trace.duration_s == 0


@given(trace=traces())
@settings(max_examples=100, deadline=None)
def test_nothing_touches_a_storage_inside_its_gaps_and_gaps_of_one_storage_are_apart(trace: Trace) -> None:
    gaps = trace.gaps()
    assert list(gaps) == sorted(set(gaps))
    for one in gaps:
        assert 0 <= one.after_op < one.before_op <= len(trace.ops)
        for op in trace.ops[one.after_op : one.before_op]:
            assert one.storage not in (*op.reads, *op.writes)
    for first, second in pairwise(gaps):
        assert first.storage != second.storage or first.before_op < second.after_op


def touched(first_op: int, last_op: int, *touches: int, kind: Kind = Kind.PARAM, count: int = 10) -> Trace:
    steps = [
        Step(name=f"op{k}", phase=Phase.FORWARD, duration_s=1.0, reads=(0,) if k in touches else ())
        for k in range(count)
    ]
    trace = make_trace(steps, [Storage(nbytes=10, kind=kind, first_op=first_op, last_op=last_op)], (), static_bytes=5)
    return replace(trace, reach=Reach.TOUCHED)


def test_gaps_between_touches_wrap_where_the_storage_lives_on() -> None:
    assert touched(-1, 10, 2, 3, 7).gaps() == (gap(4, 7), gap(8, 12))


def test_a_storage_that_lives_on_untouched_is_one_gap_of_the_whole_step() -> None:
    assert touched(-1, 10).gaps() == (gap(0, 10),)


def test_a_storage_of_the_step_has_a_last_gap_until_its_release() -> None:
    assert touched(1, 8, 1, 4).gaps() == (gap(2, 4), gap(5, 9))  # away while operator 8 runs, which frees it
    assert touched(1, 9, 1, 4).gaps() == (gap(2, 4), gap(5, 10))
    assert touched(1, 10, 1, 4).gaps() == (gap(2, 4), gap(5, 10))
    assert touched(1, 5, 1, 4).gaps() == (gap(2, 4), gap(5, 6))
    assert touched(1, 4, 1, 4).gaps() == (gap(2, 4),)


def inherited(*touches: int, freed_op: int = 2, kind: Kind = Kind.GRAD, heir_kind: Kind = Kind.GRAD) -> Trace:
    """Storage 0 is made by operator 4, touched by 5 and 7 and left alive; storage 1 was there and is freed."""
    reads = {5: (0,), 7: (0,), **dict.fromkeys(touches, (1,))}
    steps = [
        Step(name=f"op{k}", phase=Phase.FORWARD, duration_s=1.0, reads=reads.get(k, ()), writes=(0,) if k == 4 else ())
        for k in range(10)
    ]
    made = Storage(nbytes=10, kind=kind, first_op=4, last_op=10)
    found = Storage(nbytes=10, kind=heir_kind, first_op=-1, last_op=freed_op)
    return make_trace(steps, [made, found], (), static_bytes=5, reach=Reach.TOUCHED)


def test_what_a_step_leaves_to_the_next_is_away_until_that_has_freed_it() -> None:
    trace = inherited()
    assert dict(trace.heirs()) == {0: 1}
    assert trace.gaps() == (gap(6, 7), gap(8, 13))
    # Operators 4, 5 and 7 touch it, or make it; at no other is it in memory.
    assert trace.need_bytes() == [5, 5, 5, 5, 15, 15, 5, 15, 5, 5]
    assert inherited(freed_op=0).gaps() == (gap(6, 7), gap(8, 11))


def test_what_the_next_step_still_touches_is_away_until_then() -> None:
    assert inherited(1).gaps() == (gap(6, 7), gap(8, 11))
    assert inherited(0, 2).gaps() == (gap(6, 7), gap(8, 10))


def test_heirs_are_of_one_kind_and_freed_before_there_is_another() -> None:
    for trace in (inherited(freed_op=4), inherited(freed_op=6), inherited(heir_kind=Kind.OTHER)):
        assert not trace.heirs()
        assert trace.gaps() == (gap(6, 7), gap(8, 10))
    assert not replace(inherited(), reach=Reach.SAVED).heirs()


def test_heirs_are_found_in_order() -> None:
    trace = inherited()
    made, found = trace.storages
    several = replace(trace, storages=(found, made, replace(made, nbytes=7), made, found, made))
    assert dict(several.heirs()) == {1: 0, 3: 4}


def test_what_the_last_operator_touches_cannot_leave_before_the_step_ends() -> None:
    trace = inherited()
    ops = (*trace.ops[:-1], replace(trace.ops[-1], reads=(0,)))
    assert replace(trace, ops=ops).gaps() == (gap(6, 7), gap(8, 9))


def test_gaps_are_those_of_the_kinds_asked_for_and_of_what_is_worth_moving() -> None:
    trace = touched(-1, 10, 2, 7)
    assert trace.gaps(kinds={Kind.PARAM}) == trace.gaps() != ()
    assert trace.gaps(kinds={Kind.ACTIVATION, Kind.OPTIMIZER}) == ()
    assert replace(trace, least_bytes=10).gaps() == trace.gaps()
    assert replace(trace, least_bytes=11).gaps() == ()


def test_the_floor_counts_a_gap_that_wraps_on_both_sides() -> None:
    trace = touched(-1, 10, 2, 7)
    assert trace.peak_bytes == 15
    assert trace.floor_bytes() == 15  # operators 2 and 7 need it
    away = [5 if k not in (2, 7) else 15 for k in range(10)]
    assert trace.need_bytes() == away


def gaps_of(trace: Trace, storage: int) -> list[tuple[int, int]]:
    return [(found.after_op, found.before_op) for found in trace.gaps() if found.storage == storage]


def test_a_training_step_leaves_every_kind_of_storage_alone_for_a_while() -> None:
    trace = training_trace(4)  # forward 0..3, backward 4..7 from layer 3 to 0, updates 8..11
    assert [gaps_of(trace, layer) for layer in range(2)] == [[(1, 7), (9, 12)], [(2, 6), (7, 9), (10, 13)]]
    for moment in (4, 8):  # the first layer's first and second moment: from one update to the next
        assert gaps_of(trace, moment) == [(9, 20)]
    assert gaps_of(trace, 12) == [(9, 12)]  # the first layer's gradient is made last, used first, and waits to be freed
    assert gaps_of(trace, 15) == [(5, 11)]
    assert gaps_of(trace, 16) == [(2, 7)]
    assert trace.peak_bytes == 17 << 20  # all the way back: an output goes as a gradient comes
    # Any update: its parameter, moments and gradient. The other gradients may be away while the last one frees them.
    assert trace.floor_bytes() == 4 << 20


def test_gradients_that_are_only_zeroed_live_on() -> None:
    trace = training_trace(2, moments=0, keeps_gradients=True)
    assert [op.name for op in trace.ops][-1] == "zero"
    assert gaps_of(trace, 2) == [(5, 6), (7, 10)]
    assert gaps_of(trace, 3) == [(3, 5), (7, 9)]
    assert trace.static_bytes == 4 << 20


def test_an_update_of_all_at_once_needs_all_at_once() -> None:
    trace = training_trace(4, updates_at_once=True)
    assert trace.floor_bytes() == 16 << 20
    assert [gaps_of(trace, moment) for moment in (4, 11)] == [[(9, 17)], [(9, 17)]]


@settings(max_examples=300, deadline=None)
@given(touched_traces())
def test_outside_its_gaps_a_storage_is_touched_unborn_released_or_not_worth_moving(trace: Trace) -> None:
    end = len(trace.ops)
    away = [{k % end for k in range(found.after_op, found.before_op)} for found in trace.gaps()]
    touches = trace.touches()
    for storage, block in enumerate(trace.storages):
        mine = [ops for found, ops in zip(trace.gaps(), away, strict=True) if found.storage == storage]
        absent = set().union(*mine)
        assert len(absent) == sum(map(len, mine)), "gaps of one storage do not overlap"
        assert not absent & set(touches[storage])
        if trace.lives_on(storage) and block.nbytes >= max(trace.least_bytes, 1):
            assert absent == set(range(end)) - set(touches[storage])
        else:
            heir = trace.heirs().get(storage)
            if heir is not None and absent & set(range(block.first_op + 1)):
                after = {op for op in absent if op <= block.first_op}
                assert after == set(range(min((*touches[heir], trace.storages[heir].last_op + 1))))
                absent -= after
            assert all(max(block.first_op, 0) < op <= block.last_op for op in absent)
        assert not (absent and storage in trace.heirs().values())
    assert trace.floor_bytes() <= trace.peak_bytes
