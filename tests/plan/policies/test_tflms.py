"""TFLMS: thresholds, their monotony, and their tuning (Le et al., ISMM 2019)."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest

from lowtide.core.machine import Link
from lowtide.core.plan import Plan
from lowtide.core.timeline import Timeline
from lowtide.core.trace import Trace
from lowtide.plan.costs.sweep import predict
from lowtide.plan.policies.tflms import Knobs, Tflms, Tuning, cut, modelled_peak_bytes
from lowtide.plan.verify import check
from lowtide.plan.victims import victims_of
from lowtide.simulate import simulate
from lowtide.testing.policies import FakeView, PolicyTests, Record
from lowtide.testing.traces import chain_trace
from tests.plan.policies.shapes import DISK, FAST, ROOMY, densenet, inception, problem_of, resnet, vgg

NETS = (vgg(), resnet(), inception(), densenet())


class TestTflms(PolicyTests):
    def make_policy(self) -> Tflms:
        return Tflms()

    def least_budget_bytes(self, trace: Trace) -> int:
        return trace.peak_bytes  # edges over one level are never cut


class TestTflmsGivenThresholds(PolicyTests):
    def make_policy(self) -> Tflms:
        return Tflms(knobs=Knobs(swapout_threshold=4, swapin_ahead=3))

    def least_budget_bytes(self, trace: Trace) -> int:
        return 2**62 + trace.peak_bytes  # they are what they are, whatever the budget


@pytest.mark.parametrize("trace", NETS, ids=lambda trace: trace.model)
@pytest.mark.parametrize("sync_mode", range(4))
def test_a_larger_threshold_swaps_less_and_takes_more_memory(trace: Trace, sync_mode: int) -> None:
    knobs = [Knobs(swapout_threshold=value, sync_mode=sync_mode) for value in range(1, len(trace.ops) + 1)]
    swapped = [{swap.gap for swap in cut(trace, one)} for one in knobs]
    assert all(after <= before for before, after in pairwise(swapped))
    assert swapped[0]
    assert not swapped[-1]
    peaks = [modelled_peak_bytes(trace, one) for one in knobs]
    assert peaks == sorted(peaks)
    assert peaks[0] < peaks[-1] == trace.peak_bytes


@pytest.mark.parametrize("trace", NETS, ids=lambda trace: trace.model)
def test_a_larger_distance_ahead_takes_more_memory_and_waits_less(trace: Trace) -> None:
    problem = problem_of(trace, ROOMY, DISK)
    knobs = [Knobs(swapout_threshold=8, swapin_ahead=value) for value in range(1, 12)]
    peaks = [modelled_peak_bytes(trace, one) for one in knobs]
    assert peaks == sorted(peaks)
    stalls = [predict(problem, cut(trace, one)).stall_s for one in knobs]
    assert all(after <= before * (1 + 1e-9) + 1e-12 for before, after in pairwise(stalls))
    assert stalls[-1] < stalls[0]


def simulated(trace: Trace, knobs: Knobs, link: Link) -> Timeline:
    """Return the step that the thresholds make, on a clock and with as much memory as it likes."""
    return simulate(problem_of(trace, ROOMY, link), Plan(policy="tflms", budget_bytes=ROOMY, swaps=cut(trace, knobs)))


@pytest.mark.parametrize("trace", NETS, ids=lambda trace: trace.model)
@pytest.mark.parametrize("link", [FAST, DISK], ids=("fast", "disk"))
def test_simulated_memory_and_waiting_are_monotone_in_both_thresholds(trace: Trace, link: Link) -> None:
    for sync_mode in (0, 3):
        knobs = [Knobs(swapout_threshold=value, sync_mode=sync_mode) for value in range(1, len(trace.ops), 5)]
        peaks = [simulated(trace, one, link).peak_bytes for one in knobs]
        assert peaks == sorted(peaks)
        assert peaks[0] < peaks[-1]
    steps = [simulated(trace, Knobs(swapout_threshold=8, swapin_ahead=value), link) for value in range(1, 12, 2)]
    peaks = [step.peak_bytes for step in steps]
    assert peaks == sorted(peaks)
    assert all(after.stall_s <= before.stall_s * (1 + 1e-9) + 1e-12 for before, after in pairwise(steps))
    assert link is FAST or steps[-1].stall_s < steps[0].stall_s


@pytest.mark.parametrize("trace", NETS, ids=lambda trace: trace.model)
def test_larger_groups_come_back_less_often(trace: Trace) -> None:
    counts = [len(cut(trace, Knobs(swapin_groupby=value))) for value in range(len(trace.ops))]
    assert counts == sorted(counts, reverse=True)


def test_a_group_shares_one_way_back() -> None:
    trace = resnet()
    repeated = [
        gap for gap in trace.gaps() if any(gap.storage == other.storage and gap > other for other in trace.gaps())
    ]
    assert repeated, "some storage is used twice in the backward pass"
    apart, together = ({swap.gap for swap in cut(trace, Knobs(swapin_groupby=value))} for value in (0, len(trace.ops)))
    assert apart - together == set(repeated)


@pytest.mark.parametrize("trace", NETS, ids=lambda trace: trace.model)
@pytest.mark.parametrize("share", [0.2, 0.5, 0.8])
def test_tuning_finds_the_last_threshold_that_passes(trace: Trace, share: float) -> None:
    budget_bytes = trace.floor_bytes() + int(share * (trace.peak_bytes - trace.floor_bytes()))
    tuning = Tuning(problem_of(trace, budget_bytes))
    knobs = tuning.run()
    assert tuning.passes(knobs)
    assert not tuning.passes(replace(knobs, swapout_threshold=knobs.swapout_threshold + 1))
    ahead = replace(knobs, swapin_ahead=knobs.swapin_ahead + 1)
    assert not tuning.passes(ahead) or cut(trace, ahead) == cut(trace, knobs) or knobs.waits_in
    # No way of waiting less passes with the smallest threshold.
    assert not any(tuning.passes(Knobs(sync_mode=mode)) for mode in range(knobs.sync_mode))


@pytest.mark.parametrize("trace", NETS, ids=lambda trace: trace.model)
def test_tuned_plans_keep_the_budget(trace: Trace) -> None:
    for share in (0.2, 0.5, 0.8):
        budget_bytes = trace.floor_bytes() + int(share * (trace.peak_bytes - trace.floor_bytes()))
        problem = problem_of(trace, budget_bytes)
        plan = Tflms().plan(problem)
        check(plan, problem)
        assert plan.trials > 4


def test_one_after_the_other_each_read_follows_the_use_before_it() -> None:
    trace = chain_trace(6)
    swaps = sorted(cut(trace, Knobs(swapout_threshold=2, swapin_ahead=-1)), key=lambda swap: swap.gap.before_op)
    first, *others = swaps
    assert first.fetch_op == max(first.gap.before_op - 2, first.gap.after_op + 1)
    for before, swap in pairwise([first, *others]):
        assert swap.fetch_op == before.gap.before_op + 1


def test_synchronous_modes_wait() -> None:
    trace = vgg()
    for mode in range(4):
        for swap in cut(trace, Knobs(swapin_ahead=5, sync_mode=mode)):
            assert swap.landed_op == (swap.gap.after_op + 1 if mode in (1, 3) else None)
            assert (swap.fetch_op == swap.gap.before_op) or mode in (0, 1)


def test_the_reactive_allocator_reclaims_the_first_that_is_large_enough() -> None:
    sizes = (10, 50, 20, 80)
    view = FakeView(*(Record(nbytes=nbytes, last_access=k) for k, nbytes in enumerate(sizes)))
    assert list(victims_of(Tflms(), view, 40)) == [1]
    assert list(victims_of(Tflms(), view, 90)) == [0, 1, 2, 3]


@pytest.mark.parametrize("trace", NETS, ids=lambda trace: trace.model)
def test_a_tenth_of_the_memory_beside_variables_is_left_free(trace: Trace) -> None:
    problem = problem_of(trace, (3 * trace.peak_bytes + trace.floor_bytes()) // 4)
    tuning = Tuning(problem)
    knobs = tuning.run()
    beside = problem.budget_bytes - trace.static_bytes
    assert tuning.limit_bytes == trace.static_bytes + int(0.9 * beside)
    assert modelled_peak_bytes(trace, knobs) <= tuning.limit_bytes < problem.budget_bytes
