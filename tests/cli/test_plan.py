from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from lowtide import registry
from lowtide.cli import main
from lowtide.core.machine import Link
from lowtide.core.serialize import load_trace, save
from lowtide.core.trace import Reach, Trace
from lowtide.estimate.calibrate import save_machine
from lowtide.testing.traces import chain_trace, machine_of

MIB = 2**20
TRACE = chain_trace(16, nbytes=8 * MIB, duration_s=0.05, static_bytes=10 * MIB)


@pytest.fixture
def trace_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("LOWTIDE_CACHE", str(tmp_path / "cache"))
    path = tmp_path / "step.trace"
    save(TRACE, path)
    return str(path)


def told(capsys: pytest.CaptureFixture[str], *argv: str) -> dict[str, object]:
    assert main(["plan", "--json", *argv]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert isinstance(answer, dict)
    return answer


def test_the_floor_and_the_operator_that_sets_it(trace_path: str, capsys: pytest.CaptureFixture[str]) -> None:
    answer = told(capsys, "--floor", trace_path)
    floor_op = TRACE.floor_op()
    assert floor_op is not None
    assert answer["floor_bytes"] == TRACE.floor_bytes() < TRACE.peak_bytes
    assert answer["floor_op"] == floor_op.name
    assert main(["plan", "--floor", trace_path]) == 0
    assert floor_op.name in capsys.readouterr().out


def test_an_empty_trace_has_a_floor_too(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "empty.trace"
    save(Trace(ops=(), storages=(), saves=(), static_bytes=5), path)
    assert told(capsys, str(path))["floor_bytes"] == 5
    assert main(["plan", str(path)]) == 0


@pytest.mark.parametrize("policy", registry.policy_names())
def test_with_a_budget_above_the_peak_every_policy_shows_a_verified_plan(
    trace_path: str, capsys: pytest.CaptureFixture[str], policy: str
) -> None:
    answer = told(capsys, "--budget", str(TRACE.peak_bytes), "--policy", policy, trace_path)
    assert answer["policy"] == policy
    assert main(["plan", "--budget", str(TRACE.peak_bytes), "--policy", policy, trace_path]) == 0
    assert f"What policy {policy} would do" in capsys.readouterr().out


def test_a_tight_budget_makes_auto_swap_and_predict(trace_path: str, capsys: pytest.CaptureFixture[str]) -> None:
    budget = (TRACE.floor_bytes() + TRACE.peak_bytes) // 2
    answer = told(capsys, "--budget", str(budget), trace_path)
    assert int(str(answer["swaps"])) > 0
    assert int(str(answer["predicted_peak_bytes"])) <= budget
    assert float(str(answer["predicted_step_s"])) >= TRACE.duration_s * 0.999
    assert main(["plan", "--budget", str(budget), trace_path]) == 0
    text = capsys.readouterr().out
    assert "predicted peak" in text
    assert "x unmanaged" in text


@pytest.mark.parametrize("policy", ["auto", "lru", "keep_all"])
@pytest.mark.parametrize("form", [[], ["--json"]])
def test_a_budget_below_the_floor_is_refused_with_the_operator_and_the_bytes(
    trace_path: str, capsys: pytest.CaptureFixture[str], policy: str, form: list[str]
) -> None:
    floor_op = TRACE.floor_op()
    assert floor_op is not None
    assert main(["plan", *form, "--policy", policy, "--budget", str(TRACE.floor_bytes() - 1), trace_path]) == 2
    captured = capsys.readouterr()
    assert ("floor" in captured.out) == (not form), "the table is the answer to a person"
    assert captured.err.count("\n") == 1
    assert f"'{floor_op.name}'" in captured.err
    assert f"({TRACE.floor_bytes()} bytes)" in captured.err
    assert main(["plan", "--budget", str(TRACE.floor_bytes()), trace_path]) == 0


def test_a_reactive_policy_says_that_it_decides_later(trace_path: str, capsys: pytest.CaptureFixture[str]) -> None:
    budget = str((TRACE.floor_bytes() + TRACE.peak_bytes) // 2)
    assert told(capsys, "--budget", budget, "--policy", "lru", trace_path)["swaps"] == 0
    assert main(["plan", "--budget", budget, "--policy", "lru", trace_path]) == 0
    assert "reactive" in capsys.readouterr().out


def test_a_policy_that_cannot_keep_the_budget_is_named(trace_path: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--budget", str(TRACE.peak_bytes - 1), "--policy", "keep_all", trace_path]) == 2
    captured = capsys.readouterr()
    assert captured.err.startswith("lowtide: policy keep_all has no plan for ")
    assert captured.err.count("\n") == 1


@pytest.mark.parametrize("content", [b"", b"import torch\n", b"\x1f\x8b broken", b"\x00" * 4096])
def test_a_file_that_is_no_trace_is_one_line_that_says_how_to_make_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], content: bytes
) -> None:
    path = tmp_path / "train.py"
    path.write_bytes(content)
    assert main(["plan", str(path)]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.count("\n") == 1
    assert str(path) in captured.err
    assert "lowtide capture" in captured.err


def test_the_measured_machine_is_used_where_there_is_one(
    trace_path: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    budget = str((TRACE.floor_bytes() + TRACE.peak_bytes) // 2)
    assert told(capsys, "--budget", budget, trace_path)["machine"] == "assumed"
    slow = machine_of(Link(write_bytes_per_s=2e6, read_bytes_per_s=2e6))
    save_machine(slow, directories=[tmp_path])
    answer = told(capsys, "--budget", budget, "--no-recompute", trace_path)
    assert answer["machine"] == "test"
    assert float(str(answer["predicted_stall_s"])) > TRACE.duration_s
    again = told(capsys, "--budget", budget, trace_path)
    assert int(str(again["recomputes"])) > 0
    assert float(str(again["predicted_step_s"])) < float(str(answer["predicted_step_s"])) / 2


@pytest.mark.parametrize("verb", ["plan", "simulate"])
def test_times_of_one_machine_and_a_link_of_another_are_not_mixed_without_a_word(
    verb: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("LOWTIDE_CACHE", str(tmp_path / "cache"))
    path = tmp_path / "step.trace"
    timed = replace(TRACE, ops=tuple(replace(op, flops=1e9) for op in TRACE.ops), timed_for="v100")
    save(timed, path)
    options = ["--budget", "90%", str(path), "--json"]
    assert main([verb, *options]) == 0
    err = capsys.readouterr().err
    assert "predicted for v100" in err
    assert "pass --machine v100" in err
    assert main([verb, *options, "--machine", "v100"]) == 0
    captured = capsys.readouterr()
    assert captured.err == ""
    assert json.loads(captured.out)["machine"] == "v100"


def test_with_a_machine_a_plan_has_its_times_and_its_link(
    trace_path: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "known.trace"
    save(replace(TRACE, ops=tuple(replace(op, flops=1e9) for op in TRACE.ops)), path)
    slow, fast = (told(capsys, "--budget", "60%", "--machine", name, str(path)) for name in ("v100", "a100"))
    assert (slow["machine"], slow["times"]) == ("v100", "predicted for v100")
    assert float(str(fast["step_s"])) < float(str(slow["step_s"]))
    assert told(capsys, str(path))["times"] == "measured"


def test_slow_memory_is_planned_for_where_the_machine_has_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("LOWTIDE_CACHE", str(tmp_path / "cache"))
    step = Path(__file__).parents[1] / "data" / "gpt.trace"
    trace = load_trace(step)
    ops = tuple(replace(op, flops=1 + int(1e9 * op.duration_s)) for op in trace.ops)
    trace = replace(trace, ops=ops, reach=Reach.TOUCHED, saves=())
    path = tmp_path / "step.trace"
    save(trace, path)
    below = str(trace.floor_bytes() // 2)
    answer = told(capsys, "--budget", below, "--machine", "optane", "--policy", "first_touch", str(path))
    assert answer["places"]
    assert answer["placed_bytes"]
    assert answer["predicted_slow_s"]
    assert main(["plan", "--budget", below, "--machine", "optane", "--policy", "first_touch", str(path)]) == 0
    assert "in slow memory" in capsys.readouterr().out
    assert main(["plan", "--budget", below, "--machine", "v100", "--policy", "first_touch", str(path)]) == 2
