from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.emulator.races_model import HOST, BruteForce, Detector, compile_detector, compiler

pytestmark = pytest.mark.skipif(compiler() is None, reason="the race detector is compiled for its test: needs g++")


@pytest.fixture(scope="module")
def shared() -> Detector:
    return Detector(compile_detector())


@pytest.fixture
def races(shared: Detector) -> Detector:
    return shared.afresh()


@pytest.fixture
def streams(races: Detector) -> list[int]:
    return [races.stream(i) for i in range(4)]


SPAN = 24  # bytes of memory in a random program
TOKENS = EVENTS = 3

host_index = st.integers(0, 2)
stream_index = st.integers(0, 3)
event_index = st.integers(0, EVENTS - 1)


@st.composite
def spans(draw: st.DrawFn) -> tuple[int, int]:
    at = draw(st.integers(0, SPAN - 1))
    return at, draw(st.integers(1, min(8, SPAN - at)))


@st.composite
def accesses(draw: st.DrawFn) -> tuple[int, int, bool]:
    return (*draw(spans()), draw(st.booleans()))


blocks = st.integers(0, SPAN // 8 - 1)  # blocks of 8 bytes, so that programs free what they allocated

submissions = st.tuples(st.just("submit"), host_index, stream_index, st.lists(accesses(), min_size=1, max_size=3))
orders = st.one_of(
    st.tuples(st.just("record"), host_index, event_index, stream_index),
    st.tuples(st.just("wait"), host_index, event_index, stream_index),
    st.tuples(st.just("sync"), host_index, event_index),
    st.tuples(st.just("sync_stream"), host_index, stream_index),
    st.tuples(st.just("sync_device"), host_index, st.integers(0, 1)),
    st.tuples(st.just("send"), host_index, st.integers(0, TOKENS - 1)),
    st.tuples(st.just("receive"), host_index, st.integers(0, TOKENS - 1)),
)
host_accesses = st.tuples(st.just("host_access"), host_index, accesses())
memory = st.one_of(
    st.tuples(st.just("alloc"), host_index, blocks, st.integers(-1, 3), st.booleans()),
    st.tuples(st.just("free"), host_index, blocks, st.integers(-1, 3), st.lists(stream_index, max_size=2)),
    st.tuples(st.just("reached"), blocks, st.integers(-1, 3)),
)


@st.composite
def lives(draw: st.DrawFn) -> list[tuple[Any, ...]]:
    """A block from its allocation to its reuse in stream order, with other operations in between."""
    block, home, next_home = draw(blocks), draw(stream_index), draw(stream_index)
    user, recorded = draw(stream_index), draw(st.lists(stream_index, max_size=2))
    between = st.lists(st.one_of(orders, st.tuples(st.just("reached"), blocks, stream_index)), max_size=3)
    return [
        ("alloc", draw(host_index), block, home, False),
        *draw(between),
        ("submit", draw(host_index), user, [(block * 8, 8, draw(st.booleans()))]),
        *draw(between),
        ("free", draw(host_index), block, home, recorded),
        *draw(between),
        ("alloc", draw(host_index), block, next_home, True),
    ]


def play(program: list[tuple[Any, ...]], side: Any, hosts: list[int], streams: list[int]) -> None:
    """Do the operations on a detector or on the brute force; accesses are named after the operation's number."""

    def home(index: int) -> int:
        return HOST if index < 0 else streams[index]

    for n, op in enumerate(program):
        match op:
            case "submit", host, stream, made:
                side.submit(streams[stream], f"job {n}", *made, host=hosts[host])
            case "host_access", host, made:
                side.host_access(f"job {n}", made, host=hosts[host])
            case "record" | "wait", host, event, stream:
                getattr(side, op[0])(event, streams[stream], host=hosts[host])
            case "sync", host, event:
                side.sync(event, host=hosts[host])
            case "sync_stream", host, stream:
                side.sync_stream(streams[stream], host=hosts[host])
            case "sync_device", host, device:
                side.sync_device(device, host=hosts[host])
            case "send" | "receive", host, token:
                getattr(side, op[0])(token, host=hosts[host])
            case "alloc", host, block, owner, ordered:
                side.alloc(block * 8, 8, home(owner), stream_ordered=ordered, host=hosts[host])
            case "free", host, block, owner, recorded:
                side.free(block * 8, 8, home(owner), *(streams[s] for s in recorded), host=hosts[host])
            case "reached", block, agent:
                side.reached(block * 8, home(agent))


@pytest.fixture(scope="module")
def cast(shared: Detector) -> tuple[list[int], list[int], dict[int, str]]:
    """Host threads, streams (the last of another device) and what reports call them."""
    hosts = [HOST, shared.new_host("x"), shared.new_host("y")]
    streams = [*(shared.stream(i) for i in range(3)), shared.stream(0, device=1)]
    names = [
        "the host",
        "host thread 'x'",
        "host thread 'y'",
        *(f"stream {i}" for i in range(3)),
        "stream 0 of device 1",
    ]
    return hosts, streams, dict(zip([*hosts, *streams], names, strict=True))


thorough = settings(
    max_examples=400, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)


def compare(program: list[tuple[Any, ...]], races: Detector, cast: Any) -> BruteForce:
    hosts, streams, labels = cast
    races.reset()
    truth = BruteForce(labels)
    play(program, truth, hosts, streams)
    play(program, races, hosts, streams)
    assert races.pairs() == truth.found
    return truth


@thorough
@given(program=st.lists(st.one_of(submissions, submissions, orders, orders, host_accesses), max_size=60))
def test_random_programs_race_exactly_where_the_graph_has_no_path(program, races, cast):
    truth = compare(program, races, cast)
    # Beyond the last access of each agent: whatever races with anything is found, and only true races are.
    found = {(first, second) for _, first, second in truth.found}
    assert {second for _, second in found} == truth.racing
    assert found <= truth.unordered


@thorough
@given(parts=st.lists(lives(), max_size=5))
def test_random_lives_of_blocks_agree_with_the_graph(parts, races, cast):
    compare([op for part in parts for op in part], races, cast)


@thorough
@given(program=st.lists(st.one_of(submissions, orders, host_accesses, memory, memory), max_size=60))
def test_random_programs_with_frees_and_reuse_agree_with_the_graph(program, races, cast):
    compare(program, races, cast)


def wait_for_all(streams: list[int]) -> Callable[[Detector, int], None]:
    def before(races: Detector, stream: int) -> None:
        for event, other in enumerate(streams):
            races.record(event, other)
            races.wait(event, stream)

    return before


@settings(thorough, max_examples=100)
@given(jobs=st.lists(st.tuples(stream_index, st.lists(accesses(), max_size=3)), max_size=30))
def test_a_program_in_which_every_job_waits_for_all_streams_is_silent(jobs, races, streams):
    races.reset()
    order = wait_for_all(streams)
    for n, (stream, made) in enumerate(jobs):
        order(races, streams[stream])
        races.submit(streams[stream], f"job {n}", *made)
    assert races.take_report() == []
