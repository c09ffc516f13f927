"""The same trace, machine and budget give the same step by every command, and the plan that a run follows."""

from __future__ import annotations

import gc
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import lowtide
from lowtide import registry
from lowtide.cli import main
from lowtide.cli.models import Wanted, build_trace
from lowtide.core.machine import Link
from lowtide.core.plan import Plan, Problem
from lowtide.core.serialize import load_trace, save
from lowtide.core.trace import Kind, Reach, Trace
from lowtide.errors import BudgetTooSmall
from lowtide.execute.tide.script import run_script
from lowtide.plan.policies.auto import Auto
from lowtide.report import problem_of, settle
from lowtide.report.html import data_of
from lowtide.testing.traces import machine_of
from tests.execute.training import Training

DATA = Path(__file__).parent.parent / "data"
# It does not say how fast it computes: operators take the times that were recorded.
SLOW = machine_of(Link(write_bytes_per_s=1e7, read_bytes_per_s=1e7))


def _fake(reach: Reach) -> Trace:
    sizes: dict[str, int | float | bool] = {"image": 64, "width": 16}
    return build_trace(
        Wanted(name="vgg16", batch=8, dtype="float32", sizes=sizes), fake=True, machine="v100", reach=reach
    )


CASES = {
    "recorded VGG": ("slow", lambda: load_trace(DATA / "vgg.trace")),
    "recorded GPT": ("slow", lambda: load_trace(DATA / "gpt.trace")),
    "fake, what autograd saves": ("v100", lambda: _fake(Reach.SAVED)),
    "fake, pages": ("v100", lambda: _fake(Reach.TOUCHED)),
    "fake, slow memory": ("optane", lambda: _fake(Reach.TOUCHED)),
}


def _told(capsys: pytest.CaptureFixture[str], *argv: str) -> dict[str, Any]:
    assert main(argv) == 0, capsys.readouterr().err
    answer = json.loads(capsys.readouterr().out)
    assert isinstance(answer, dict)
    return answer


@pytest.mark.parametrize(
    ("case", "more"), [*((case, ()) for case in CASES), ("recorded VGG", ("--no-recompute",))], ids=str
)
def test_every_command_tells_the_same_step(
    case: str, more: tuple[str, ...], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    machine, made = CASES[case]
    if machine == "slow":
        machine = str(tmp_path / "slow.machine")
        save(SLOW, machine)
    trace, path = made(), tmp_path / "step.trace"
    save(trace, path)
    budget = str(int(0.7 * trace.floor_bytes() + 0.3 * trace.peak_bytes))
    asked = ("--machine", machine, "--budget", budget, *more, str(path))
    simulated = _told(capsys, "simulate", "--json", *asked)
    expected = (simulated["step_s"], simulated["peak_bytes"], simulated["stall_s"], simulated["recompute_s"])
    assert simulated["slowdown"] > 1 or simulated["moved_out_bytes"] > 0, "nothing is decided: this shows nothing"

    planned = _told(capsys, "plan", "--json", *asked)
    names = ("predicted_step_s", "predicted_peak_bytes", "predicted_stall_s", "predicted_recompute_s")
    assert tuple(planned[name] for name in names) == expected
    estimated = _told(capsys, "estimate", "--json", *asked)
    names = ("managed_step_s", "managed_peak_bytes", "stall_s", "recompute_s")
    assert tuple(estimated[name] for name in names) == expected

    compared, page = tmp_path / "all.json", tmp_path / "page.html"
    shared = ("--policies", "auto", "--jobs", "1", "--budgets", budget, *more, str(path))
    assert main(["compare", "--machines", machine, "--json", str(compared), *shared]) == 0
    assert main(["report", "--machine", machine, "--budget", budget, "-o", str(page), *shared]) == 0
    capsys.readouterr()
    for results in (json.loads(compared.read_text())["results"], data_of(page.read_text())["results"]):
        names = ("step_s", "peak_bytes", "stall_s", "recompute_s")
        assert tuple(results[0][name] for name in names) == pytest.approx(expected, rel=1e-9)


def test_recomputation_is_a_choice_by_default(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    machine = tmp_path / "slow.machine"
    save(SLOW, machine)
    trace = ("--budget", "75%", "--machine", str(machine), str(DATA / "vgg.trace"))
    for command, name in (("plan", "predicted_recompute_s"), ("simulate", "recompute_s")):
        assert _told(capsys, command, "--json", *trace)[name] > 0
        assert _told(capsys, command, "--json", "--no-recompute", *trace)[name] == 0


@pytest.mark.parametrize("share", [0.3, 0.7])
def test_a_run_follows_the_plan_that_its_trace_and_machine_give(share: float, tmp_path: Path) -> None:
    with lowtide.fit((watched := Training()).model, watched.optimizer, budget="1GiB", spill=tmp_path) as tide:
        watched.steps(3, tide.step)
        trace = tide.trace()
    budget_bytes = int(trace.floor_bytes() + share * (trace.peak_bytes - trace.floor_bytes()))
    training = Training()
    with lowtide.fit(training.model, training.optimizer, budget=budget_bytes, spill=tmp_path) as tide:
        training.steps(3, tide.step)
        trace, plan, machine = tide.trace(), tide.plan(), tide.machine
    assert plan is not None
    problem = problem_of(trace, machine, budget_bytes=budget_bytes, keep_times=True)
    settled = settle(problem, registry.policy("auto"))
    assert (settled.plan.swaps, settled.plan.recomputes) == (plan.swaps, plan.recomputes)
    assert settled.plan.prediction == plan.prediction


SCRIPT = """
import torch
torch.manual_seed(11)
model = torch.nn.Sequential(*(layer for _ in range(6) for layer in (torch.nn.Linear(192, 192), torch.nn.GELU())))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, foreach={foreach})
for step in range(5):
    model(torch.randn(256, 192)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
"""


class Remembering(Auto):
    """Keeps what it was asked last, and its answer."""

    problem: Problem
    answer: Plan

    def plan(self, problem: Problem) -> Plan:
        self.problem, self.answer = problem, super().plan(problem)
        return self.answer


@pytest.mark.parametrize("foreach", [False, True])
def test_a_captured_script_needs_and_plans_what_a_run_of_it_does(
    foreach: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    script, path = tmp_path / "train.py", tmp_path / "step.trace"
    script.write_text(SCRIPT.format(foreach=foreach))
    captured_floor = _told(capsys, "capture", "--json", "-o", str(path), str(script))["floor_bytes"]
    captured = load_trace(path)
    gc.collect()
    budget_bytes = int(captured_floor + 0.4 * (captured.peak_bytes - captured_floor))
    fitted = Remembering()
    run_script(script, [], budget=budget_bytes, spill=tmp_path, policy=fitted)
    run, machine = fitted.problem.trace, fitted.problem.machine
    assert captured.reach is run.reach is Reach.TOUCHED
    assert (captured.peak_bytes, captured.static_bytes) == (run.peak_bytes, run.static_bytes)
    assert _told(capsys, "plan", "--floor", "--json", str(path))["floor_bytes"] == run.floor_bytes()
    moved = {captured.storages[gap.storage].kind for gap in captured.gaps()}
    assert moved >= {Kind.PARAM, Kind.OPTIMIZER, Kind.GRAD, Kind.ACTIVATION}
    if foreach:
        return  # a budget slices the update as it needs to: there are other operators
    assert [op.name for op in captured.ops] == [op.name for op in run.ops]
    assert captured.gaps() == run.gaps()
    # Operators take another time in every run, and codecs leave what they leave of its values: with those of this one
    # the plan is the same.
    timed = tuple(
        replace(op, start_s=there.start_s, duration_s=there.duration_s)
        for op, there in zip(captured.ops, run.ops, strict=True)
    )
    problem = problem_of(replace(captured, ops=timed), machine, budget_bytes=budget_bytes, keep_times=True)
    problem = replace(problem, codecs=fitted.problem.codecs, sampled=fitted.problem.sampled)
    plan = settle(problem, registry.policy("auto")).plan
    assert (plan.swaps, plan.recomputes, plan.prediction) == (
        fitted.answer.swaps,
        fitted.answer.recomputes,
        fitted.answer.prediction,
    )
    assert plan.swaps or plan.recomputes, "nothing is decided: this shows nothing"


GRAIN_BYTES = 64 << 10  # what refusals are told in


@pytest.mark.parametrize(("foreach", "share"), [(False, 0.5), (True, 0.9)])
def test_a_refusal_tells_the_floor_that_plan_tells_and_obeying_it_once_is_enough(
    foreach: bool, share: float, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    script, path = tmp_path / "train.py", tmp_path / "step.trace"
    script.write_text(SCRIPT.format(foreach=foreach))
    assert main(["capture", "-o", str(path), str(script)]) == 0
    capsys.readouterr()
    floor_bytes = _told(capsys, "plan", "--floor", "--json", str(path))["floor_bytes"]
    gc.collect()
    with pytest.raises(BudgetTooSmall) as refused:
        run_script(script, [], budget=int(share * floor_bytes), spill=tmp_path)
    needed_bytes = refused.value.needed_bytes
    refused.value.__traceback__ = None
    del refused
    gc.collect()
    assert floor_bytes <= needed_bytes < floor_bytes + GRAIN_BYTES
    run_script(script, [], budget=needed_bytes, spill=tmp_path)
