"""From the log of an executor that moves pages to the trace of every touch."""

from __future__ import annotations

from lowtide.capture.builder import Recorded
from lowtide.core.log import Event
from lowtide.core.trace import Gap, Kind, Phase, Reach, Trace
from tests.capture.made_up import Log


def build(log: Log, *, static_bytes: int = 0, kinds: dict[int, Kind] | None = None, least_bytes: int = 0) -> Recorded:
    return log.build(static_bytes=static_bytes, kinds=kinds, reach=Reach.TOUCHED, least_bytes=least_bytes)


def lives(trace: Trace) -> list[tuple[int, int]]:
    return [(storage.first_op, storage.last_op) for storage in trace.storages]


def touched(trace: Trace) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    return [(op.reads, op.writes) for op in trace.ops]


def gaps_of(trace: Trace, storage: int) -> list[tuple[int, int]]:
    return [(gap.after_op, gap.before_op) for gap in trace.gaps() if gap.storage == storage]


# ---- what exists ----


def test_what_exists_when_the_log_starts_is_in_the_trace_touched_or_not() -> None:
    log = Log().add(Event.EXISTS, 7, 100).add(Event.EXISTS, 8, 50).add(Event.EXISTS, 9, 25)
    log.op("aten::a").op("aten::b", reads={8: 0}).add(Event.FREE, 9, 25).op("aten::c")
    recorded = build(log, static_bytes=175, kinds={7: Kind.OPTIMIZER}, least_bytes=10)
    trace = recorded.trace
    assert [(storage.nbytes, storage.kind) for storage in trace.storages] == [
        (100, Kind.OPTIMIZER),
        (50, Kind.INPUT),
        (25, Kind.OTHER),
    ]
    assert lives(trace) == [(-1, 3), (-1, 3), (-1, 1)]
    assert (trace.reach, trace.least_bytes) == (Reach.TOUCHED, 10)
    assert recorded.serials == (7, 8, 9)
    assert recorded.births == (None, None, None)
    assert trace.gaps() == (
        Gap(storage=0, after_op=0, before_op=3),
        Gap(storage=1, after_op=2, before_op=4),
    )
    assert [op.peak_bytes for op in trace.ops] == [175, 175, 150]
    assert trace.static_bytes == 150


def test_a_block_that_is_known_is_not_taken_for_another_when_it_is_said_to_exist() -> None:
    log = Log().op("aten::a", makes=1).add(Event.EXISTS, 1, 100).op("aten::b", reads={1: 0})
    assert lives(build(log).trace) == [(0, 2)]


def test_a_log_of_pages_has_no_saves_and_no_places_of_saves() -> None:
    recorded = build(Log().op("aten::a", makes=1).op("aten::b", reads={1: 0}))
    assert recorded.trace.saves == ()
    assert (recorded.positions, recorded.use_events, recorded.needs) == ((), (), ())


def test_a_log_of_saves_names_no_blocks() -> None:
    recorded = Log().op("aten::a", makes=1).build()
    assert (recorded.serials, recorded.births) == ((), ())
    assert (recorded.trace.reach, recorded.trace.least_bytes) == (Reach.SAVED, 0)


# ---- pages that come and go ----


def test_pages_that_left_and_came_back_change_nothing() -> None:
    def step(*, moved: bool) -> Trace:
        log = Log().add(Event.EXISTS, 7, 8192).op("aten::a", makes=1, reads={7: 0})
        if moved:
            log.now_ns -= 2000
            log.add(Event.LEFT, 7, 8192, 1).add(Event.LEFT, 1, 100, 0)
        log.op("aten::b", makes=2)
        if moved:
            log.now_ns -= 2000
            log.add(Event.CAME_BACK, 1, 100).add(Event.CAME_BACK, 7, 8192)
        log.op("aten::c", reads={1: 0, 7: 0}).add(Event.FREE, 1, 100).op("aten::d")
        return build(log, static_bytes=8192).trace

    assert step(moved=True) == step(moved=False)
    assert [op.peak_bytes for op in step(moved=True).ops] == [8292, 8392, 8392, 8292]


def test_a_block_that_is_freed_while_it_is_away_is_freed_whole() -> None:
    log = Log().op("aten::a", makes=1, nbytes=4096).add(Event.LEFT, 1, 4096, 1).op("aten::b")
    trace = build(log.add(Event.FREE, 1, 4096).op("aten::c"), static_bytes=10).trace
    assert [op.peak_bytes for op in trace.ops] == [4106, 4106, 10]
    assert lives(trace) == [(0, 1)]


# ---- touches that no operator announced ----


def test_a_fault_inside_an_operator_is_a_touch_by_it() -> None:
    log = Log().add(Event.EXISTS, 7, 100).add(Event.EXISTS, 8, 100)
    log.op("aten::a").begin("aten::b").add(Event.TOUCH, 7).add(Event.TOUCH, 8, 1).end("aten::b").op("aten::c")
    trace = build(log).trace
    assert touched(trace) == [((), ()), ((0, 1), (1,)), ((), ())]
    assert [storage.versions for storage in trace.storages] == [0, 1]
    assert [gaps_of(trace, storage) for storage in (0, 1)] == [[(2, 4)], [(2, 4)]]


def test_a_fault_belongs_to_the_operator_of_its_thread_though_another_began_later() -> None:
    log = Log().add(Event.EXISTS, 7, 100).begin("aten::mine").begin("aten::other", thread=1)
    log.add(Event.TOUCH, 7, thread=0).end("aten::other", thread=1).end("aten::mine")
    assert touched(build(log).trace) == [((0,), ()), ((), ())]


def test_a_fault_outside_of_operators_belongs_to_the_one_that_began_last_on_any_thread() -> None:
    log = Log().add(Event.EXISTS, 7, 100).op("aten::a").begin("aten::b", thread=1)
    log.add(Event.TOUCH, 7, 1, thread=0).end("aten::b", thread=1).op("aten::c")
    assert touched(build(log).trace) == [((), ()), ((0,), (0,)), ((), ())]


def test_a_fault_before_the_first_operator_belongs_to_it() -> None:
    log = Log().add(Event.EXISTS, 7, 100).add(Event.EXISTS, 8, 100).add(Event.TOUCH, 8, thread=3)
    log.add(Event.TOUCH, 7, 1).op("aten::a").op("aten::b")
    assert touched(build(log).trace) == [((1, 0), (0,)), ((), ())]
    assert build(Log().add(Event.EXISTS, 7, 100).add(Event.TOUCH, 7)).trace.ops == ()


def test_a_write_seen_by_a_fault_is_a_change_whatever_version_was_announced() -> None:
    log = Log().add(Event.EXISTS, 7, 100).begin("aten::a", reads={7: 5}).add(Event.TOUCH, 7, 1)
    trace = build(log.add(Event.TOUCH, 7, 1).end("aten::a")).trace
    assert touched(trace) == [((0,), (0,))]
    assert trace.storages[0].versions == 1, "one operator changed it, in however many places"


def test_a_result_in_storage_that_only_a_fault_saw_read_is_a_change_of_it() -> None:
    log = Log().add(Event.EXISTS, 7, 100).begin("aten::a").add(Event.TOUCH, 7).end("aten::a", writes={7: 0})
    assert touched(build(log).trace) == [((0,), (0,))]


def test_the_first_write_to_a_new_block_makes_it_and_reads_nothing() -> None:
    log = Log().begin("aten::a").add(Event.ALLOC, 1, 100).add(Event.TOUCH, 1, 1).end("aten::a").op("aten::b")
    trace = build(log).trace
    assert touched(trace) == [((), (0,)), ((), ())]
    assert (trace.storages[0].producer, trace.storages[0].versions) == (0, 0)


def test_a_fault_in_a_block_that_nobody_told_of_is_passed_over() -> None:
    trace = build(Log().op("aten::a").add(Event.TOUCH, 99, 1)).trace
    assert (trace.storages, touched(trace)) == ((), [((), ())])


# ---- operands ----


def test_operands_belong_to_the_operator_of_their_thread() -> None:
    log = Log().add(Event.EXISTS, 7, 100).add(Event.EXISTS, 8, 100)
    log.begin("aten::mine").begin("aten::other", thread=1)
    log.add(Event.READ, 7, 0, 100, thread=0).add(Event.READ, 8, 0, 100, thread=1)
    log.add(Event.ALLOC, 1, 100, thread=0).add(Event.CALL, 4, thread=0)
    log.end("aten::mine", writes={1: 0, 7: 1}).end("aten::other", writes={8: 1}, thread=1)
    for recorded in (build(log), log.build()):
        assert touched(recorded.trace) == [((0,), (2, 0)), ((1,), (1,))]
        assert (recorded.trace.storages[2].first_op, recorded.trace.storages[2].producer) == (0, 0)
        assert recorded.calls == {0: [4]}


def test_what_calls_inside_an_operator_touch_it_touches_too() -> None:
    log = Log().add(Event.EXISTS, 7, 100).add(Event.EXISTS, 8, 100).begin("mine::linear", reads={7: 0})
    log.begin("aten::mm", reads={7: 0, 8: 2}).end("aten::mm", writes={8: 3}).end("mine::linear").op("aten::b")
    assert touched(build(log).trace) == [((0, 1), (1,)), ((), ())]
    assert touched(log.build().trace)[0] == ((0,), ()), "hooks ask for what was saved, not for what is touched"


# ---- kinds ----


def test_what_the_step_makes_is_an_activation_if_it_outlives_its_operator() -> None:
    log = Log().begin("aten::a").add(Event.ALLOC, 1, 10).add(Event.ALLOC, 2, 10).add(Event.FREE, 2, 10)
    log.end("aten::a", writes={1: 0}).op("aten::b", makes=3).add(Event.FREE, 1, 10).op("aten::c")
    trace = build(log).trace
    assert [storage.kind for storage in trace.storages] == [Kind.ACTIVATION, Kind.SCRATCH, Kind.ACTIVATION]
    assert lives(trace) == [(0, 1), (0, 0), (1, 3)]


def test_a_gradient_that_is_gone_by_the_end_of_the_step_is_one_all_the_same() -> None:
    log = Log().op("aten::a", makes=1).op("aten::b").op("aten::c", reads={1: 0}).add(Event.FREE, 1, 100)
    trace = build(log, kinds={1: Kind.GRAD, 99: Kind.GRAD}).trace
    assert [storage.kind for storage in trace.storages] == [Kind.GRAD]
    assert trace.gaps(kinds={Kind.GRAD}) == (Gap(storage=0, after_op=1, before_op=2),)


# ---- who is who in the next step ----


def test_a_storage_of_the_step_is_known_by_which_large_allocation_it_was() -> None:
    log = Log().add(Event.EXISTS, 7, 100).add(Event.ALLOC, 1, 60).add(Event.ALLOC, 2, 100)
    log.begin("aten::a").add(Event.ALLOC, 3, 59).add(Event.ALLOC, 4, 60)
    log.begin("aten::inner").add(Event.ALLOC, 5, 100).end("aten::inner").end("aten::a").add(Event.ALLOC, 6, 100)
    log.begin("aten::b").add(Event.FREE, 4, 60).add(Event.ALLOC, 8, 100).end("aten::b")
    recorded = build(log, least_bytes=60)
    assert recorded.serials == (7, 1, 2, 3, 4, 5, 6, 8)
    assert recorded.births == (None, (-1, 0), (-1, 1), None, (0, 0), (0, 1), (0, 2), (1, 0))


def test_births_are_counted_from_the_operator_that_began_last_on_any_thread() -> None:
    log = Log().begin("aten::mine").begin("aten::other", thread=1).add(Event.ALLOC, 1, 100, thread=0)
    recorded = build(log.add(Event.ALLOC, 2, 100, thread=1))
    assert recorded.births == ((1, 0), (1, 1))
    assert [storage.first_op for storage in recorded.trace.storages] == [0, 1]


def test_what_the_step_makes_before_its_first_operator_does_not_live_on() -> None:
    log = Log().add(Event.EXISTS, 7, 10).add(Event.FREE, 7, 10).add(Event.ALLOC, 1, 100)
    log.op("aten::a", reads={1: 0}).op("aten::b").op("aten::c")
    trace = build(log, static_bytes=10).trace
    assert lives(trace) == [(-1, 0), (0, 3)]
    assert [storage.kind for storage in trace.storages] == [Kind.OTHER, Kind.ACTIVATION]
    assert trace.gaps() == (Gap(storage=1, after_op=1, before_op=3),)
    assert trace.ops[0].peak_bytes == 100


# ---- a whole step ----


def test_a_training_step_has_the_gaps_of_its_touches() -> None:
    """Two layers: weights 1 and 2, moments 3 and 4; outputs 11 and 12; gradients 21 and 22, freed in the end."""
    log = Log()
    for serial in (1, 2, 3, 4):
        log.add(Event.EXISTS, serial, 100)
    log.op("aten::f1", makes=11, reads={1: 0}).op("aten::f2", makes=12, reads={2: 0, 11: 0})
    log.op("aten::b2", makes=22, reads={2: 0, 11: 0, 12: 0}).add(Event.FREE, 12, 100)
    log.op("aten::b1", makes=21, reads={1: 0, 11: 0}).add(Event.FREE, 11, 100)
    name = "Optimizer.step#SGD.step"
    log.begin(name, scope=7)
    for layer in (1, 2):
        operands = {20 + layer: 0, layer: 0, 2 + layer: 0}
        log.begin("aten::u", reads=operands).end("aten::u", writes={layer: 1, 2 + layer: 1})
    log.end(name, scope=7).add(Event.FREE, 21, 100).add(Event.FREE, 22, 100)
    kinds = {1: Kind.PARAM, 2: Kind.PARAM, 3: Kind.OPTIMIZER, 4: Kind.OPTIMIZER, 21: Kind.GRAD, 22: Kind.GRAD}
    recorded = build(log, static_bytes=400, kinds=kinds)
    trace = recorded.trace
    assert [op.phase for op in trace.ops][-2:] == [Phase.UPDATE, Phase.UPDATE]
    by_serial = {serial: gaps_of(trace, storage) for storage, serial in enumerate(recorded.serials)}
    assert by_serial == {
        1: [(1, 3), (5, 6)],
        2: [(3, 5), (6, 7)],
        3: [(5, 10)],
        4: [(6, 11)],
        11: [],
        12: [],
        22: [(3, 5)],  # read by the operator that it is freed with
        21: [(5, 6)],  # freed with the last operator, which does not touch it
    }
    assert trace.static_bytes == 400
    assert trace.peak_bytes == 700
    assert recorded.births[4:] == ((0, 0), (1, 0), (2, 0), (3, 0))


# ---- what an operator was given ----


def test_what_an_operator_makes_and_reads_inside_is_no_operand_of_it() -> None:
    log = Log().add(Event.EXISTS, 7, 100).begin("aten::convolution", reads={7: 0}).add(Event.ALLOC, 1, 100)
    log.begin("aten::inner", reads={1: 0}).end("aten::inner", writes={1: 0})
    log.end("aten::convolution", writes={1: 0}).op("aten::relu", makes=2, reads={1: 0})
    assert touched(build(log, static_bytes=100).trace) == [((0,), (1,)), ((1,), (2,))]


def test_a_tensor_without_bytes_is_no_operand() -> None:
    log = Log().begin("aten::convolution").add(Event.ALLOC, 1, 100)
    log.add(Event.READ, 9, 0, 0).add(Event.WRITE, 9, 0, 0).end("aten::convolution", writes={1: 0})
    trace = build(log.op("aten::relu", makes=2, reads={1: 0})).trace
    made = [trace.storages[storage].nbytes for storage in trace.ops[0].writes]
    assert (made, trace.ops[0].reads) == ([100], ())
