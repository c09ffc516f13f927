"""The measurement behind docs/agreement.md, on one model at one budget: what is simulated is what happens."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import agreement


@pytest.mark.slow  # four trainings of half a minute each
def test_peaks_agree_within_a_percent_and_times_roughly_on_a_busy_machine(tmp_path: Path) -> None:
    out = tmp_path / "agreement.json"
    agreement.main(
        ["--models", "vgg16", "--shares", "0.4", "--steps", "4", "--out", str(out), "--spill", str(tmp_path)]
    )
    cases = json.loads(out.read_text())["cases"]
    assert [case["policy"] for case in cases] == list(agreement.POLICIES)
    for case in cases:
        assert abs(case["peak_ratio"] - 1) <= agreement.PEAK_TOLERANCE, case
        # The goal of 10% is for a machine that does nothing else; tests may share it.
        assert abs(case["time_ratio"] - 1) <= 3 * agreement.TIME_TOLERANCE, case
        assert case["moved_out_bytes"] > 0


def test_a_case_that_fails_or_disagrees_is_no_success(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    answers = [
        {"floor_bytes": 1, "peak_bytes": 2},
        {"failure": "BudgetTooSmall: no"},
    ]
    monkeypatch.setattr(agreement, "_answer", lambda _case: answers.pop(0))
    out = ["--models", "vgg16", "--shares", "0.4", "--policies", "auto", "--out", str(tmp_path / "a.json")]
    assert agreement.main(out) == 1
