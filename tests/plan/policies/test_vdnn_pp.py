"""vDNN++: vDNN without its waits (Shriram et al., IPDPS 2019)."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings

from lowtide.codecs import Stats, ZeroValue
from lowtide.core.machine import Link
from lowtide.core.plan import IDENTITY, CodecCost, Problem
from lowtide.core.serialize import load_trace
from lowtide.core.trace import Trace
from lowtide.core.units import format_bytes
from lowtide.errors import BadArgument
from lowtide.plan.policies.vdnn import VdnnAll, VdnnConv
from lowtide.plan.policies.vdnn_pp import VdnnPlusPlus, host_bytes
from lowtide.plan.verify import check, replay
from lowtide.testing.codecs import some_values
from lowtide.testing.networks import MIB, network_trace, networks
from lowtide.testing.policies import PolicyTests
from lowtide.testing.traces import problems
from tests.plan.policies.shapes import (
    BOUND,
    DISK,
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
RECORDED = [load_trace(path) for path in sorted((Path(__file__).parents[2] / "data").glob("*.trace"))]
SAME_SETS = ((VdnnAll(), VdnnPlusPlus(offload="all")), (VdnnConv(), VdnnPlusPlus(offload="conv")))


class TestVdnnPlusPlus(PolicyTests):
    def make_policy(self) -> VdnnPlusPlus:
        return VdnnPlusPlus()

    def least_budget_bytes(self, trace: Trace) -> int:
        return least_bytes(VdnnAll(), trace)


@pytest.mark.parametrize("pair", SAME_SETS, ids=("all", "conv"))
@pytest.mark.parametrize("trace", NETS, ids=lambda trace: trace.model)
def test_it_moves_what_vdnn_moves(trace: Trace, pair: tuple[VdnnAll, VdnnPlusPlus]) -> None:
    ours, theirs = (policy.plan(problem_of(trace, ROOMY)) for policy in pair)
    assert {swap.gap for swap in ours.swaps} == {swap.gap for swap in theirs.swaps}
    assert all(swap.landed_op is None and swap.arrived_op is None for swap in theirs.swaps)


@pytest.mark.parametrize("pair", SAME_SETS, ids=("all", "conv"))
@pytest.mark.parametrize("trace", NETS, ids=lambda trace: trace.model)
@pytest.mark.parametrize("link", [BOUND, replace(BOUND, duplex=False)], ids=("duplex", "half duplex"))
@pytest.mark.parametrize("share", [0.0, 0.5, 1.0])
def test_it_is_faster_where_the_link_is_the_bottleneck(
    trace: Trace, pair: tuple[VdnnAll, VdnnPlusPlus], link: Link, share: float
) -> None:
    least = least_bytes(pair[0], trace)
    problem = problem_of(trace, least + int(share * (trace.peak_bytes - least)), link)
    waits, runs_on = (predicted(policy.plan(problem)).step_s for policy in pair)
    assert runs_on <= waits
    if share == 1.0:
        assert runs_on < waits


@given(problem=problems(networks()))
@settings(max_examples=200, deadline=None)
def test_it_is_never_slower_than_vdnn_with_the_same_candidates(problem: Problem) -> None:
    for waiting, free in SAME_SETS:
        least = least_bytes(waiting, problem.trace)
        fair = replace(problem, budget_bytes=max(problem.budget_bytes, least))
        waits, runs_on = (predicted(policy.plan(fair)).step_s for policy in (waiting, free))
        assert runs_on <= waits * (1 + 1e-9)


@pytest.mark.parametrize("trace", NETS, ids=lambda trace: trace.model)
def test_both_are_as_fast_as_compute_where_every_transfer_hides(trace: Trace) -> None:
    # The shortest operator takes 10 us, and the largest storage 1 us each way.
    link = Link(write_bytes_per_s=2e13, read_bytes_per_s=2e13, duplex=True)
    for policy in (VdnnAll(), VdnnPlusPlus(offload="all")):
        assert predicted(policy.plan(problem_of(trace, ROOMY, link))).stall_s == pytest.approx(0, abs=1e-12)


def as_long_as_its_layer(trace: Trace) -> float:
    """Return the rate at which no copy of vDNN's takes longer than the layer it runs beside, and one takes as long."""
    starts_s = [op.start_s for op in trace.ops]
    rates = []
    for swap in VdnnAll().plan(problem_of(trace, ROOMY)).swaps:
        nbytes = trace.storages[swap.gap.storage].nbytes
        assert swap.landed_op is not None
        rates.append(nbytes / (starts_s[swap.landed_op] - starts_s[swap.gap.after_op]))
        if swap.arrived_op is not None and swap.fetch_op < swap.arrived_op:
            rates.append(nbytes / (starts_s[swap.arrived_op] - starts_s[swap.fetch_op]))
    return max(rates)


@pytest.mark.parametrize("trace", [*NETS, *RECORDED], ids=lambda trace: f"{trace.model}-{len(trace.ops)}")
def test_both_are_equal_until_a_copy_takes_longer_than_its_layer(trace: Trace) -> None:
    rate = as_long_as_its_layer(trace)
    for times, waits in ((0.5, False), (0.9, False), (0.999, False), (1.02, True), (1.5, True)):
        link = Link(write_bytes_per_s=rate / times, read_bytes_per_s=rate / times, duplex=True)
        vdnn, ours = (
            predicted(policy.plan(problem_of(trace, trace.peak_bytes, link)))
            for policy in (VdnnAll(), VdnnPlusPlus(offload="all"))
        )
        if waits:
            assert ours.stall_s < vdnn.stall_s
        else:
            assert ours.step_s == vdnn.step_s == pytest.approx(trace.duration_s, rel=1e-12)


@given(problem=problems(networks()))
@settings(max_examples=150, deadline=None)
def test_it_ends_under_the_smallest_budget_that_can_work(problem: Problem) -> None:
    for offload in ("all", "conv", "alternate_conv"):
        policy = VdnnPlusPlus(offload=offload)
        tight = replace(problem, budget_bytes=least_bytes(policy, problem.trace))
        plan = policy.plan(tight)
        seen = replay(plan, tight)
        assert seen.peak_bytes == predicted(plan).peak_bytes <= tight.budget_bytes


def test_the_first_set_that_fits_is_taken() -> None:
    trace = vgg()
    sets = ("none", "alternate_conv", "conv", "all")
    least = {offload: least_bytes(VdnnPlusPlus(offload=offload), trace) for offload in sets}
    assert list(least.values()) == sorted(least.values(), reverse=True)
    assert len(set(least.values())) == len(sets)
    for trials, offload in enumerate(sets, start=1):
        problem = problem_of(trace, least[offload])
        plan = VdnnPlusPlus().plan(problem)
        check(plan, problem)
        assert plan.notes[0].startswith(f"takes offload {offload};")
        assert plan.trials == trials


def test_every_other_convolution_is_half_of_them() -> None:
    trace = network_trace(chain(*["conv"] * 9, "linear"))
    problem = problem_of(trace, ROOMY)
    conv, alternate = (VdnnPlusPlus(offload=offload).plan(problem).swaps for offload in ("conv", "alternate_conv"))
    # The input of the first convolution is the network's own, which stays.
    assert len(conv) == 8
    assert len(alternate) == 4
    assert {swap.gap for swap in alternate} < {swap.gap for swap in conv}


def test_compression_shrinks_what_is_pinned_on_the_host_and_nothing_else() -> None:
    trace = network_trace(chain(*["conv"] * 5, "linear"))
    problem = problem_of(trace, ROOMY, DISK)
    plain, packed = (VdnnPlusPlus(offload="all", host_ratio=ratio).plan(problem) for ratio in (1.0, 0.4))
    # Four inputs are away at once.
    assert host_bytes(trace, plain.swaps) == 4 * MIB
    assert plain.notes == ("takes offload all; pins at most 4.00 MiB on the host",)
    assert packed.notes[1] == "compressed on the host: 1.60 MiB"
    assert packed.swaps == plain.swaps
    assert packed.prediction == plain.prediction


@pytest.mark.parametrize("density", [0.0, 0.5, 0.9])
@pytest.mark.parametrize("trace", NETS, ids=lambda trace: trace.model)
def test_a_codec_on_the_host_pins_fewer_bytes(trace: Trace, density: float) -> None:
    ratio = ZeroValue().ratio_model(Stats(density=density))
    plan = VdnnPlusPlus(offload="all", host_ratio=ratio).plan(problem_of(trace, ROOMY))
    plain, packed = host_bytes(trace, plan.swaps), host_bytes(trace, plan.swaps, ratio=ratio)
    assert 0 < packed < plain
    assert packed == pytest.approx(ratio * plain, abs=len(plan.swaps))  # each in whole bytes
    assert plan.notes[1] == f"compressed on the host: {format_bytes(packed)}"


def test_what_the_codec_leaves_of_real_copies_is_what_the_plan_pins() -> None:
    trace = network_trace(chain(*["conv"] * 5, "linear"))
    plan = VdnnPlusPlus(offload="all").plan(problem_of(trace, ROOMY))
    codec, pinned, kept = ZeroValue(), 0, 0
    for swap in plan.swaps:
        copy = some_values(trace.storages[swap.gap.storage].nbytes // 4, density=0.5, seed=swap.gap.storage)
        pinned += codec.encode(copy).nbytes
        kept += np.count_nonzero(copy)
    # All four are away at once.
    plain = host_bytes(trace, plan.swaps)
    assert plain == 4 * MIB == sum(trace.storages[swap.gap.storage].nbytes for swap in plan.swaps)
    ratio = codec.ratio_model(Stats(density=4 * kept / plain))
    assert pinned == pytest.approx(host_bytes(trace, plan.swaps, ratio=ratio), abs=len(plan.swaps))
    assert pinned < 0.6 * plain


@pytest.mark.parametrize("arguments", [{"offload": "some"}, {"host_ratio": 0.0}, {"host_ratio": 1.5}])
def test_bad_arguments_are_refused(arguments: dict[str, object]) -> None:
    with pytest.raises(BadArgument):
        VdnnPlusPlus(**arguments)  # type: ignore[arg-type]


def test_copies_go_through_the_codec_if_the_executor_has_it() -> None:
    problem = problem_of(network_trace(chain(*["conv"] * 5, "linear")), ROOMY)
    known = replace(problem, codecs=(IDENTITY, CodecCost(name="zvc", ratio=0.5)))
    plain, coded = (VdnnPlusPlus(offload="all", codec=codec).plan(known) for codec in ("identity", "zvc"))
    assert {swap.codec for swap in coded.swaps} == {"zvc"}
    assert coded.prediction is not None
    assert plain.prediction is not None
    assert coded.prediction.moved_out_bytes == plain.prediction.moved_out_bytes // 2
    assert VdnnPlusPlus(offload="all", codec="zvc").plan(problem).swaps == plain.swaps
