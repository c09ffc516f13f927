"""`lowtide run` around a stand-in for the runtime: what it passes, prints, writes and returns."""

from __future__ import annotations

import json
import runpy
import sys
import types
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lowtide.cli import checks, main
from lowtide.core.units import format_bytes
from lowtide.errors import BudgetTooSmall
from lowtide.memory import budget, native
from lowtide.tiers import filesystem
from lowtide.tiers.open import default_directory

STATS = {
    "steps": 3,
    "step_s": 1.5,
    "stall_s": 0.01,
    "peak_bytes": 900 * 2**20,
    "budget_bytes": 2**30,
    "budget_exact": True,
    "over_budget_bytes": 0,
    "swapped_out_bytes": 5 * 2**20,
    "swapped_in_bytes": 4 * 2**20,
    "unmanaged": {},
}

Install = Callable[[Callable[..., dict[str, Any]]], None]


@pytest.fixture
def install(monkeypatch: pytest.MonkeyPatch) -> Install:
    """Put a function in the place of run_script."""

    def put(run_script: Callable[..., dict[str, Any]]) -> None:
        module = types.ModuleType("lowtide.execute.tide.script")
        module.run_script = run_script  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, "lowtide.execute.tide.script", module)

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
    options = ["--budget=cpu=1GiB,disk=2GiB,slow=3GiB", "--spill", str(tmp_path), "--slow", "cxl:?emulate=cxl"]
    options += ["--policy", "lru", "--verify", "--recompute", "--codecs", "zvc,bf16+zvc2", "--max-error", "0.01"]
    options += ["--put-off"]
    assert main(["run", *options, str(script), "--epochs", "3", "--help", "-x"]) == 0
    assert callable(seen.pop("on_forked_step"))
    assert callable(seen.pop("on_step"))
    assert seen == {
        "path": script,
        "argv": ["--epochs", "3", "--help", "-x"],
        "budget": {"cpu": "1GiB", "disk": "2GiB", "slow": "3GiB"},
        "spill": str(tmp_path),
        "slow": "cxl:?emulate=cxl",
        "policy": "lru",
        "verify": True,
        "recompute": True,
        "codecs": ("zvc", "bf16+zvc2"),
        "max_error": 0.01,
        "put_off": True,
        "serve": False,
        "strict": False,
    }


def test_codecs_may_be_none_and_have_to_exist(
    install: Install, script: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    seen: dict[str, Any] = {}

    def run_script(*_: Any, **options: Any) -> dict[str, Any]:
        seen.update(options)
        return STATS

    install(run_script)
    assert main(["run", "--budget", "1GiB", "--codecs", "none", str(script)]) == 0
    assert seen["codecs"] == ()
    assert main(["run", "--budget", "1GiB", str(script)]) == 0
    assert seen["codecs"] is None
    capsys.readouterr()
    assert main(["run", "--budget", "1GiB", "--codecs", "zip", str(script)]) == 2
    assert "unknown codec 'zip'" in capsys.readouterr().err


def test_configuration_and_summary_go_to_stderr(
    install: Install, script: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    install(lambda *_, **__: STATS)
    assert main(["run", "--budget=1GiB", str(script)]) == 0
    captured = capsys.readouterr()
    assert captured.out == ""
    first, steps, memory = captured.err.splitlines()
    assert "budget 1.00 GiB" in first
    assert f"spill to {default_directory()[0]}," in first
    assert "policy auto" in first
    assert "3 steps at 1.50 s, stalled 10.0 ms in all" in steps
    assert memory == "lowtide: peak 900 MiB of 1.00 GiB; swapped out 5.00 MiB, in 4.00 MiB"


def test_what_a_codec_left_to_write_is_told(install: Install, script: Path, capsys: pytest.CaptureFixture[str]) -> None:
    install(lambda *_, **__: STATS | {"disk_written_bytes": 3 * 2**20})
    assert main(["run", "--budget=1GiB", str(script)]) == 0
    assert "swapped out 5.00 MiB, in 4.00 MiB; written to disk 3.00 MiB" in capsys.readouterr().err


def test_what_slow_memory_held_and_cost_is_told(
    install: Install, script: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    install(lambda *_, **__: STATS | {"slow_bytes": 0, "peak_slow_bytes": 7 * 2**20, "in_place_ops": 9, "slow_s": 0.25})
    assert main(["run", "--budget=1GiB", "--slow", "cxl:", str(script)]) == 0
    told = capsys.readouterr().err
    assert "slow memory cxl:, spill to" in told
    assert "slow memory held 7.00 MiB at most; 9 operators used it in place, 250.0 ms longer for that" in told
    assert main(["run", "--budget=1GiB", "--slow", "/mnt", str(script)]) != 0
    assert "cannot read '/mnt' as slow memory" in capsys.readouterr().err


def test_what_is_not_managed_is_named(install: Install, script: Path, capsys: pytest.CaptureFixture[str]) -> None:
    install(lambda *_, **__: STATS | {"unmanaged": {"sparse tensor": 2, "tensor on meta": 1}})
    assert main(["run", "--budget=1GiB", str(script)]) == 0
    assert "not managed: sparse tensor (2), tensor on meta (1)" in capsys.readouterr().err


def test_quiet_is_quiet_and_json_is_whole(
    install: Install, script: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    install(lambda *_, **__: STATS)
    target = tmp_path / "stats.json"
    assert main(["run", "--budget=1GiB", "--quiet", "--json", str(target), str(script)]) == 0
    assert capsys.readouterr().err == ""
    assert json.loads(target.read_text()) == STATS | {"processes": [], "outside_the_budget": []}
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


def lines_of(capsys: pytest.CaptureFixture[str], *argv: str) -> list[str]:
    assert main(["run", *argv]) == 0
    return capsys.readouterr().err.splitlines()


def test_an_advisory_peak_is_marked_and_what_passed_the_budget_is_told(
    install: Install, script: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    install(lambda *_, **__: STATS | {"budget_exact": False})
    assert (
        "of 1.00 GiB (advisory: accounted in Python, not enforced); swapped"
        in lines_of(capsys, "--budget=1GiB", str(script)).pop()
    )
    install(lambda *_, **__: STATS | {"budget_exact": False, "over_budget_bytes": 3 * 2**20})
    assert "not enforced), 3.00 MiB over the budget; swapped" in lines_of(capsys, "--budget=1GiB", str(script)).pop()


def test_a_run_without_an_optimizer_step_says_so(
    install: Install, script: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    install(lambda *_, **__: STATS | {"steps": 0, "step_s": 0.0})
    told = [line for line in lines_of(capsys, "--budget=1GiB", str(script)) if "step" in line]
    assert len(told) == 1
    assert told[0].startswith("lowtide: no optimizer step was seen: ")
    install(lambda *_, **__: STATS | {"steps": 1})
    assert "lowtide: 1 step at 1.50 s, stalled 10.0 ms in all" in lines_of(capsys, "--budget=1GiB", str(script))


def test_a_spill_directory_in_memory_is_warned_of_in_one_line_even_when_quiet(
    install: Install, script: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    install(lambda *_, **__: STATS)
    options = ["--budget=1GiB", "--quiet", "--spill", str(tmp_path), str(script)]
    monkeypatch.setattr(filesystem, "filesystem_type", lambda path: "ext4")
    assert lines_of(capsys, *options) == []
    monkeypatch.setattr(filesystem, "filesystem_type", lambda path: "tmpfs")
    (line,) = lines_of(capsys, *options)
    assert line.startswith(f"lowtide: warning: spill directory {tmp_path} is memory (tmpfs), not a disk")


def test_the_default_spill_directory_is_checked_as_a_stated_one_is(
    install: Install, script: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    install(lambda *_, **__: STATS)
    monkeypatch.setenv("LOWTIDE_SPILL", str(tmp_path))
    assert f"spill to {tmp_path}, policy auto" in lines_of(capsys, "--budget=1GiB", str(script))[0]
    monkeypatch.setenv("LOWTIDE_SPILL", str(tmp_path / "gone"))
    assert main(["run", "--budget=1GiB", str(script)]) == 2
    assert "gone does not exist: create it" in capsys.readouterr().err


@pytest.mark.parametrize("stated", ["auto", "cpu=auto,disk=1GiB"])
def test_auto_is_one_figure_with_its_reason(
    install: Install, script: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, stated: str
) -> None:
    """However often the host's memory is looked at, what is said is what is used."""
    seen: list[Any] = []
    left = iter(range(8 * 2**30, 0, -(2**30)))
    for module in (budget, checks):
        monkeypatch.setattr(
            module,
            "memory_limits",
            lambda **_: (budget.MemoryLimit(source="host memory", limit_bytes=2**40, left_bytes=next(left)),),
        )

    def run_script(*_: Any, **options: Any) -> dict[str, Any]:
        seen.append(options["budget"])
        return STATS

    install(run_script)
    first = lines_of(capsys, f"--budget={stated}", str(script))[0]
    used = seen[0]["cpu"] if isinstance(seen[0], dict) else seen[0]
    assert isinstance(used, int)
    told = "what host memory leaves, less a margin of 10%, 256 MiB at least"
    assert first.startswith(f"lowtide: budget {format_bytes(used)} (auto: {told}), spill")


def test_a_budget_for_an_accelerator_is_passed_on_and_shown_as_stated(
    install: Install, script: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    seen: list[Any] = []

    def run_script(*_: Any, **options: Any) -> dict[str, Any]:
        seen.append(options["budget"])
        return STATS

    install(run_script)
    first = lines_of(capsys, "--budget=cuda:0=auto, cpu=8GiB", str(script))[0]
    assert first.startswith("lowtide: budget cuda:0 auto, cpu 8GiB, spill to ")
    assert seen == [{"cuda:0": "auto", "cpu": "8GiB"}]


def test_quiet_also_holds_for_the_build(install: Install, script: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[bool] = []
    monkeypatch.setattr(native, "build_quietly", lambda: asked.append(True))
    install(lambda *_, **__: STATS)
    assert main(["run", "--budget=1GiB", str(script)]) == 0
    assert asked == []
    assert main(["run", "--budget=1GiB", "--quiet", str(script)]) == 0
    assert asked == [True]


def test_warnings_of_lowtide_are_one_line_and_those_of_the_script_stay_as_they_are(
    install: Install, script: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def run_script(*_: Any, **__: Any) -> dict[str, Any]:
        warnings.warn("lowtide: the disk is full;\nkeeping the data in memory", RuntimeWarning, stacklevel=1)
        warnings.warn("the script's own", UserWarning, stacklevel=1)
        return STATS

    install(run_script)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        before = warnings.showwarning
        lines = lines_of(capsys, "--budget=1GiB", "--quiet", str(script))
        assert warnings.showwarning is before
    assert lines == ["lowtide: warning: the disk is full; keeping the data in memory"]
    assert [str(warning.message) for warning in caught] == ["the script's own"]
