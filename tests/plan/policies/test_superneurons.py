"""SuperNeurons: its four analytic peaks, its segments and its cache (Wang et al., PPoPP 2018)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given, settings

from lowtide.core.plan import Problem
from lowtide.core.trace import Kind, Phase, Save, Storage, Trace
from lowtide.plan.policies.superneurons import SuperNeurons, discards, largest_need_bytes
from lowtide.plan.verify import check, replay
from lowtide.simulate import simulate
from lowtide.testing.networks import networks
from lowtide.testing.policies import PolicyTests
from lowtide.testing.traces import Step, chain_trace, make_trace, problems
from tests.plan.policies.shapes import DISK, densenet, inception, predicted, problem_of, resnet, vgg

NAMES = {
    "conv": "aten::convolution",
    "relu": "aten::relu",
    "pool": "aten::max_pool2d_with_indices",
    "norm": "aten::native_batch_norm",
}
# (kind, l_i^f, l_i^b): what each layer makes in the forward and in the backward pass.
LINEAR = (
    ("conv", 400, 400),
    ("relu", 100, 100),
    ("pool", 100, 100),
    ("conv", 100, 100),
    ("norm", 100, 100),
    ("relu", 100, 100),
    ("conv", 100, 100),
    ("relu", 100, 100),
    ("pool", 100, 100),
    ("norm", 100, 200),
)


def linear_net(layers: Sequence[tuple[str, int, int]], *, liveness: bool = True) -> Trace:
    """Return a linear net: the backward pass of layer i works on what it made forward, and on its own gradient.

    Without liveness nothing is ever freed.
    """
    count = len(layers)
    last = 2 * count - 1
    steps, storages, saves = [], [], []
    for i, (kind, forward_bytes, _) in enumerate(layers):
        steps.append(
            Step(name=NAMES[kind], phase=Phase.FORWARD, duration_s=1e-3, reads=(i - 1,) if i else (), writes=(i,))
        )
        storages.append(Storage(nbytes=forward_bytes, kind=Kind.ACTIVATION, first_op=i, last_op=last - i, producer=i))
        saves.append(Save(storage=i, packed_op=i, free_op=min(i + 2, last - i), uses=(last - i,), released_op=last - i))
    for i in reversed(range(count)):
        kind, _, backward_bytes = layers[i]
        op = len(steps)
        steps.append(
            Step(
                name=f"{NAMES[kind]}_backward",
                phase=Phase.BACKWARD,
                duration_s=2e-3,
                reads=(i,),
                writes=(len(storages),),
            )
        )
        storages.append(Storage(nbytes=backward_bytes, kind=Kind.OTHER, first_op=op, last_op=op, producer=op))
    if not liveness:
        storages = [replace(storage, last_op=len(steps)) for storage in storages]
    return make_trace(steps, storages, saves, model="linear")


class TestSuperNeurons(PolicyTests):
    def make_policy(self) -> SuperNeurons:
        return SuperNeurons()


class TestSuperNeuronsWithoutRecomputation(PolicyTests):
    def make_policy(self) -> SuperNeurons:
        return SuperNeurons(recompute=False)


def test_the_four_analytic_peaks_are_met_exactly() -> None:
    forward = sum(forward_bytes for _, forward_bytes, _ in LINEAR)
    backward = sum(backward_bytes for _, _, backward_bytes in LINEAR)
    last = LINEAR[-1][2]
    cheap = sum(forward_bytes for kind, forward_bytes, _ in LINEAR if kind != "conv")
    largest = max(forward_bytes + backward_bytes for _, forward_bytes, backward_bytes in LINEAR)
    trace = linear_net(LINEAR)

    assert linear_net(LINEAR, liveness=False).peak_bytes == forward + backward == 2700
    assert trace.peak_bytes == forward + last == 1500
    for unbounded, peak_bytes in ((linear_net(LINEAR, liveness=False), 2700), (trace, 1500)):
        assert simulate(problem_of(unbounded, 1 << 40), None).peak_bytes == peak_bytes

    offload = problem_of(trace, cheap + last)
    plan = SuperNeurons(recompute=False).plan(offload)
    assert replay(plan, offload).peak_bytes == predicted(plan).peak_bytes == cheap + last == 900
    assert simulate(offload, plan, strict=True).peak_bytes == 900
    assert {LINEAR[swap.gap.storage][0] for swap in plan.swaps} == {"conv"}

    recompute = problem_of(trace, largest, can_recompute=True)
    plan = SuperNeurons().plan(recompute)
    assert replay(plan, recompute).peak_bytes == predicted(plan).peak_bytes == largest == 800
    assert simulate(recompute, plan, strict=True).peak_bytes == 800
    assert largest_need_bytes(trace) == largest
    # The last layer's output is needed at once; all other cheap ones are discarded.
    discarded = {one.gap.storage for one in plan.recomputes}
    assert discarded == {i for i, (kind, _, _) in enumerate(LINEAR[:-1]) if kind != "conv"}
    assert {LINEAR[swap.gap.storage][0] for swap in plan.swaps} <= {"conv"}


def test_a_segment_within_l_peak_is_made_once_and_kept() -> None:
    plan = SuperNeurons().plan(problem_of(linear_net(LINEAR), 800, can_recompute=True))
    # Segments: operators 1 and 2 are needed first at 17, 4 and 5 at 14, 7 and 8 at 11.
    assert {(one.gap.before_op, one.ops) for one in plan.recomputes} == {
        (17, (1,)),
        (17, (1, 2)),
        (14, (4,)),
        (14, (4, 5)),
        (11, (7,)),
        (11, (7, 8)),
    }
    runs = Counter(op for op, _ in {(op, one.gap.before_op) for one in plan.recomputes for op in one.ops})
    assert set(runs.values()) == {1}
    assert predicted(plan).recompute_s == pytest.approx(6e-3)


def test_a_longer_segment_is_made_again_for_each_member() -> None:
    trace = linear_net([("conv", 100, 100), *[("relu", 100, 100)] * 6])
    assert largest_need_bytes(trace) == 200
    discarded = {one.gap.storage: one for one in discards(trace, keep_bytes=largest_need_bytes(trace))}
    assert sorted(discarded) == [1, 2, 3, 4, 5]
    for storage, one in discarded.items():
        assert one.ops == tuple(range(1, storage + 1))
        assert one.gap.before_op == 13 - storage
    # The five members, 500 bytes, are more than l_peak, so that none is kept for the next.
    problem = problem_of(trace, 500, can_recompute=True)
    plan = SuperNeurons().plan(problem)
    check(plan, problem)
    assert plan.notes == ("cost-aware recomputation of 5 storages",)
    assert predicted(plan).recompute_s == pytest.approx((1 + 2 + 3 + 4 + 5) * 1e-3)


def test_the_cache_of_a_feed_forward_net_evicts_the_earliest_first_and_on_demand() -> None:
    trace = chain_trace(10)
    plan = SuperNeurons().plan(problem_of(trace, trace.peak_bytes - 4 * (1 << 20), DISK))
    by_time = sorted(plan.swaps, key=lambda swap: (swap.gap.after_op, swap.gap.storage))
    assert [swap.gap.storage for swap in by_time] == [0, 1, 2, 3]
    for swap in plan.swaps:
        assert swap.gap.after_op >= 6, "nothing leaves before the seventh layer finds no room"
        assert swap.fetch_op == swap.gap.before_op


def test_what_fits_is_neither_discarded_nor_moved() -> None:
    trace = linear_net(LINEAR)
    plan = SuperNeurons().plan(problem_of(trace, trace.peak_bytes, can_recompute=True))
    assert (plan.swaps, plan.recomputes) == ((), ())


@pytest.mark.parametrize(
    ("policy", "can_recompute", "note"),
    [
        (SuperNeurons(), False, "the executor cannot run operators again: only swaps"),
        (SuperNeurons(recompute=False), True, "recomputation is switched off: only swaps"),
    ],
)
def test_without_recomputation_it_swaps_and_says_why(policy: SuperNeurons, can_recompute: bool, note: str) -> None:
    problem = problem_of(linear_net(LINEAR), 800, can_recompute=can_recompute)
    plan = policy.plan(problem)
    check(plan, problem)
    assert plan.recomputes == ()
    assert plan.notes == (note,)


@pytest.mark.parametrize("trace", [vgg(), resnet(), inception(), densenet()], ids=lambda trace: trace.model)
@pytest.mark.parametrize("share", [0.0, 0.3, 0.6])
def test_no_convolution_is_ever_run_again(trace: Trace, share: float) -> None:
    budget_bytes = trace.floor_bytes() + int(share * (trace.peak_bytes - trace.floor_bytes()))
    problem = problem_of(trace, budget_bytes, can_recompute=True)
    plan = SuperNeurons().plan(problem)
    check(plan, problem)
    for one in plan.recomputes:
        assert all("convolution" not in trace.ops[op].name for op in one.ops)


@given(problem=problems(networks(), can_recompute=True))
@settings(max_examples=150, deadline=None)
def test_every_budget_from_the_floor_on_is_met(problem: Problem) -> None:
    for budget_bytes in (problem.trace.floor_bytes(), problem.budget_bytes):
        tight = replace(problem, budget_bytes=budget_bytes)
        plan = SuperNeurons().plan(tight)
        assert replay(plan, tight).peak_bytes <= budget_bytes
