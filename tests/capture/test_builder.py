"""From a log that is made up to the trace that it has to become, to the byte and the nanosecond."""

from __future__ import annotations

from lowtide.capture.builder import Scope
from lowtide.core.log import Event
from lowtide.core.trace import Gap, Kind, Phase, Save
from tests.capture.made_up import COMPOSITE, Log

# ---- operators ----


def test_operators_are_listed_in_order_with_their_operands_and_results() -> None:
    trace = Log().op("aten::a", makes=1).op("aten::b", makes=2, reads={1: 0}).build().trace
    assert [op.name for op in trace.ops] == ["aten::a", "aten::b"]
    assert [(op.reads, op.writes) for op in trace.ops] == [((), (0,)), ((0,), (1,))]
    assert [storage.producer for storage in trace.storages] == [0, 1]


def test_a_composite_call_is_replaced_by_what_is_inside_it() -> None:
    log = Log().begin(COMPOSITE).op("aten::t").op("aten::addmm", makes=1).end(COMPOSITE)
    assert [op.name for op in log.build().trace.ops] == ["aten::t", "aten::addmm"]


def test_what_numbering_a_call_takes_is_no_part_of_its_operator() -> None:
    mode = "PythonDispatchMode"

    def called(number: int | None) -> Log:
        """An operator of 12 us: 5 us of a mode before the call it lets pass, 3 us after it."""
        log = Log().begin("aten::mm").begin(mode)
        if number is not None:
            log.add(Event.CALL, number)
        log.now_ns = 1_000_000 + 6000
        log.op("aten::mm", makes=1)
        log.now_ns += 2000
        return log.end(mode).end("aten::mm")

    numbered, other = called(7).build(), called(None).build()
    [op] = numbered.trace.ops
    assert numbered.calls == {0: [7]}
    assert numbered.numbering_s * 1e6 == 8
    assert op.duration_s * 1e6 == other.trace.ops[0].duration_s * 1e6 - 8
    assert other.numbering_s == 0, "a mode of the program's takes its time in every step"


def test_what_an_operator_calls_itself_is_a_part_of_it() -> None:
    log = Log().begin("aten::conv").op("aten::inner", makes=1, reads={9: 0}).end("aten::conv", writes={1: 0})
    trace = log.build().trace
    assert [op.name for op in trace.ops] == ["aten::conv"]
    assert trace.ops[0].writes == (0,)
    assert trace.ops[0].reads == (), "an operand of the inner call is none of the outer's"
    assert trace.storages[0].producer == 0


def test_phases_come_from_the_scopes_around_an_operator() -> None:
    log = Log().op("aten::f")
    log.begin("Backward", scope=Scope.BACKWARD).op("aten::b").end("Backward", scope=Scope.BACKWARD)
    log.begin("Optimizer.step#SGD.step", scope=Scope.USER).op("aten::u")
    log.end("Optimizer.step#SGD.step", scope=Scope.USER).begin("mine", scope=Scope.USER).op("aten::g")
    phases = [op.phase for op in log.build().trace.ops]
    assert phases == [Phase.FORWARD, Phase.BACKWARD, Phase.UPDATE, Phase.FORWARD]


def test_a_scope_that_began_before_the_log_may_end_in_it() -> None:
    trace = Log().end("Optimizer.step#SGD.step", scope=Scope.USER).op("aten::a").build().trace
    assert [op.phase for op in trace.ops] == [Phase.FORWARD]


def test_operators_carry_the_module_that_was_entered_last() -> None:
    log = Log().op("aten::before")
    log.add(Event.MODULE, log.name("encoder.0")).op("aten::inside").add(Event.MODULE, log.name("")).op("aten::after")
    assert [op.module for op in log.build().trace.ops] == ["", "encoder.0", ""]


def test_other_threads_do_not_mix_up_who_is_inside_whom() -> None:
    log = Log().begin("aten::a")
    log.add(Event.OP_BEGIN, log.name("aten::other"), Scope.FUNCTION, thread=1)
    log.add(Event.OP_END, log.name("aten::other"), Scope.FUNCTION, thread=1)
    log.begin("aten::inner").end("aten::inner").end("aten::a")
    assert [op.name for op in log.build().trace.ops] == ["aten::a", "aten::other"]


# ---- time ----


def test_durations_reach_to_the_next_operator_and_add_up_to_the_step() -> None:
    log = Log().op("aten::a").add(Event.MARKER).op("aten::b")
    first, second = log.build().trace.ops
    assert (first.start_s, first.duration_s) == (0.0, 3e-6)
    assert (second.start_s, second.duration_s) == (3e-6, 2e-6)


def test_time_spent_waiting_for_transfers_is_taken_out() -> None:
    log = Log().begin("aten::a")
    log.now_ns += 5_000_000
    log.add(Event.STALL, 5_000_000).end("aten::a").op("aten::b")
    first, second = log.build().trace.ops
    assert first.duration_s == 3e-6
    assert second.start_s == 3e-6


def test_a_stall_longer_than_its_operator_makes_no_negative_time() -> None:
    log = Log().begin("aten::a").add(Event.STALL, 9_000_000).end("aten::a")
    assert log.build().trace.ops[0].duration_s == 0.0


# ---- memory ----


def test_an_operators_peak_is_the_most_that_was_alive_until_the_next_began() -> None:
    log = Log().begin("aten::a").add(Event.ALLOC, 1, 100).add(Event.ALLOC, 2, 50).add(Event.FREE, 2, 50)
    log.end("aten::a", writes={1: 0}).add(Event.ALLOC, 3, 20).op("aten::b").add(Event.FREE, 1, 100)
    trace = log.build(static_bytes=1000).trace
    assert [op.peak_bytes for op in trace.ops] == [1150, 1120]
    assert trace.peak_bytes == 1150
    assert trace.static_bytes == 1000


def test_what_is_allocated_before_the_first_operator_counts_for_it() -> None:
    log = Log().add(Event.ALLOC, 1, 500).add(Event.FREE, 1, 500).op("aten::a")
    assert log.build(static_bytes=10).trace.ops[0].peak_bytes == 510


def test_storages_live_from_their_allocation_to_their_release() -> None:
    log = Log().op("aten::a", makes=1).op("aten::b", makes=2).add(Event.FREE, 1, 100).op("aten::c")
    first, second = log.build().trace.storages
    assert (first.first_op, first.last_op) == (0, 1)
    assert (second.first_op, second.last_op) == (1, 3)


def test_static_bytes_are_what_was_alive_before_and_after() -> None:
    log = Log().op("aten::a", makes=1).add(Event.FREE, -7, 300)
    assert log.build(static_bytes=1000).trace.static_bytes == 800
    log = Log().op("aten::a", makes=1)
    assert log.build(static_bytes=1000).trace.static_bytes == 1000


def save_and_use(log: Log, *, managed: bool) -> Log:
    """Save a storage of two pages, move it away and back if it is managed, use it and let it go."""
    log.op("aten::a", makes=1, nbytes=8192).add(Event.PACK, 77, 1, 8000).op("aten::b", makes=2, reads={1: 0})
    log.add(Event.SOLE, 77)
    if managed:
        log.add(Event.EVICT_FREE, 1, 8192)
    log.op("aten::c", makes=3)
    if managed:
        log.add(Event.FETCH_ALLOC, 4, 8192, 77)
    log.add(Event.UNPACK, 77)
    log.op("aten::d", makes=5, reads={4 if managed else 1: 0})
    return log.add(Event.GONE, 77, 0, 8000).add(Event.FREE, 4 if managed else 1, 8192).op("aten::e")


def test_bytes_that_left_and_came_back_leave_the_curve_as_an_unmanaged_step_draws_it() -> None:
    managed, unmanaged = (save_and_use(Log(), managed=managed).build().trace for managed in (True, False))
    assert [op.peak_bytes for op in managed.ops] == [op.peak_bytes for op in unmanaged.ops]
    assert [op.peak_bytes for op in managed.ops] == [8192, 8292, 8392, 8492, 300]
    assert [(op.reads, op.writes) for op in managed.ops] == [(op.reads, op.writes) for op in unmanaged.ops]
    assert managed.storages == unmanaged.storages
    assert managed.saves == unmanaged.saves


def test_bytes_that_are_let_go_while_away_are_freed_whole_then() -> None:
    log = Log().op("aten::a", makes=1, nbytes=8192).add(Event.PACK, 77, 1, 8000).add(Event.SOLE, 77)
    log.add(Event.EVICT_FREE, 1, 8192).op("aten::b").add(Event.GONE, 77, 1, 8000).op("aten::c")
    trace = log.build(static_bytes=50).trace
    assert [op.peak_bytes for op in trace.ops] == [8242, 8242, 50]
    assert trace.storages[0].last_op == 1
    assert trace.static_bytes == 50


# ---- versions ----


def test_an_in_place_operator_writes_what_it_reads_and_raises_the_version() -> None:
    log = Log().op("aten::a", makes=1).begin("aten::relu_", reads={1: 0}).end("aten::relu_", writes={1: 1})
    trace = log.build().trace
    assert trace.ops[1].reads == trace.ops[1].writes == (0,)
    assert trace.storages[0].versions == 1
    assert trace.storages[0].producer == 0


def test_a_view_of_an_operand_is_no_write() -> None:
    log = Log().op("aten::a", makes=1).begin("aten::v", reads={1: 0}).end("aten::v", writes={1: 0})
    trace = log.build().trace
    assert trace.ops[1].writes == ()
    assert trace.storages[0].versions == 0


def test_a_storage_from_before_the_step_has_no_producer_even_if_it_is_written() -> None:
    log = Log().begin("aten::add_", reads={-5: 3}).end("aten::add_", writes={-5: 4})
    storage = log.build().trace.storages[0]
    assert (storage.first_op, storage.producer, storage.versions) == (-1, None, 4)


# ---- what autograd saved ----


def test_a_save_knows_when_it_was_packed_freed_used_and_released() -> None:
    recorded = save_and_use(Log(), managed=False).build()
    assert recorded.trace.saves == (Save(storage=0, packed_op=0, free_op=2, uses=(3,), released_op=4),)
    assert recorded.trace.gaps() == (Gap(storage=0, after_op=2, before_op=3),)
    assert recorded.positions == (1, 3)
    assert recorded.use_events == ((1,),)


def test_several_packs_of_one_storage_are_one_save() -> None:
    log = Log().op("aten::a", makes=1).add(Event.PACK, 77, 1, 100).op("aten::b").add(Event.PACK, 77, 1, 100)
    log.op("aten::c").add(Event.UNPACK, 77).add(Event.UNPACK, 77).op("aten::d").add(Event.UNPACK, 77).op("aten::e")
    recorded = log.build()
    (save,) = recorded.trace.saves
    assert save.packs == 2
    assert save.packed_op == 0
    assert save.uses == (3, 4)
    assert recorded.use_events == ((2, 3, 4),)


def test_a_storage_that_the_program_holds_all_along_is_never_free_to_go() -> None:
    log = Log().op("aten::a", makes=1).add(Event.PACK, 77, 1, 100).op("aten::b").add(Event.UNPACK, 77).op("aten::c")
    trace = log.add(Event.SOLE, 77).build().trace
    assert trace.saves[0].free_op is None
    assert trace.gaps() == ()


def test_saves_are_numbered_in_the_order_of_their_first_pack() -> None:
    log = Log().op("aten::a", makes=1).op("aten::b", makes=2).add(Event.PACK, 9, 2, 100).add(Event.PACK, 8, 1, 100)
    assert [save.storage for save in log.build().trace.saves] == [1, 0]


def test_uses_of_a_record_from_an_earlier_step_still_count_as_events() -> None:
    log = Log().op("aten::a", makes=1).add(Event.UNPACK, 5).op("aten::b").add(Event.PACK, 77, 1, 100)
    recorded = log.add(Event.GONE, 5, 0, 10).build()
    assert recorded.positions == (1, 2)
    assert recorded.use_events == ((),)


# ---- kinds ----


def test_kinds_are_what_is_known_and_else_what_a_life_looks_like() -> None:
    log = Log().begin("aten::a", reads={-1: 0, -2: 0}).add(Event.ALLOC, 1, 10).add(Event.ALLOC, 2, 10)
    log.add(Event.FREE, 2, 10).end("aten::a", writes={1: 0}).add(Event.PACK, 77, 1, 10).op("aten::b", makes=3)
    log.op("aten::c").add(Event.FREE, 3, 100)
    trace = log.build(kinds={-1: Kind.PARAM}).trace
    assert [storage.kind for storage in trace.storages] == [
        Kind.PARAM,
        Kind.INPUT,
        Kind.ACTIVATION,
        Kind.SCRATCH,
        Kind.OTHER,
    ]


def test_an_empty_log_is_an_empty_step() -> None:
    trace = Log().build(static_bytes=123).trace
    assert (trace.ops, trace.storages, trace.saves) == ((), (), ())
    assert trace.peak_bytes == trace.floor_bytes() == trace.static_bytes == 123
