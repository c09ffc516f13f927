"""What the papers report of each other, in shape: by simulation, at equal memory, on networks built and recorded."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from lowtide import registry, zoo
from lowtide.capture.fake import capture_fake
from lowtide.core.machine import Link
from lowtide.core.serialize import load_trace
from lowtide.core.trace import Trace
from lowtide.estimate.presets import machine
from lowtide.report import Outcome, compare
from lowtide.simulate.run import simulate_run
from tests.plan.policies.shapes import BOUND, FAST, least_bytes, problem_of, resnet, vgg

DATA = Path(__file__).parents[2] / "data"
NETS: dict[str, Trace] = {
    "vgg": vgg(),
    "resnet": resnet(),
    "recorded vgg": load_trace(DATA / "vgg.trace"),
    "recorded resnet": load_trace(DATA / "resnet.trace"),
}
ORDER = ("vdnn", "vdnn_pp", "capuchin")


def simulated_s(name: str, trace: Trace, budget_bytes: int, link: Link) -> float:
    """Return a step under a policy, once its plan is settled."""
    problem = replace(problem_of(trace, budget_bytes, link), can_recompute=True)
    run = simulate_run(problem, registry.policy(name), steps=8)
    assert run.timelines[-1].peak_bytes <= budget_bytes
    return run.timelines[-1].step_s


def relative(link: Link, trace: Trace, share: float) -> Link:
    """Return a link on which everything saved takes `share` of the step's compute, each way."""
    nbytes = sum(trace.storages[gap.storage].nbytes for gap in trace.gaps())
    rate = nbytes / (share * trace.duration_s)
    return replace(link, write_bytes_per_s=rate, read_bytes_per_s=rate)


@pytest.mark.parametrize("net", NETS)
@pytest.mark.parametrize("share", [2.0, 8.0])
def test_vdnn_is_slower_than_vdnn_pp_and_that_slower_than_capuchin(net: str, share: float) -> None:
    trace = NETS[net]
    budget_bytes = max(least_bytes(registry.policy("vdnn_all"), trace), trace.floor_bytes())
    times_s = [simulated_s(name, trace, budget_bytes, relative(BOUND, trace, share)) for name in ORDER]
    assert times_s == sorted(times_s, reverse=True)
    assert times_s[0] > 1.02 * times_s[2], "the link is the bottleneck: it must show"


@pytest.mark.parametrize("net", NETS)
def test_where_the_link_could_hide_most_capuchin_is_about_as_fast_as_vdnn_pp(net: str) -> None:
    trace = NETS[net]
    budget_bytes = max(least_bytes(registry.policy("vdnn_all"), trace), trace.floor_bytes())
    vdnn_s, vdnn_pp_s, capuchin_s = (
        simulated_s(name, trace, budget_bytes, relative(BOUND, trace, 0.5)) for name in ORDER
    )
    assert vdnn_s >= max(vdnn_pp_s, capuchin_s)
    assert capuchin_s <= 1.05 * vdnn_pp_s  # 3% slower on the built ResNet: docs/systems.md


@pytest.mark.parametrize("net", NETS)
def test_with_an_endless_link_all_are_as_fast_as_compute(net: str) -> None:
    trace = NETS[net]
    budget_bytes = max(least_bytes(registry.policy("vdnn_all"), trace), trace.floor_bytes())
    endless = replace(FAST, write_bytes_per_s=1e18, read_bytes_per_s=1e18)
    for name in ORDER:
        assert simulated_s(name, trace, budget_bytes, endless) == pytest.approx(trace.duration_s, rel=1e-3)


@pytest.mark.parametrize("net", NETS)
def test_pooch_beats_swapping_everything(net: str) -> None:
    trace = NETS[net]
    budget_bytes = (max(least_bytes(registry.policy("swap_all"), trace), trace.floor_bytes()) + trace.peak_bytes) // 2
    link = relative(BOUND, trace, 2.0)
    assert simulated_s("pooch", trace, budget_bytes, link) < simulated_s("swap_all", trace, budget_bytes, link)


@pytest.mark.parametrize("model", ["vgg16", "resnet50"])
def test_the_order_of_the_papers_holds_on_presets_at_every_budget(model: str) -> None:
    """vDNN slower than vDNN++ slower than Capuchin, and PoocH faster than swapping everything, with predicted times."""
    trace = capture_fake(lambda: zoo.build(model, batch=64).training())
    floor_bytes = trace.floor_bytes()
    # At half, vDNN++ hides everything on the two slowest cards, as Capuchin does.
    budgets_bytes = [round(floor_bytes + share * (trace.peak_bytes - floor_bytes)) for share in (0.15, 0.3)]
    machines = [machine(name) for name in ("k40c", "titan-x", "v100", "rtx4090")]
    found = compare(
        trace, policies=[*ORDER, "pooch", "swap_all"], budgets_bytes=budgets_bytes, machines=machines, jobs=1
    )
    times_s: dict[tuple[str, int], dict[str, float]] = {}
    for one in found.results:
        assert isinstance(one, Outcome)
        assert not one.over_budget
        times_s.setdefault((one.machine, one.budget_bytes), {})[one.policy] = one.step_s
    assert len(times_s) == len(machines) * len(budgets_bytes)
    for place, step_s in times_s.items():
        assert step_s["vdnn"] > 1.01 * step_s["vdnn_pp"] > 1.01 * step_s["capuchin"], place
        assert step_s["pooch"] < 0.99 * step_s["swap_all"], place
