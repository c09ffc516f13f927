"""Li & Chapman: explicit copies or paging, and what is kept of a scan that does not fit (SC 2019)."""

from __future__ import annotations

from dataclasses import replace

import pytest

from lowtide.core.machine import Link, Machine
from lowtide.core.plan import Problem
from lowtide.core.trace import Kind, Phase, Save, Storage, Trace
from lowtide.plan.policies.li_chapman import LiChapman, Mode, densities, keep, mode_of
from lowtide.plan.policies.unified_memory import PageCache, paging
from lowtide.plan.verify import check
from lowtide.testing.networks import MIB
from lowtide.testing.policies import PolicyTests
from lowtide.testing.traces import Step, make_trace
from tests.plan.policies.shapes import densenet, inception, problem_of, resnet, vgg

NETS = (vgg(), resnet(), inception(), densenet())
LINK = Link(write_bytes_per_s=1e10, read_bytes_per_s=1e10)
MACHINE = Machine(name="paged", links={"spill": LINK}, page_bytes=65536, page_fault_s=45e-6)


class TestLiChapman(PolicyTests):
    def make_policy(self) -> LiChapman:
        return LiChapman()


def embedding_trace(*, table_bytes: int = 64 * MIB, touched_bytes: int = 4 * MIB) -> Trace:
    """A table that is read in part, and two dense parameters; together they do not fit with the table."""
    storages = [
        Storage(nbytes=table_bytes, kind=Kind.PARAM, first_op=-1, last_op=6),
        Storage(nbytes=touched_bytes, kind=Kind.ACTIVATION, first_op=0, last_op=5, producer=0),
        *(Storage(nbytes=16 * MIB, kind=Kind.PARAM, first_op=-1, last_op=6) for _ in range(2)),
    ]
    reads = ((0,), (1, 2), (1, 3), (2,), (3,), (1,))
    steps = [
        Step(
            name="aten::embedding" if k == 0 else "aten::mm",
            phase=Phase.FORWARD if k < 3 else Phase.BACKWARD,
            duration_s=1e-3,
            reads=read,
            writes=(1,) if k == 0 else (),
        )
        for k, read in enumerate(reads)
    ]
    return make_trace(steps, storages, [], model="embedding")


@pytest.mark.parametrize("nbytes", [4096, 65536, MIB, 100 * MIB])
def test_what_is_dense_is_copied_explicitly(nbytes: int) -> None:
    assert mode_of(nbytes, 1.0, link=LINK, machine=MACHINE) is Mode.EXPLICIT


def test_what_is_sparse_is_paged() -> None:
    assert mode_of(100 * MIB, 0.01, link=LINK, machine=MACHINE) is Mode.IMPLICIT
    # A page of 64 KiB takes 6.6 us to copy and 45 us to fault: below one page in eight, paging is cheaper.
    share = 6.5536e-6 / (6.5536e-6 + 45e-6)
    assert mode_of(100 * MIB, share * 1.02, link=LINK, machine=MACHINE) is Mode.EXPLICIT
    assert mode_of(100 * MIB, share * 0.98, link=LINK, machine=MACHINE) is Mode.IMPLICIT


@pytest.mark.parametrize("trace", NETS, ids=lambda trace: trace.model)
def test_dense_objects_beat_unified_memory_by_the_cost_of_its_faults(trace: Trace) -> None:
    problem = Problem(trace=trace, machine=MACHINE, budget_bytes=(trace.floor_bytes() + trace.peak_bytes) // 2)
    implicit = paging(problem)
    explicit = paging(problem, explicit=range(len(trace.storages)))
    assert implicit.faults > 0
    assert explicit.faults == 0
    assert implicit.step_s - explicit.step_s == pytest.approx(implicit.fault_s, rel=1e-9)
    assert densities(trace) == {}


def test_a_table_that_is_touched_in_part_is_better_paged() -> None:
    trace = embedding_trace()
    assert densities(trace) == {0: 1 / 16}
    problem = Problem(trace=trace, machine=MACHINE, budget_bytes=32 * MIB)
    implicit = paging(problem, explicit=(1, 2, 3), density=densities(trace))
    explicit = paging(problem, explicit=range(4), density=densities(trace))
    assert implicit.step_s < explicit.step_s
    assert implicit.faults == 64
    assert mode_of(64 * MIB, 1 / 16, link=LINK, machine=MACHINE) is Mode.IMPLICIT


@pytest.mark.parametrize("held", [3, 5, 8])
def test_a_scan_that_does_not_fit_hits_as_much_as_is_kept_and_nothing_by_age(held: int) -> None:
    blocks, pages, rounds = 10, 32, 20

    def hit_rate(kept: tuple[int, ...]) -> float:
        cache = PageCache(capacity_bytes=held * pages, page_bytes=1)
        missed = 0
        for turn in range(rounds + 1):
            for block in range(blocks):
                came, _ = cache.touch(block, pages, pin=block in kept)
                missed += came if turn else 0
        return 1 - missed / (rounds * blocks * pages)

    assert hit_rate(()) == 0.0
    sizes = dict.fromkeys(range(blocks), pages)
    kept = keep(dict.fromkeys(range(blocks), 1.0), sizes, capacity_bytes=held * pages)
    assert len(kept) == held
    # One page of memory is left to the others.
    assert hit_rate(kept) == pytest.approx(held / blocks, abs=1.5 / (blocks * pages))


def test_near_and_dense_objects_are_kept_first() -> None:
    distances = {0: 500.0, 1: 100.0, 2: 300.0, 3: 200.0}
    sizes = {0: 10, 1: 10, 2: 10, 3: 10}
    assert keep(distances, sizes, capacity_bytes=20) == (1, 3)
    assert keep(distances, sizes, capacity_bytes=0) == ()


@pytest.mark.parametrize("trace", NETS, ids=lambda trace: trace.model)
def test_the_furthest_reuse_leaves_and_is_copied_back_before_its_use(trace: Trace) -> None:
    problem = problem_of(trace, (trace.floor_bytes() + trace.peak_bytes) // 2)
    plan = LiChapman().plan(problem)
    check(plan, problem)
    touched = [sum(trace.storages[one].nbytes for one in {*op.reads, *op.writes}) for op in trace.ops]
    swapped = {swap.gap for swap in plan.swaps}
    # Everything is dense: copied one operator ahead, or on demand where it does not fit before.
    assert all(swap.gap.before_op - swap.fetch_op <= 1 for swap in plan.swaps)
    assert any(swap.fetch_op < swap.gap.before_op for swap in plan.swaps)
    # At the peak, what left is used again further away than what stayed, as far as it is large.
    peak_op = max(range(len(trace.ops)), key=lambda op: trace.ops[op].peak_bytes)
    crossing = [
        gap
        for gap in trace.gaps()
        if gap.after_op <= peak_op < gap.before_op and trace.storages[gap.storage].nbytes >= MIB // 4
    ]
    away, here = (
        [sum(touched[gap.after_op : gap.before_op]) for gap in crossing if (gap in swapped) == gone]
        for gone in (True, False)
    )
    assert sum(away) / len(away) > sum(here) / len(here)
    assert max(away) > max(here)


def test_a_stated_density_changes_who_leaves() -> None:
    trace = resnet()
    problem = problem_of(trace, trace.peak_bytes - MIB)
    dense = {swap.gap.storage for swap in LiChapman().plan(problem).swaps}
    thin = dict.fromkeys({gap.storage for gap in trace.gaps()} - dense, 1e-3)
    sparse = {swap.gap.storage for swap in LiChapman(density=thin).plan(problem).swaps}
    assert dense
    assert sparse
    assert sparse.isdisjoint(dense)


def test_dense_objects_are_copied_ahead_and_sparse_ones_come_on_demand() -> None:
    trace = resnet()
    problem = problem_of(trace, (trace.floor_bytes() + trace.peak_bytes) // 2)
    paged = Machine(name="paged", links=problem.machine.links, page_bytes=65536, page_fault_s=45e-6)
    problem = replace(problem, machine=paged)
    storages = sorted({swap.gap.storage for swap in LiChapman().plan(problem).swaps})
    thin = dict.fromkeys(storages[::2], 1e-3)
    plan = LiChapman(density=thin).plan(problem)
    ahead = {swap.gap.storage for swap in plan.swaps if swap.fetch_op < swap.gap.before_op}
    on_demand = {swap.gap.storage for swap in plan.swaps} - ahead
    assert ahead
    assert ahead.isdisjoint(thin)
    assert on_demand & set(thin)


def scanned_twice(*, near: bool) -> Trace:
    """A sparse object that is used again soon or late, beside a dense one that is used again still later."""
    last = 3 if near else 9
    steps = [
        Step(
            name=f"aten::op{k}",
            phase=Phase.FORWARD if k < 6 else Phase.BACKWARD,
            duration_s=1e-3,
            reads=tuple(one for one, used in ((0, last), (1, 11)) if used == k) + ((2,) if k in (4, 5, 6, 10) else ()),
            writes={0: (0,), 1: (1,)}.get(k, ()),
            scratch_bytes=8 * MIB if k == 2 else 0,
        )
        for k in range(12)
    ]
    storages = [
        Storage(nbytes=8 * MIB, kind=Kind.ACTIVATION, first_op=0, last_op=last, producer=0),
        Storage(nbytes=8 * MIB, kind=Kind.ACTIVATION, first_op=1, last_op=11, producer=1),
        Storage(nbytes=12 * MIB, kind=Kind.PARAM, first_op=-1, last_op=12),
    ]
    saves = [
        Save(storage=k, packed_op=k, free_op=k + 1, uses=(used,), released_op=used) for k, used in ((0, last), (1, 11))
    ]
    return make_trace(steps, storages, saves)


@pytest.mark.parametrize(("near", "left"), [(True, 1), (False, 0)])
def test_a_sparse_object_leaves_first_unless_it_is_used_again_within_memorys_reach(near: bool, left: int) -> None:
    problem = Problem(trace=scanned_twice(near=near), machine=MACHINE, budget_bytes=30 * MIB)
    plan = LiChapman(density={0: 0.1}).plan(problem)
    assert [swap.gap.storage for swap in plan.swaps] == [left]


@pytest.mark.parametrize("held", [3, 5, 8])
def test_of_a_scan_that_does_not_fit_a_part_stays(held: int) -> None:
    """The guard against thrashing: by age every object would be away when its turn comes."""
    blocks, rounds = 10, 6
    count = blocks * rounds
    steps = [
        Step(
            name="aten::scan",
            phase=Phase.FORWARD if k < count // 2 else Phase.BACKWARD,
            duration_s=1e-3,
            reads=() if k < blocks else (k % blocks,),
            writes=(k,) if k < blocks else (),
        )
        for k in range(count)
    ]
    last = [count - blocks + k for k in range(blocks)]
    storages = [
        Storage(nbytes=MIB, kind=Kind.ACTIVATION, first_op=k, last_op=last[k], producer=k) for k in range(blocks)
    ]
    saves = [
        Save(storage=k, packed_op=k, free_op=k + 1, uses=tuple(range(k + blocks, count, blocks)), released_op=last[k])
        for k in range(blocks)
    ]
    trace = make_trace(steps, storages, saves)
    problem = Problem(trace=trace, machine=MACHINE, budget_bytes=held * MIB)
    gone = {swap.gap for swap in LiChapman().plan(problem).swaps}
    gaps = [gap for gap in trace.gaps() if gap.after_op >= blocks]
    stayed = sum(gap not in gone for gap in gaps) / len(gaps)
    assert stayed >= (held - 2) / blocks
