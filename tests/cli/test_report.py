from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from lowtide import registry, zoo
from lowtide.capture.fake import capture_fake
from lowtide.cli import main
from lowtide.core.serialize import load_timeline, save
from lowtide.core.trace import Reach
from lowtide.report.html import data_of as page_data
from lowtide.testing.traces import chain_trace

MIB = 2**20
TRACE = chain_trace(16, nbytes=8 * MIB, duration_s=0.05, static_bytes=10 * MIB)


@pytest.fixture
def trace_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("LOWTIDE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("COLUMNS", "80")
    path = tmp_path / "step.trace"
    save(TRACE, path)
    return str(path)


@pytest.fixture
def compared(trace_path: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Path:
    out = tmp_path / "all.json"
    arguments = ["--policies", "lru,auto,keep_all", "--budgets", "50%,80%", "--jobs", "1", "--json", str(out)]
    assert main(["compare", *arguments, trace_path]) == 0
    capsys.readouterr()
    return out


def refused(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    assert main(["report", *argv]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.count("\n") == 1
    return captured.err


def data_of(path: Path) -> dict[str, Any]:
    return page_data(path.read_text(encoding="utf-8"))


def test_a_trace_becomes_a_page_with_the_step_that_simulate_gives(
    trace_path: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page, timeline_path, view = tmp_path / "r.html", tmp_path / "t.timeline", tmp_path / "p.json"
    arguments = ["--budget", "50%", "--policies", "swap_all,auto,keep_all", "--budgets", "50%,90%", "--jobs", "1"]
    assert main(["report", *arguments, "--out", str(page), "--perfetto", str(view), trace_path]) == 0
    text = capsys.readouterr().out
    assert max(map(len, text.splitlines())) <= 80
    assert main(["simulate", "--budget", "50%", "--policy", "swap_all", "--out", str(timeline_path), trace_path]) == 0
    timeline = load_timeline(timeline_path)
    data = data_of(page)
    # In the order the user gave; keep_all does not fit and has no timeline, but a row.
    assert [step["policy"] for step in data["focus"]["steps"]] == ["swap_all", "auto"]
    for name, value in data["focus"]["steps"][0]["figures"].items():
        assert value == getattr(timeline, name), name
    assert len(data["results"]) == 6
    assert {result["policy"] for result in data["results"] if not result["ran"]} == {"keep_all"}
    assert json.loads(view.read_text())["otherData"]["policies"] == "swap_all, auto"


def test_without_a_choice_five_policies_are_there_and_auto_on_top(trace_path: str, tmp_path: Path) -> None:
    page = tmp_path / "r.html"
    assert main(["report", "--budget", "60%", "--budgets", "60%", "-o", str(page), trace_path]) == 0
    data = data_of(page)
    assert len(data["policies"]) == 5
    assert data["focus"]["steps"][0]["policy"] == "auto"
    assert data["more_policies"] == len(registry.policy_names()) - 5


def test_a_tensor_that_is_away_over_the_end_of_the_step_counts_once_in_the_headline(tmp_path: Path) -> None:
    trace, page = tmp_path / "touched.trace", tmp_path / "r.html"
    sizes = {"layers": 2, "width": 64, "heads": 2}
    step = capture_fake(lambda: zoo.build("gpt2", batch=2, **sizes).training(), reach=Reach.TOUCHED)
    save(step, trace)
    budget_bytes = step.floor_bytes() + (step.peak_bytes - step.floor_bytes()) // 5
    wanted = ["--budget", str(budget_bytes), "--budgets", str(budget_bytes), "--policies", "swap_all"]
    assert main(["report", *wanted, "-o", str(page), str(trace)]) == 0
    (shown,) = data_of(page)["focus"]["steps"]
    absent = [journey["storage"] for journey in shown["journeys"] if journey["way"] != "remade"]
    assert shown["swapped_tensors"] == len(set(absent)) < len(absent)


def test_on_demand_every_policy_is_there_and_auto_on_top(trace_path: str, tmp_path: Path) -> None:
    page = tmp_path / "r.html"
    wanted = ["--budget", "60%", "--budgets", "60%", "--policies", "all"]
    assert main(["report", *wanted, "-o", str(page), trace_path]) == 0
    data = data_of(page)
    steps = data["focus"]["steps"]
    assert steps[0]["policy"] == "auto"
    assert len(data["policies"]) == len(data["results"]) > len(steps) > 10


def test_a_comparison_becomes_a_page_with_timelines_from_its_trace(
    compared: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page = tmp_path / "r.html"
    assert main(["report", "-o", str(page), "--jobs", "1", str(compared)]) == 0
    assert capsys.readouterr().err == ""
    data = data_of(page)
    stored = json.loads(compared.read_text())
    assert data["focus"]["budget_bytes"] == stored["results"][0]["budget_bytes"]
    assert [step["policy"] for step in data["focus"]["steps"]] == ["auto", "lru"]
    assert len(data["results"]) == len(stored["results"])
    for step in data["focus"]["steps"]:
        result = next(
            each
            for each in stored["results"]
            if each["policy"] == step["policy"] and each["budget_bytes"] == data["focus"]["budget_bytes"]
        )
        assert step["figures"]["step_s"] == result["step_s"]
        assert step["figures"]["peak_bytes"] == result["peak_bytes"]


def test_a_budget_that_was_not_compared_is_added(compared: Path, tmp_path: Path) -> None:
    page = tmp_path / "r.html"
    arguments = ["--budget", "65%", "--policies", "auto", "--jobs", "1"]
    assert main(["report", *arguments, "-o", str(page), str(compared)]) == 0
    data = data_of(page)
    assert len(data["results"]) == 7
    assert data["results"][-1]["budget_bytes"] == data["focus"]["budget_bytes"]


def test_a_comparison_whose_trace_is_gone_or_changed_says_so_on_the_page(
    compared: Path, trace_path: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page = tmp_path / "r.html"
    save(chain_trace(3), trace_path)
    assert main(["report", "-o", str(page), str(compared)]) == 0
    assert "is not the trace that was compared" in capsys.readouterr().err
    Path(trace_path).unlink()
    assert main(["report", "-o", str(page), str(compared)]) == 0
    assert "is not there" in capsys.readouterr().err
    data = data_of(page)
    assert data["focus"] is None
    assert "is not there" in data["note"]
    line = refused(capsys, "-o", str(page), "--perfetto", str(tmp_path / "p.json"), str(compared))
    assert "needs timelines" in line


def test_bad_arguments_are_one_line_and_write_nothing(
    compared: Path, trace_path: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page = tmp_path / "r.html"
    out = ["-o", str(page)]
    assert "needs --budget" in refused(capsys, *out, trace_path)
    assert "'--out'" in refused(capsys, "--budget", "50%", trace_path)
    assert "'magic'" in refused(capsys, *out, "--budget", "50%", "--policies", "magic", trace_path)
    assert "unknown machine" in refused(capsys, *out, "--budget", "50%", "--machine", "k9000", trace_path)
    assert "no machine 'v100'" in refused(capsys, *out, "--machine", "v100", str(compared))
    assert "--budgets is for a trace" in refused(capsys, *out, "--budgets", "50%", str(compared))
    assert "simulated already" in refused(capsys, *out, "--no-recompute", str(compared))
    assert "cannot be written" in refused(capsys, "-o", str(tmp_path / "no" / "r.html"), "--budget=50%", trace_path)
    assert "does not exist" in refused(capsys, *out, "--budget", "50%", str(tmp_path / "none.trace"))
    floor = str(TRACE.floor_bytes())
    assert floor in refused(capsys, *out, "--budget", str(TRACE.floor_bytes() - 1), trace_path)
    assert "none of these policies runs" in refused(capsys, *out, "--budget=50%", "--policies=keep_all", trace_path)
    damaged = tmp_path / "damaged.json"
    damaged.write_text(json.dumps({**json.loads(compared.read_text()), "results": 3}))
    assert "damaged.json is damaged" in refused(capsys, *out, str(damaged))
    damaged.write_text("{")
    assert "damaged.json" in refused(capsys, *out, "--budget=50%", str(damaged))
    assert not page.exists()
    assert not [path for path in tmp_path.iterdir() if path.name.startswith(".")]


def test_a_page_that_is_there_already_is_replaced_whole_or_not_at_all(
    trace_path: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page = tmp_path / "r.html"
    page.write_text("older")
    refused(capsys, "-o", str(page), "--budget", "1", trace_path)
    assert page.read_text() == "older"
    assert main(["report", "-o", str(page), "--budget=90%", "--budgets=90%", "--policies=auto", trace_path]) == 0
    assert page.read_text(encoding="utf-8").startswith("<!doctype html>")


def test_the_page_of_a_long_step_is_light(tmp_path: Path) -> None:
    """Fifteen thousand operators are what a step of GPT-3 has."""
    trace, page = tmp_path / "long.trace", tmp_path / "r.html"
    save(chain_trace(7_500, nbytes=2**20, duration_s=1e-3), trace)
    assert main(["report", "--budget", "90%", "--budgets", "90%", "-o", str(page), str(trace)]) == 0
    assert len(data_of(page)["focus"]["steps"]) == 5
    assert page.stat().st_size < 1_000_000


def test_every_headline_says_whether_it_is_simulated_or_measured(
    trace_path: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for verb in (
        ["plan", "--budget", "60%", trace_path],
        ["simulate", "--budget", "60%", trace_path],
        ["compare", "--policies", "auto", "--jobs", "1", trace_path],
        ["report", "--policies", "auto", "--budget", "60%", "-o", str(tmp_path / "r.html"), trace_path],
        ["estimate", "--model", "resnet18", "--machine", "v100"],
        ["capture", "--model", "resnet18", "--fake", "-o", str(tmp_path / "m.trace")],
        ["probe", "--spill", str(tmp_path)],
    ):
        assert main(verb) == 0
        headline = capsys.readouterr().out.splitlines()[0]
        assert "simulated" in headline or "measured" in headline, verb[0]
    assert "<title>Simulated: " in (tmp_path / "r.html").read_text()
