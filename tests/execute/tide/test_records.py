"""What `tide.on_step` tells: one record a step, with the figures of that step alone."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import lowtide
from lowtide.core.step_record import StepRecord
from lowtide.errors import BadArgument
from tests.execute.training import Need, Training


def budget_of(need: Need) -> int:
    return (need.floor_bytes + need.peak_bytes) // 2


def records_of(need: Need, spill: Path, *, policy: str = "auto", steps: int = 6) -> tuple[list[StepRecord], dict]:
    training, seen = Training(), []
    with lowtide.fit(
        training.model, training.optimizer, budget=budget_of(need), spill=str(spill), policy=policy
    ) as tide:
        tide.on_step(seen.append)
        training.steps(steps, tide.step)
        return seen, tide.stats()


@pytest.mark.parametrize("moves", ["pages", "saves"])
def test_each_step_is_told_once_with_its_own_figures(
    mlp_need: Need, tmp_path: Path, moves: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if moves == "saves":
        monkeypatch.setattr("lowtide.memory.ranges.unavailable", lambda: "not here")
    seen, stats = records_of(mlp_need, tmp_path)
    assert [record.step for record in seen] == [1, 2, 3, 4, 5, 6]
    for record in seen:
        assert record.budget_bytes == budget_of(mlp_need)
        assert record.peak_bytes > 0
        assert record.peak_bytes <= record.budget_bytes or moves == "saves", "an advisory budget is passed"
        assert 0 <= record.stall_s <= record.step_s
    # What lands between two steps is in the total alone.
    assert 0 < sum(record.moved_out_bytes for record in seen) <= stats["swapped_out_bytes"]
    assert 0 < sum(record.moved_in_bytes for record in seen) <= stats["swapped_in_bytes"]
    assert sum(record.stall_s for record in seen) <= stats["stall_s"]
    assert stats["last_step_s"] == seen[-1].step_s


@pytest.mark.parametrize("moves", ["pages", "saves"])
def test_a_planned_step_is_compared_with_the_trace_it_was_planned_from(
    mlp_need: Need, tmp_path: Path, moves: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if moves == "saves":
        monkeypatch.setattr("lowtide.memory.ranges.unavailable", lambda: "not here")
    training, seen = Training(), []
    with lowtide.fit(training.model, training.optimizer, budget=budget_of(mlp_need), spill=str(tmp_path)) as tide:
        tide.on_step(seen.append)
        training.steps(6, tide.step)
        trace, plan, stats = tide.trace(), tide.plan(), tide.stats()
    assert not seen[0].planned
    assert seen[0].expected is None
    assert seen[0].slowdown is None
    last = seen[-1]
    assert last.planned
    assert last.expected is not None
    assert last.expected.unmanaged_s == trace.duration_s > 0
    assert plan is not None
    assert plan.prediction is not None
    assert last.expected.planned_s == plan.prediction.step_s
    assert last.slowdown == last.step_s / trace.duration_s
    assert stats["predicted_unmanaged_step_s"] == trace.duration_s
    assert stats["predicted_slowdown"] == plan.prediction.step_s / trace.duration_s
    planned = sorted(record.slowdown for record in seen if record.slowdown is not None)
    assert planned[0] <= stats["slowdown"] <= planned[-1]


def test_an_exception_in_a_callback_is_raised_and_the_training_can_go_on(mlp_need: Need, tmp_path: Path) -> None:
    training, seen = Training(), []

    def broken(record: StepRecord) -> None:
        if record.step == 2:
            raise KeyError("logger")

    with lowtide.fit(training.model, training.optimizer, budget=budget_of(mlp_need), spill=str(tmp_path)) as tide:
        tide.on_step(broken)
        tide.on_step(seen.append)
        training.steps(1, tide.step)
        with pytest.raises(KeyError, match="logger"):
            training.steps(1, tide.step)
        assert [record.step for record in seen] == [1, 2], "the others were told all the same"
        training.steps(3, tide.step)
        assert [record.step for record in seen] == [1, 2, 3, 4, 5]
    alone = Training()
    alone.steps(len(training.losses))
    assert training.losses == alone.losses


def test_a_callback_can_be_taken_away_once_for_each_time_it_was_given(mlp_need: Need, tmp_path: Path) -> None:
    training, seen = Training(), []
    with lowtide.fit(training.model, training.optimizer, budget=budget_of(mlp_need), spill=str(tmp_path)) as tide:
        remove = tide.on_step(seen.append)
        tide.on_step(seen.append)
        training.steps(1, tide.step)
        remove()
        remove()
        training.steps(1, tide.step)
        with pytest.raises(BadArgument, match="a function of one StepRecord, and got a int"):
            tide.on_step(3)  # type: ignore[arg-type]
    assert [record.step for record in seen] == [1, 1, 2]


def test_a_step_that_raised_is_not_told(tmp_path: Path) -> None:
    seen: list[StepRecord] = []
    with lowtide.fit(budget="64MiB", spill=str(tmp_path)) as tide:
        tide.on_step(seen.append)
        with pytest.raises(ValueError, match="mine"), tide.step():
            raise ValueError("mine")
        assert seen == []
        assert "no step has ended yet" in tide._repr_html_()
        with tide.step():
            torch.ones(8)
        assert [record.step for record in seen] == [1]
        assert "peak" in tide._repr_html_()
