"""Slow memory: pages of a file at a range's own addresses, touched in place, migrating both ways."""

from __future__ import annotations

import gc
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from lowtide.memory.native.bindings import Place, SlowRates
from tests.memory.engine import MIB, Engine, address_of, files, filled, in_fork, pattern, peek, poke, slow_memory
from tests.memory.steps import FETCH, LANDED, PLACE, RETURN, Step

Opened = Callable[..., Engine]


def place(engine: Engine, *tensors: torch.Tensor) -> None:
    for tensor in tensors:
        assert engine.native.place_in(tensor._cdata, engine.memory.first_tier) == 0
    engine.native.settle()
    for tensor in tensors:
        assert engine.place(tensor) is Place.SLOW


def fetch(engine: Engine, tensor: torch.Tensor) -> None:
    assert engine.native.fetch(tensor._cdata) == 0
    engine.native.settle()
    assert engine.place(tensor) is Place.HERE


@pytest.fixture(params=["memory", "file"])
def slow(opened: Opened, request: pytest.FixtureRequest, tmp_path: Path) -> Engine:
    """An engine with slow memory above a spill file: in memory, or a file on a filesystem."""
    from lowtide.tiers.slow import open_slow

    medium = slow_memory() if request.param == "memory" else open_slow(f"pmem://{tmp_path}?emulate=none")
    return opened(medium, files(tmp_path), budget=16 * MIB)


def test_operators_read_and_write_in_place_and_addresses_stay(slow: Engine) -> None:
    x = filled(3 * MIB + 4096, seed=1)
    before, address = slow.native.counters().live_bytes, address_of(x)
    place(slow, x)
    assert slow.native.counters().live_bytes == before - x.nbytes
    assert slow.counted.slow == slow.counted.peak_slow == x.nbytes
    assert torch.equal(x, pattern(x.nbytes, 1))
    x.bitwise_not_()
    assert slow.place(x) is Place.SLOW, "it stays there"
    assert address_of(x) == address
    fetch(slow, x)
    assert address_of(x) == address
    assert torch.equal(x, pattern(x.nbytes, 1).bitwise_not())
    assert slow.counted.slow == 0
    assert slow.counted.faults == slow.counted.write_faults == 0


def test_what_changed_in_place_is_what_comes_back_after_a_clean_return(slow: Engine) -> None:
    x = filled(MIB)
    place(slow, x)
    fetch(slow, x)
    written = slow.counted.written
    place(slow, x)
    assert slow.counted.written == written, "its bytes were there already"
    x.fill_(7)
    fetch(slow, x)
    assert peek(x, 5) == 7
    x.fill_(8)
    place(slow, x)
    assert slow.counted.written == written + MIB, "it changed in fast memory"
    assert peek(x, MIB - 1) == 8


def test_slow_memory_is_none_of_the_budget_and_a_block_that_does_not_fit_is_made_there(slow: Engine) -> None:
    held = [torch.zeros(2 * MIB, dtype=torch.uint8) for _ in range(6)]
    views = [each.numpy() for each in held]  # lent: they cannot leave
    room = torch.full((24 * MIB,), 3, dtype=torch.uint8)
    assert slow.place(room) is Place.SLOW
    assert int(room[-1]) == 3
    assert slow.peak <= 16 * MIB
    assert slow.counted.born_slow == 24 * MIB
    del views, room
    gc.collect()
    assert slow.counted.slow == 0


def test_operands_beyond_the_budget_are_touched_in_place(slow: Engine) -> None:
    parts = [filled(6 * MIB, seed=seed) for seed in range(4)]
    slow.native.leave_all()
    slow.native.settle()
    whole = torch.cat(parts)
    assert slow.peak <= 16 * MIB
    assert slow.counted.beyond == 0
    for seed, part in enumerate(whole.split(6 * MIB)):
        assert torch.equal(part, pattern(6 * MIB, seed))


def test_a_small_block_finds_room_where_operators_use_all_of_fast_memory(slow: Engine) -> None:
    free = slow.free_bytes
    x = torch.ones(free // 4096 * 4096 - 4096, dtype=torch.uint8)
    assert slow.place(x) is Place.HERE
    rows = x.view(-1, 512).amax(1)  # its result finds less than it needs, and its operand cannot leave
    assert rows.nbytes > 2 * 4096 > free - x.nbytes
    assert slow.place(x) is Place.SLOW
    assert slow.peak <= 16 * MIB
    assert bool((rows == 1).all())


def test_what_is_on_a_disk_finds_room_where_operators_use_all_of_fast_memory(slow: Engine) -> None:
    parts = [filled(7 * MIB, seed=seed) for seed in range(3)]
    for part in parts:
        if slow.place(part) is Place.HERE:
            assert slow.start_leaving(part, tier=1)
    slow.native.settle()
    whole = torch.cat(parts)
    assert slow.peak <= 16 * MIB
    assert slow.counted.beyond == 0
    for seed, part in enumerate(whole.split(7 * MIB)):
        assert torch.equal(part, pattern(7 * MIB, seed))


def test_who_touches_what_migrates_waits_for_it(slow: Engine) -> None:
    for seed in range(20):
        x = filled(4 * MIB, seed=seed)
        assert slow.native.place_in(x._cdata, slow.memory.first_tier) == 0
        poke(x, 1)  # nobody announces it
        assert slow.place(x) is Place.SLOW
        assert slow.native.fetch(x._cdata) == 0
        assert peek(x) == 1
        assert slow.place(x) is Place.HERE
        assert torch.equal(x[1:], pattern(4 * MIB, seed)[1:])


def test_memory_from_before_goes_there_too_and_its_allocator_gets_it_back_whole(opened: Opened, tmp_path: Path) -> None:
    x = torch.arange(1 << 20)
    y = torch.arange(1 << 20)
    engine = opened(slow_memory(), files(tmp_path), budget=64 * MIB)
    place(engine, x, y)
    x += 1
    del y
    gc.collect()
    assert [torch.zeros(1 << 20, dtype=torch.int64).sum() for _ in range(4)] == [0] * 4
    engine.close(left=1)
    assert torch.equal(x, torch.arange(1, (1 << 20) + 1))


def test_closing_brings_everything_into_fast_memory(slow: Engine) -> None:
    x, lent = filled(4 * MIB, seed=5), filled(4 * MIB, seed=6)
    place(slow, x, lent)
    view = lent.numpy()
    slow.memory.close()
    slow.open = False
    assert torch.equal(x, pattern(4 * MIB, 5))
    view[0] = 1
    assert torch.equal(lent[1:], pattern(4 * MIB, 6)[1:])
    assert Path("/proc/self/maps").read_text().count("lowtide-slow") == 0


def test_full_slow_memory_leaves_the_rest_to_the_tier_below(opened: Opened, tmp_path: Path) -> None:
    engine = opened(slow_memory(capacity_bytes=4 * MIB), files(tmp_path), budget=64 * MIB)
    first, second = filled(3 * MIB, seed=1), filled(3 * MIB, seed=2)
    place(engine, first)
    assert engine.native.place_in(second._cdata, engine.memory.first_tier) == 0
    engine.native.settle()
    assert engine.place(second) is Place.AWAY
    assert engine.tier_used(0) == engine.tier_used(1) == 3 * MIB
    assert torch.equal(second, pattern(3 * MIB, 2))
    assert torch.equal(first, pattern(3 * MIB, 1))


def test_checksums_say_nothing_of_what_changed_in_place(opened: Opened, tmp_path: Path) -> None:
    engine = opened(slow_memory(), files(tmp_path), budget=64 * MIB, verify=True)
    x = filled(MIB)
    place(engine, x)
    x.fill_(7)
    fetch(engine, x)
    assert bool((x == 7).all())
    assert engine.memory.take_errors() == (None, "")


def test_slow_memory_in_pieces_is_put_together(opened: Opened, tmp_path: Path) -> None:
    engine = opened(slow_memory(capacity_bytes=8 * MIB), files(tmp_path), budget=64 * MIB)
    parts = [filled(MIB, seed=seed) for seed in range(8)]
    place(engine, *parts)
    engine.native.fetch(parts[3]._cdata)  # its copy there is clean, and stays
    engine.native.settle()
    away = parts[5]
    for gone in (0, 2, 4):
        parts[gone] = torch.empty(0)
    gc.collect()
    large = filled(3 * MIB, seed=9)
    place(engine, large)
    assert engine.counted.compacted > 0
    assert engine.tier_used(0) == 8 * MIB
    for seed in (1, 3, 5, 6, 7):
        assert torch.equal(parts[seed], pattern(MIB, seed))
    away.bitwise_not_()
    place(engine, parts[3])
    assert torch.equal(parts[3], pattern(MIB, 3))
    assert torch.equal(away, pattern(MIB, 5).bitwise_not())
    assert torch.equal(large, pattern(3 * MIB, 9))


# ---- children ----


def test_a_child_sees_what_was_there_at_the_fork_and_the_parent_what_it_wrote_since(slow: Engine) -> None:
    x, y = filled(2 * MIB, seed=1), filled(2 * MIB, seed=2)
    place(slow, x, y)
    go, wait = torch.multiprocessing.get_context("fork").Pipe()

    def child() -> tuple[bool, bool]:
        wait.recv()
        y.fill_(9)  # nobody's business but the child's
        return torch.equal(x, pattern(2 * MIB, 1)), bool((y == 9).all())

    result = in_fork(child)
    x.fill_(1)
    poke(y, 77)
    go.send(None)
    assert result() == (True, True)
    assert slow.place(x) is Place.SLOW
    assert bool((x == 1).all())
    assert peek(y) == 77
    assert torch.equal(y[1:], pattern(2 * MIB, 2)[1:])


# ---- plans ----


def test_a_plan_places_waits_and_returns_at_its_operators(slow: Engine) -> None:
    x, small = filled(4 * MIB, seed=3), torch.zeros(4)
    step = Step(slow, ["aten::fill_", "aten::bitwise_not_", "aten::neg_", "aten::bitwise_not_"])
    number = step.known(x, 1, 3)
    plan = step.at(0, PLACE, number).at(0, LANDED, number).at(2, FETCH, number).at(3, RETURN, number).compile()
    for _ in range(3):
        slow.native.step_begin(plan)
        small.fill_(1)
        assert slow.place(x) is Place.SLOW, "the operator waited for it"
        x.bitwise_not_()
        assert slow.place(x) is Place.SLOW
        small.neg_()
        assert slow.place(x) in (Place.ARRIVING, Place.HERE)
        x.bitwise_not_()
        assert slow.place(x) is Place.HERE
        assert slow.native.step_end().plan == plan
    assert torch.equal(x, pattern(4 * MIB, 3))
    assert slow.counted.faults == 0


def test_a_plan_has_a_block_made_in_slow_memory(slow: Engine) -> None:
    x = filled(2 * MIB, seed=4)
    step = Step(slow, ["aten::bitwise_not", "aten::bitwise_not_"])
    step.known(x, 0)
    made = step.born(0, 0, 2 * MIB, 0, 1, slow=0)
    plan = step.at(1, RETURN, made).compile()
    slow.native.step_begin(plan)
    y = torch.bitwise_not(x)
    assert slow.place(y) is Place.SLOW
    y.bitwise_not_()
    assert slow.place(y) is Place.HERE
    assert slow.native.step_end().plan == plan
    assert torch.equal(y, x)


def test_what_another_plan_left_there_comes_back_once_there_is_room(slow: Engine) -> None:
    x, small = filled(4 * MIB, seed=3), torch.zeros(4)
    place(slow, x)
    step = Step(slow, ["aten::fill_", "aten::neg_"])
    step.known(x, 1)
    plan = step.compile()
    slow.native.step_begin(plan)
    small.fill_(1)
    slow.native.settle()
    assert slow.place(x) is Place.HERE
    small.neg_()
    assert slow.native.step_end().plan == plan
    assert torch.equal(x, pattern(4 * MIB, 3))


# ---- what it costs ----

# Far slower than what operators take here, however loaded the machine is.
READ, WRITE = 20e6, 10e6
RATES = SlowRates(read_bytes_per_s=READ, write_bytes_per_s=WRITE, mixed_share=0.5, fast_bytes_per_s=1e12)


def charged(engine: Engine, work: Callable[[], object]) -> float:
    before = engine.counted.charged_ns
    work()
    return (engine.counted.charged_ns - before) / 1e9


def test_operators_are_charged_for_what_they_read_and_write_in_slow_memory(opened: Opened, tmp_path: Path) -> None:
    engine = opened(slow_memory(), files(tmp_path), budget=64 * MIB, slow=RATES)
    x, y, out = filled(MIB), filled(MIB), filled(MIB)
    assert charged(engine, lambda: torch.add(x, y, out=out)) == 0
    place(engine, x)
    reading = charged(engine, lambda: torch.add(x, y, out=out))
    assert 0.7 * MIB / READ <= reading <= 1.01 * MIB / READ
    writing = charged(engine, lambda: x.fill_(0))
    # In place: what it writes is read as well, as a trace says, and the two are in each other's way.
    both = (MIB / READ + MIB / WRITE) / 0.5
    assert 0.9 * both <= writing <= 1.01 * both
    assert engine.counted.in_place == 2


def test_a_view_is_charged_no_more_than_memory_could_have_delivered(opened: Opened, tmp_path: Path) -> None:
    engine = opened(
        slow_memory(),
        files(tmp_path),
        budget=64 * MIB,
        slow=SlowRates(read_bytes_per_s=1e9, write_bytes_per_s=1e9, fast_bytes_per_s=2e9),
    )
    x = filled(32 * MIB)
    place(engine, x)
    assert charged(engine, lambda: x[:4096].sum()) < 0.5 * x.nbytes / 1e9


def test_what_the_cache_holds_is_read_for_nothing(opened: Opened, tmp_path: Path) -> None:
    engine = opened(
        slow_memory(),
        files(tmp_path),
        budget=64 * MIB,
        slow=SlowRates(read_bytes_per_s=1e9, write_bytes_per_s=1e9, fast_bytes_per_s=1e12, cache_bytes=4 * MIB),
    )
    x, other = filled(2 * MIB), filled(8 * MIB)
    place(engine, x)
    x.amax()
    assert charged(engine, x.amax) == 0
    other.amax()
    assert charged(engine, x.amax) > 0.5 * x.nbytes / 1e9


def test_migrations_take_their_time_and_neighbours_move_as_one_run(opened: Opened, tmp_path: Path) -> None:
    rate = 0.2e9
    rates = SlowRates(
        read_bytes_per_s=1e12,
        write_bytes_per_s=1e12,
        migrate_out_bytes_per_s=rate,
        migrate_in_bytes_per_s=1e12,
        migrate_out_latency_s=0.01,
    )
    engine = opened(slow_memory(), files(tmp_path), budget=64 * MIB, slow=rates)
    parts, small = [filled(MIB, seed=seed) for seed in range(8)], torch.zeros(4)
    step = Step(engine, ["aten::fill_"])
    for part in parts:
        number = step.known(part)
        step.at(0, PLACE, number).at(0, LANDED, number)
    before = engine.counted.wait_ns
    engine.native.step_begin(step.compile())
    small.fill_(1)
    engine.native.step_abandon()
    assert (engine.counted.wait_ns - before) / 1e9 >= 0.9 * (8 * MIB / rate + 0.01)
    moved = engine.native.tier_counters(engine.memory.first_tier)
    assert (moved.runs, moved.run_bytes) == (1, 8 * MIB)
