"""The example of docs/howto-watch.md does what its page says."""

from __future__ import annotations

import json
import runpy
import sys
from pathlib import Path

import pytest

EXAMPLE = Path(__file__).parents[2] / "examples" / "watch.py"


def test_every_step_is_in_the_log_and_in_tensorboard(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    log, events = tmp_path / "steps.jsonl", tmp_path / "events"
    monkeypatch.setattr(sys, "argv", [str(EXAMPLE), "--log", str(log), "--tensorboard", str(events)])
    runpy.run_path(str(EXAMPLE), run_name="__main__")
    records = [json.loads(line) for line in log.read_text().splitlines()]
    assert [record["step"] for record in records] == [1, 2, 3, 4, 5, 6]
    assert sum(record["moved_out_bytes"] for record in records) > 0
    assert "of the predicted step" in capsys.readouterr().out
    assert list(events.iterdir())
