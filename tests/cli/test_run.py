"""`lowtide run` around a stand-in for the runtime: what it passes, prints, writes and returns."""

from __future__ import annotations

import json
import runpy
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lowtide.cli import main
from lowtide.errors import BudgetTooSmall

STATS = {
    "steps": 3,
    "step_s": 1.5,
    "stall_s": 0.01,
    "peak_bytes": 900 * 2**20,
    "budget_bytes": 2**30,
    "swapped_out_bytes": 5 * 2**20,
    "swapped_in_bytes": 4 * 2**20,
    "unmanaged": {},
}

Install = Callable[[Callable[..., dict[str, Any]]], None]


@pytest.fixture
def install(monkeypatch: pytest.MonkeyPatch) -> Install:
    """Put a function in the place of run_script."""

    def put(run_script: Callable[..., dict[str, Any]]) -> None:
        module = types.ModuleType("lowtide.execute.script")
        module.run_script = run_script  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, "lowtide.execute.script", module)

    return put


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "train.py"
    path.write_text("def inner():\n    raise RuntimeError('out of luck')\ninner()\n")
    return path


def test_everything_reaches_the_runtime(install: Install, script: Path, tmp_path: Path) -> None:
    seen: dict[str, Any] = {}

    def run_script(path: Path, argv: list[str], **options: Any) -> dict[str, Any]:
        seen.update(path=path, argv=argv, **options)
        return STATS

    install(run_script)
    options = ["--budget=cpu=1GiB,disk=2GiB", "--spill", str(tmp_path), "--policy", "lru", "--verify"]
    assert main(["run", *options, str(script), "--epochs", "3", "--help", "-x"]) == 0
    assert seen == {
        "path": script,
        "argv": ["--epochs", "3", "--help", "-x"],
        "budget": {"cpu": "1GiB", "disk": "2GiB"},
        "spill": str(tmp_path),
        "policy": "lru",
        "verify": True,
    }


def test_configuration_and_summary_go_to_stderr(
    install: Install, script: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    install(lambda *_, **__: STATS)
    assert main(["run", "--budget=1GiB", str(script)]) == 0
    captured = capsys.readouterr()
    assert captured.out == ""
    first, last = captured.err.splitlines()
    assert "budget 1.00 GiB" in first
    assert "policy auto" in first
    assert "3 steps at 1.50 s" in last
    assert "peak 900 MiB of 1.00 GiB" in last
    assert "out 5.00 MiB, in 4.00 MiB" in last


def test_what_is_not_managed_is_named(install: Install, script: Path, capsys: pytest.CaptureFixture[str]) -> None:
    install(lambda *_, **__: STATS | {"unmanaged": {"sparse tensor": 2}})
    assert main(["run", "--budget=1GiB", str(script)]) == 0
    assert "not managed: {'sparse tensor': 2}" in capsys.readouterr().err


def test_quiet_is_quiet_and_json_is_whole(
    install: Install, script: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    install(lambda *_, **__: STATS)
    target = tmp_path / "stats.json"
    assert main(["run", "--budget=1GiB", "--quiet", "--json", str(target), str(script)]) == 0
    assert capsys.readouterr().err == ""
    assert json.loads(target.read_text()) == STATS
    assert sorted(path.name for path in tmp_path.iterdir()) == ["stats.json", "train.py"]


def test_the_scripts_exit_code_is_passed_on(install: Install, script: Path, tmp_path: Path) -> None:
    install(lambda *_, **__: STATS | {"exit_code": 7})
    target = tmp_path / "stats.json"
    assert main(["run", "--budget=1GiB", "--json", str(target), str(script)]) == 7
    assert json.loads(target.read_text())["exit_code"] == 7


def test_the_scripts_exception_shows_its_own_traceback(
    install: Install, script: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    install(lambda path, *_, **__: runpy.run_path(str(path), run_name="__main__"))
    assert main(["run", "--budget=1GiB", "--quiet", str(script)]) == 1
    lines = capsys.readouterr().err.splitlines()
    assert lines[0] == "Traceback (most recent call last):"
    assert lines[-1] == "RuntimeError: out of luck"
    assert not [line for line in lines if "lowtide" in line and "train.py" not in line]
    assert [line for line in lines if "in inner" in line]


def test_a_budget_too_small_is_one_line(install: Install, script: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def run_script(*_: Any, **__: Any) -> dict[str, Any]:
        raise BudgetTooSmall(budget_bytes=2**30, needed_bytes=2**31, op="aten.mm")

    install(run_script)
    assert main(["run", "--budget=1GiB", "--quiet", str(script)]) == 2
    err = capsys.readouterr().err
    assert err.count("\n") == 1
    assert "'aten.mm', which needs at least 2.00 GiB" in err


def test_ctrl_c_is_130(install: Install, script: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def run_script(*_: Any, **__: Any) -> dict[str, Any]:
        raise KeyboardInterrupt

    install(run_script)
    assert main(["run", "--budget=1GiB", "--quiet", str(script)]) == 130
    # click ends the terminal's "^C" line first.
    assert capsys.readouterr().err.strip() == "lowtide: interrupted"
