"""The queue by age: what is touched often, or never asked for, takes no more room than there are records."""

from __future__ import annotations

from lowtide.execute.ages import Ages


def test_the_oldest_come_first_and_among_equals_those_that_cost_no_write() -> None:
    ages = Ages()
    for record, (last_access, clean) in enumerate([(7, False), (3, False), (5, False), (3, True)]):
        ages.put(record, last_access=last_access, clean=clean)
    assert ages.oldest(2, lambda _: 1) == [3, 1]
    assert ages.oldest(2, lambda _: 1) == [3, 1], "who is looked at keeps its place"
    assert ages.oldest(100, lambda _: 1) == [3, 1, 2, 0]


def test_a_record_has_one_place() -> None:
    ages = Ages()
    for event in range(10):
        ages.put(event % 2, last_access=event, clean=False)
    assert ages.oldest(100, lambda _: 1) == [0, 1]
    ages.forget(0)
    assert ages.oldest(100, lambda _: 1) == [1]


def test_what_cannot_be_given_up_loses_its_place_until_it_gets_one_again() -> None:
    ages = Ages()
    ages.put(0, last_access=0, clean=False)
    assert ages.oldest(1, lambda _: None) == []
    assert ages.oldest(1, lambda _: 1) == []
    ages.put(0, last_access=0, clean=False)
    assert ages.oldest(1, lambda _: 1) == [0]


def test_places_of_the_past_do_not_pile_up_while_nobody_asks() -> None:
    ages = Ages()
    for event in range(10_000):
        ages.put(event % 10, last_access=event, clean=False)
    assert len(ages._heap) <= 2 * 10 + 64
    assert ages.oldest(100, lambda _: 1) == list(range(10))
