"""The cross-system suite: what holds for every policy there is, on built, random and recorded traces."""

from __future__ import annotations

import time
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
from hypothesis import given, settings

from lowtide import registry
from lowtide.core.machine import Link
from lowtide.core.plan import Problem
from lowtide.core.serialize import load_trace
from lowtide.core.trace import Kind, Phase, Save, Storage, Trace
from lowtide.plan.policies.auto import MOST_GAPS_FOR_GUIDES, NEGLIGIBLE
from lowtide.plan.policy import Policy
from lowtide.testing.networks import Layer, network_trace, networks
from lowtide.testing.optimum import Best, optimum
from lowtide.testing.policies import FAST, SLOW, PolicyTests, assert_sound
from lowtide.testing.shapes import branches_trace, resnet_trace, transformer_trace, unet_trace, vgg_trace
from lowtide.testing.simulated import simulated_steps
from lowtide.testing.traces import Step, chain_trace, machine_of, make_trace, problems, training_trace

NAMES = registry.policy_names()
RECORDED = sorted((Path(__file__).parent.parent / "data").glob("*.trace"))
QUICK = ("gpt",)  # the other recorded steps are the same question again

# These plan for every budget that any plan can meet; the others say by their prediction what they need.
PROMISE_THE_FLOOR = {"auto", "belady", "swap_all"}
GIVE_UP_NOTHING = {"keep_all", "infinite_memory"}


class _Registered(PolicyTests):
    name = ""

    def make_policy(self) -> Policy:
        return registry.policy(self.name)

    def least_budget_bytes(self, trace: Trace) -> int:
        if self.name in PROMISE_THE_FLOOR:
            return trace.floor_bytes()
        # At the whole step's peak, who adapts does nothing; the others promise nothing.
        return trace.peak_bytes if self.make_policy().about.adapts else 2**62


for _name in NAMES:
    globals()[f"Test_{_name}"] = type(
        f"Test_{_name}",
        (_Registered,),
        {"name": _name, "gives_up_records": _name not in GIVE_UP_NOTHING, "__module__": __name__},
    )


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    "path",
    [pytest.param(path, marks=[pytest.mark.slow] * (path.stem not in QUICK), id=path.stem) for path in RECORDED],
)
def test_plans_and_steps_of_recorded_traces_are_sound(name: str, path: Path) -> None:
    trace = _recorded(path)
    floor = trace.floor_bytes()
    for can_recompute in (False, True):
        for link in (FAST, SLOW):
            for share in (0.1, 0.5):
                problem = Problem(
                    trace=trace,
                    machine=machine_of(link),
                    budget_bytes=floor + int(share * (trace.peak_bytes - floor)),
                    can_recompute=can_recompute,
                )
                policy = registry.policy(name)
                plan = policy.plan(problem)
                seen = assert_sound(plan, problem)
                assert seen is not None or name not in PROMISE_THE_FLOOR
                if (can_recompute, link, share) == (True, FAST, 0.1):  # more are in test_cross_simulated.py
                    simulated_steps(problem, policy, plan, may_refuse=name in GIVE_UP_NOTHING)


@cache
def _recorded(path: Path) -> Trace:
    return load_trace(path)


def test_there_are_recorded_steps() -> None:
    assert {path.stem for path in RECORDED} >= {"gpt", "resnet", "vgg"}


def _late_use() -> Trace:
    """Two storages that are needed again in the order in which they were made."""
    steps = [
        Step(name=f"aten::op{k}", phase=Phase.FORWARD if k < 4 else Phase.BACKWARD, duration_s=1.0) for k in range(8)
    ]
    storages = [Storage(nbytes=100 * (1 + k), kind=Kind.ACTIVATION, first_op=k, last_op=5 + k) for k in range(2)]
    saves = [Save(storage=k, packed_op=k, free_op=k + 1, uses=(5 + k,), released_op=5 + k) for k in range(2)]
    return make_trace(steps, storages, saves, model="in order")


def _join() -> Trace:
    layers = [
        Layer(kind="conv", inputs=(-1,), nbytes=300, duration_s=1.0),
        Layer(kind="relu", inputs=(0,), nbytes=300, duration_s=0.1),
        Layer(kind="linear", inputs=(1,), nbytes=100, duration_s=1.0),
    ]
    return network_trace(layers, input_bytes=100, model="join")


TINY = (chain_trace(3, nbytes=100, duration_s=1.0), chain_trace(4, nbytes=100, duration_s=1.0), _late_use(), _join())
TINY_LINKS = {
    "fast": Link(write_bytes_per_s=200.0, read_bytes_per_s=200.0),
    "slow": Link(write_bytes_per_s=40.0, read_bytes_per_s=60.0),
    "duplex": Link(write_bytes_per_s=60.0, read_bytes_per_s=60.0, read_latency_s=0.1, duplex=True),
}
SHARES = (0.0, 0.4, 0.8)
SHAPES = (vgg_trace(3), resnet_trace(4), unet_trace(3), branches_trace(2), transformer_trace(2))


@cache
def _tiny(trace: int, link: str, share: float, can_recompute: bool) -> tuple[Problem, Best | None]:
    floor = TINY[trace].floor_bytes()
    problem = Problem(
        trace=TINY[trace],
        machine=machine_of(TINY_LINKS[link]),
        budget_bytes=floor + int(share * (TINY[trace].peak_bytes - floor)),
        can_recompute=can_recompute,
    )
    return problem, optimum(problem)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("trace", range(len(TINY)), ids=lambda k: TINY[k].model + str(k))
def test_no_policy_beats_the_best_of_all_plans(name: str, trace: int) -> None:
    for link in TINY_LINKS:
        for share in SHARES:
            for can_recompute in (False, True):
                problem, best = _tiny(trace, link, share, can_recompute)
                assert best is not None
                seen = assert_sound(registry.policy(name).plan(problem), problem)
                if seen is not None:
                    assert seen.step_s >= best.prediction.step_s * (1 - 1e-9)


@pytest.mark.parametrize("trace", range(len(TINY)), ids=lambda k: TINY[k].model + str(k))
@pytest.mark.parametrize("link", TINY_LINKS)
@pytest.mark.parametrize("can_recompute", [False, True], ids=("swap", "recompute"))
def test_auto_finds_the_best_of_all_plans(trace: int, link: str, can_recompute: bool) -> None:
    for share in SHARES:
        problem, best = _tiny(trace, link, share, can_recompute)
        seen = assert_sound(registry.policy("auto").plan(problem), problem)
        assert seen is not None
        assert best is not None
        assert seen.step_s <= best.prediction.step_s * (1 + NEGLIGIBLE)


@pytest.mark.parametrize("can_recompute", [False, True], ids=("swap", "recompute"))
def test_recomputation_pays_where_the_link_is_slow(can_recompute: bool) -> None:
    trace = resnet_trace(6)
    link = Link(write_bytes_per_s=1e8, read_bytes_per_s=1e8)
    floor = trace.floor_bytes()
    problem = Problem(
        trace=trace,
        machine=machine_of(link),
        budget_bytes=floor + (trace.peak_bytes - floor) // 2,
        can_recompute=can_recompute,
    )
    seen = assert_sound(registry.policy("auto").plan(problem), problem)
    assert seen is not None
    # 11 MiB have to leave and come back, or be made again: the first takes 0.23 s, the second a few milliseconds.
    slowdown = seen.step_s / trace.duration_s
    assert slowdown < 1.25 if can_recompute else slowdown > 3


@given(problem=problems(can_recompute=True) | problems(networks(), can_recompute=True))
@settings(max_examples=60, deadline=None)
def test_auto_is_not_slower_for_being_allowed_to_recompute(problem: Problem) -> None:
    allowed, not_allowed = (
        assert_sound(
            registry.policy("auto").plan(replace(problem, can_recompute=can)), replace(problem, can_recompute=can)
        )
        for can in (True, False)
    )
    assert allowed is not None
    assert not_allowed is not None
    assert allowed.step_s <= not_allowed.step_s * (1 + 2 * NEGLIGIBLE)


@pytest.mark.parametrize("can_recompute", [False, True], ids=("swap", "recompute"))
@pytest.mark.parametrize("traffic", [1.0, 5.0], ids=("moderate", "bound by the link"))
@pytest.mark.parametrize("trace", SHAPES, ids=lambda trace: trace.model)
def test_auto_is_within_a_percent_of_the_best_of_all_policies(
    trace: Trace, traffic: float, can_recompute: bool
) -> None:
    # `traffic`: how long it takes to move everything that can move out and back, over the step's compute.
    moved_bytes = 2 * sum(trace.storages[gap.storage].nbytes for gap in trace.gaps())
    rate = moved_bytes / (traffic * trace.duration_s)
    link = Link(write_bytes_per_s=rate, read_bytes_per_s=rate, write_latency_s=1e-5, read_latency_s=1e-5)
    floor = trace.floor_bytes()
    for share in (0.1, 0.5):
        problem = Problem(
            trace=trace,
            machine=machine_of(link),
            budget_bytes=floor + int(share * (trace.peak_bytes - floor)),
            can_recompute=can_recompute,
        )
        seen = {name: assert_sound(registry.policy(name).plan(problem), problem) for name in NAMES}
        auto = seen["auto"]
        assert auto is not None
        best_s, name = min((one.step_s, name) for name, one in seen.items() if one is not None)
        assert auto.step_s <= best_s * 1.01, f"{name} takes {best_s} s"


@pytest.mark.parametrize(
    ("bandwidth", "can_recompute"),
    [
        pytest.param(3e9, False, id="bound by the link", marks=pytest.mark.slow),
        pytest.param(3e9, True, id="recomputing", marks=pytest.mark.slow),
        pytest.param(3e10, False, id="hidden"),
    ],
)
def test_auto_plans_a_hundred_thousand_operators_in_thirty_seconds_of_a_core(
    bandwidth: float, can_recompute: bool
) -> None:
    assert_planned_in_time(50_000, bandwidth=bandwidth, can_recompute=can_recompute)


@pytest.mark.slow
@pytest.mark.parametrize("bandwidth", [3e9, 3e10], ids=("bound by the link", "less so"))
def test_auto_plans_a_hundred_thousand_operators_whose_pages_move_in_thirty_seconds_of_a_core(bandwidth: float) -> None:
    trace = training_trace(33_333, duration_s=5e-5, update_s=5e-5)
    link = Link(write_bytes_per_s=bandwidth, read_bytes_per_s=bandwidth)
    problem = Problem(trace=trace, machine=machine_of(link), budget_bytes=trace.peak_bytes // 2)
    began_s = time.process_time()
    plan = registry.policy("auto").plan(problem)
    assert time.process_time() - began_s < 30
    assert plan.prediction is not None
    assert plan.prediction.peak_bytes <= problem.budget_bytes


@pytest.mark.slow  # 15 seconds of a core
@pytest.mark.parametrize("can_recompute", [False, True], ids=("swapping", "recomputing"))
@pytest.mark.parametrize("gaps", [MOST_GAPS_FOR_GUIDES, 8_300], ids=("with guides", "too many gaps for guides"))
def test_steps_of_any_length_are_planned_in_thirty_seconds_of_a_core(gaps: int, can_recompute: bool) -> None:
    assert_planned_in_time(gaps + 1, bandwidth=3e9, can_recompute=can_recompute)


def assert_planned_in_time(layers: int, *, bandwidth: float, can_recompute: bool) -> None:
    trace = chain_trace(layers, duration_s=5e-5)
    link = Link(write_bytes_per_s=bandwidth, read_bytes_per_s=bandwidth)
    problem = Problem(
        trace=trace, machine=machine_of(link), budget_bytes=trace.peak_bytes // 2, can_recompute=can_recompute
    )
    began_s = time.process_time()
    plan = registry.policy("auto").plan(problem)
    assert time.process_time() - began_s < 30
    assert plan.prediction is not None
    assert plan.prediction.peak_bytes <= problem.budget_bytes
