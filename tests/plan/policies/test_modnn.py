"""moDNN: evict on demand but early enough, fetch at the last moment, cut the batch (Chen et al., DATE 2018)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lowtide.core.machine import Link
from lowtide.core.plan import Problem, Swap
from lowtide.core.trace import Phase, Trace
from lowtide.errors import BadArgument
from lowtide.plan.costs.sweep import predict
from lowtide.plan.policies.modnn import Modnn, sub_batched
from lowtide.plan.verify import check, replay
from lowtide.plan.views.algorithms import Algorithm
from lowtide.testing.networks import networks
from lowtide.testing.policies import PolicyTests
from lowtide.testing.traces import chain_trace, problems
from tests.plan.policies.shapes import BOUND, DISK, densenet, inception, predicted, problem_of, resnet, vgg

NETS = (vgg(), resnet(), inception(), densenet())


class TestModnn(PolicyTests):
    def make_policy(self) -> Modnn:
        return Modnn()


@given(problem=problems(networks()))
@settings(max_examples=60, deadline=None)
def test_every_budget_from_the_largest_working_set_on_is_met(problem: Problem) -> None:
    for budget_bytes in (problem.trace.floor_bytes(), problem.budget_bytes):
        tight = replace(problem, budget_bytes=budget_bytes)
        plan = Modnn().plan(tight)
        assert replay(plan, tight).peak_bytes <= budget_bytes


@pytest.mark.parametrize("trace", NETS, ids=lambda trace: trace.model)
@pytest.mark.parametrize("link", [DISK, BOUND], ids=("disk", "bound"))
def test_more_memory_never_takes_longer(trace: Trace, link: Link) -> None:
    floor, peak = trace.floor_bytes(), trace.peak_bytes
    times = [
        predicted(Modnn().plan(problem_of(trace, floor + k * (peak - floor) // 23, link))).step_s for k in range(24)
    ]
    assert times == sorted(times, reverse=True)
    assert times[-1] == pytest.approx(trace.duration_s)


@pytest.mark.parametrize("trace", NETS, ids=lambda trace: trace.model)
@pytest.mark.parametrize("share", [0.0, 0.3, 0.6])
def test_postponing_a_read_is_never_slower_than_fetching_it_as_early_as_possible(trace: Trace, share: float) -> None:
    problem = problem_of(trace, trace.floor_bytes() + int(share * (trace.peak_bytes - trace.floor_bytes())), DISK)
    plan = Modnn().plan(problem)
    eager = tuple(
        Swap(gap=swap.gap, fetch_op=min(swap.gap.after_op + 1, swap.gap.before_op), tier=swap.tier)
        for swap in plan.swaps
    )
    assert predicted(plan).step_s <= predict(problem, eager).step_s


def test_on_a_chain_the_earliest_layers_leave() -> None:
    trace = chain_trace(10)
    plan = Modnn().plan(problem_of(trace, trace.peak_bytes - 3 * (1 << 20), DISK))
    moved = sorted(swap.gap.storage for swap in plan.swaps)
    assert moved == list(range(len(moved)))
    assert 3 <= len(moved) < 10


def test_what_fits_is_left_alone_in_one_trial() -> None:
    trace = resnet()
    plan = Modnn().plan(problem_of(trace, trace.peak_bytes))
    assert plan.swaps == ()
    assert plan.trials == 1


def test_a_smaller_workspace_is_taken_where_no_copy_is_over_in_time() -> None:
    trace = chain_trace(6, nbytes=100, duration_s=1.0, scratch_bytes=100)
    slow = Link(write_bytes_per_s=10.0, read_bytes_per_s=1000.0)
    wide, lean = Algorithm(duration_s=1.0, workspace_bytes=100), Algorithm(duration_s=1.5, workspace_bytes=0)
    # The sixth layer needs 600 bytes and its workspace. A copy takes 10 s: none is over by then.
    problem = problem_of(trace, 600, slow)
    without, with_table = (
        Modnn(algorithms=table).plan(problem) for table in (None, dict.fromkeys(range(12), (wide, lean)))
    )
    assert "smaller workspaces at operators" in with_table.notes[0]
    assert predicted(with_table).step_s < predicted(without).step_s
    assert len(with_table.swaps) < len(without.swaps)


def test_a_piece_of_the_batch_is_a_piece_of_its_activations_and_time() -> None:
    trace = resnet()
    problem = problem_of(trace, trace.peak_bytes)
    half = sub_batched(problem, 2).trace
    assert sub_batched(problem, 1) == problem
    updates_s = sum(op.duration_s for op in trace.ops if op.phase is Phase.UPDATE)
    assert half.duration_s - updates_s == pytest.approx((trace.duration_s - updates_s) / 2)
    kept = {
        index
        for index, storage in enumerate(trace.storages)
        if storage.first_op < 0 or storage.kind in ("param", "grad")
    }
    for index, (whole, part) in enumerate(zip(trace.storages, half.storages, strict=True)):
        assert part.nbytes == (whole.nbytes if index in kept else (whole.nbytes + 1) // 2)
    grads = sum(storage.nbytes for storage in trace.storages if storage.kind == "grad")
    shrinking = trace.peak_bytes - trace.static_bytes
    assert shrinking // 2 <= half.peak_bytes - half.static_bytes <= shrinking // 2 + grads + len(trace.storages)
    with pytest.raises(BadArgument, match="0 pieces"):
        sub_batched(problem, 0)


@given(problem=problems(networks()), pieces=st.integers(1, 8))
@settings(max_examples=60, deadline=None)
def test_a_piece_is_a_sound_problem_of_its_own(problem: Problem, pieces: int) -> None:
    part = sub_batched(problem, pieces)
    assert part.trace.floor_bytes() <= problem.trace.floor_bytes()
    part = replace(part, budget_bytes=max(part.trace.floor_bytes(), part.budget_bytes))
    check(Modnn().plan(part), part)


def test_cutting_the_batch_is_reported_where_the_whole_does_not_fit() -> None:
    trace = vgg()
    problem = problem_of(trace, trace.floor_bytes() - 1)
    policy = Modnn(sub_batches=(1, 2, 4))
    choices = {cut.pieces: cut for cut in policy.sub_batch_choices(problem)}
    assert [choices[pieces].fits for pieces in (1, 2, 4)] == [False, True, True]
    assert choices[1].peak_bytes > choices[2].peak_bytes > choices[4].peak_bytes
    notes = policy.plan(problem).notes
    assert any("best effort" in note for note in notes)
    assert any(note.startswith("fastest cut of the batch: ") for note in notes)
    assert any("no cut of the batch fits: 1, 2, 4" in note for note in policy.plan(problem_of(trace, 1)).notes)


@pytest.mark.parametrize("pieces", [2, 4])
def test_accumulated_gradients_of_the_pieces_are_those_of_the_whole_batch(pieces: int) -> None:
    """What cutting a batch rests on; BatchNorm, which looks at the whole batch, breaks it."""
    torch = pytest.importorskip("torch")
    torch.manual_seed(0)
    batch, labels = torch.randn(8, 6, dtype=torch.float64), torch.randint(3, (8,))

    def gradients(norm: Callable[[int], object], cut: int) -> list[Any]:
        torch.manual_seed(1)
        model = torch.nn.Sequential(torch.nn.Linear(6, 5), norm(5), torch.nn.ReLU(), torch.nn.Linear(5, 3)).double()
        for part, wanted in zip(batch.chunk(cut), labels.chunk(cut), strict=True):
            (torch.nn.functional.cross_entropy(model(part), wanted) / cut).backward()
        return [parameter.grad for parameter in model.parameters()]

    for norm, exact in ((torch.nn.LayerNorm, True), (torch.nn.BatchNorm1d, False)):
        pairs = zip(gradients(norm, 1), gradients(norm, pieces), strict=True)
        furthest = max(float((whole - parts).abs().max()) for whole, parts in pairs)
        assert (furthest <= 1e-6) == exact


def test_a_read_begins_at_the_last_moment_that_the_link_leaves_it() -> None:
    # A read takes 1.05 ms and a backward operator 2 ms: the operator before the use is early enough for each.
    trace = chain_trace(12)
    link = Link(write_bytes_per_s=1e9, read_bytes_per_s=1e9)
    plan = Modnn().plan(problem_of(trace, 8 << 20, link))
    assert plan.swaps
    assert all(swap.fetch_op == swap.gap.before_op - 1 for swap in plan.swaps)


def test_the_fastest_of_sixteen_targets_wins() -> None:
    trace = vgg()
    # Nothing hides on this link, so no target ends the search.
    problem = problem_of(trace, trace.peak_bytes - 1, BOUND)
    plan = Modnn().plan(problem)
    assert plan.trials == 16
    tighter = Modnn().plan(problem_of(trace, (trace.floor_bytes() + trace.peak_bytes) // 2, BOUND))
    assert tighter.trials == 9, "the targets of a smaller budget are those below it"
    assert predicted(plan).step_s < predicted(tighter).step_s
