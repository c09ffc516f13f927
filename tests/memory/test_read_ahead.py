"""Where no plan says what is used next, ranges that are used one after another are read before they are."""

from __future__ import annotations

import errno
import os
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch

from lowtide.memory.native.bindings import Place
from lowtide.memory.ranges import InFile
from tests.memory.engine import KIB, MIB, PATIENCE_S, Engine, HeldMedium, filled, pattern, peek, poke
from tests.memory.steps import Step

Opened = Callable[..., Engine]


def away(engine: Engine, count: int, nbytes: int = MIB) -> list[torch.Tensor]:
    """Return so many tensors with `pattern` in them, all away, in the order in which they were made."""
    made = []
    for seed in range(count):
        made.append(filled(nbytes, seed))
        engine.send_away(made[-1])
    return made


def here(engine: Engine, tensors: Sequence[torch.Tensor]) -> list[int]:
    """Return the numbers of those that are in memory once nothing is under way."""
    engine.native.settle()
    return [number for number, each in enumerate(tensors) if engine.place(each) is Place.HERE]


def as_operand(tensor: torch.Tensor) -> None:
    """Use a tensor as an operator's operand."""
    tensor.any()


def lent(tensor: torch.Tensor) -> None:
    """Use a tensor by its address, which is asked for."""
    tensor.numpy()


@pytest.mark.parametrize("use", [as_operand, lent])
def test_uses_in_order_read_ahead_and_twice_as_much_each_time(
    opened: Opened, use: Callable[[torch.Tensor], object]
) -> None:
    engine = opened()
    made = away(engine, 12)
    use(made[0])
    assert here(engine, made) == [0], "one use is no order"
    use(made[1])
    assert here(engine, made) == [0, 1, 2, 3]
    use(made[2])
    assert here(engine, made) == [0, 1, 2, 3, 4, 5, 6]
    read = engine.counted.read
    assert read == 7 * MIB
    for seed, each in enumerate(made):
        assert torch.equal(each, pattern(MIB, seed))
    assert engine.counted.read == 12 * MIB, "something was read twice"


def test_uses_that_nobody_announces_are_seen_where_they_fault(opened: Opened) -> None:
    engine = opened(budget=8 * MIB)
    made = away(engine, 24)
    for number, each in enumerate(made):
        engine.native.settle()
        assert peek(each, 77) == pattern(MIB, number)[77]
    counted = engine.counted
    assert (counted.read, counted.beyond) == (24 * MIB, 0)
    assert counted.faults < 24 // 2, "what came ahead was forgotten, or nothing did"
    assert engine.peak <= 8 * MIB


def test_uses_need_not_be_strictly_in_order(opened: Opened) -> None:
    engine = opened()
    made = away(engine, 12)
    for number in (2, 0, 4):  # a layer that uses its weights in another order than it has made them
        as_operand(made[number])
    assert here(engine, made) == [0, 2, 4, 5, 6]


@pytest.mark.parametrize("order", [range(11, -1, -1), (0, 30, 10, 20)])
def test_uses_elsewhere_read_nothing_ahead(opened: Opened, order: Sequence[int]) -> None:
    engine = opened(budget=128 * MIB)
    made = away(engine, 31)
    for number in order:
        as_operand(made[number])
    assert here(engine, made) == sorted(order)


def test_several_streams_go_on_beside_each_other(opened: Opened) -> None:
    engine = opened(budget=128 * MIB)
    made = away(engine, 40)
    for number in (0, 10, 20, 30, 1, 11, 21, 31):
        as_operand(made[number])
    assert here(engine, made) == [begin + i for begin in (0, 10, 20, 30) for i in range(4)]


def test_tensors_of_a_file_are_read_in_the_files_order(opened: Opened, tmp_path: Path) -> None:
    engine = opened()
    path, count = tmp_path / "weights", 12
    path.write_bytes(b"x" + b"".join(pattern(MIB, seed).numpy().tobytes() for seed in range(count)))
    source = engine.memory.read_in_place(path, [InFile(begin=1 + seed * MIB, nbytes=MIB) for seed in range(count)])
    made: dict[int, torch.Tensor] = {}
    others = []
    for place in ((seed * 5) % count for seed in range(count)):
        made[place] = torch.empty(MIB, dtype=torch.uint8)
        assert engine.memory.refer(made[place], source, place)
        others += away(engine, 9, 64 * KIB)  # so many apart they are not near each other
    tensors = [made[place] for place in range(count)]
    for tensor in tensors[:2]:
        as_operand(tensor)
    assert here(engine, tensors) == [0, 1, 2, 3]
    for seed, tensor in enumerate(tensors):
        assert torch.equal(tensor, pattern(MIB, seed))


def test_a_pass_over_more_than_memory_holds_waits_for_few_and_reads_each_once(opened: Opened) -> None:
    engine = opened(budget=8 * MIB)
    made = away(engine, 24)
    written = engine.counted.written
    for seed, each in enumerate(made):
        engine.native.settle()  # what is under way has the time that the program works
        assert torch.equal(each, pattern(MIB, seed))
    counted = engine.counted
    assert engine.peak <= 8 * MIB
    assert (counted.read, counted.written, counted.beyond) == (24 * MIB, written, 0)
    assert counted.waits == 2, "it was read when it was used, and not ahead"


def test_nothing_is_written_to_read_ahead(opened: Opened) -> None:
    engine = opened(budget=8 * MIB)
    made = away(engine, 4)
    changed = [filled(MIB, 100 + seed) for seed in range(5)]
    as_operand(made[0])
    as_operand(made[1])
    assert len(here(engine, made)) == 2, "there is room for no third one"
    assert here(engine, changed) == list(range(5))
    assert engine.counted.written == 4 * MIB


def test_what_came_ahead_stays_for_its_use_and_not_for_what_follows_it(opened: Opened) -> None:
    engine = opened(budget=10 * MIB)
    changed = [filled(MIB, 100 + seed) for seed in range(5)]
    made = away(engine, 8)
    as_operand(made[0])
    as_operand(made[1])
    assert here(engine, made) == [0, 1, 2, 3]
    for each in made[:2]:
        poke(each, peek(each))  # no longer clean
    as_operand(made[2])
    assert here(engine, made) == [0, 1, 2, 3], "the next but one has taken the next one's room"
    assert here(engine, changed) == list(range(5))


def test_what_came_ahead_leaves_before_what_has_to_be_written(opened: Opened) -> None:
    engine = opened(budget=10 * MIB)
    changed = [filled(MIB, 100 + seed) for seed in range(5)]
    made = away(engine, 8)
    as_operand(made[0])
    as_operand(made[1])
    assert here(engine, made) == [0, 1, 2, 3]
    for each in made[:2]:
        poke(each, 1)  # these have to be written, too
    written = engine.counted.written
    more = filled(5 * MIB // 2, 7)
    assert here(engine, made) == [0, 1]
    assert here(engine, changed) == list(range(5))
    assert engine.counted.written == written
    assert torch.equal(more, pattern(5 * MIB // 2, 7))


def test_an_operator_waits_for_what_is_on_its_way_instead_of_writing(opened: Opened) -> None:
    medium = HeldMedium()
    engine = opened(medium, budget=10 * MIB)
    changed = [filled(MIB, 100 + seed) for seed in range(5)]
    made = away(engine, 8)
    as_operand(made[0])
    as_operand(made[1])
    engine.native.settle()
    written, reads = engine.counted.written, len(medium.reads)
    medium.may_read.clear()
    as_operand(made[2])
    assert engine.place(made[4]) is Place.ARRIVING
    # Once what came ahead has gone, only what has to be written is left to this one, and what is on its way.
    released = engine.counted.released

    def open_gate() -> None:
        until = time.monotonic() + PATIENCE_S
        while engine.counted.released == released and time.monotonic() < until:
            os.sched_yield()
        medium.may_read.set()

    opener = threading.Thread(target=open_gate)
    opener.start()
    more = filled(5 * MIB // 2, 9)
    opener.join()
    assert torch.equal(more, pattern(5 * MIB // 2, 9))
    assert len(medium.reads) > reads
    assert here(engine, changed) == list(range(5))
    assert engine.counted.written == written
    assert engine.peak <= 10 * MIB
    assert engine.counted.beyond == 0


def test_an_operator_that_needs_what_came_ahead_and_all_the_rest_has_it(opened: Opened) -> None:
    engine = opened(budget=10 * MIB)
    changed = [filled(MIB, 100 + seed) for seed in range(5)]
    made = away(engine, 4)
    (other,) = away(engine, 1, 2 * MIB)
    as_operand(made[0])
    as_operand(made[1])
    assert here(engine, made) == [0, 1, 2, 3]
    for each in made[:2]:
        poke(each, peek(each))  # these have to be written, too
    joined = torch.cat([other, made[2], made[3]])
    expected = [pattern(2 * MIB, 0), pattern(MIB, 2), pattern(MIB, 3)]
    assert torch.equal(joined, torch.cat(expected))
    assert engine.counted.beyond == 0
    assert all(torch.equal(each, pattern(MIB, 100 + seed)) for seed, each in enumerate(changed))


def test_a_read_ahead_that_fails_is_nobodys_concern(opened: Opened) -> None:
    medium = HeldMedium()
    engine = opened(medium)
    made = away(engine, 6)
    as_operand(made[0])
    as_operand(made[1])
    engine.native.settle()
    medium.read_errno = errno.EIO
    as_operand(made[2])
    engine.native.settle()
    assert here(engine, made) == [0, 1, 2, 3]
    assert engine.native.take_trouble() == (None, None)
    medium.read_errno = 0
    for seed, each in enumerate(made):
        assert torch.equal(each, pattern(MIB, seed))


def test_a_planned_step_reads_what_its_plan_says(opened: Opened) -> None:
    engine = opened()
    made = away(engine, 6)
    step = Step(engine, ["aten::any"] * 4)
    for number, each in enumerate(made[:4]):
        step.known(each, number)
    plan = step.compile()
    engine.native.step_begin(plan)
    for each in made[:4]:
        as_operand(each)
    assert engine.native.step_end()[0] == plan
    assert here(engine, made) == [0, 1, 2, 3]


@pytest.mark.parametrize("leaves", [False, True])
def test_reading_in_vain_ends(opened: Opened, leaves: bool) -> None:
    engine = opened(budget=16 * MIB)
    made = away(engine, 160)

    # Of every twenty two are used, as of experts that are chosen anew for each word.
    def use_some() -> None:
        for begin in range(0, 160, 20):
            as_operand(made[begin])
            as_operand(made[begin + 1])
            if leaves:  # what came ahead as well; else it stays until its stream is forgotten
                engine.native.settle()
            engine.native.leave_all()
            engine.native.settle()

    use_some()
    assert engine.counted.read > 16 * MIB, "nothing was read ahead in the first place"
    use_some()
    read = engine.counted.read
    use_some()
    assert engine.counted.read - read == 16 * MIB
