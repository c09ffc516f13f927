"""Ranges that are discarded and made again: by whom, from what, and what happens where that is not possible."""

from __future__ import annotations

import tempfile
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest
import torch

from lowtide.core.log import Event
from lowtide.errors import RecomputeError
from lowtide.memory.native.bindings import Place
from tests.memory.engine import (
    KIB,
    MIB,
    PATIENCE_S,
    Engine,
    HeldMedium,
    address_of,
    files,
    in_fork,
    in_fresh_process,
    raw_array,
)
from tests.memory.steps import LEAVE, Step

Opened = Callable[..., Engine]
COUNT = MIB // 4  # numbers in a mebibyte


class Halves:
    """A step that makes `half` of `whole`, runs one more operator, and uses it: discarded in between."""

    def __init__(self, engine: Engine, *, between: Sequence[str] = ()) -> None:
        self.engine, self.native = engine, engine.native
        self.whole = torch.randn(COUNT)
        self.small = torch.zeros(4)
        self.names = ("aten::div", *between, "aten::fill_", "aten::neg")
        self.plan = self.compile(before=len(self.names) - 1)

    def compile(self, *, before: int | None) -> int:
        """Have a plan that discards it until operator `before` (None: for ever)."""
        step = Step(self.engine, self.names)
        step.known(self.whole, 0)
        number = step.born(0, 0, MIB, 0, len(self.names) - 1)
        return step.discarded(number, after=len(self.names) - 2, before=before, ops=(0,)).compile()

    def begin(self) -> torch.Tensor:
        """Begin a step, and return what is discarded."""
        self.native.step_begin(self.plan)
        half = self.whole / 2
        self.small.fill_(1)
        return half

    def end(self) -> None:
        """End the step."""
        self.native.step_end()

    def try_out(self) -> None:
        """Have the plan's first step behind, in which nothing is given up for good."""
        half = self.begin()
        half.neg()
        self.end()
        assert self.engine.counted.trials == 1
        assert self.engine.counted.discarded == 0


def test_the_first_time_a_range_is_swapped_and_compared(opened: Opened) -> None:
    engine = opened()
    halves = Halves(engine)
    half = halves.begin()
    engine.native.settle()
    assert engine.place(half) is Place.AWAY
    assert engine.counted.written == half.nbytes
    assert torch.equal(half.neg(), -halves.whole / 2)
    assert engine.counted.calls_again == 1
    halves.end()


def test_then_it_is_given_up_without_a_copy_and_made_again(opened: Opened) -> None:
    engine = opened()
    halves = Halves(engine)
    halves.try_out()
    written, address = engine.counted.written, 0
    half = halves.begin()
    address = address_of(half)
    assert engine.place(half) is Place.AWAY
    assert engine.counted.discarded == half.nbytes
    assert engine.counted.written == written
    result = half.neg()
    assert engine.place(half) is Place.HERE
    assert address_of(half) == address
    assert engine.counted.calls_again == 2
    assert engine.counted.faults == 0
    halves.end()
    assert torch.equal(result, -halves.whole / 2)


# ---- touched before its time, by whoever ----


def test_an_operator_of_another_step_has_it_made(opened: Opened) -> None:
    engine = opened()
    halves = Halves(engine)
    halves.try_out()
    half = halves.begin()
    result = half.exp()  # the plan says `neg`
    assert torch.equal(result, (halves.whole / 2).exp())
    assert engine.counted.faults == 0
    halves.end()


def test_a_bare_address_finds_it_made(opened: Opened) -> None:
    engine = opened()
    halves = Halves(engine)
    halves.try_out()
    half = halves.begin()
    assert engine.place(half) is Place.AWAY
    array = raw_array(half)
    expected = (halves.whole / 2).numpy()
    assert array[3] == expected[3]
    assert engine.counted.faults == 1
    assert np.array_equal(array, expected)
    half.neg()
    halves.end()


def test_what_is_lent_is_made_and_stays(opened: Opened) -> None:
    engine = opened()
    halves = Halves(engine)
    halves.try_out()
    half = halves.begin()
    array = half.numpy()
    assert engine.counted.faults == 0
    assert engine.place(half) is Place.HERE
    assert np.array_equal(array, (halves.whole / 2).numpy())
    half.neg()
    halves.end()


def test_another_thread_finds_it_made_while_this_one_waits_with_the_gil(opened: Opened) -> None:
    """Nothing that runs again may need what the interrupted thread holds: here, several at once without announcing."""
    engine = opened()
    halves = Halves(engine)
    halves.try_out()
    half = halves.begin()
    expected = (halves.whole / 2).numpy().copy()
    found: list[bool] = []

    def look() -> None:
        found.append(np.array_equal(raw_array(half), expected))

    threads = [threading.Thread(target=look) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE_S)
    assert found == [True] * 4
    half.neg()
    halves.end()


def test_the_end_of_a_step_has_it_made(opened: Opened) -> None:
    engine = opened()
    halves = Halves(engine)
    halves.try_out()
    halves.plan = halves.compile(before=None)
    half = halves.begin()
    halves.end()
    assert engine.place(half) is Place.HERE
    assert torch.equal(half, halves.whole / 2)


def test_an_abandoned_step_has_it_made(opened: Opened) -> None:
    engine = opened()
    halves = Halves(engine)
    halves.try_out()
    half = halves.begin()
    engine.native.step_abandon()
    assert engine.place(half) is Place.HERE
    assert torch.equal(half, halves.whole / 2)


def test_the_end_of_the_engine_has_it_made(opened: Opened) -> None:
    engine = opened()
    halves = Halves(engine)
    halves.try_out()
    half = halves.begin()
    expected = halves.whole.clone() / 2
    engine.memory.close()
    engine.open = False
    assert torch.equal(half, expected)


def test_a_forked_child_finds_it_made(opened: Opened) -> None:
    engine = opened()
    halves = Halves(engine)
    halves.try_out()
    half = halves.begin()
    expected = (halves.whole / 2).numpy().copy()
    assert engine.place(half) is Place.AWAY
    assert in_fork(lambda: np.array_equal(raw_array(half), expected))()
    half.neg()
    halves.end()


# ---- what it is made from changes ----


def doubled(tensor: torch.Tensor) -> None:
    tensor.mul_(2)


def doubled_by_a_view(tensor: torch.Tensor) -> None:
    tensor.view(2, -1)[0].mul_(2)


def doubled_through_numpy(tensor: torch.Tensor) -> None:
    tensor.numpy()[:] *= 2


def doubled_through_dlpack(tensor: torch.Tensor) -> None:
    np.from_dlpack(tensor)[:] *= 2


def doubled_through_its_address(tensor: torch.Tensor) -> None:
    raw_array(tensor)[:] *= 2


def doubled_in_a_list(tensor: torch.Tensor) -> None:
    torch._foreach_mul_([tensor], 2.0)


def doubled_on_another_thread(tensor: torch.Tensor) -> None:
    thread = threading.Thread(target=lambda: tensor.mul_(2))
    thread.start()
    thread.join(PATIENCE_S)


CHANGES = [
    doubled,
    doubled_by_a_view,
    doubled_through_numpy,
    doubled_through_dlpack,
    doubled_through_its_address,
    doubled_in_a_list,
    doubled_on_another_thread,
]


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_it_is_made_before_its_source_changes(opened: Opened, change: Callable[[torch.Tensor], None]) -> None:
    engine = opened()
    halves = Halves(engine)
    halves.try_out()
    half = halves.begin()
    expected = raw_array(halves.whole).copy() / 2
    assert engine.place(half) is Place.AWAY
    change(halves.whole)
    assert engine.place(half) is Place.HERE
    assert np.array_equal(raw_array(half), expected)
    assert np.array_equal(raw_array(halves.whole), expected * 4) or change is doubled_by_a_view
    halves.end()


@pytest.mark.parametrize(
    ("change", "ops"),
    [
        (doubled, 1),
        (doubled_by_a_view, 1),
        (doubled_through_numpy, 0),
        (doubled_through_dlpack, 0),
        (doubled_through_its_address, 0),
        (doubled_in_a_list, 2),
    ],
    ids=lambda given: getattr(given, "__name__", ""),
)
def test_it_is_swapped_where_its_source_changed_before(
    opened: Opened, change: Callable[[torch.Tensor], None], ops: int
) -> None:
    engine = opened()
    names = {0: (), 1: ("aten::mul_",), 2: ("aten::_foreach_mul_",)}[ops]
    halves = Halves(engine, between=names)
    for _ in range(2):
        engine.native.step_begin(halves.plan)
        half = halves.whole / 2
        expected = raw_array(half).copy()
        change(halves.whole)
        halves.small.fill_(1)
        engine.native.settle()
        assert engine.place(half) is Place.AWAY
        assert np.array_equal(raw_array(half), expected)
        half.neg()
        halves.end()
    assert engine.counted.discarded == engine.counted.trials == 0
    assert engine.counted.not_discarded == 2
    assert engine.counted.calls_again == 0


def test_a_source_that_is_freed_stays_until_it_is_made(opened: Opened) -> None:
    engine = opened()
    halves = Halves(engine)
    halves.try_out()
    half = halves.begin()
    expected = halves.whole.clone() / 2
    before = engine.counted.ranges
    halves.whole = torch.zeros(1)
    assert engine.counted.ranges == before, "what it is made from is still there"
    assert torch.equal(half.neg(), -expected)
    assert engine.counted.ranges == before - 1
    halves.end()


def test_what_is_freed_while_it_is_discarded_leaves_nothing(opened: Opened) -> None:
    engine = opened()
    halves = Halves(engine)
    halves.try_out()
    half = halves.begin()
    calls = engine.counted.calls_again
    del half
    halves.whole.mul_(2)
    halves.end()
    assert engine.counted.calls_again == calls


# ---- longer recipes ----


class Planned:
    """A plan that is followed from its second step on, in which it gives up for good what it discards."""

    def __init__(self, engine: Engine, names: Sequence[str], body: Callable[[], object]) -> None:
        self.engine, self.native, self.body = engine, engine.native, body
        self.step = Step(engine, names)

    def run(self, body: Callable[[], object] | None = None) -> object:
        """Run a step of the plan; `body`: a step that leaves it."""
        self.native.step_begin(self.number)
        try:
            return (body or self.body)()
        finally:
            self.native.step_end()

    def try_out(self) -> None:
        """Compile the plan and run its first step."""
        self.number = self.step.compile()
        self.run()
        assert self.engine.counted.trials == len(self.step.remade)
        assert self.engine.counted.not_discarded == self.engine.counted.discarded == 0


def test_what_a_discarded_one_is_made_from_is_made_too(opened: Opened) -> None:
    """`b` is made from `a`, which the plan makes again before: a step that asks for `b` first makes both."""
    engine = opened()
    x, small = torch.randn(COUNT), torch.zeros(4)
    expected = x.exp().sin()

    def forward() -> tuple[torch.Tensor, torch.Tensor]:
        a = x.exp()
        b = a.sin()
        small.fill_(1)
        return a, b

    def planned() -> torch.Tensor:
        a, b = forward()
        a.neg()
        return b.neg()

    def other() -> torch.Tensor:
        a, b = forward()
        assert engine.place(a) is engine.place(b) is Place.AWAY
        result = b.clone()
        assert engine.place(a) is engine.place(b) is Place.HERE
        return result

    plan = Planned(engine, ["aten::exp", "aten::sin", "aten::fill_", "aten::neg", "aten::neg"], planned)
    a, b = plan.step.born(0, 0, MIB, 0, 1, 3), plan.step.born(1, 0, MIB, 1, 4)
    plan.step.discarded(a, after=2, before=3, ops=(0,)).discarded(b, after=2, before=4, ops=(1,))
    plan.try_out()
    assert torch.equal(plan.run(), -expected)
    assert engine.counted.calls_again == 4
    assert torch.equal(plan.run(other), expected)
    assert engine.counted.faults == 0


def test_what_is_changed_in_place_is_made_as_it_was_left(opened: Opened) -> None:
    engine = opened()
    x, small = torch.randn(COUNT), torch.zeros(4)

    def body() -> torch.Tensor:
        a = x.exp()
        a.sin_()
        small.fill_(1)
        return a.neg()

    plan = Planned(engine, ["aten::exp", "aten::sin_", "aten::fill_", "aten::neg"], body)
    plan.step.discarded(plan.step.born(0, 0, MIB, 0, 1, 3), after=2, before=3, ops=(0, 1))
    plan.try_out()
    assert torch.equal(plan.run(), -x.exp().sin())
    assert engine.counted.discarded == MIB


def test_half_a_recipe_is_none(opened: Opened) -> None:
    """A list that leaves out the change in place would make what was there before it."""
    engine = opened()
    x, small = torch.randn(COUNT), torch.zeros(4)

    def body() -> torch.Tensor:
        a = x.exp()
        a.sin_()
        small.fill_(1)
        return a.neg()

    plan = Planned(engine, ["aten::exp", "aten::sin_", "aten::fill_", "aten::neg"], body)
    plan.step.discarded(plan.step.born(0, 0, MIB, 0, 1, 3), after=2, before=3, ops=(0,))
    plan.number = plan.step.compile()
    for _ in range(2):
        assert torch.equal(plan.run(), -x.exp().sin())
    assert engine.counted.not_discarded == 2
    assert engine.counted.discarded == 0


def test_a_recipe_that_would_read_another_version_is_none(opened: Opened) -> None:
    """`b` was made from `a` after `sin_`, which the list leaves out."""
    engine = opened()
    x, small = torch.randn(COUNT), torch.zeros(4)

    def body() -> torch.Tensor:
        a = x.exp()
        a.sin_()
        b = a.cos()
        small.fill_(1)
        return b.neg()

    plan = Planned(engine, ["aten::exp", "aten::sin_", "aten::cos", "aten::fill_", "aten::neg"], body)
    plan.step.discarded(plan.step.born(2, 0, MIB, 2, 4), after=3, before=4, ops=(0, 2))
    plan.number = plan.step.compile()
    for _ in range(2):
        assert torch.equal(plan.run(), -x.exp().sin().cos())
    assert engine.counted.not_discarded == 2
    assert engine.counted.trials == 0


def test_what_was_read_before_a_change_in_place_is_made_from_a_copy(opened: Opened) -> None:
    """`b` is made from `a` as it was before `sin_`: `a` is made anew for it, and the one that is there stays."""
    engine = opened()
    x, small = torch.randn(COUNT), torch.zeros(4)

    def body() -> tuple[torch.Tensor, torch.Tensor]:
        a = x.exp()
        b = a.cos()
        a.sin_()
        small.fill_(1)
        return b.neg(), a

    names = ["aten::exp", "aten::cos", "aten::sin_", "aten::fill_", "aten::neg"]
    plan = Planned(engine, names, body)
    plan.step.born(0, 0, MIB, 0, 1, 2)
    plan.step.discarded(plan.step.born(1, 0, MIB, 1, 4), after=3, before=4, ops=(0, 1))
    plan.try_out()
    b, a = plan.run()
    assert torch.equal(b, -x.exp().cos())
    assert torch.equal(a, x.exp().sin())
    assert engine.counted.discarded == MIB


def test_what_is_made_together_reads_each_its_own_version(opened: Opened) -> None:
    """`b` needs `a` as it was before `sin_`, which is made for it, and `c` the one that is there."""
    engine = opened()
    x, small = torch.randn(COUNT), torch.zeros(4)

    def body() -> tuple[torch.Tensor, torch.Tensor]:
        a = x.exp()
        b = a.cos()
        a.sin_()
        c = a.tan()
        small.fill_(1)
        return b.neg(), c.neg()

    names = ["aten::exp", "aten::cos", "aten::sin_", "aten::tan", "aten::fill_", "aten::neg", "aten::neg"]
    plan = Planned(engine, names, body)
    plan.step.born(0, 0, MIB, 0, 1, 2, 3)
    b, c = plan.step.born(1, 0, MIB, 1, 5), plan.step.born(3, 0, MIB, 3, 6)
    plan.step.discarded(b, after=4, before=5, ops=(0, 1)).discarded(c, after=4, before=5, ops=(3,))
    plan.try_out()
    assert torch.equal(torch.stack(plan.run()), -torch.stack([x.exp().cos(), x.exp().sin().tan()]))
    assert engine.counted.discarded == 2 * MIB


def test_small_operands_are_as_they_were(opened: Opened) -> None:
    engine = opened()
    x, scale = torch.randn(COUNT), torch.tensor([3.0])

    def body() -> torch.Tensor:
        a = x * scale
        scale.fill_(7)
        return a.neg()

    plan = Planned(engine, ["aten::mul", "aten::fill_", "aten::neg"], body)
    plan.step.discarded(plan.step.born(0, 0, MIB, 0, 2), after=1, before=2, ops=(0,))
    plan.try_out()
    scale.fill_(3)
    assert torch.equal(plan.run(), -(x * 3))
    assert engine.counted.discarded == MIB


def test_statistics_do_not_move_along_once_more(opened: Opened) -> None:
    engine = opened()
    count = 20 * KIB  # large enough to be ranges, which the calls would find and write
    x, mean, variance = torch.randn(4, count, 1, 8), torch.zeros(count), torch.ones(count)
    small = torch.zeros(4)

    def body() -> torch.Tensor:
        a = torch.native_batch_norm(x, None, None, mean, variance, True, 0.1, 1e-5)[0]
        small.fill_(1)
        return a.neg()

    expected_mean, expected_variance = torch.zeros(count), torch.ones(count)
    for _ in range(2):
        expected = torch.native_batch_norm(x, None, None, expected_mean, expected_variance, True, 0.1, 1e-5)[0]
    plan = Planned(engine, ["aten::native_batch_norm", "aten::fill_", "aten::neg"], body)
    plan.step.discarded(plan.step.born(0, 0, x.nbytes, 0, 2), after=1, before=2, ops=(0,))
    plan.try_out()
    assert torch.equal(plan.run(), -expected)
    assert engine.counted.discarded == x.nbytes
    assert torch.equal(mean, expected_mean)
    assert torch.equal(variance, expected_variance)


def test_what_looks_at_shapes_only_does_not_need_its_operand(opened: Opened) -> None:
    engine = opened()
    small = torch.zeros(4)

    def body() -> torch.Tensor:
        x = torch.randn(COUNT)
        a = torch.full_like(x, 2.0)
        del x
        small.fill_(1)
        return a.neg()

    plan = Planned(engine, ["aten::randn", "aten::full_like", "aten::fill_", "aten::neg"], body)
    plan.step.discarded(plan.step.born(1, 0, MIB, 1, 3), after=2, before=3, ops=(1,))
    plan.try_out()
    ranges = engine.counted.ranges
    assert torch.equal(plan.run(), torch.full((COUNT,), -2.0))
    assert engine.counted.discarded == MIB
    assert engine.counted.ranges == ranges


def test_what_runs_again_is_no_part_of_the_step(opened: Opened) -> None:
    engine = opened()
    halves = Halves(engine)
    halves.try_out()
    native = engine.native
    native.log_start()
    result = halves.begin().neg()
    halves.end()
    entries, names = native.log_stop(), native.names()
    assert entries is not None
    assert engine.counted.calls_again == 2
    begun = [names[entry.a] for entry in entries if entry.kind == Event.OP_BEGIN]
    assert begun.count("aten::div") == begun.count("aten::neg") == 1
    assert [entry.b for entry in entries if entry.kind == Event.ALLOC and entry.b >= MIB] == [MIB, MIB]
    assert sum(entry.a for entry in entries if entry.kind == Event.STALL) > 0, "its time is none of the operators'"
    assert torch.equal(result, -halves.whole / 2)


def test_what_is_made_again_is_not_taken_for_what_the_operator_makes(opened: Opened) -> None:
    engine = opened()
    x, small = torch.randn(COUNT), torch.zeros(4)

    def body() -> torch.Tensor:
        result = x.exp()
        small.fill_(1)
        result = result.neg()
        small.fill_(2)
        assert engine.place(result) in (Place.LEAVING, Place.AWAY)
        return result

    plan = Planned(engine, ["aten::exp", "aten::fill_", "aten::neg", "aten::fill_"], body)
    plan.step.discarded(plan.step.born(0, 0, MIB, 0, 2), after=1, before=2, ops=(0,))
    plan.step.at(3, LEAVE, plan.step.born(2, 0, MIB, 2))
    plan.try_out()
    assert torch.equal(plan.run(), -x.exp())
    assert engine.counted.discarded == MIB


# ---- what does not come back the same ----


def test_a_write_that_nobody_announces_is_found_by_its_fault(opened: Opened) -> None:
    engine = opened()
    halves = Halves(engine)
    for _ in range(3):
        engine.native.step_begin(halves.plan)
        half = halves.whole / 2
        raw_array(half)[7] = 42.0
        halves.small.fill_(1)
        assert half.neg()[7] == -42.0
        halves.end()
    assert engine.counted.discarded == engine.counted.trials == 0
    assert engine.counted.not_discarded == 3


def unset(tensor: torch.Tensor) -> torch.Tensor:
    return torch.ops.aten.new_empty_strided(tensor, tensor.shape, tensor.stride())


def drawn(tensor: torch.Tensor) -> torch.Tensor:
    return torch.rand_like(tensor)


@pytest.mark.parametrize(("make", "name"), [(unset, "new_empty_strided"), (drawn, "rand_like")])
def test_an_operator_that_does_not_repeat_is_not_run_again(
    opened: Opened, make: Callable[[torch.Tensor], torch.Tensor], name: str
) -> None:
    engine = opened()
    x, small = torch.randn(COUNT), torch.zeros(4)
    plan = Step(engine, [f"aten::{name}", "aten::fill_", "aten::neg"])
    number = plan.discarded(plan.born(0, 0, MIB, 0, 2), after=1, before=2, ops=(0,)).compile()
    for _ in range(2):
        engine.native.step_begin(number)
        a = make(x)
        expected = raw_array(a).copy()
        small.fill_(1)
        assert np.array_equal(raw_array(a.neg()), -expected, equal_nan=True)
        engine.native.step_end()
    assert engine.counted.calls_again == engine.counted.discarded == 0
    assert engine.counted.not_discarded == 2


# ---- settings ----


def test_calls_run_under_their_own_settings_and_leave_the_programs_alone(opened: Opened) -> None:
    engine = opened()
    x, small = torch.randn(512, 512), torch.zeros(4)

    def body() -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            a = torch.mm(x, x)
        torch.use_deterministic_algorithms(True, warn_only=True)
        torch.set_flush_denormal(True)
        torch.set_default_dtype(torch.float64)
        torch.set_num_threads(1)
        small.fill_(1)
        return a.neg()

    def settings() -> tuple[object, ...]:
        tiny = torch.tensor([1e-310], dtype=torch.float64)
        return (
            torch.are_deterministic_algorithms_enabled(),
            torch.is_deterministic_algorithms_warn_only_enabled(),
            torch.get_default_dtype(),
            torch.get_num_threads(),
            bool((tiny / 2 == 0).item()),
            torch.is_grad_enabled(),
            torch.is_autocast_enabled("cpu"),
            torch.get_autocast_dtype("cpu"),
            torch.is_autocast_cache_enabled(),
            torch.backends.mkldnn.matmul.fp32_precision,
        )

    def usual() -> None:
        torch.use_deterministic_algorithms(False)
        torch.set_flush_denormal(False)
        torch.set_default_dtype(torch.float32)
        torch.set_num_threads(threads)

    threads = torch.get_num_threads()
    plan = Planned(engine, ["aten::mm", "aten::fill_", "aten::neg"], body)
    nbytes = x.nbytes // 2  # in half precision
    found: list[tuple[object, ...]] = []
    try:
        # The cast operand is made first.
        plan.step.discarded(plan.step.born(0, 2, nbytes, 0, 2), after=1, before=2, ops=(0,))
        plan.number = plan.step.compile()
        for _ in range(2):
            usual()
            plan.run()
            found.append(settings())
        usual()
        with torch.autocast("cpu", torch.bfloat16):
            expected = torch.mm(x, x).neg()
        usual()
        assert torch.equal(plan.run(), expected)
    finally:
        usual()
    assert engine.counted.discarded == 2 * nbytes
    assert found == [(True, True, torch.float64, 1, True, True, False, torch.bfloat16, True, "none")] * 2


def test_a_result_that_depends_on_a_setting_is_the_same(opened: Opened) -> None:
    engine = opened()
    numbers, small = torch.arange(COUNT), torch.zeros(4)

    def body() -> torch.Tensor:
        a = numbers / 3
        torch.set_default_dtype(torch.float64)
        small.fill_(1)
        return a.neg()

    plan = Planned(engine, ["aten::div", "aten::fill_", "aten::neg"], body)
    # Its operand in the result's dtype is made first.
    plan.step.discarded(plan.step.born(0, 1, MIB, 0, 2), after=1, before=2, ops=(0,))
    try:
        plan.try_out()
        torch.set_default_dtype(torch.float32)
        found = plan.run()
    finally:
        torch.set_default_dtype(torch.float32)
    assert torch.equal(found, -(numbers / 3))
    assert engine.counted.discarded == MIB


# ---- room, and errors ----


def test_what_is_made_again_is_within_the_budget(opened: Opened) -> None:
    """Room is made for it as for any operator: what is not needed meanwhile leaves."""
    engine = opened(budget=8 * MIB)
    halves = Halves(engine)
    halves.try_out()
    half = halves.begin()
    others = [torch.full((COUNT,), float(number)) for number in range(9)]
    assert engine.place(half) is Place.AWAY
    result = half.neg()
    halves.end()
    assert torch.equal(result, -halves.whole / 2)
    assert all(bool((other == number).all()) for number, other in enumerate(others))
    assert engine.peak <= 8 * MIB
    assert engine.counted.beyond == 0


@pytest.mark.parametrize("lends", [False, True], ids=["a fault", "a borrower of its source"])
def test_who_cannot_be_refused_passes_the_budget_and_says_so(opened: Opened, lends: bool) -> None:
    engine = opened(budget=8 * MIB)
    halves = Halves(engine)
    halves.try_out()
    half = halves.begin()
    expected = raw_array(halves.whole).copy() / 2
    held = [torch.ones(COUNT) for _ in range(engine.free_bytes // MIB)]
    lent = [one.numpy() for one in held]  # they cannot leave
    assert engine.place(half) is Place.AWAY
    if lends:
        lent.append(halves.whole.numpy())
        lent[-1][:] = 0
        assert engine.place(half) is Place.HERE
    assert np.array_equal(raw_array(half), expected)
    assert engine.counted.beyond > 0
    trouble, _ = engine.memory.take_errors()
    assert trouble is not None
    assert "budget" in str(trouble)
    del lent, held
    halves.end()


def test_an_operator_that_finds_no_room_to_make_it_is_refused(opened: Opened) -> None:
    engine = opened(budget=8 * MIB)
    halves = Halves(engine)
    halves.try_out()
    half = halves.begin()
    expected = raw_array(halves.whole).copy() / 2
    held = [torch.ones(COUNT) for _ in range(engine.free_bytes // MIB)]
    lent = [one.numpy() for one in held]
    with pytest.raises(torch.OutOfMemoryError):
        half.neg()
    engine.memory.take_errors()
    del lent, held
    assert np.array_equal(raw_array(half), expected)
    halves.end()


def test_nobody_waits_for_the_gil_with_a_medium_in_python(opened: Opened) -> None:
    """The source is away on a medium that needs the GIL, which the interrupted thread holds."""
    engine = opened(HeldMedium())
    halves = Halves(engine)
    halves.try_out()
    half = halves.begin()
    expected = raw_array(halves.whole).copy() / 2
    engine.send_away(halves.whole)
    assert np.array_equal(raw_array(half), expected)
    half.neg()
    halves.end()


def fails_the_second_time(touch: str) -> tuple[str, bool]:
    """Discard what an operator made that then cannot; return the error, and whether the program went on."""
    calls: list[int] = []

    def halve(tensor: torch.Tensor) -> torch.Tensor:
        calls.append(1)
        if len(calls) > 3:  # once in each of two steps, and once more in the trial
            raise RuntimeError("not again")
        return tensor / 2

    library = torch.library.Library("aten", "IMPL")
    library.impl("sinh", halve, "CPU")
    with tempfile.TemporaryDirectory() as directory:
        engine = Engine(files(Path(directory)))
        x, small = torch.randn(COUNT), torch.zeros(4)
        step = Step(engine, ["aten::sinh", "aten::fill_", "aten::neg"])
        number = step.discarded(step.born(0, 0, MIB, 0, 2), after=1, before=2, ops=(0,)).compile()
        for _ in range(2):
            engine.native.step_begin(number)
            a = x.sinh()
            small.fill_(1)
            if engine.counted.discarded:
                break
            a.neg()
            engine.native.step_end()
        assert engine.counted.discarded == MIB
        try:
            if touch == "fault":
                float(raw_array(a)[0])
            else:
                a.neg()
        except torch.OutOfMemoryError:
            pass
        engine.native.step_end()
        trouble, _ = engine.memory.take_errors()
        assert isinstance(trouble, RecomputeError), trouble
        del a
        again = torch.ones(COUNT).neg()
        engine.memory.close()
        return str(trouble), bool((again == -1).all())


def makes_other_bits(since: int, verify: bool) -> tuple[int, int, int, str]:
    """Discard what an operator makes otherwise from call `since` on; return the counters, wrong results, the error."""
    calls: list[int] = []

    def halve(tensor: torch.Tensor) -> torch.Tensor:
        calls.append(1)
        return tensor / (2 if len(calls) < since else 2 + len(calls))

    library = torch.library.Library("aten", "IMPL")
    library.impl("sinh", halve, "CPU")
    with tempfile.TemporaryDirectory() as directory:
        engine = Engine(files(Path(directory)), verify=verify)
        x, small = torch.randn(COUNT), torch.zeros(4)
        step = Step(engine, ["aten::sinh", "aten::fill_", "aten::neg"])
        number = step.discarded(step.born(0, 0, MIB, 0, 2), after=1, before=2, ops=(0,)).compile()
        wrong = 0
        for _ in range(2):
            engine.native.step_begin(number)
            a = x.sinh()
            expected = raw_array(a).copy()
            small.fill_(1)
            try:
                wrong += not np.array_equal(raw_array(a.neg()), -expected)
            except torch.OutOfMemoryError:
                engine.native.step_abandon()
                break
            engine.native.step_end()
        counted = engine.counted
        trouble, _ = engine.memory.take_errors()
        del a
        engine.memory.close()
        return counted.discarded, counted.not_discarded, wrong, str(trouble or "")


def test_what_comes_back_otherwise_the_first_time_is_never_discarded() -> None:
    outcome = in_fresh_process(makes_other_bits, 2, False)
    assert outcome.exit_code == 0, outcome.stderr
    assert outcome.value == (0, 1, 0, "")


def test_what_comes_back_otherwise_later_is_an_error_where_that_is_verified() -> None:
    outcome = in_fresh_process(makes_other_bits, 4, True)
    assert outcome.exit_code == 0, outcome.stderr
    discarded, _, wrong, error = outcome.value
    assert (discarded, wrong) == (MIB, 0)
    assert "made something else" in error


@pytest.mark.parametrize("touch", ["operator", "fault"])
def test_a_call_that_fails_is_an_error_and_never_a_wrong_number(touch: str) -> None:
    outcome = in_fresh_process(fails_the_second_time, touch)
    assert outcome.exit_code == 0, outcome.stderr
    message, went_on = outcome.value
    assert "1.00 MiB of a tensor was given up to be computed again" in message
    assert went_on
