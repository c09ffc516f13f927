from __future__ import annotations

from lowtide.core.machine import Link
from lowtide.core.plan import Problem
from lowtide.core.trace import Gap, Kind, Phase, Save, Storage
from lowtide.plan.auto.choose import Candidate, candidates, choose, furthest_first, largest_first, longest_first
from lowtide.plan.auto.layout import lay_out
from lowtide.plan.costs.sweep import Sweep
from lowtide.testing.traces import Step, chain_trace, machine_of, make_trace

MIB = 2**20


def candidate(storage: int, after_op: int, before_op: int, nbytes: int = 100, **changes: bool) -> Candidate:
    return Candidate(
        gap=Gap(storage=storage, after_op=after_op, before_op=before_op),
        nbytes=nbytes,
        span_s=float(before_op - after_op),
        write_s=0.5,
        read_s=0.5,
        returns=changes.get("returns", True),
        worthwhile=changes.get("worthwhile", True),
    )


def chosen_storages(*found: Candidate, need_bytes: list[int]) -> set[int]:
    return {one.gap.storage for one in choose(found, need_bytes=need_bytes, rank=longest_first)}


def test_nothing_is_chosen_where_nothing_is_needed() -> None:
    assert chosen_storages(candidate(0, 0, 4), need_bytes=[0, -5, 0, -100]) == set()


def test_the_longest_open_gap_covers_the_need() -> None:
    found = (candidate(0, 0, 3), candidate(1, 0, 4), candidate(2, 2, 4))
    assert chosen_storages(*found, need_bytes=[0, 0, 100, 0]) == {1}
    assert chosen_storages(*found, need_bytes=[0, 0, 101, 0]) == {0, 1}


def test_a_gap_that_a_later_choice_made_superfluous_is_given_back() -> None:
    # Operator 1 takes the long gap for its 10 bytes; operator 3 then needs the large one as well, which covers both.
    found = (candidate(0, 0, 9, nbytes=10), candidate(1, 1, 4, nbytes=500))
    assert chosen_storages(*found, need_bytes=[0, 10, 0, 500, 0, 0, 0, 0, 0]) == {1}


def test_an_operator_that_needs_more_than_there_is_gets_all() -> None:
    found = (candidate(0, 0, 4), candidate(1, 1, 3), candidate(2, 3, 4))
    assert chosen_storages(*found, need_bytes=[0, 0, 10**6, 0]) == {0, 1}


def test_what_is_not_worthwhile_comes_last_in_every_rank() -> None:
    small, large = candidate(0, 0, 90, worthwhile=False), candidate(1, 0, 2)
    for rank in (longest_first, furthest_first, largest_first):
        assert rank(large) < rank(small)


def test_ranks_differ_in_what_they_prefer() -> None:
    long, late, large = candidate(0, 0, 20), candidate(1, 15, 22), candidate(2, 5, 15, nbytes=10_000)
    assert min((long, late, large), key=longest_first) is long
    assert min((long, late, large), key=furthest_first) is late
    assert min((long, late, large), key=largest_first) is large


def small_and_large(large_bytes: int) -> list[Candidate]:
    steps = [Step(name=f"op{k}", phase=Phase.FORWARD, duration_s=1e-3) for k in range(9)]
    sizes = (large_bytes, large_bytes // 1024)
    storages = [Storage(nbytes=nbytes, kind=Kind.ACTIVATION, first_op=0, last_op=8) for nbytes in sizes]
    saves = [Save(storage=k, packed_op=0, free_op=1, uses=(8,), released_op=8) for k in range(2)]
    trace = make_trace(steps, storages, saves)
    link = Link(write_bytes_per_s=1e9, read_bytes_per_s=1e9, write_latency_s=1e-4, read_latency_s=1e-4)
    problem = Problem(trace=trace, machine=machine_of(link), budget_bytes=trace.peak_bytes // 2)
    return candidates(problem, Sweep(problem))


def test_what_is_worth_moving_follows_from_the_excess_and_the_link() -> None:
    # 16 MiB over the budget: 32 KiB are mostly latency on this link, and no help. For a model that is 32 KiB over,
    # 64 KiB are mostly latency too, but they are what there is.
    assert [one.worthwhile for one in small_and_large(32 * MIB)] == [True, False]
    assert [one.worthwhile for one in small_and_large(64 * 1024)] == [True, False]
    # 1 GiB over: 1 MiB is a transfer like any other, although it is as small a share.
    assert [one.worthwhile for one in small_and_large(2**30)] == [True, True]


def test_reads_are_laid_out_one_after_another_before_their_uses() -> None:
    # Layers are used two seconds apart and take 3 s to read: each has to begin earlier than the one after it allows.
    trace = chain_trace(10, nbytes=300, duration_s=1.0)
    problem = Problem(
        trace=trace,
        machine=machine_of(Link(write_bytes_per_s=1e6, read_bytes_per_s=100.0, duplex=True)),
        budget_bytes=10**6,
    )
    facts = Sweep(problem)
    chosen = [one for one in candidates(problem, facts) if one.gap.storage in (0, 1, 2)]
    swaps = lay_out(problem, facts, chosen, comfort_bytes=10**6, margin=0.0)
    # Uses of 2, 1, 0: operators 17, 18, 19 at 24, 26, 28 s. Last moments, backwards: 25, 22, 19 s.
    assert [facts.start_s[swap.fetch_op] for swap in swaps] == [24.0, 22.0, 18.0]
    assert facts.run(swaps).prediction.stall_s == 0


def test_a_read_is_not_asked_for_before_its_write_has_landed() -> None:
    trace = chain_trace(6, nbytes=100, duration_s=1.0)
    slow = Link(write_bytes_per_s=100 / 6.5, read_bytes_per_s=100.0)
    problem = Problem(trace=trace, machine=machine_of(slow), budget_bytes=10**6)
    facts = Sweep(problem)
    chosen = [one for one in candidates(problem, facts) if one.gap.storage == 0]
    (swap,) = lay_out(problem, facts, chosen, comfort_bytes=10**6, margin=100.0)
    # Written from 2 s to 8.5 s: the first operator that begins after that is number 8, at 10 s.
    assert facts.start_s[swap.fetch_op] == 10.0


def test_a_read_is_pulled_ahead_only_while_memory_is_left() -> None:
    trace = chain_trace(10, nbytes=100, duration_s=1.0)
    problem = Problem(
        trace=trace,
        machine=machine_of(Link(write_bytes_per_s=1000.0, read_bytes_per_s=1000.0)),
        budget_bytes=500,
    )
    facts = Sweep(problem)
    chosen = [one for one in candidates(problem, facts) if one.gap.storage == 0]
    late, early = (
        lay_out(problem, facts, chosen, comfort_bytes=comfort_bytes, margin=100.0)[0].fetch_op
        for comfort_bytes in (300, 500)
    )
    # Storage 0 is used by operator 19. Without it, operator 10 + k has 900 - 100 k bytes alive.
    assert (late, early) == (17, 15)
