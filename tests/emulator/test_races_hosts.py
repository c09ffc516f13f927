from __future__ import annotations

import threading

import pytest

from tests.emulator.races_model import BASE, HOST, Detector, compile_detector, compiler

pytestmark = pytest.mark.skipif(compiler() is None, reason="the race detector is compiled for its test: needs g++")

READ, WRITE = False, True


@pytest.fixture(scope="module")
def shared() -> Detector:
    return Detector(compile_detector())


@pytest.fixture
def races(shared: Detector) -> Detector:
    return shared.afresh()


@pytest.fixture
def streams(races: Detector) -> list[int]:
    return [races.stream(i) for i in range(4)]


def test_host_threads_without_an_agent_of_their_own_are_ordered_as_they_call(races, streams):
    races.submit(streams[3], "copy d2h", (0, 64, WRITE))
    races.sync_stream(streams[3])
    other = threading.Thread(target=lambda: races._host_access(BASE, 64, READ, b"read"))
    other.start()
    other.join()
    assert races.take_report() == []


def test_a_thread_with_an_agent_of_its_own_is_ordered_by_hand_offs_only(races, streams):
    mover = races.new_host("mover")
    races.submit(streams[3], "copy d2h", (0, 64, WRITE))
    races.sync_stream(streams[3])
    races.host_access("write to disk", (0, 64, READ), host=mover)
    assert races.pairs() == {("race", "copy d2h", "write to disk")}
    races.send(7)
    races.receive(7, host=mover)
    races.host_access("write to disk", (0, 64, READ), host=mover)
    assert races.take_report() == []
    races.host_access("refill", (0, 64, WRITE))
    (line,) = races.take_report()
    assert line.endswith(
        "while 'refill' on the host writes it: nothing orders them "
        "(hand over from host thread 'mover' to the thread that does or submits the other)"
    )


def test_a_token_is_received_once_and_holds_what_was_sent_before_it(races):
    one, two = races.new_host("one"), races.new_host("two")
    races.host_access("before", (0, 8, WRITE), host=HOST)
    races.send(7)
    races.host_access("after", (8, 8, WRITE), host=HOST)
    races.receive(7, host=one)
    races.receive(7, host=two)
    races.host_access("one", (0, 16, READ), host=one)
    races.host_access("two", (0, 8, READ), host=two)
    assert races.pairs() == {("race", "after", "one"), ("race", "before", "two")}


def test_senders_of_one_token_are_all_before_the_receiver(races):
    one, two = races.new_host("one"), races.new_host("two")
    for host, at in ((one, 0), (two, 8)):
        races.host_access("part", (at, 8, WRITE), host=host)
        races.send(7, host=host)
    races.receive(7)
    races.host_access("whole", (0, 16, READ))
    assert races.take_report() == []


def test_an_agent_belongs_to_the_thread_that_took_it(races, streams):
    mover = races.new_host("mover")
    both = threading.Barrier(2, timeout=10)

    def act() -> None:
        races._act_as(mover)
        both.wait()
        races._host_access(BASE, 64, WRITE, b"mine")

    thread = threading.Thread(target=act)
    thread.start()
    both.wait()
    races._host_access(BASE + 64, 64, WRITE, b"other")
    thread.join()
    races._host_access(BASE, 128, READ, b"other read")
    assert races.pairs() == {("race", "mine", "other read")}


def test_threads_that_submit_at_once_lose_no_finding(races):
    rounds = 500

    def run(index: int) -> None:
        a, b = races.stream(10 + 2 * index), races.stream(11 + 2 * index)
        for _ in range(rounds):
            races.submit(a, f"writer {index}", (index * 64, 64, WRITE))
            races.submit(b, f"reader {index}", (index * 64, 64, READ))
            races.record(index, b)
            races.wait(index, a)

    threads = [threading.Thread(target=run, args=(i,)) for i in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert races.count() == 3 * rounds
    assert races.pairs() == {("race", f"writer {i}", f"reader {i}") for i in range(3)}
