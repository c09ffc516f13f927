"""A compiled plan: what leaves and returns at its operators, how storages are recognised, and a step that diverges."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from lowtide.core.order import Order
from lowtide.memory.native.bindings import Place
from tests.memory.engine import KIB, MIB, PATIENCE_S, Engine, HeldMedium, files, filled, pattern, peek, raw_array
from tests.memory.steps import FETCH, LEAVE, Step

Opened = Callable[..., Engine]


def test_actions_happen_at_their_operators(opened: Opened) -> None:
    engine = opened()
    x, small = filled(MIB), torch.zeros(4)
    step = Step(engine, ["aten::fill_", "aten::neg_", "aten::fill_", "aten::neg_"])
    number = step.known(x, 0, 3)
    plan = step.at(1, LEAVE, number).at(2, FETCH, number).compile()
    native = engine.native
    native.step_begin(plan)
    small.fill_(1)
    assert engine.place(x) is Place.HERE
    small.neg_()
    assert engine.place(x) in (Place.LEAVING, Place.AWAY)
    native.settle()
    assert engine.place(x) is Place.AWAY
    small.fill_(2)
    assert engine.place(x) in (Place.ARRIVING, Place.HERE)
    native.settle()
    assert engine.place(x) is Place.HERE
    small.neg_()
    assert native.step_end() == (plan, 4, None, False)
    assert engine.counted.faults == 0
    assert torch.equal(x, pattern(MIB))


def test_births_are_recognised_by_operator_and_number(opened: Opened) -> None:
    engine = opened()
    small = torch.zeros(4)
    step = Step(engine, ["aten::fill_", "aten::neg_"])
    step.born(0, 0, MIB)
    second = step.born(0, 1, MIB)
    plan = step.at(1, LEAVE, second).compile()
    engine.native.step_begin(plan)
    small.fill_(1)
    made = [torch.empty(MIB, dtype=torch.uint8) for _ in range(3)]
    small.neg_()
    engine.native.settle()
    assert [engine.place(each) for each in made] == [Place.HERE, Place.AWAY, Place.HERE]
    assert engine.native.step_end()[0] == plan


def test_what_a_running_operator_uses_leaves_when_it_ends(opened: Opened) -> None:
    engine = opened()
    x = filled(MIB)
    array = x.numpy()  # pinned
    small = torch.zeros(4)
    step = Step(engine, ["aten::fill_"])
    plan = step.at(0, LEAVE, step.known(x, 0)).compile()
    engine.native.step_begin(plan)
    small.fill_(1)
    assert engine.place(x) is Place.HERE
    del array
    engine.native.settle()
    assert engine.place(x) is Place.AWAY
    engine.native.step_end()


def test_a_fetch_takes_an_order_to_leave_back(opened: Opened) -> None:
    engine = opened()
    x, small = filled(MIB), torch.zeros(4)
    array = x.numpy()
    step = Step(engine, ["aten::fill_", "aten::neg_"])
    number = step.known(x, 1)
    plan = step.at(0, LEAVE, number).at(1, FETCH, number).compile()
    engine.native.step_begin(plan)
    small.fill_(1)
    small.neg_()
    del array
    engine.native.settle()
    assert engine.place(x) is Place.HERE
    engine.native.step_end()


def test_a_fetch_that_finds_no_room_is_tried_again(opened: Opened) -> None:
    engine = opened(budget=4 * MIB)
    x, small = filled(2 * MIB), torch.zeros(4)
    engine.send_away(x)
    other = filled(3 * MIB, 3)
    step = Step(engine, ["aten::fill_", "aten::neg_", "aten::neg_"])
    plan = step.at(0, FETCH, step.known(x, 2)).compile()
    engine.native.step_begin(plan)
    small.fill_(1)
    small.neg_()
    assert engine.place(x) is Place.AWAY
    assert engine.place(other) is Place.HERE  # a fetch ahead gives nothing up
    del other
    small.neg_()
    engine.native.settle()
    assert engine.place(x) is Place.HERE
    engine.native.step_end()


def test_a_late_fetch_does_not_undo_a_leave(opened: Opened) -> None:
    engine = opened(budget=4 * MIB)
    x, small = filled(2 * MIB), torch.zeros(4)
    step = Step(engine, ["aten::fill_", "aten::neg_", "aten::fill_", "aten::neg_", "aten::fill_"])
    number = step.known(x, 2)
    plan = step.at(1, FETCH, number).at(3, LEAVE, number).compile()
    native = engine.native
    native.step_begin(plan)
    native.step_abandon()
    engine.send_away(x)
    peek(x)  # unchanged from here on: it leaves at once
    engine.send_away(x)
    native.step_begin(plan)
    others = [filled_without_operators(3 * MIB)]
    small.fill_(1)
    small.neg_()  # asked for, without room
    small.fill_(1)
    peek(x)  # the use, which makes room
    assert engine.place(x) is Place.HERE
    others.clear()
    small.neg_()
    small.fill_(1)
    native.settle()
    assert engine.place(x) is Place.AWAY
    assert native.step_end()[0] == plan


def test_a_plan_with_the_same_beginning_takes_over(opened: Opened) -> None:
    engine = opened()
    x, small = filled(MIB), torch.zeros(4)
    first = Step(engine, ["aten::fill_", "aten::neg_"])
    first.known(x)
    other = Step(engine, ["aten::fill_", "aten::fill_", "aten::neg_"])
    born = other.born(0, 0, MIB)
    other.at(2, LEAVE, other.known(x, 0)).at(2, LEAVE, born)
    numbers = first.compile(), other.compile()
    engine.native.step_begin(numbers[0])
    small.fill_(1)
    made = filled_without_operators(MIB)
    small.fill_(1)
    small.neg_()
    engine.native.settle()
    assert engine.place(x) is Place.AWAY
    assert engine.place(made) is Place.AWAY
    assert engine.native.step_end() == (numbers[1], 3, 1, False)


def filled_without_operators(nbytes: int) -> torch.Tensor:
    """Make a block that no operator of the step is counted for."""
    return torch.empty(nbytes, dtype=torch.uint8)


@pytest.mark.parametrize("way", ["name", "size", "longer", "shorter"])
def test_a_step_that_diverges_goes_on_without_a_plan(opened: Opened, way: str) -> None:
    engine = opened()
    x, small = filled(MIB), torch.zeros(4)
    step = Step(engine, ["aten::fill_", "aten::neg_"])
    step.born(0, 0, MIB)
    plan = step.at(1, LEAVE, step.known(x, 0)).compile()
    engine.native.step_begin(plan)
    small.fill_(1)
    made = filled_without_operators(2 * MIB if way == "size" else MIB)
    if way == "name":
        small.abs_()
    elif way != "shorter":
        small.neg_()
    if way == "longer":
        small.neg_()
    followed, operators, diverged, resized = engine.native.step_end()
    assert followed is None
    assert (operators, diverged) == {
        "name": (2, 1),
        "size": (2, 0),
        "longer": (3, 2),
        "shorter": (1, None),
    }[way]
    engine.native.settle()
    assert resized == (way == "size")
    # A block of another size is not the plan's; the rest of the plan is followed.
    assert engine.place(x) is (Place.AWAY if way in ("longer", "size") else Place.HERE)
    assert torch.equal(x, pattern(MIB))
    assert made.nbytes >= MIB


def test_what_no_plan_knows_leaves_first_and_the_next_use_last(opened: Opened) -> None:
    engine = opened(budget=9 * MIB // 2)
    engine.native.order(Order.FURTHEST)
    soon, late = filled(MIB, 1), filled(MIB, 2)
    small = torch.zeros(4)
    step = Step(engine, ["aten::fill_", "aten::neg_", "aten::neg_"])
    step.known(soon, 1)
    step.known(late, 2)
    plan = step.compile()
    engine.native.step_begin(plan)
    small.fill_(1)
    unknown = filled_without_operators(MIB)
    soon_place = [engine.place(soon)]
    more = [filled_without_operators(MIB)]
    more.append(filled_without_operators(MIB))
    engine.native.settle()
    assert soon_place == [Place.HERE]
    assert engine.place(unknown) is Place.AWAY
    more.append(filled_without_operators(MIB))
    more.append(filled_without_operators(MIB))
    engine.native.settle()
    assert engine.place(soon) is Place.HERE
    assert engine.place(late) is Place.HERE
    engine.native.step_end()


# Four ranges, oldest first: bytes, operator of the next use, whether it is clean. The order in which they leave.
VICTIMS = {
    Order.NOTHING: [],
    Order.OLDEST: [0, 1, 2, 3],
    Order.FURTHEST: [1, 3, 2, 0],
    Order.FURTHEST_NEWEST: [3, 1, 2, 0],
    Order.FURTHEST_CHEAPEST: [3, 1, 2, 0],
    Order.LARGEST: [2, 0, 1, 3],
    Order.LARGEST_AREA: [2, 1, 3, 0],
    Order.FIRST_THAT_SUFFICES: [2, 0, 1, 3],
    Order.CHEAPEST: [2, 0, 1, 3],  # where nothing is made again all cost the same for their bytes
    Order.CHEAPEST_STALE: [2, 0, 1, 3],
}


@pytest.mark.parametrize("order", list(Order))
def test_ranges_leave_in_the_policys_order(opened: Opened, order: Order) -> None:
    medium = HeldMedium()
    engine = opened(medium, budget=7 * MIB + MIB // 4)
    native = engine.native
    tensors = [filled(nbytes, seed) for seed, nbytes in enumerate((MIB, MIB, 4 * MIB, MIB))]
    native.leave(tensors[3]._cdata, engine.memory.first_tier)
    native.settle()
    small = torch.zeros(4)
    step = Step(engine, ["aten::fill_", *["aten::neg_"] * 9])
    for tensor, use in zip(tensors, (1, 9, 7, 9), strict=True):
        step.known(tensor, 0, use)
    plan = step.compile()
    native.order(order)
    native.step_begin(plan)
    for tensor in tensors:
        tensor[:1].max()  # oldest first; the last one comes back, and its copy stays good
    native.step_abandon()
    native.step_begin(plan)
    small.fill_(1)
    gone: list[int] = []
    more: list[torch.Tensor] = []
    try:
        while len(gone) < len(tensors):
            more.append(filled_without_operators((2 if order is Order.FIRST_THAT_SUFFICES and not gone else 1) * MIB))
            native.lend(more[-1]._cdata)  # it stays
            native.settle()
            places = {at: engine.place(tensor) for at, tensor in enumerate(tensors)}
            gone += [at for at, place in places.items() if place is Place.AWAY and at not in gone]
    except torch.OutOfMemoryError:
        assert order is Order.NOTHING
    assert gone == VICTIMS[order]
    native.step_end()


def test_the_furthest_use_leaves_first(opened: Opened) -> None:
    engine = opened(budget=9 * MIB // 2)
    engine.native.order(Order.FURTHEST)
    xs = [filled(MIB, seed) for seed in range(3)]
    small = torch.zeros(4)
    step = Step(engine, ["aten::fill_", "aten::neg_", "aten::neg_", "aten::neg_"])
    for x, use in zip(xs, (2, 3, 1), strict=True):
        step.known(x, 0, use)
    plan = step.compile()
    engine.native.step_begin(plan)
    small.fill_(1)
    array = [filled_without_operators(MIB).numpy()]  # pinned
    array.append(filled_without_operators(MIB).numpy())
    engine.native.settle()
    assert [engine.place(x) for x in xs] == [Place.HERE, Place.AWAY, Place.HERE]
    array.append(filled_without_operators(MIB).numpy())
    engine.native.settle()
    assert [engine.place(x) for x in xs] == [Place.AWAY, Place.AWAY, Place.HERE]
    engine.native.step_end()
    for seed, x in enumerate(xs):
        assert torch.equal(x, pattern(MIB, seed))
        array.pop()


def test_without_a_plan_the_least_recently_touched_leaves(opened: Opened) -> None:
    engine = opened(budget=9 * MIB // 2)
    xs = [filled(MIB, seed) for seed in range(4)]
    xs[0].add_(0)
    made = filled_without_operators(MIB)
    engine.native.settle()
    assert [engine.place(x) for x in xs] == [Place.HERE, Place.AWAY, Place.HERE, Place.HERE]
    assert engine.place(made) is Place.HERE


def test_each_storage_goes_to_its_tier(opened: Opened, tmp_path: Path) -> None:
    held = HeldMedium()
    engine = opened(files(tmp_path), held, budget=16 * MIB)
    xs = [filled(MIB, seed) for seed in range(4)]
    small = torch.zeros(4)
    step = Step(engine, ["aten::fill_"])
    for seed, x in enumerate(xs):
        step.at(0, LEAVE, step.known(x, 0), tier=seed % 2)
    engine.native.step_begin(step.compile())
    small.fill_(1)
    engine.native.settle()
    assert [engine.place(x) for x in xs] == [Place.AWAY] * 4
    assert (engine.tier_used(0), engine.tier_used(1)) == (2 * MIB, 2 * MIB)
    assert len(held.writes) == 2
    for seed, x in enumerate(xs):
        assert torch.equal(x, pattern(MIB, seed))
    engine.native.step_end()
    x = xs[0]
    x.add_(1)
    engine.send_away(x, tier=1)  # from one tier to the other
    assert (engine.tier_used(0), engine.tier_used(1)) == (MIB, 3 * MIB)
    assert torch.equal(x, pattern(MIB, 0) + 1)


def test_reactive_evictions_go_where_the_plan_says(opened: Opened, tmp_path: Path) -> None:
    held = HeldMedium()
    engine = opened(files(tmp_path), held, budget=7 * MIB // 2)
    x, small = filled(MIB, 1), torch.zeros(4)
    step = Step(engine, ["aten::fill_"])
    step.known(x, 0, tier=1)
    engine.native.step_begin(step.compile())
    small.fill_(1)
    kept = [filled_without_operators(MIB).numpy() for _ in range(3)]
    engine.native.settle()
    assert engine.tier_used(1) == MIB
    engine.native.step_end()
    del kept


def test_an_abandoned_step_leaves_nothing_behind(opened: Opened) -> None:
    engine = opened()
    x, small = filled(MIB), torch.zeros(4)
    step = Step(engine, ["aten::fill_", "aten::neg_"])
    plan = step.at(1, LEAVE, step.known(x, 0)).compile()
    engine.native.step_begin(plan)
    small.fill_(1)
    engine.native.step_abandon()
    small.neg_()
    assert engine.place(x) is Place.HERE


def test_operators_of_other_threads_are_not_the_steps(opened: Opened) -> None:
    engine = opened()
    x, small = filled(MIB), torch.zeros(4)
    step = Step(engine, ["aten::fill_", "aten::neg_"])
    plan = step.at(1, LEAVE, step.known(x, 0)).compile()
    engine.native.step_begin(plan)
    small.fill_(1)
    thread = threading.Thread(target=lambda: torch.zeros(3).abs_())
    thread.start()
    thread.join(PATIENCE_S)
    small.neg_()
    assert engine.native.step_end() == (plan, 2, None, False)


# ---- whatever a plan says, the step is exact ----


def _compute(xs: list[torch.Tensor]) -> list[torch.Tensor]:
    """Twelve operators over tensors from before and tensors of its own."""
    made = []
    for turn in range(3):
        for number, x in enumerate(xs):
            y = x * 2
            y.add_(xs[(number + turn) % len(xs)])
            x.sub_(y)
            made.append(y)
    return made


@pytest.mark.parametrize("seed", range(12))
def test_random_plans_change_nothing(opened: Opened, tmp_path: Path, seed: int) -> None:
    rng = random.Random(seed)
    nbytes = 512 * KIB
    changed = [pattern(nbytes, number) for number in range(4)]
    want = [each.numpy().copy() for each in _compute(changed)]
    want_x = [each.numpy() for each in changed]
    del changed
    engine = opened(files(tmp_path), HeldMedium(), budget=rng.choice([4, 6, 64]) * MIB, verify=seed % 3 == 0)
    xs = [filled(nbytes, number) for number in range(4)]
    names = ["aten::mul", "aten::add_", "aten::sub_"] * 12
    numbers = []
    for _ in range(3):
        step = Step(engine, names[: rng.choice([36, 36, 20])])
        known = [step.known(x, *sorted(rng.sample(range(20), 5)), tier=rng.randrange(2)) for x in xs]
        known += [step.born(op, 0, rng.choice([nbytes, nbytes, MIB]), op) for op in range(0, 20, 3)]
        for _ in range(rng.randrange(60)):
            step.at(rng.randrange(len(step.names)), rng.randrange(2), rng.choice(known), rng.randrange(2))
        numbers.append(step.compile())
    for number in (*numbers, numbers[0]):
        engine.native.step_begin(number)
        got = _compute(xs)
        engine.native.step_end()
        for x, each in zip(xs, want_x, strict=True):
            assert np.array_equal(raw_array(x), each)
        for y, each in zip(got, want, strict=True):
            assert np.array_equal(raw_array(y), each)
        for seed_of, x in enumerate(xs):
            x.copy_(pattern(nbytes, seed_of))
        assert engine.memory.take_errors() == (None, "")
    del got, y
