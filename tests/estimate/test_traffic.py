"""A link as its transfers found it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from lowtide.core.machine import Link
from lowtide.estimate.traffic import LEAST_BYTES, Moved, Traffic, link_seen

LINK = Link(write_bytes_per_s=2e9, read_bytes_per_s=1e9, write_latency_s=1e-3, read_latency_s=2e-3)
NONE = Moved(nbytes=0, transfers=0, busy_s=0)
NOTHING = Traffic(write=NONE, read=NONE, write_waited=NONE, read_waited=NONE)


def moved(nbytes: float, *, transfers: int, link: Link, read: bool = False, slower: float = 1.0) -> Moved:
    """Transfers as a link carries them, `slower` times as long."""
    per_transfer = nbytes / transfers
    one_s = link.read_s(int(per_transfer)) if read else link.write_s(int(per_transfer))
    return Moved(nbytes=nbytes, transfers=transfers, busy_s=slower * transfers * one_s)


def test_a_link_that_carried_nothing_is_what_it_was() -> None:
    assert link_seen(LINK, NOTHING) == LINK


def test_a_link_that_carried_what_it_said_is_what_it_was() -> None:
    write, read = moved(1e9, transfers=40, link=LINK), moved(1e9, transfers=25, link=LINK, read=True)
    traffic = Traffic(write=write, read=read, write_waited=write, read_waited=read)
    found = link_seen(LINK, traffic)
    assert found.write_bytes_per_s == pytest.approx(LINK.write_bytes_per_s)
    assert found.read_latency_s == pytest.approx(LINK.read_latency_s)
    assert found.idle_speedup == pytest.approx(1)


def test_each_direction_is_as_slow_as_it_was_beside_operators() -> None:
    found = link_seen(LINK, replace(NOTHING, write=moved(1e9, transfers=40, link=LINK, slower=2.0)))
    assert (found.write_bytes_per_s, found.write_latency_s) == (pytest.approx(1e9), pytest.approx(2e-3))
    assert (found.read_bytes_per_s, found.read_latency_s) == (LINK.read_bytes_per_s, LINK.read_latency_s)
    assert found.idle_speedup == 1


def test_a_wait_says_how_much_faster_the_link_is_than_beside_operators() -> None:
    traffic = replace(
        NOTHING,
        read=moved(1e9, transfers=25, link=LINK, read=True, slower=3.0),
        read_waited=moved(1e9, transfers=25, link=LINK, read=True, slower=2.0),
    )
    found = link_seen(LINK, traffic)
    assert found.read_bytes_per_s == pytest.approx(1e9 / 3)
    assert found.idle_speedup == pytest.approx(1.5)


def test_where_the_program_waited_for_everything_the_link_is_as_slow_beside_it() -> None:
    link = replace(LINK, idle_speedup=1.25)
    waited = moved(1e9, transfers=25, link=link, read=True, slower=4.0 / 1.25)
    found = link_seen(link, replace(NOTHING, read_waited=waited))
    assert found.read_bytes_per_s == pytest.approx(1e9 / 4)
    assert found.write_latency_s == pytest.approx(4e-3)
    assert found.idle_speedup == 1.25


def test_a_few_bytes_say_nothing() -> None:
    few = Moved(nbytes=LEAST_BYTES - 1, transfers=3, busy_s=9.0)
    assert link_seen(LINK, Traffic(write=few, read=few, write_waited=NONE, read_waited=few)) == LINK


def test_traffic_adds_up_and_is_taken_away_again() -> None:
    one, other = Moved(nbytes=7, transfers=2, busy_s=0.5), Moved(nbytes=3, transfers=1, busy_s=0.25)
    first = Traffic(write=one, read=other, write_waited=NONE, read_waited=one)
    second = Traffic(write=other, read=NONE, write_waited=one, read_waited=one)
    assert first.plus(second).plus(second, times=-1) == first
    assert first.plus(second).write == Moved(nbytes=10, transfers=3, busy_s=0.75)
