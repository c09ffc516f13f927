"""Steps are recorded until they are known, and again when they no longer fit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import lowtide
from lowtide.execute.tide import cpu
from tests.execute.training import Need, Training


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many steps have been recorded, as the length of a list."""
    found: list[int] = []
    start = cpu.Recorder.start

    def counted(recorder: Any, *, static_bytes: int) -> None:
        found.append(static_bytes)
        start(recorder, static_bytes=static_bytes)

    monkeypatch.setattr(cpu.Recorder, "start", counted)
    return found


@pytest.mark.parametrize("share", [0.6, 2.0])
def test_a_training_that_is_known_is_not_recorded_any_more(
    share: float, recorded: list[int], tmp_path: Path, mlp_need: Need
) -> None:
    training = Training()
    with lowtide.fit(training.model, training.optimizer, budget=mlp_need.share(share), spill=tmp_path) as tide:
        training.steps(6, tide.step)
        known = len(recorded)
        training.steps(6, tide.step)
        assert (tide.stats()["swapped_out_bytes"] == 0) == (share > 1)
    assert len(recorded) == known


def test_a_step_that_no_longer_fits_is_recorded_and_planned(
    recorded: list[int], tmp_path: Path, mlp_need: Need
) -> None:
    training, stock = Training(), Training()
    with lowtide.fit(training.model, training.optimizer, budget=mlp_need.share(1.2), spill=tmp_path) as tide:
        training.steps(6, tide.step)
        known = len(recorded)
        training.shape = (2048, 128)
        training.steps(2, tide.step)
        assert len(recorded) == known + 1, "the second of its kind"
        training.steps(2, tide.step)
        plan = tide.plan()
        assert plan is not None
        assert plan.swaps or plan.recomputes
    stock.steps(6)
    stock.shape = training.shape
    assert training.result() == stock.steps(4).result()
