"""vDNN: what leaves, when the step waits, and how the variants relate (Rhu et al., MICRO 2016)."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings

from lowtide.core.machine import Link
from lowtide.core.plan import Problem
from lowtide.core.trace import Phase, Trace
from lowtide.plan.policies.vdnn import Vdnn, VdnnAll, VdnnConv, VdnnDyn
from lowtide.plan.verify import check, replay
from lowtide.plan.views.algorithms import Algorithm
from lowtide.plan.views.layers import LayerKind, kind_of, layers_of
from lowtide.testing.networks import INPUT, MIB, Layer, network_trace, networks
from lowtide.testing.policies import PolicyTests
from lowtide.testing.traces import problems
from tests.plan.policies.shapes import (
    BOUND,
    DISK,
    FAST,
    ROOMY,
    chain,
    densenet,
    inception,
    least_bytes,
    predicted,
    problem_of,
    resnet,
    vgg,
)

NETS = (vgg(), resnet(), inception(), densenet())


class TestVdnnAll(PolicyTests):
    def make_policy(self) -> VdnnAll:
        return VdnnAll()

    def least_budget_bytes(self, trace: Trace) -> int:
        return least_bytes(VdnnAll(), trace)


class TestVdnnConv(PolicyTests):
    def make_policy(self) -> VdnnConv:
        return VdnnConv()

    def least_budget_bytes(self, trace: Trace) -> int:
        return least_bytes(VdnnConv(), trace)


class TestVdnnDyn(PolicyTests):
    def make_policy(self) -> VdnnDyn:
        return VdnnDyn()

    def least_budget_bytes(self, trace: Trace) -> int:
        return least_bytes(VdnnAll(), trace)


@pytest.mark.parametrize("trace", NETS, ids=lambda trace: trace.model)
@pytest.mark.parametrize("link", [FAST, DISK, BOUND], ids=("fast", "disk", "bound"))
def test_the_more_is_offloaded_the_lower_the_peak(trace: Trace, link: Link) -> None:
    problem = problem_of(trace, ROOMY, link)
    every, conv = (predicted(policy.plan(problem)).peak_bytes for policy in (VdnnAll(), VdnnConv()))
    assert every <= conv <= trace.peak_bytes


def test_on_vgg_each_variant_lowers_the_peak() -> None:
    trace = vgg()
    problem = problem_of(trace, ROOMY, FAST)
    every, conv = (predicted(policy.plan(problem)).peak_bytes for policy in (VdnnAll(), VdnnConv()))
    assert every < conv < trace.peak_bytes


@pytest.mark.parametrize("trace", NETS, ids=lambda trace: trace.model)
def test_conv_offloads_inputs_of_convolutions_only(trace: Trace) -> None:
    inputs = {
        storage
        for op in trace.ops
        if op.phase is Phase.FORWARD and kind_of(op) is LayerKind.CONV
        for storage in op.reads
    }
    moved = {swap.gap.storage for swap in VdnnConv().plan(problem_of(trace, ROOMY)).swaps}
    assert moved
    assert moved < inputs
    assert moved <= {swap.gap.storage for swap in VdnnAll().plan(problem_of(trace, ROOMY)).swaps}


@pytest.mark.parametrize("trace", NETS, ids=lambda trace: trace.model)
def test_the_input_of_the_last_layer_before_the_softmax_stays(trace: Trace) -> None:
    last = [layer for layer in layers_of(trace) if layer.kind is not LayerKind.LOSS][-1]
    moved = {swap.gap.storage for swap in VdnnAll().plan(problem_of(trace, ROOMY)).swaps}
    assert last.kind is LayerKind.LINEAR
    assert not moved & set(last.inputs)


# Convolutions of different sizes and times. X_n, the input of convolution n, leaves beside convolution n+1, and n+2
# waits for it; X_0 is the network's own input and X_7 that of the last layer, which stay.
SIZES_MIB = (1, 2, 1, 3, 1, 2, 4, 1)
TIMES_S = (3e-3, 1e-3, 8e-3, 2e-3, 5e-3, 1e-3, 6e-3, 4e-3)
CONVS = network_trace(
    [
        Layer(kind="conv", inputs=(n - 1,), nbytes=size * MIB, duration_s=duration_s, param_bytes=4096)
        for n, (size, duration_s) in enumerate(zip(SIZES_MIB, TIMES_S, strict=True))
    ],
    model="convolutions",
)


def synchronised_s(link: Link) -> float:
    """The sync signature: no layer is shorter than the transfer beside it."""
    last = len(SIZES_MIB) - 1
    inputs = {n: SIZES_MIB[n - 1] * MIB for n in range(1, last)}
    forward_s = TIMES_S[0] + TIMES_S[1]
    forward_s += sum(max(TIMES_S[n], link.write_s(inputs[n - 1])) for n in range(2, last + 1))
    backward_s = sum(max(2 * TIMES_S[n], link.read_s(inputs[n - 1])) for n in range(2, last + 1))
    backward_s += 2 * (TIMES_S[0] + TIMES_S[1]) + TIMES_S[last] / 10
    return forward_s + backward_s + 1e-4


@pytest.mark.parametrize("bandwidth", [5e7, 1e8, 3e8, 1e9, 1e10])
@pytest.mark.parametrize("duplex", [True, False])
@pytest.mark.parametrize("policy", [VdnnAll(), VdnnConv()], ids=lambda policy: policy.name)
def test_every_layer_takes_the_longer_of_its_compute_and_its_transfer(
    policy: VdnnAll | VdnnConv, bandwidth: float, duplex: bool
) -> None:
    link = Link(write_bytes_per_s=bandwidth, read_bytes_per_s=1.5 * bandwidth, duplex=duplex)
    problem = problem_of(CONVS, ROOMY, link)
    plan = policy.plan(problem)
    assert len(plan.swaps) == 6
    assert predicted(plan).step_s == pytest.approx(synchronised_s(link), rel=1e-9)
    assert replay(plan, problem).step_s == pytest.approx(synchronised_s(link), rel=1e-9)


def test_the_prefetch_looks_no_further_than_the_next_convolution() -> None:
    # In the backward pass: softmax, linear, conv3, conv2, pool, conv0. The input of conv3 is found across no other
    # convolution; that of conv2 only from conv3 on; the pool's only from conv2 on.
    kinds = ("conv", "pool", "conv", "conv", "linear", "softmax")
    trace = network_trace(chain(*kinds))
    steps = {layer.index: layer.backward.start for layer in layers_of(trace)}
    plan = VdnnAll().plan(problem_of(trace, ROOMY))
    fetched = {swap.gap.before_op: (swap.fetch_op, swap.arrived_op) for swap in plan.swaps}
    assert fetched == {
        steps[3]: (steps[5], steps[4]),
        steps[2]: (steps[3], steps[2]),
        steps[1]: (steps[2], steps[1]),
    }


def test_a_fork_is_offloaded_after_its_last_reader() -> None:
    layers = [
        *chain("conv", "conv", "conv"),
        Layer(kind="add", inputs=(2, 0)),
        Layer(kind="conv", inputs=(3,), param_bytes=4096),
        Layer(kind="linear", inputs=(4,), param_bytes=4096),
    ]
    trace = network_trace(layers)
    forked = next(swap for swap in VdnnConv().plan(problem_of(trace, ROOMY)).swaps if swap.gap.storage == 2)
    assert trace.storages[2].producer == 0
    assert forked.gap.after_op == 4  # the join is operator 3


@given(problem=problems(networks()))
@settings(max_examples=100, deadline=None)
def test_dyn_offloads_nothing_exactly_if_the_step_fits(problem: Problem) -> None:
    plan = Vdnn().plan(problem)
    fits = problem.trace.peak_bytes <= problem.budget_bytes
    assert (plan.notes[0] == "takes offload none") == fits
    assert plan.trials == 1 if fits else plan.trials in (2, 3)
    if fits:
        assert plan.swaps == ()


@pytest.mark.parametrize("trace", NETS[:3], ids=lambda trace: trace.model)
def test_dyn_takes_the_first_rung_that_fits(trace: Trace) -> None:
    conv, every = (least_bytes(policy, trace) for policy in (VdnnConv(), VdnnAll()))
    assert every < conv < trace.peak_bytes
    for budget_bytes, label, trials in ((trace.peak_bytes, "none", 1), (conv, "conv", 2), (conv - 1, "all", 3)):
        problem = problem_of(trace, budget_bytes)
        plan = VdnnDyn().plan(problem)
        check(plan, problem)
        assert plan.notes == (f"takes offload {label}",)
        assert plan.trials == trials
    assert "best effort" in VdnnDyn().plan(problem_of(trace, every - 1)).notes[1]


def test_dyn_descends_to_smaller_workspaces_where_a_table_states_them() -> None:
    trace = CONVS
    scratch_bytes = 8 * MIB
    convs = [index for index, op in enumerate(trace.ops) if kind_of(op) is LayerKind.CONV]
    quick = Algorithm(duration_s=1e-3, workspace_bytes=scratch_bytes)
    table = {op: (Algorithm(duration_s=trace.ops[op].duration_s, workspace_bytes=0), quick) for op in convs}
    wide = trace.peak_bytes + scratch_bytes
    policy = VdnnDyn(algorithms=table)
    notes = [
        policy.plan(problem_of(trace, budget_bytes)).notes[0].partition(" algorithms")[0]
        for budget_bytes in (wide, least_bytes(VdnnAll(), trace) + scratch_bytes, least_bytes(VdnnAll(), trace))
    ]
    assert notes == ["takes offload none, fastest", "takes offload conv, fastest", "takes offload conv, greedy"]
    with pytest.raises(ValueError, match="operator 999"):
        VdnnDyn(algorithms={999: (quick,)}).plan(problem_of(trace, wide))


@given(problem=problems(networks()))
@settings(max_examples=100, deadline=None)
def test_plans_that_fit_pass_the_verifier_and_do_what_they_predict(problem: Problem) -> None:
    for policy in (VdnnAll(), VdnnConv(), Vdnn()):
        least = least_bytes(VdnnConv() if isinstance(policy, VdnnConv) else VdnnAll(), problem.trace)
        roomy = replace(problem, budget_bytes=max(problem.budget_bytes, least))
        plan = policy.plan(roomy)
        seen = replay(plan, roomy)
        assert seen.peak_bytes == predicted(plan).peak_bytes
        assert seen.step_s == pytest.approx(predicted(plan).step_s, rel=1e-9)


def test_an_input_that_does_not_fit_when_awaited_comes_later() -> None:
    # Beside the pool's own gradient there is no room for the convolution's input: waiting for it would never end.
    layers = [
        Layer(kind="conv", inputs=(INPUT,), nbytes=MIB, param_bytes=4096),
        Layer(kind="conv", inputs=(0,), nbytes=MIB, param_bytes=4096),
        Layer(kind="conv", inputs=(1,), nbytes=8 * MIB, param_bytes=4096, scratch_bytes=4 * MIB),
        Layer(kind="relu", inputs=(2,), nbytes=8 * MIB),
        Layer(kind="linear", inputs=(3,), nbytes=MIB, param_bytes=4096),
    ]
    trace = network_trace(layers)
    least = least_bytes(VdnnAll(), trace)
    tight, wide = (VdnnAll().plan(problem_of(trace, budget_bytes)) for budget_bytes in (least, ROOMY))
    check(tight, problem_of(trace, least))
    assert any(swap.arrived_op is None for swap in tight.swaps)
    assert all(swap.arrived_op is not None for swap in wide.swaps)


def test_the_last_rung_has_the_leanest_algorithms() -> None:
    trace = CONVS
    convs = [index for index, op in enumerate(trace.ops) if kind_of(op) is LayerKind.CONV]
    quick = Algorithm(duration_s=1e-3, workspace_bytes=8 * MIB)
    table = {op: (Algorithm(duration_s=trace.ops[op].duration_s, workspace_bytes=0), quick) for op in convs}
    plan = VdnnDyn(algorithms=table).plan(problem_of(trace, least_bytes(VdnnAll(), trace) - 1))
    assert plan.notes[0].startswith("takes offload all, leanest algorithms")
    assert plan.trials == 7
    assert "best effort" in plan.notes[1]
