from __future__ import annotations

import json
import operator
import os
import time
from dataclasses import replace
from pathlib import Path

import pytest

from lowtide import registry
from lowtide.core.plan import Plan, Problem
from lowtide.errors import BadArgument, TraceError
from lowtide.plan.policy import About, Family, Runs
from lowtide.report import Outcome, Refusal, compare, encode_comparison, load_comparison, problem_of, settle
from lowtide.report.compare import digest_of
from lowtide.report.page import best_first
from lowtide.report.workers import WorkerDied, run_all
from lowtide.testing.traces import chain_trace
from tests.report.samples import MACHINE, sample, share, vgg


def test_every_case_is_there_once_by_machine_budget_and_policy() -> None:
    other = replace(MACHINE, name="other")
    budgets = [share(vgg(), "70%"), share(vgg(), "100%"), share(vgg(), "70%")]
    found = compare(vgg(), policies=["lru", "auto", "lru"], budgets_bytes=budgets, machines=[MACHINE, other])
    assert [(result.machine, result.budget_bytes, result.policy) for result in found.results] == [
        (machine, budget, policy)
        for machine in ("test", "other")
        for budget in budgets[:2]
        for policy in ("lru", "auto")
    ]


def test_an_outcome_holds_the_figures_of_the_simulated_step() -> None:
    budget = share(vgg(), "70%")
    problem = problem_of(vgg(), MACHINE, budget_bytes=budget)
    timeline = settle(problem, registry.policy("swap_all")).timeline
    (found,) = compare(vgg(), policies=["swap_all"], budgets_bytes=[budget], machines=[MACHINE]).results
    assert isinstance(found, Outcome)
    for name in ("step_s", "compute_s", "recompute_s", "stall_s", "peak_bytes", "moved_out_bytes", "moved_in_bytes"):
        assert getattr(found, name) == getattr(timeline, name), name
    assert found.slowdown == timeline.step_s / vgg().duration_s > 1


def test_what_does_not_fit_names_the_operator_and_its_bytes() -> None:
    budget = share(vgg(), "70%")
    (found,) = compare(vgg(), policies=["keep_all"], budgets_bytes=[budget], machines=[MACHINE]).results
    assert isinstance(found, Refusal)
    assert found.op.startswith("aten::")
    assert found.needed_bytes is not None
    assert budget < found.needed_bytes <= vgg().peak_bytes
    assert not found.crashed


class Broken:
    name = "broken"
    summary = "has a bug"
    about = About(family=Family.BASELINE, runs=(Runs.SIMULATED,))

    def plan(self, problem: Problem) -> Plan:
        raise ZeroDivisionError("a bug\nof two lines")


def test_a_policy_with_a_bug_does_not_end_the_comparison(monkeypatch: pytest.MonkeyPatch) -> None:
    known = registry.policy
    monkeypatch.setattr(registry, "policy", lambda name: Broken() if name == "broken" else known(name))
    budget = share(vgg(), "90%")
    found = compare(vgg(), policies=["broken", "lru"], budgets_bytes=[budget], machines=[MACHINE]).results
    broken, lru = found
    assert isinstance(broken, Refusal)
    assert broken.crashed
    assert broken.reason == "ZeroDivisionError: a bug of two lines"
    assert isinstance(lru, Outcome)


def test_a_plan_that_had_to_be_helped_out_is_marked() -> None:
    comparison, _ = sample()
    for result in comparison.results:
        if isinstance(result, Outcome) and result.policy in ("lru", "dtr", "auto"):
            assert result.unplanned_bytes == 0, result


def test_processes_give_what_one_gives_and_tell_of_their_progress() -> None:
    trace, seen = chain_trace(12), list[tuple[int, int]]()
    arguments = {"policies": ["auto", "lru", "keep_all"], "budgets_bytes": [8 << 20, 99 << 20], "machines": [MACHINE]}
    one = compare(trace, **arguments)  # type: ignore[arg-type]
    two = compare(trace, jobs=2, on_done=lambda *step: seen.append(step), **arguments)  # type: ignore[arg-type]
    assert two == one
    assert seen == [(done, 6) for done in range(1, 7)]


def test_a_machine_that_cannot_be_used_is_refused_before_anything_runs() -> None:
    stated = replace(MACHINE, flops_per_s=1e12, memory_bytes_per_s=1e11)
    with pytest.raises(BadArgument, match="floating-point"):
        compare(chain_trace(4), policies=["auto"], budgets_bytes=[1 << 30], machines=[stated])


def test_no_jobs_are_refused() -> None:
    with pytest.raises(BadArgument, match="1 or more"):
        compare(chain_trace(4), policies=["auto"], budgets_bytes=[1 << 30], machines=[MACHINE], jobs=0)


def test_the_fastest_comes_first_and_what_cannot_run_last() -> None:
    comparison, _ = sample()
    ordered = best_first(comparison.results)
    steps = [result.step_s for result in ordered if isinstance(result, Outcome)]
    assert steps == sorted(steps)
    assert [isinstance(result, Outcome) for result in ordered] == [True] * len(steps) + [False] * (
        len(ordered) - len(steps)
    )


# ---- processes ----


def test_results_come_in_the_order_of_the_items() -> None:
    # The first item takes longest, so that the others overtake it.
    assert run_all(time.sleep, [0.3, 0, 0, 0], jobs=3) == [None] * 4
    assert run_all(operator.neg, range(20), jobs=3) == [-each for each in range(20)]


def test_what_a_function_raises_in_a_process_is_raised_here() -> None:
    with pytest.raises(TypeError, match="bad operand"):
        run_all(operator.neg, [1, "two", 3], jobs=2)


def test_a_process_that_dies_is_named_with_what_it_did() -> None:
    with pytest.raises(WorkerDied, match=r"working on 7 ended with code 7"):
        run_all(os._exit, [7], jobs=2)


# ---- files ----


def written(tmp_path: Path, **changes: object) -> Path:
    path = tmp_path / "all.json"
    path.write_text(json.dumps({**encode_comparison(sample()[0]), **changes}))
    return path


def test_a_comparison_comes_back_from_its_file_as_it_was(tmp_path: Path) -> None:
    assert load_comparison(written(tmp_path)) == sample()[0]


@pytest.mark.parametrize(
    "changes",
    [
        {"version": 99},
        {"format": "else"},
        {"results": [{"policy": 3}]},
        {"results": 3},
        {"machines": [{}]},
        {"digest": 1},
    ],
)
def test_a_damaged_or_newer_file_is_refused_in_one_line(tmp_path: Path, changes: dict[str, object]) -> None:
    with pytest.raises(TraceError) as caught:
        load_comparison(written(tmp_path, **changes))
    assert "all.json" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_digest_tells_traces_apart() -> None:
    assert digest_of(chain_trace(4)) == digest_of(chain_trace(4)) != digest_of(chain_trace(5))
