from __future__ import annotations

import json
from pathlib import Path

import pytest

from lowtide import registry
from lowtide.cli import main
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


def test_policies_lists_what_the_registry_knows(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["policies", "--json"]) == 0
    listed = json.loads(capsys.readouterr().out)
    assert [entry["name"] for entry in listed] == list(registry.policy_names())
    assert all(entry["summary"] for entry in listed)
    assert main(["policies"]) == 0
    text = capsys.readouterr().out
    assert all(name in text for name in registry.policy_names())
