"""The queue by age: what is touched often, or never asked for, takes no more room than there are records."""

from __future__ import annotations

from lowtide.residency.lru_queue import LruQueue


def test_the_oldest_come_first_and_among_equals_those_that_cost_no_write() -> None:
    queue = LruQueue()
    for record, (last_access, clean) in enumerate([(7, False), (3, False), (5, False), (3, True)]):
        queue.put(record, last_access=last_access, clean=clean)
    assert queue.oldest(2, lambda _: 1) == [3, 1]
    assert queue.oldest(2, lambda _: 1) == [3, 1], "who is looked at keeps its place"
    assert queue.oldest(100, lambda _: 1) == [3, 1, 2, 0]


def test_a_record_has_one_place() -> None:
    queue = LruQueue()
    for event in range(10):
        queue.put(event % 2, last_access=event, clean=False)
    assert queue.oldest(100, lambda _: 1) == [0, 1]
    queue.forget(0)
    assert queue.oldest(100, lambda _: 1) == [1]


def test_what_cannot_be_given_up_loses_its_place_until_it_gets_one_again() -> None:
    queue = LruQueue()
    queue.put(0, last_access=0, clean=False)
    assert queue.oldest(1, lambda _: None) == []
    assert queue.oldest(1, lambda _: 1) == []
    queue.put(0, last_access=0, clean=False)
    assert queue.oldest(1, lambda _: 1) == [0]


def test_places_of_the_past_do_not_pile_up_while_nobody_asks() -> None:
    queue = LruQueue()
    for event in range(10_000):
        queue.put(event % 10, last_access=event, clean=False)
    assert len(queue._heap) <= 2 * 10 + 64
    assert queue.oldest(100, lambda _: 1) == list(range(10))
