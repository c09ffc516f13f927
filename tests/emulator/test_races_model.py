from __future__ import annotations

import re

import pytest

from tests.emulator.races_model import BASE, HOST, Detector, compile_detector, compiler

pytestmark = pytest.mark.skipif(compiler() is None, reason="the race detector is compiled for its test: needs g++")

READ, WRITE = False, True
MIB = 1 << 20


@pytest.fixture(scope="module")
def shared() -> Detector:
    return Detector(compile_detector())


@pytest.fixture
def races(shared: Detector) -> Detector:
    return shared.afresh()


@pytest.fixture
def streams(races: Detector) -> list[int]:
    return [races.stream(i) for i in range(4)]


# ---- what a program may forget ----


def test_a_kernel_that_does_not_wait_for_its_copy_is_named_with_the_copy_and_the_remedy(races, streams):
    races.submit(streams[2], "copy h2d of 4.0 MiB", (0, 4 * MIB, WRITE))
    races.submit(streams[0], "aten::addmm", (0, 4 * MIB, READ))
    (line,) = races.take_report()
    assert line == (
        f"race: 'copy h2d of 4.0 MiB' on stream 2 writes {BASE:#x}+{4 * MIB} while 'aten::addmm' on stream 0 reads it: "
        "no event orders them (record an event on stream 2 after it and wait for it on stream 0)"
    )


def test_an_event_orders_the_copy_and_the_kernel(races, streams):
    races.submit(streams[2], "copy", (0, 64, WRITE))
    races.record(1, streams[2])
    races.wait(1, streams[0])
    races.submit(streams[0], "addmm", (0, 64, READ))
    assert races.take_report() == []


def test_an_event_recorded_before_the_copy_does_not_order_it(races, streams):
    races.record(1, streams[2])
    races.submit(streams[2], "copy", (0, 64, WRITE))
    races.wait(1, streams[0])
    races.submit(streams[0], "addmm", (0, 64, READ))
    assert races.pairs() == {("race", "copy", "addmm")}


def test_a_wait_for_an_event_that_was_never_recorded_orders_nothing(races, streams):
    races.submit(streams[2], "copy", (0, 64, WRITE))
    races.wait(1, streams[0])
    races.record(1, streams[2])
    races.submit(streams[0], "addmm", (0, 64, READ))
    assert races.pairs() == {("race", "copy", "addmm")}


def test_recording_an_event_again_does_not_change_an_earlier_wait(races, streams):
    races.submit(streams[1], "first", (0, 64, WRITE))
    races.record(1, streams[1])
    races.wait(1, streams[0])
    races.submit(streams[1], "second", (64, 64, WRITE))
    races.record(1, streams[1])
    races.submit(streams[0], "reads first", (0, 64, READ))
    races.submit(streams[0], "reads second", (64, 64, READ))
    assert races.pairs() == {("race", "second", "reads second")}
    races.wait(1, streams[0])
    races.submit(streams[0], "reads again", (64, 64, READ))
    assert races.take_report() == []


def test_an_event_recorded_again_on_another_stream_no_longer_stands_for_the_first(races, streams):
    races.submit(streams[1], "copy", (0, 64, WRITE))
    races.record(1, streams[1])
    races.record(1, streams[2])
    races.wait(1, streams[0])
    races.submit(streams[0], "addmm", (0, 64, READ))
    assert races.pairs() == {("race", "copy", "addmm")}


def test_order_passes_through_a_third_stream(races, streams):
    races.submit(streams[0], "a", (0, 64, WRITE))
    races.record(1, streams[0])
    races.wait(1, streams[1])
    races.record(2, streams[1])
    races.wait(2, streams[2])
    races.submit(streams[2], "b", (0, 64, WRITE))
    assert races.take_report() == []


def test_a_copy_out_that_does_not_wait_for_the_kernel_is_found(races, streams):
    races.submit(streams[0], "aten::relu", (0, 64, WRITE))
    races.submit(streams[3], "copy d2h", (0, 64, READ), (1000, 64, WRITE))
    assert races.pairs() == {("race", "aten::relu", "copy d2h")}


def test_overwriting_what_a_copy_still_reads_is_found(races, streams):
    races.submit(streams[3], "copy d2h", (0, 64, READ))
    races.submit(streams[0], "aten::add_", (0, 64, READ), (0, 64, WRITE))
    assert races.pairs() == {("race", "copy d2h", "aten::add_")}


def test_an_early_host_read_says_to_synchronize(races, streams):
    races.submit(streams[3], "copy d2h", (0, 64, WRITE))
    races.host_access("host read of a pinned buffer", (0, 64, READ))
    (line,) = races.take_report()
    assert line == (
        f"race: 'copy d2h' on stream 3 writes {BASE:#x}+64 while 'host read of a pinned buffer' on the host reads it: "
        "nothing orders them (synchronize stream 3, or an event recorded on it, before that)"
    )


@pytest.mark.parametrize("how", ["event", "stream", "device", "event of a stream that waited"])
def test_the_host_may_read_after_it_synchronized(races, streams, how):
    races.submit(streams[3], "copy d2h", (0, 64, WRITE))
    races.record(1, streams[3])
    match how:
        case "event":
            races.sync(1)
        case "stream":
            races.sync_stream(streams[3])
        case "device":
            races.sync_device(0)
        case _:
            races.wait(1, streams[0])
            races.record(2, streams[0])
            races.sync(2)
    races.host_access("host read", (0, 64, READ))
    assert races.take_report() == []


def test_synchronizing_one_stream_or_another_device_orders_nothing_else(races, streams):
    races.submit(streams[3], "copy d2h", (0, 64, WRITE))
    races.sync_stream(streams[2])
    races.sync_device(1)
    races.host_access("host read", (0, 64, READ))
    assert races.pairs() == {("race", "copy d2h", "host read")}


def test_what_the_host_did_before_it_submitted_is_before_the_job_and_what_it_does_next_is_not(races, streams):
    races.host_access("fill", (0, 64, WRITE))
    races.submit(streams[2], "copy h2d", (0, 64, READ))
    assert races.take_report() == []
    races.host_access("refill", (0, 64, WRITE))
    assert races.pairs() == {("race", "copy h2d", "refill")}


def test_a_stream_of_another_device_is_another_stream(races, streams):
    other = races.stream(0, device=1)
    races.submit(streams[0], "a", (0, 64, WRITE))
    races.submit(other, "b", (0, 64, READ))
    (line,) = races.take_report()
    assert "'a' on stream 0 writes" in line
    assert "'b' on stream 0 of device 1 reads" in line


def test_reads_never_race_and_one_byte_of_overlap_does(races, streams):
    races.submit(streams[0], "a", (0, 64, READ))
    races.submit(streams[1], "b", (0, 64, READ))
    races.submit(streams[2], "c", (64, 64, WRITE))
    assert races.take_report() == []
    races.submit(streams[3], "d", (63, 2, WRITE))
    lines = races.take_report()
    assert [re.search(r"'(\w)' on .* (0x\w+\+\d+) ", line).groups() for line in lines] == [
        ("a", f"{BASE + 63:#x}+1"),
        ("b", f"{BASE + 63:#x}+1"),
        ("c", f"{BASE + 64:#x}+1"),
    ]


def test_one_pair_of_jobs_is_one_finding_over_all_its_ranges_and_shows_the_first(races, streams):
    races.submit(streams[0], "a", (0, 8, WRITE), (8, 8, WRITE), (100, 8, WRITE))
    races.submit(streams[1], "b", (0, 200, READ))
    assert races.count() == 1
    (line,) = races.take_report()
    assert f"'a' on stream 0 writes {BASE:#x}+16 while 'b'" in line


def test_a_missing_wait_is_found_at_every_repetition_and_told_once(races, streams):
    for _ in range(50):
        races.submit(streams[2], "copy", (0, 64, WRITE))
        races.submit(streams[0], "addmm", (0, 64, READ))
        races.record(1, streams[0])
        races.wait(1, streams[2])
    assert races.count() == 50
    (line,) = races.take_report()
    assert line.endswith(" [50 times]")
    assert races.count() == 0
    assert races.take_report() == []


# ---- memory that changes hands ----


def test_a_block_freed_while_another_stream_reads_it_is_found_at_the_free(races, streams):
    races.alloc(0, 512, streams[0])
    races.submit(streams[0], "fill", (0, 512, WRITE))
    races.record(1, streams[0])
    races.wait(1, streams[3])
    races.submit(streams[3], "copy d2h", (0, 512, READ))
    races.free(0, 512, streams[0])
    (line,) = races.take_report()
    assert line == (
        f"use after free: 'copy d2h' on stream 3 reads {BASE:#x}+512 while it is freed on stream 0: "
        "no event orders them (call record_stream for stream 3 before the free, "
        "or record an event on stream 3 after it and wait for it on stream 0 before the free)"
    )


@pytest.mark.parametrize("how", ["record_stream", "the home stream waits", "the host waits"])
def test_a_free_may_come_when_the_last_use_is_ordered_before_it(races, streams, how):
    races.alloc(0, 512, streams[0])
    races.record(1, streams[0])
    races.wait(1, streams[3])
    races.submit(streams[3], "copy d2h", (0, 512, READ))
    match how:
        case "record_stream":
            races.free(0, 512, streams[0], streams[3])
        case "the home stream waits":
            races.record(2, streams[3])
            races.wait(2, streams[0])
            races.free(0, 512, streams[0])
        case _:
            races.sync_stream(streams[3])
            races.free(0, 512, streams[0])
    assert races.take_report() == []


def test_record_stream_for_the_wrong_stream_does_not_help(races, streams):
    races.alloc(0, 512, streams[0])
    races.sync_stream(streams[0])
    races.submit(streams[3], "copy d2h", (0, 512, READ))
    races.free(0, 512, streams[0], streams[2])
    assert races.pairs() == {("freed in use", "copy d2h", "stream 0")}


def test_a_job_submitted_after_the_free_is_found(races, streams):
    races.alloc(0, 512, streams[0])
    races.free(0, 512, streams[0])
    races.submit(streams[0], "late", (256, 512, READ))
    (line,) = races.take_report()
    assert line.startswith(f"use after free: 'late' on stream 0 reads {BASE + 256:#x}+256, which was freed on stream 0")


def test_a_second_free_is_found(races, streams):
    races.alloc(0, 512, streams[0])
    races.free(0, 512, streams[0])
    races.free(0, 512, streams[1])
    assert races.pairs() == {("freed twice", "stream 0", "stream 1")}


def test_the_first_use_on_another_stream_must_wait_for_the_stream_of_the_allocation(races, streams):
    races.alloc(0, 512, streams[0])
    races.submit(streams[2], "copy h2d", (0, 512, WRITE))
    (line,) = races.take_report()
    assert line.startswith("race: 'copy h2d' on stream 2 writes")
    assert "while it is allocated on stream 0, whose earlier jobs may still use that memory" in line
    races.alloc(1024, 512, streams[0])
    races.record(1, streams[0])
    races.wait(1, streams[2])
    races.submit(streams[2], "copy h2d", (1024, 512, WRITE))
    assert races.take_report() == []


def test_a_new_block_has_no_history(races, streams):
    races.alloc(0, 512, streams[0])
    races.sync_stream(streams[0])
    races.submit(streams[1], "old", (0, 512, WRITE))
    races.free(0, 512, streams[0], streams[1])
    races.alloc(0, 512, streams[2])
    races.submit(streams[2], "new", (0, 512, WRITE))
    assert races.take_report() == []


def test_a_block_handed_on_in_stream_order_must_come_from_that_stream(races, streams):
    races.alloc(0, 512, streams[0])
    races.submit(streams[0], "old", (0, 512, WRITE))
    races.free(0, 512, streams[0])
    races.alloc(0, 256, streams[0], stream_ordered=True)
    assert races.take_report() == []
    races.alloc(256, 256, streams[1], stream_ordered=True)
    assert races.pairs() == {("reused", "old", "stream 1")}


def test_a_block_handed_on_in_stream_order_must_not_be_held_by_record_stream(races, streams):
    def use_and_free() -> None:
        races.alloc(0, 512, streams[0])
        races.record(1, streams[0])
        races.wait(1, streams[1])
        races.submit(streams[1], "copy d2h", (0, 512, READ))
        races.free(0, 512, streams[0], streams[1])

    use_and_free()
    races.alloc(0, 512, streams[0], stream_ordered=True)
    (line,) = races.take_report()
    assert line == (
        f"use after free: 'copy d2h' on stream 1 reads {BASE:#x}+512 "
        "while the freed block is given out again on stream 0: "
        "no event orders them (the allocator must wait until stream 1 has passed the free)"
    )
    use_and_free()
    races.reached(0, streams[1])
    races.alloc(0, 512, streams[0], stream_ordered=True)
    assert races.take_report() == []


def test_a_block_handed_on_after_the_host_waited_is_ordered(races, streams):
    races.alloc(0, 512, streams[0])
    races.submit(streams[0], "old", (0, 512, WRITE))
    races.free(0, 512, streams[0])
    races.sync_stream(streams[0])
    races.alloc(0, 512, streams[1], stream_ordered=True)
    assert races.take_report() == []


def test_what_was_reported_at_the_free_is_not_reported_again_at_the_reuse(races, streams):
    races.alloc(0, 512, streams[0])
    races.sync_stream(streams[0])
    races.submit(streams[1], "kernel", (0, 512, READ))
    races.free(0, 512, streams[0])
    races.alloc(0, 512, streams[0], stream_ordered=True)
    assert races.pairs() == {("freed in use", "kernel", "stream 0")}


def test_a_pinned_buffer_freed_under_a_copy_is_found(races, streams):
    races.alloc(0, 512, HOST)
    races.submit(streams[2], "copy h2d", (0, 512, READ))
    races.free(0, 512, HOST)
    (line,) = races.take_report()
    assert "'copy h2d' on stream 2 reads" in line
    assert "while it is freed on the host: nothing orders them (synchronize stream 2," in line
    races.alloc(0, 512, HOST)
    races.submit(streams[2], "copy h2d", (0, 512, READ))
    races.free(0, 512, HOST, streams[2])
    assert races.take_report() == []
