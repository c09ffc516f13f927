from __future__ import annotations

from dataclasses import replace

import pytest

from lowtide import registry
from lowtide.codecs import Stats, ZeroValue
from lowtide.core.machine import Link
from lowtide.core.plan import CodecCost, Plan, Problem
from lowtide.core.timeline import Timeline
from lowtide.errors import BadArgument, BudgetTooSmall
from lowtide.plan.policy import About, Family, Runs
from lowtide.plan.views.layers import relu_results
from lowtide.report import budget_of, problem_of, settle
from lowtide.report.case import FEEDBACK_STEPS, Encoding
from lowtide.testing.traces import chain_trace, machine_of
from tests.plan.policies import shapes
from tests.report.samples import MACHINE, share, vgg

MIB = 2**20


def test_a_share_is_of_what_activations_add_to_the_static_bytes() -> None:
    assert budget_of("0.5%", static_bytes=1000, peak_bytes=3000) == 1010
    assert budget_of("100%", static_bytes=1000, peak_bytes=3000) == 3000
    assert budget_of(" 150 %", static_bytes=1000, peak_bytes=3000) == 4000
    assert budget_of("2GiB", static_bytes=1000, peak_bytes=3000) == 2 << 30


@pytest.mark.parametrize("text", ["", "%", "x%", "0%", "-5%", "nan%", "inf%", "0", "-1GiB", "2G", "2 parsecs"])
def test_a_budget_that_makes_no_sense_is_refused_in_one_line(text: str) -> None:
    with pytest.raises(BadArgument) as caught:
        budget_of(text, static_bytes=1000, peak_bytes=3000)
    assert "\n" not in str(caught.value)


def test_a_step_that_does_not_fit_names_the_operator() -> None:
    problem = problem_of(vgg(), MACHINE, budget_bytes=share(vgg(), "70%"))
    with pytest.raises(BudgetTooSmall, match="aten::"):
        settle(problem, registry.policy("keep_all"))


def test_a_bound_ignores_the_budget_and_says_so() -> None:
    problem = problem_of(vgg(), MACHINE, budget_bytes=share(vgg(), "70%"))
    settled = settle(problem, registry.policy("infinite_memory"))
    assert settled.bound
    assert settled.timeline.peak_bytes == vgg().peak_bytes > problem.budget_bytes == settled.timeline.budget_bytes
    assert settled.timeline.step_s == pytest.approx(vgg().duration_s)
    assert not settle(replace(problem, budget_bytes=vgg().peak_bytes), registry.policy("infinite_memory")).bound


class Learner:
    """Changes its mind `changes` times, each time with another note."""

    name = "learner"
    summary = "learns"
    about = About(family=Family.BASELINE, runs=(Runs.SIMULATED,))

    def __init__(self, changes: int) -> None:
        self.changes = changes

    def plan(self, problem: Problem) -> Plan:
        return Plan(policy=self.name, budget_bytes=problem.budget_bytes, notes=("0",), trials=5)

    def observe(self, problem: Problem, plan: Plan, timeline: Timeline) -> Plan:
        assert timeline.notes == plan.notes
        seen = int(plan.notes[0])
        return plan if seen == self.changes else replace(plan, notes=(str(seen + 1),))


def test_feedback_goes_on_until_the_plan_is_settled_and_counts_as_trials() -> None:
    problem = problem_of(chain_trace(4), MACHINE, budget_bytes=100 * MIB)
    settled = settle(problem, Learner(3))
    assert settled.timeline.notes == ("3",)
    assert settled.timeline.trials == 5 + 3
    endless = settle(problem, Learner(10**9))
    assert endless.timeline.trials == 5 + FEEDBACK_STEPS


def test_times_are_the_machines_where_it_states_them_and_the_traces_own_otherwise() -> None:
    trace = chain_trace(4)
    stated = replace(
        machine_of(Link(write_bytes_per_s=1e9, read_bytes_per_s=1e9)), flops_per_s=1e9, memory_bytes_per_s=1e9
    )
    known = replace(trace, ops=tuple(replace(op, flops=6e8) for op in trace.ops))
    assert problem_of(known, stated, budget_bytes=1).trace.duration_s == pytest.approx(8 * 1.0)
    assert problem_of(known, stated, budget_bytes=1, keep_times=True).trace == known
    assert problem_of(trace, MACHINE, budget_bytes=1).trace == trace
    with pytest.raises(BadArgument, match="floating-point"):
        problem_of(trace, stated, budget_bytes=1)


FAST_ENGINE = CodecCost(
    name="zvc", encode_bytes_per_s=1e13, decode_bytes_per_s=1e13, ratio=ZeroValue().ratio_model(Stats(density=0.25))
)


@pytest.mark.parametrize("policy", ["vdnn_all", "flashneuron"])
def test_relus_results_travel_through_the_codec_and_others_as_they_are(policy: str) -> None:
    trace = shapes.vgg()
    problem = shapes.problem_of(trace, (trace.floor_bytes() + trace.peak_bytes) // 2, shapes.BOUND)
    plain = settle(problem, registry.policy(policy))
    encoded = settle(problem, registry.policy(policy), encoding=Encoding(codec=FAST_ENGINE))
    assert encoded.plan == plain.plan, "no policy knows of the codec"
    moved = [swap.gap.storage for swap in plain.plan.swaps]
    relus = relu_results(trace)
    assert sum(one in relus for one in moved) > 0
    expected = sum(round(trace.storages[one].nbytes * (FAST_ENGINE.ratio if one in relus else 1)) for one in moved)
    assert encoded.timeline.moved_out_bytes == encoded.timeline.moved_in_bytes == expected
    assert plain.timeline.moved_out_bytes == sum(trace.storages[one].nbytes for one in moved) > expected
    assert encoded.timeline.step_s < plain.timeline.step_s, "the link is the bottleneck"


def test_a_codec_gains_nothing_where_the_link_is_not_the_bottleneck_and_costs_where_it_is_slow() -> None:
    trace = shapes.vgg()
    problem = shapes.problem_of(trace, trace.peak_bytes - MIB, shapes.FAST)
    plain = settle(problem, registry.policy("vdnn_all")).timeline.step_s
    assert plain == pytest.approx(trace.duration_s, rel=1e-3)
    for codec, slower in ((FAST_ENGINE, False), (replace(FAST_ENGINE, decode_bytes_per_s=1e8), True)):
        encoding = Encoding(codec=codec, everything=True)
        step_s = settle(problem, registry.policy("vdnn_all"), encoding=encoding).timeline.step_s
        assert (step_s > 1.5 * plain) == slower
        assert slower or step_s == pytest.approx(plain, rel=1e-3)
