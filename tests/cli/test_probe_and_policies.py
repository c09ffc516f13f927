from __future__ import annotations

import json
from pathlib import Path

import pytest

from lowtide import registry
from lowtide.cli import main
from lowtide.core.units import format_rate
from lowtide.estimate.calibrate import load_machine


def test_probe_measures_prints_and_keeps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("LOWTIDE_CACHE", str(tmp_path / "cache"))
    spill = tmp_path / "spill"
    spill.mkdir()
    assert main(["probe", "--json", "--spill", str(spill)]) == 0
    told = json.loads(capsys.readouterr().out)
    kept = load_machine(directories=[spill])
    assert kept is not None
    assert told["links"]["spill"]["read_bytes_per_s"] == kept.links["spill"].read_bytes_per_s
    assert told["matmul_flop_per_s"] > 0
    cut = told["read_and_copy"]
    assert 0 < cut["best_s"] <= min(cut["tier_s"], cut["whole_s"])
    assert told["file"] == str(tmp_path / "cache" / "machine.json")
    assert list(spill.iterdir()) == []


def test_probe_and_report_state_the_same_memory_bandwidth(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("LOWTIDE_CACHE", str(tmp_path / "cache"))
    assert main(["probe", "--spill", str(tmp_path)]) == 0
    kept = load_machine()
    assert kept is not None
    assert kept.memory_bytes_per_s is not None
    (line,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("memory")]
    assert line.split(None, 1)[1].startswith(f"{format_rate(kept.memory_bytes_per_s)};")


def test_policies_lists_what_the_registry_knows(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["policies", "--json"]) == 0
    listed = json.loads(capsys.readouterr().out)
    assert [entry["name"] for entry in listed] == list(registry.policy_names())
    assert all(entry["summary"] for entry in listed)
    assert main(["policies"]) == 0
    text = capsys.readouterr().out
    assert all(name in text for name in registry.policy_names())


def test_codecs_lists_what_they_leave_and_how_fast_they_are(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["codecs", "--density", "0.25", "--json"]) == 0
    rows = {row["name"]: row for row in json.loads(capsys.readouterr().out)}
    zvc, fp16, bits = rows["zvc"], rows["fp16"], rows["bits"]
    assert (zvc["lossless"], zvc["ratio"]) == (True, pytest.approx(0.25 + 1 / 32, rel=0.01))
    assert (fp16["lossless"], fp16["exactness"], fp16["ratio"]) == (False, "bound", 0.5)
    assert bits["ratio"] == pytest.approx(1 / 8, rel=0.01), "of a mask"
    for row in (zvc, fp16):
        both = 1 / row["encode_bytes_per_s"] + 1 / row["decode_bytes_per_s"]
        assert row["pays_below_bytes_per_s"] == pytest.approx(2 * (1 - row["ratio"]) / both)
    assert main(["codecs"]) == 0
    text = capsys.readouterr().out
    assert "53.1%" in text
    assert "sign only" in text


def test_a_density_that_is_no_share_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["codecs", "--density", "2"]) == 2
    assert "a density of 2.0 is not a share" in capsys.readouterr().err


def test_a_spill_with_a_codec_is_a_directory_all_the_same(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script = tmp_path / "train.py"
    script.write_text("print('hello')")
    spill = f"file+zvc://{tmp_path}/absent"
    assert main(["run", "--budget", "1GiB", "--spill", spill, str(script)]) == 2
    assert f"spill directory {tmp_path}/absent does not exist" in capsys.readouterr().err
