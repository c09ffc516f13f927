"""Costs of making records again, with all that is dropped around them."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from lowtide.execute.recompute.neighbourhoods import Neighbourhoods

# 1 -> 2 -> 3 -> 4 -> 5, and 6 made from 2 and 5.
OWN: dict[int, tuple[float, Sequence[int]]] = {
    1: (1.0, ()),
    2: (2.0, (1,)),
    3: (4.0, (2,)),
    4: (8.0, (3,)),
    5: (16.0, (4,)),
    6: (32.0, (2, 5)),
}


@pytest.fixture
def costs() -> Neighbourhoods:
    known = Neighbourhoods(OWN.__getitem__)
    known.learn(OWN)
    return known


def test_alone_a_record_costs_what_its_own_calls_took(costs: Neighbourhoods) -> None:
    assert [costs.cost_s(record) for record in OWN] == [own for own, _ in OWN.values()]


def test_what_is_dropped_on_either_side_counts(costs: Neighbourhoods) -> None:
    costs.dropped(3)
    assert costs.cost_s(2) == 2.0 + 4.0
    assert costs.cost_s(4) == 8.0 + 4.0
    assert costs.cost_s(5) == 16.0, "not a neighbour"


def test_dropped_neighbours_join_and_count_once(costs: Neighbourhoods) -> None:
    costs.dropped(3)
    costs.dropped(5)
    assert costs.cost_s(4) == 8.0 + 4.0 + 16.0
    costs.dropped(4)
    assert costs.cost_s(2) == 2.0 + 4.0 + 8.0 + 16.0
    assert costs.cost_s(6) == 32.0 + 4.0 + 8.0 + 16.0, "the component next to it, once"


def test_what_is_made_again_takes_its_cost_out(costs: Neighbourhoods) -> None:
    for record in (3, 4):
        costs.dropped(record)
    costs.remade(4)
    assert costs.cost_s(2) == 2.0 + 4.0
    costs.dropped(4)
    assert costs.cost_s(2) == 2.0 + 4.0 + 8.0


def test_records_may_become_known_in_any_order() -> None:
    known = Neighbourhoods(OWN.__getitem__)
    known.learn([3])
    known.dropped(3)
    known.learn([2])
    assert known.cost_s(2) == 2.0 + 4.0


def test_a_record_that_nobody_asked_for_is_no_neighbour(costs: Neighbourhoods) -> None:
    costs.dropped(99)
    costs.remade(99)
    costs.remade(1)
    assert costs.cost_s(1) == 1.0
