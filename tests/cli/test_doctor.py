from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from lowtide.cli import doctor, main
from lowtide.cli.doctor import Finding, Verdict, examine
from lowtide.core.machine import Link
from lowtide.estimate.calibrate import save_machine
from lowtide.testing.traces import machine_of


def found(spill: Path, *, root: Path) -> dict[str, Finding]:
    return {finding.what: finding for finding in examine(spill, root=root)}


@pytest.fixture
def root(tmp_path: Path) -> Path:
    fake = tmp_path / "root"
    (fake / "proc").mkdir(parents=True)
    (fake / "proc/meminfo").write_text("MemTotal: 8388608 kB\nMemAvailable: 4194304 kB\n")
    pages = fake / "sys/kernel/mm/transparent_hugepage"
    pages.mkdir(parents=True)
    (pages / "enabled").write_text("always madvise [never]\n")
    return fake


def test_every_finding_that_is_not_well_has_a_fix(tmp_path: Path, root: Path) -> None:
    findings = found(tmp_path, root=root)
    assert {"python", "torch", "compiler", "native part", "spill", "limits", "budget 'auto'", "huge pages"} <= set(
        findings
    )
    assert all(finding.fix for finding in findings.values() if finding.verdict is not Verdict.OK)
    assert all(not finding.fix for finding in findings.values() if finding.verdict is Verdict.OK)


def test_the_machine_is_read_from_the_root_given(tmp_path: Path, root: Path) -> None:
    findings = found(tmp_path, root=root)
    margin = "less a margin of 10%, 256 MiB at least"
    assert findings["budget 'auto'"].detail == f"3.60 GiB now: what host memory leaves, {margin}"
    assert findings["huge pages"].verdict is Verdict.WARN
    assert findings["limits"].detail.startswith("no cgroup")
    (root / "proc/self").mkdir()
    (root / "proc/self/cgroup").write_text("0::/job\n")
    job = root / "sys/fs/cgroup/job"
    job.mkdir(parents=True)
    (job / "memory.max").write_text(f"{2**30}\n")
    (job / "memory.current").write_text("0\n")
    findings = found(tmp_path, root=root)
    assert findings["limits"].detail == "1.00 GiB (cgroup v2 /job memory.max), 1.00 GiB left"
    assert findings["budget 'auto'"].detail == f"768 MiB now: what cgroup v2 /job memory.max leaves, {margin}"


def test_a_spill_directory_that_does_not_work_fails_with_exit_code_1(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["doctor", "--json", "--spill", str(tmp_path / "no")]) == 1
    spill = [finding for finding in json.loads(capsys.readouterr().out) if finding["what"] == "spill"]
    assert spill[0]["verdict"] == "fail"
    assert "does not exist" in spill[0]["detail"]


def test_a_file_as_spill_directory_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "file"
    path.write_text("")
    for location in (str(path), f"file://{path}"):
        assert main(["doctor", "--spill", location]) == 2
        captured = capsys.readouterr()
        assert captured.out == ""
        assert captured.err == f"lowtide: spill location {path} is not a directory: pass a directory with --spill\n"
    assert main(["doctor", "--spill", "null:"]) == 2
    assert "null: is not a directory" in capsys.readouterr().err


def test_the_probe_names_the_disk_that_was_measured(
    tmp_path: Path, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LOWTIDE_CACHE", str(tmp_path / "cache"))
    missing = found(tmp_path, root=root)["probe"]
    assert (missing.verdict, missing.detail) == (Verdict.WARN, "not measured yet")
    assert missing.fix == f"run 'lowtide probe --spill {tmp_path}'"
    machine = machine_of(Link(write_bytes_per_s=1e9, read_bytes_per_s=2e9))
    save_machine(machine, directories=[tmp_path])
    measured = found(tmp_path, root=root)["probe"]
    rates = f"1.00 GB/s write, 2.00 GB/s read, measured on {tmp_path}"
    assert (measured.verdict, measured.detail, measured.fix) == (Verdict.OK, rates, "")
    # /proc is a filesystem of its own wherever it exists.
    other = found(Path("/proc"), root=root)["probe"]
    assert other.verdict is Verdict.WARN
    assert other.detail == f"{rates}, not on the disk of /proc"
    assert other.fix == "run 'lowtide probe --spill /proc'"
    (tmp_path / "cache" / "machine.json").write_text("{")
    assert found(tmp_path, root=root)["probe"].detail == "damaged or of another version"


def test_a_native_part_that_cannot_be_built_is_a_warning_with_its_reason(
    tmp_path: Path, root: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from lowtide.memory import native

    missing: dict[str, Any] = {"compiler": None, "origin": "none", "usable": False, "reason": "no C++ compiler found"}
    monkeypatch.setattr(native, "status", lambda: missing)
    findings = found(tmp_path, root=root)
    assert findings["compiler"].verdict is Verdict.WARN
    assert "g++" in findings["compiler"].fix
    assert findings["native part"].detail == "no C++ compiler found"
    assert "advisory" in findings["native part"].fix
    doctor._print(list(findings.values()))
    text = capsys.readouterr().out
    assert "warn" in text
    assert "-> install g++" in text


@pytest.mark.parametrize(
    "origin", ["shipped, for torch 2.13 (/x/liblowtide_torch.so)", "built here (/y/liblowtide_torch.so)"]
)
def test_doctor_says_where_the_native_part_is_from(
    tmp_path: Path, root: Path, monkeypatch: pytest.MonkeyPatch, origin: str
) -> None:
    from lowtide.memory import native

    there: dict[str, Any] = {"compiler": None, "origin": origin, "usable": True, "reason": ""}
    monkeypatch.setattr(native, "status", lambda: there)
    findings = found(tmp_path, root=root)
    assert findings["compiler"].verdict is Verdict.OK
    assert findings["native part"].verdict is Verdict.OK
    assert findings["native part"].detail == origin
