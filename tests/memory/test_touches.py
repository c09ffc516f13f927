"""Operators announce their operands: those come back before, and stay until the operator ends."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from lowtide.memory.native.bindings import Place
from tests.memory.engine import MIB, Engine, filled, pattern

Opened = Callable[..., Engine]


def test_operands_come_back_without_a_fault(opened: Opened) -> None:
    engine = opened()
    x, y = filled(MIB, 1), filled(MIB, 2)
    engine.send_away(x, y)
    assert torch.equal(x + y, pattern(MIB, 1) + pattern(MIB, 2))
    assert engine.counted.faults == 0
    assert engine.counted.touches > 0


def test_operands_in_lists_come_back_without_a_fault(opened: Opened) -> None:
    engine = opened()
    xs = [filled(MIB, seed) for seed in range(4)]
    engine.send_away(*xs)
    torch._foreach_add_(xs, 1)
    joined = torch.cat(xs)
    engine.send_away(*xs)
    picked = torch.zeros(MIB, dtype=torch.uint8)[[xs[0].long() % MIB]]
    assert picked.sum() == 0
    assert torch.equal(joined, torch.cat([pattern(MIB, seed) + 1 for seed in range(4)]))
    assert engine.counted.faults == 0


def test_lists_beyond_memory_come_one_by_one(opened: Opened) -> None:
    budget = 20 * MIB
    engine = opened(budget=budget)
    parameters = [torch.full((MIB // 4,), float(number)) for number in range(30)]
    gradients = [torch.full((MIB // 4,), 1.0) for _ in range(30)]
    torch._fused_sgd_(
        parameters,
        gradients,
        [],
        weight_decay=0.0,
        momentum=0.0,
        lr=0.5,
        dampening=0.0,
        nesterov=False,
        maximize=False,
        is_first_step=False,
    )
    assert engine.counted.faults > 0
    assert engine.peak <= budget
    assert all(bool((each == number - 0.5).all()) for number, each in enumerate(parameters))
    assert engine.native.take_trouble() == (None, None)


def library(test: str) -> torch.library.Library:
    return torch.library.Library(f"lowtide_{test}", "DEF")


def test_nothing_that_an_operator_uses_leaves_while_it_runs(opened: Opened) -> None:
    budget = 12 * MIB
    engine = opened(budget=budget)
    ours = library("pinned")
    ours.define("work(Tensor x, Tensor[] more, Tensor(a!) out) -> Tensor")
    seen: list[Place | None] = []

    def work(x: torch.Tensor, more: list[torch.Tensor], out: torch.Tensor) -> torch.Tensor:
        made = torch.full((MIB,), 7, dtype=torch.uint8)
        for each in (x, *more, out, made):
            assert not engine.start_leaving(each)
        for _ in range(12):  # each of them needs room that only others can give
            torch.full((MIB,), 1, dtype=torch.uint8)
        engine.native.leave_all()
        seen.extend(engine.place(each) for each in (x, *more, out, made))
        out.copy_(x)
        return made

    ours.impl("work", work, "CPU")
    x, more, out = filled(MIB, 1), [filled(MIB, 2)], filled(MIB, 3)
    others = [filled(MIB, seed) for seed in range(10, 20)]
    engine.native.leave_all()
    engine.native.settle()
    result = torch.ops.lowtide_pinned.work(x, more, out)
    assert seen == [Place.HERE] * 4
    assert engine.peak <= budget
    engine.send_away(x, *more, out, result)  # nothing is pinned any more
    assert torch.equal(out, pattern(MIB, 1))
    assert torch.equal(result, torch.full((MIB,), 7, dtype=torch.uint8))
    for seed, other in zip(range(10, 20), others, strict=True):
        assert torch.equal(other, pattern(MIB, seed))


def test_what_an_operator_makes_after_it_freed_something_is_pinned_once(opened: Opened) -> None:
    engine = opened()
    ours = library("freed")
    ours.define("work(Tensor x) -> Tensor")
    ours.define("look(Tensor x) -> Tensor")
    left: list[bool] = []

    def work(x: torch.Tensor) -> torch.Tensor:
        made = torch.empty(MIB, dtype=torch.uint8)
        del made
        return torch.full((MIB,), 7, dtype=torch.uint8)

    def look(x: torch.Tensor) -> torch.Tensor:
        left.append(engine.start_leaving(x))
        return torch.zeros(1)

    ours.impl("work", work, "CPU")
    ours.impl("look", look, "CPU")
    made = torch.ops.lowtide_freed.work(filled(MIB))
    torch.ops.lowtide_freed.look(made)
    assert left == [False]
    engine.send_away(made)
    assert bool((made == 7).all())


def test_pins_end_when_an_operator_raises(opened: Opened) -> None:
    engine = opened()
    x = filled(MIB)
    with pytest.raises(RuntimeError):
        x.add_(torch.zeros(3, dtype=torch.uint8))
    engine.send_away(x)


def test_views_and_shapes_bring_nothing_back(opened: Opened) -> None:
    engine = opened()
    x = filled(MIB)
    engine.send_away(x)
    touches = engine.counted.touches
    kept = [x[5:], x.view(1024, -1).t(), x.detach(), x.unsqueeze(0).expand(3, MIB), x.split(1000)[1], x.chunk(2)[0]]
    kept += [torch.empty_like(x), x.new_zeros(3), torch.zeros_like(x), torch.randint_like(x, 5), x.new_empty(7)]
    assert engine.place(x) is Place.AWAY
    assert engine.counted.touches == touches + 3  # the results of zeros_like, new_zeros and randint_like are filled
    assert torch.equal(kept[0], pattern(MIB)[5:])


def test_with_announcing_off_faults_alone_give_the_same(opened: Opened) -> None:
    budget = 10 * MIB
    engine = opened(budget=budget, announcing=False)
    xs = [filled(MIB, seed) for seed in range(30)]
    for x in xs:
        x.add_(1)
    total = sum(int(x.sum(dtype=torch.int64)) for x in xs)
    assert total == sum(int((pattern(MIB, seed) + 1).sum(dtype=torch.int64)) for seed in range(30))
    assert engine.counted.faults > 0
    assert engine.counted.touches == 0
    assert engine.peak <= budget


def test_announcing_can_be_left_to_faults(opened: Opened) -> None:
    engine = opened()
    x = filled(MIB)
    engine.send_away(x)
    engine.native.announce(0)
    assert torch.equal(x, pattern(MIB))
    assert engine.counted.faults > 0
    engine.native.announce(1)


def test_operands_beyond_the_budget_are_raised_and_right(opened: Opened) -> None:
    engine = opened(budget=5 * MIB)
    xs = [filled(2 * MIB, seed) for seed in range(3)]
    out = filled(64 * 1024)
    for x in xs:
        engine.start_leaving(x)
    engine.native.settle()
    torch.add(xs[0], xs[1], out=xs[2])
    assert engine.counted.beyond >= MIB
    trouble, _ = engine.native.take_trouble()
    assert trouble is not None
    assert trouble.code == 12
    del out
    engine.native.shrink()
    assert torch.equal(xs[2], pattern(2 * MIB, 0) + pattern(2 * MIB, 1))


def test_an_allocation_that_cannot_fit_is_refused(opened: Opened) -> None:
    opened(budget=5 * MIB)
    x = filled(2 * MIB)
    with pytest.raises(torch.OutOfMemoryError, match="asked for 6291456 bytes"):
        torch.empty(6 * MIB, dtype=torch.uint8)
    assert torch.equal(x, pattern(2 * MIB))
