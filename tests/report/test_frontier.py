"""Memory against time, and the smallest budget within limits."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest

from lowtide import registry
from lowtide.cli import main
from lowtide.core.machine import Link
from lowtide.core.plan import Problem
from lowtide.core.serialize import save
from lowtide.report.frontier import RESOLUTION, Wanted, frontier, point_at, smallest
from lowtide.testing.shapes import resnet_trace
from lowtide.testing.traces import chain_trace, machine_of

TRACE = resnet_trace(3)
LINK = Link(write_bytes_per_s=3e8, read_bytes_per_s=3e8)
PROBLEM = Problem(trace=TRACE, machine=machine_of(LINK), budget_bytes=0, can_recompute=True)
AUTO = registry.policy("auto")


def test_the_frontier_reaches_from_the_floor_to_the_peak_and_more_memory_is_never_slower() -> None:
    points = frontier(PROBLEM, AUTO)
    assert points[0].budget_bytes == TRACE.floor_bytes()
    assert points[-1].budget_bytes == TRACE.peak_bytes
    assert (points[-1].slowdown, points[-1].swapped_bytes, points[-1].recomputed_bytes) == (pytest.approx(1.0), 0, 0)
    for less, more in pairwise(points):
        assert less.budget_bytes < more.budget_bytes
        assert less.step_s >= more.step_s
    assert all(point.peak_bytes <= point.budget_bytes for point in points)
    assert points[0].slowdown > 1.05
    assert points[0].swapped_bytes > 0 < points[0].recomputed_bytes, "a mix of decisions"


@pytest.mark.slow  # a second whole frontier
def test_a_budget_whose_own_plan_is_slower_gets_that_of_a_smaller_one() -> None:
    class Odd:
        """Swaps everything, unless there is little memory."""

        name, summary, about = "odd", "odd", AUTO.about

        def plan(self, problem: Problem):  # type: ignore[no-untyped-def]
            least = problem.budget_bytes < (TRACE.floor_bytes() + TRACE.peak_bytes) // 2
            return registry.policy("auto" if least else "swap_all").plan(problem)

    points = frontier(PROBLEM, Odd())
    assert all(less.step_s >= more.step_s for less, more in pairwise(points))
    alone = point_at(PROBLEM, Odd(), points[-1].budget_bytes)
    assert alone is not None
    assert alone.step_s > points[-1].step_s


@pytest.mark.parametrize("slowdown", [1.1, pytest.param(1.02, marks=pytest.mark.slow)])
def test_the_smallest_budget_for_a_slowdown_is_within_it_and_less_is_not(slowdown: float) -> None:
    point = smallest(PROBLEM, AUTO, Wanted(slowdown=slowdown))
    assert point is not None
    assert point.slowdown <= slowdown
    less = int(point.budget_bytes - 2 * RESOLUTION * (TRACE.peak_bytes - TRACE.floor_bytes()))
    below = point_at(PROBLEM, AUTO, less)
    assert below is None or below.slowdown > slowdown


@pytest.mark.slow  # three searches over budgets; the one of the test above is the quick one
def test_with_little_to_write_more_is_recomputed() -> None:
    link = Link(write_bytes_per_s=3e9, read_bytes_per_s=3e9)
    problem = replace(PROBLEM, machine=machine_of(link))
    free = smallest(problem, AUTO, Wanted(slowdown=1.3))
    assert free is not None
    lean = smallest(problem, AUTO, Wanted(slowdown=1.3, written_bytes=free.written_bytes // 2))
    assert lean is not None
    assert lean.slowdown <= 1.3
    assert lean.written_bytes <= free.written_bytes // 2
    assert lean.recomputed_bytes > free.recomputed_bytes
    assert free.budget_bytes <= lean.budget_bytes < TRACE.peak_bytes
    nothing = smallest(problem, AUTO, Wanted(written_bytes=0))
    assert nothing is not None
    assert nothing.written_bytes == 0 < nothing.recomputed_bytes


def test_limits_that_nothing_meets_have_no_answer() -> None:
    assert smallest(PROBLEM, AUTO, Wanted(slowdown=0.5)) is None


# ---- the command ----


def test_the_command_shows_the_frontier_and_the_smallest_budget(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "step.trace"
    save(chain_trace(8, nbytes=1 << 20), path)
    assert main(["plan", "--pareto", "--json", str(path)]) == 0
    points = json.loads(capsys.readouterr().out)["points"]
    assert len(points) > 4
    assert main(["plan", "--max-slowdown", "5%", "--max-written", "2MiB", "--json", str(path)]) == 0
    (point,) = json.loads(capsys.readouterr().out)["points"]
    assert point["slowdown"] <= 1.05
    assert point["written_bytes"] <= 2 << 20
    assert main(["plan", "--pareto", str(path)]) == 0
    text = capsys.readouterr().out
    assert "Memory against time under auto" in text
    assert "simulated" in text
    assert max(map(len, text.splitlines())) <= 80


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--pareto", "--budget", "1GiB"], "--budget and --pareto ask different questions"),
        (["--max-slowdown", "5"], "such as 5%"),
        (["--max-slowdown", "-5%"], "such as 5%"),
        (["--max-written", "x"], "x"),
    ],
)
def test_questions_that_make_no_sense_are_refused_in_one_line(
    arguments: list[str], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "step.trace"
    save(chain_trace(4), path)
    assert main(["plan", *arguments, str(path)]) == 2
    captured = capsys.readouterr()
    assert captured.err.count("\n") == 1
    assert said in captured.err
