from __future__ import annotations

import json
from pathlib import Path

import pytest

from lowtide.cli import main
from lowtide.core.machine import Link
from lowtide.core.serialize import load_timeline, save
from lowtide.testing.traces import chain_trace, machine_of

MIB = 2**20
CODEC = ("--codec", "fp16")
TRACE = chain_trace(16, nbytes=8 * MIB, duration_s=0.05, static_bytes=10 * MIB)


@pytest.fixture
def trace_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("LOWTIDE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("COLUMNS", "80")
    path = tmp_path / "step.trace"
    save(TRACE, path)
    return str(path)


def told(capsys: pytest.CaptureFixture[str], *argv: str) -> dict[str, object]:
    assert main(["simulate", "--json", *argv]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert isinstance(answer, dict)
    return answer


def refused(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    assert main(["simulate", *argv]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.count("\n") == 1
    return captured.err


def test_the_summary_is_that_of_the_timeline_and_fits_80_columns(
    trace_path: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "step.timeline"
    answer = told(capsys, "--budget", "50%", "--policy", "swap_all", "--out", str(out), trace_path)
    timeline = load_timeline(out)
    for name in ("policy", "machine", "budget_bytes", "step_s", "stall_s", "peak_bytes", "moved_out_bytes"):
        assert answer[name] == getattr(timeline, name), name
    assert timeline.budget_bytes == TRACE.static_bytes + (TRACE.peak_bytes - TRACE.static_bytes) // 2
    assert answer["slowdown"] == timeline.step_s / TRACE.duration_s
    assert main(["simulate", "--budget", "50%", "--policy", "swap_all", trace_path]) == 0
    text = capsys.readouterr().out
    assert "swap_all, simulated" in text
    assert f"{timeline.step_s / TRACE.duration_s:.2f}x of infinite memory" in text
    assert max(map(len, text.splitlines())) <= 80


def test_a_perfetto_trace_holds_the_step(trace_path: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "step.json"
    answer = told(capsys, "--budget", "50%", "--perfetto", str(path), trace_path)
    events = json.loads(path.read_text())["traceEvents"]
    ends = [event["ts"] + event["dur"] for event in events if event.get("cat") == "compute"]
    assert max(ends) == pytest.approx(float(str(answer["step_s"])) * 1e6)


def test_a_machine_file_sets_the_link_and_an_allocator_what_is_reserved(
    trace_path: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    slow = tmp_path / "slow.machine"
    save(machine_of(Link(write_bytes_per_s=2e6, read_bytes_per_s=2e6)), slow)
    fast = told(capsys, "--budget", "50%", trace_path)
    answer = told(
        capsys, "--budget", "50%", "--machine", str(slow), "--allocator", "pytorch", "--no-recompute", trace_path
    )
    assert answer["machine"] == "test"
    assert float(str(answer["stall_s"])) > float(str(fast["stall_s"]))
    assert int(str(answer["reserved_peak_bytes"])) >= int(str(answer["peak_bytes"]))


def test_bad_arguments_are_one_line_and_write_nothing(
    trace_path: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out, view = tmp_path / "out.timeline", tmp_path / "view.json"
    files = ["--out", str(out), "--perfetto", str(view)]
    assert "'keep'" in refused(capsys, *files, "--budget", "50%", "--policy", "keep", trace_path)
    assert "unknown machine 'k9000'" in refused(capsys, *files, "--budget", "50%", "--machine", "k9000", trace_path)
    assert "floating-point operations" in refused(capsys, *files, "--budget", "50%", "--machine", "v100", trace_path)
    assert "cannot read budget '50 percent%'" in refused(capsys, *files, "--budget", "50 percent%", trace_path)
    assert "GiB (binary)" in refused(capsys, *files, "--budget", "2G", trace_path)
    assert "'--budget'" in refused(capsys, *files, trace_path)
    assert "lowtide capture" in refused(capsys, *files, "--budget", "50%", str(tmp_path / "none.trace"))
    assert "cannot be written" in refused(capsys, "--out", str(tmp_path / "no" / "x"), "--budget", "50%", trace_path)
    broken = tmp_path / "broken.trace"
    broken.write_bytes(Path(trace_path).read_bytes()[:-9])
    assert "broken.trace is damaged" in refused(capsys, *files, "--budget", "50%", str(broken))
    assert not out.exists()
    assert not view.exists()


def test_an_infeasible_budget_names_the_operator_and_writes_nothing(
    trace_path: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out.timeline"
    floor_op = TRACE.floor_op()
    assert floor_op is not None
    line = refused(capsys, "--out", str(out), "--budget", str(TRACE.floor_bytes() - 1), trace_path)
    assert floor_op.name in line
    assert str(TRACE.floor_bytes()) in line
    assert "needs at least" in refused(capsys, "--budget", "50%", "--policy", "keep_all", trace_path)
    assert not out.exists()


def test_times_are_kept_where_the_trace_cannot_be_timed_anew(
    trace_path: str, capsys: pytest.CaptureFixture[str]
) -> None:
    answer = told(capsys, "--budget", "100%", "--machine", "v100", "--keep-times", trace_path)
    assert answer["machine"] == "v100"
    assert answer["infinite_s"] == TRACE.duration_s


def test_a_codec_before_the_spill_shrinks_what_travels(trace_path: str, capsys: pytest.CaptureFixture[str]) -> None:
    plain, half = (told(capsys, "--budget", "50%", "--policy", "swap_all", *more, trace_path) for more in ((), CODEC))
    assert half["moved_out_bytes"] == int(str(plain["moved_out_bytes"])) // 2
    assert any("everything through fp16: 50.0% left" in note for note in half["notes"])  # type: ignore[attr-defined]
    assert "unknown codec 'zip'" in refused(capsys, "--budget", "50%", "--codec", "zip", trace_path)
    assert "name one with --codec" in refused(capsys, "--budget", "50%", "--density", "0.5", trace_path)
    zvc = ("--codec", "zvc", "--density", "3")
    assert "a density of 3.0 is not a share" in refused(capsys, "--budget", "50%", *zvc, trace_path)
