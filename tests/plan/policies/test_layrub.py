"""Layrub: layers share blocks, gradients take the place of dead data (Jin et al., ACM TACO 2018)."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given, settings

from lowtide.core.machine import Link
from lowtide.core.serialize import load_trace
from lowtide.core.trace import Kind, Phase, Storage, Trace
from lowtide.errors import BadArgument
from lowtide.plan.costs.sweep import predict
from lowtide.plan.policies.layrub import Layrub, aliases
from lowtide.plan.policies.vdnn import transfers
from lowtide.plan.verify import check
from lowtide.plan.views.layers import crossing_gaps, layers_of
from lowtide.simulate import simulate
from lowtide.testing.networks import MIB, networks
from lowtide.testing.policies import PolicyTests
from lowtide.testing.traces import Step, make_trace, traces
from tests.plan.policies.shapes import (
    ROOMY,
    densenet,
    inception,
    least_bytes,
    predicted,
    problem_of,
    resnet,
    vgg,
)

NETS = (vgg(), resnet(), inception(), densenet())
RECORDED = [load_trace(path) for path in sorted((Path(__file__).parents[2] / "data").glob("*.trace"))]


class TestLayrub(PolicyTests):
    def make_policy(self) -> Layrub:
        return Layrub()

    def least_budget_bytes(self, trace: Trace) -> int:
        return least_bytes(Layrub(), trace)


def assert_no_block_has_two_tenants(trace: Trace) -> None:
    tenants: dict[int, list[Storage]] = {}
    for alias in aliases(trace):
        block = tenants.setdefault(alias.data, [trace.storages[alias.data]])
        block.append(trace.storages[alias.gradient])
    for data, living in tenants.items():
        assert all(one.nbytes <= trace.storages[data].nbytes for one in living)
        for first, second in pairwise(sorted(living, key=lambda one: one.first_op)):
            assert first.last_op < second.first_op


@given(trace=traces())
@settings(max_examples=150, deadline=None)
def test_in_random_traces_no_two_tensors_share_a_block_at_once(trace: Trace) -> None:
    assert_no_block_has_two_tenants(trace)


@given(trace=networks())
@settings(max_examples=100, deadline=None)
def test_in_networks_no_two_tensors_share_a_block_at_once(trace: Trace) -> None:
    assert_no_block_has_two_tenants(trace)
    gradients = [alias.gradient for alias in aliases(trace)]
    assert len(set(gradients)) == len(gradients)


def caffe_chain(layers: int) -> Trace:
    """Return a chain as Caffe runs it: a layer first makes its weights' gradient from its data, then the data's own.

    The gradient of each layer's data stays until the end, as Caffe's do.
    """
    last = 3 * layers - 1
    steps = [
        Step(name=f"conv{k}", phase=Phase.FORWARD, duration_s=1e-3, reads=(k - 1,) if k else (), writes=(k,))
        for k in range(layers)
    ]
    storages = []
    for k in range(layers):
        weights_op = layers + 2 * (layers - 1 - k)
        storages.append(Storage(nbytes=MIB, kind=Kind.ACTIVATION, first_op=k, last_op=weights_op, producer=k))
    for k in reversed(range(layers)):
        gradient = layers + len(storages) - layers
        steps.append(Step(name="weights", phase=Phase.BACKWARD, duration_s=1e-3, reads=(k,)))
        steps.append(Step(name="data", phase=Phase.BACKWARD, duration_s=1e-3, writes=(gradient,)))
        storages.append(
            Storage(nbytes=MIB, kind=Kind.OTHER, first_op=len(steps) - 1, last_op=last, producer=len(steps) - 1)
        )
    return make_trace(steps, storages, (), model="caffe")


def test_inside_layers_alone_halves_the_bytes_of_activations_and_gradients_on_a_chain() -> None:
    trace = caffe_chain(6)
    total_bytes = sum(storage.nbytes for storage in trace.storages)
    pairs = aliases(trace)
    # The gradient of layer k takes the place of layer k's own data: gradients are numbered backwards from 6 on.
    assert {(alias.data, alias.gradient) for alias in pairs} == {(k, 11 - k) for k in range(6)}
    assert total_bytes - sum(trace.storages[alias.gradient].nbytes for alias in pairs) == total_bytes // 2
    plan = Layrub(strategy="intra").plan(problem_of(trace, ROOMY))
    assert plan.swaps == ()
    assert plan.notes == ("6 gradients, 6.00 MiB, live in the memory of dead data",)


@pytest.mark.parametrize("trace", [*NETS, *RECORDED], ids=lambda trace: f"{trace.model}-{len(trace.ops)}")
@pytest.mark.parametrize("strategy", ["intra", "hybrid"])
def test_gradients_lie_where_the_data_was_whose_place_they_take(trace: Trace, strategy: str) -> None:
    plan = Layrub(strategy=strategy).plan(problem_of(trace, ROOMY))
    last = {one.block: one.offset_bytes for one in plan.layout}
    pairs = [one for one in aliases(trace) if one.gradient in last and one.data in last]
    assert pairs
    assert all(last[one.gradient] == last[one.data] for one in pairs)
    assert Layrub(strategy="inter").plan(problem_of(trace, ROOMY)).layout == ()


def test_inside_layers_a_chain_lies_in_the_memory_of_its_data() -> None:
    """Caffe has a block for every datum and one for its gradient: 12 MiB; followed, the layout takes half of that."""
    trace = caffe_chain(6)
    problem = problem_of(trace, ROOMY)
    timeline = simulate(problem, Layrub(strategy="intra").plan(problem))
    assert timeline.reserved_peak_bytes == 6 * MIB
    assert timeline.notes[-1].startswith("12 blocks lay where the plan has them, 0 found others there")


@pytest.mark.parametrize("trace", [*NETS, *RECORDED], ids=lambda trace: f"{trace.model}-{len(trace.ops)}")
@pytest.mark.parametrize("duplex", [True, False], ids=("duplex", "half duplex"))
def test_it_is_slower_than_vdnn_pp_with_the_same_storages_where_the_link_is_the_bottleneck(
    trace: Trace, duplex: bool
) -> None:
    layers, gaps = layers_of(trace), sorted(crossing_gaps(trace).values())
    nbytes = sum(trace.storages[gap.storage].nbytes for gap in gaps)
    for traffic in (0.5, 2.0, 8.0):  # what leaves, over the step's compute
        rate = nbytes / (traffic * trace.duration_s)
        link = Link(write_bytes_per_s=rate, read_bytes_per_s=rate, duplex=duplex)
        for budget_bytes in ((trace.floor_bytes() + trace.peak_bytes) // 2, trace.peak_bytes):
            problem = problem_of(trace, budget_bytes, link)
            ours = Layrub(strategy="inter").plan(problem)
            assert {swap.gap for swap in ours.swaps} == set(gaps)
            theirs = predict(problem, transfers(problem, layers, gaps, synchronous=False))
            assert predicted(ours).stall_s > theirs.stall_s > 0


@pytest.mark.parametrize("trace", NETS, ids=lambda trace: trace.model)
def test_data_comes_back_beside_the_layer_before_and_not_earlier(trace: Trace) -> None:
    plan = Layrub(strategy="inter").plan(problem_of(trace, ROOMY))
    check(plan, problem_of(trace, ROOMY))
    assert plan.notes == ()
    used = sorted({use for save in trace.saves for use in save.uses})
    for swap in plan.swaps:
        position = used.index(swap.gap.before_op)
        assert swap.fetch_op == (used[position - 1] if position else swap.gap.before_op)


def test_an_unknown_strategy_is_refused() -> None:
    with pytest.raises(BadArgument, match="choose one of hybrid, inter, intra"):
        Layrub(strategy="none")


@pytest.mark.parametrize("trace", NETS, ids=lambda trace: trace.model)
def test_the_layer_that_uses_data_waits_for_it_at_its_beginning(trace: Trace) -> None:
    starts = sorted({layer.backward.start for layer in layers_of(trace) if layer.backward})
    plan = Layrub().plan(problem_of(trace, ROOMY))
    assert plan.swaps
    for swap in plan.swaps:
        begun = max((start for start in starts if start <= swap.gap.before_op), default=swap.gap.before_op)
        assert swap.arrived_op == max(begun, swap.fetch_op)
