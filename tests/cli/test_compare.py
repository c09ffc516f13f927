from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from lowtide import registry
from lowtide.cli import main
from lowtide.core.machine import Link
from lowtide.core.serialize import load_trace, save
from lowtide.core.units import format_bytes
from lowtide.plan.policy import About, Family, Runs
from lowtide.report import Outcome, load_comparison
from lowtide.testing.traces import chain_trace, machine_of
from tests.interrupts import feel_interrupts

MIB = 2**20
TRACE = chain_trace(16, nbytes=8 * MIB, duration_s=0.05, static_bytes=10 * MIB)


@pytest.fixture
def trace_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("LOWTIDE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("COLUMNS", "80")
    path = tmp_path / "step.trace"
    save(TRACE, path)
    return str(path)


def refused(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    assert main(["compare", *argv]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.count("\n") == 1
    return captured.err


def test_all_policies_at_three_budgets_on_a_recorded_resnet_take_less_than_a_minute(tmp_path: Path) -> None:
    trace_path = Path(__file__).parents[1] / "data" / "resnet.trace"
    assert len(load_trace(trace_path).ops) > 800
    begun_s = time.monotonic()
    assert main(["compare", "--json", str(tmp_path / "all.json"), str(trace_path)]) == 0
    assert time.monotonic() - begun_s < 60
    results = load_comparison(tmp_path / "all.json").results
    assert len(results) == 3 * len(registry.policy_names())


def test_a_budget_below_the_floor_names_the_operator_that_sets_it(
    capsys: pytest.CaptureFixture[str],
) -> None:
    trace_path = Path(__file__).parents[1] / "data" / "resnet.trace"
    trace = load_trace(trace_path)
    floor_op = trace.floor_op()
    assert floor_op is not None
    assert main(["compare", "--policies", "auto,vdnn", "--budgets", "1%,95%", str(trace_path)]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert f"auto: does not fit, '{floor_op.name}' needs {format_bytes(trace.floor_bytes())}" in said


def test_all_policies_at_three_budgets_in_a_table_of_80_columns(
    trace_path: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)  # the only line that grows with what it names says where the file is
    out = Path("all.json")
    assert main(["compare", "--json", str(out), trace_path]) == 0
    captured = capsys.readouterr()
    assert captured.err == ""
    assert max(map(len, captured.out.splitlines())) <= 80
    comparison = load_comparison(out)
    assert {result.policy for result in comparison.results} == set(registry.policy_names())
    assert len(comparison.results) == 3 * len(registry.policy_names())
    for share in ("40%", "60%", "80%"):
        assert f"({share})" in captured.out
    assert "keep_all: does not fit, 'layer" in captured.out
    for result in comparison.results:
        if isinstance(result, Outcome):
            assert f"{result.slowdown:.2f}x" in captured.out
    assert "infinite_memory!" in captured.out


def test_budgets_and_machines_are_those_asked_for(
    trace_path: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    machine, out = tmp_path / "slow.machine", tmp_path / "all.json"
    save(machine_of(Link(write_bytes_per_s=2e6, read_bytes_per_s=2e6)), machine)
    arguments = [
        "--budgets",
        "60%,120MiB",
        "--machines",
        f"{machine},{machine}",
        "--policies",
        "lru,auto",
        "--jobs",
        "1",
    ]
    assert main(["compare", *arguments, "--json", str(out), trace_path]) == 0
    comparison = load_comparison(out)
    share = TRACE.static_bytes + int(0.6 * (TRACE.peak_bytes - TRACE.static_bytes))
    assert [(each.machine, each.budget_bytes, each.policy) for each in comparison.results] == [
        ("test", budget, policy) for budget in (share, 120 * MIB) for policy in ("lru", "auto")
    ]
    assert "test, budget 120 MiB\n" in capsys.readouterr().out


def test_budgets_below_the_floor_are_rows_as_long_as_one_is_above(
    trace_path: str, capsys: pytest.CaptureFixture[str]
) -> None:
    floor = TRACE.floor_bytes()
    assert main(["compare", "--budgets", f"{floor - 1},{floor}", "--policies", "auto,lru", "--jobs=1", trace_path]) == 0
    assert f"needs {format_bytes(floor)}" in capsys.readouterr().out
    line = refused(capsys, "--budgets", f"{floor - 1},{floor - 2}", trace_path)
    assert str(floor) in line


def test_a_policy_that_fails_by_itself_is_a_row_and_exit_code_1(
    trace_path: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    class Broken:
        name = "broken"
        summary = "has a bug"
        about = About(family=Family.BASELINE, runs=(Runs.SIMULATED,))

        def plan(self, problem: object) -> None:
            raise IndexError("out of reach")

        def victims(self, view: object, need_bytes: int) -> None: ...

    known = registry.policy
    monkeypatch.setattr(registry, "policy", lambda name: Broken() if name == "broken" else known(name))
    monkeypatch.setattr(registry, "policy_names", lambda: ("auto", "broken"))
    assert main(["compare", "--policies", "broken,auto", "--budgets", "90%", "--jobs", "1", trace_path]) == 1
    text = capsys.readouterr().out
    assert "broken: failed, IndexError: out of reach" in text
    assert "\nauto " in text


def test_bad_arguments_are_one_line_and_write_nothing(
    trace_path: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "all.json"
    files = ["--json", str(out)]
    assert "'magic'" in refused(capsys, *files, "--policies", "auto,magic", trace_path)
    assert "--policies is empty" in refused(capsys, *files, "--policies", ",", trace_path)
    assert "unknown machine 'k9000'" in refused(capsys, *files, "--machines", "k9000", trace_path)
    assert "floating-point operations" in refused(capsys, *files, "--machines", "v100", trace_path)
    assert "cannot read budget" in refused(capsys, *files, "--budgets", "40%,half%", trace_path)
    assert "--jobs 0" in refused(capsys, *files, "--jobs", "0", trace_path)
    assert "does not exist" in refused(capsys, *files, str(tmp_path / "none.trace"))
    other = tmp_path / "other.machine"
    save(machine_of(Link(write_bytes_per_s=1e9, read_bytes_per_s=1e9)), other)
    save(machine_of(Link(write_bytes_per_s=2e9, read_bytes_per_s=2e9)), tmp_path / "third.machine")
    assert "two machines" in refused(capsys, *files, "--machines", f"{other},{tmp_path / 'third.machine'}", trace_path)
    assert not out.exists()


def children(pid: int) -> list[int]:
    try:
        return [int(each) for each in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except FileNotFoundError:
        return []


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="finds the processes in /proc")
def test_ctrl_c_ends_everything_and_leaves_no_file(tmp_path: Path) -> None:
    path, out = tmp_path / "long.trace", tmp_path / "all.json"
    save(chain_trace(4000, nbytes=MIB, duration_s=1e-3), path)
    process = subprocess.Popen(
        [sys.executable, "-m", "lowtide.cli", "compare", "--jobs", "2", "--json", str(out), str(path)],
        env={**os.environ, "LOWTIDE_CACHE": str(tmp_path / "cache")},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=feel_interrupts,
    )
    deadline_s = time.monotonic() + 60
    workers: list[int] = []
    while len(workers) < 2 and process.poll() is None and time.monotonic() < deadline_s:
        workers = children(process.pid)
        time.sleep(0.01)
    assert len(workers) == 2
    process.send_signal(signal.SIGINT)
    _, said = process.communicate(timeout=60)
    assert process.returncode == 130
    # click ends the line on which a terminal has written "^C".
    assert said == "\nlowtide: interrupted\n"
    assert not [pid for pid in workers if Path(f"/proc/{pid}").exists()]
    assert not out.exists()
    assert sorted(each.name for each in tmp_path.iterdir()) == ["long.trace"]
