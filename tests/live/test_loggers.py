"""Steps in files and in loggers: what is written is what happened."""

from __future__ import annotations

import json
import multiprocessing
import os
import sys
import types
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from lowtide.errors import BadArgument
from lowtide.live import to_jsonl, to_notebook, to_tensorboard, to_wandb
from tests.live.test_line import RECORD


def test_each_step_is_a_line_of_json(tmp_path: Path) -> None:
    path = tmp_path / "steps.jsonl"
    log = to_jsonl(path, rank=3)
    log(RECORD)
    log(replace(RECORD, step=129, expected=None))
    first, second = map(json.loads, path.read_text().splitlines())
    assert first["step"] == 128
    assert first["rank"] == 3
    assert first["pid"] == os.getpid()
    assert first["predicted_unmanaged_s"] == 1.6
    assert first["slowdown"] == RECORD.slowdown
    assert first["at"].endswith("+00:00")
    assert second["slowdown"] is None
    assert second.keys() == first.keys(), "every line has every key"


def _log(path: Path, rank: int, ready: Any) -> None:
    log = to_jsonl(path, rank=rank)
    ready.wait()
    for step in range(200):
        log(replace(RECORD, step=step))


def test_the_lines_of_several_ranks_do_not_mix(tmp_path: Path) -> None:
    path, context = tmp_path / "steps.jsonl", multiprocessing.get_context("fork")
    ready = context.Barrier(3)
    ranks = [context.Process(target=_log, args=(path, rank, ready)) for rank in range(3)]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join()
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert sorted((line["rank"], line["step"]) for line in lines) == [(r, s) for r in range(3) for s in range(200)]


def test_a_log_that_cannot_be_opened_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BadArgument, match=r"cannot write the log .*: No such file or directory"):
        to_jsonl(tmp_path / "nowhere" / "steps.jsonl")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs Linux's /dev/full")
def test_a_full_disk_ends_the_log_and_not_the_training() -> None:
    log = to_jsonl("/dev/full")
    with pytest.warns(RuntimeWarning, match="ends before step 128: No space left"):
        log(RECORD)
    log(RECORD)  # nothing more to say


def test_tensorboard_has_every_figure_at_its_step(tmp_path: Path) -> None:
    events = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    log = to_tensorboard(tmp_path)
    log(RECORD)
    log(replace(RECORD, step=129, stall_s=0.5))
    log.close()
    seen = events.EventAccumulator(str(tmp_path))
    seen.Reload()
    assert set(seen.Tags()["scalars"]) == {f"lowtide/{name}" for name in RECORD.figures()}
    assert [(event.step, event.value) for event in seen.Scalars("lowtide/stall_s")] == [
        (128, pytest.approx(0.08)),
        (129, 0.5),
    ]


class Run:
    """Notes what `wandb.Run` would be told."""

    def __init__(self) -> None:
        self.axes: dict[str, str | None] = {}
        self.rows: list[tuple[dict[str, float], bool]] = []

    def define_metric(self, name: str, *, step_metric: str | None = None) -> None:
        self.axes[name] = step_metric

    def log(self, data: dict[str, float], *, commit: bool) -> None:
        self.rows.append((data, commit))


def test_wandb_has_an_axis_of_ours_and_the_programs_rows_stay_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run()
    monkeypatch.setitem(sys.modules, "wandb", types.SimpleNamespace(run=run))  # type: ignore[arg-type]
    to_wandb()(RECORD)
    to_wandb(run, commit=True)(RECORD)
    assert run.axes["lowtide/*"] == "lowtide/step"
    (row, committed), (_, at_once) = run.rows
    assert row["lowtide/step"] == 128
    assert row["lowtide/slowdown"] == RECORD.slowdown
    assert (committed, at_once) == (False, True)
    monkeypatch.setitem(sys.modules, "wandb", types.SimpleNamespace(run=None))  # type: ignore[arg-type]
    with pytest.raises(BadArgument, match=r"wandb.init\(\) first"):
        to_wandb()


@pytest.mark.parametrize(
    ("make", "module", "message"),
    [
        (to_wandb, "wandb", "pip install wandb"),
        (to_tensorboard, "torch.utils.tensorboard", "pip install tensorboard"),
        (to_notebook, "IPython.display", "IPython is not installed"),
    ],
)
def test_a_logger_that_is_not_installed_is_named(
    make: Any, module: str, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(BadArgument, match=message):
        make()


def test_a_notebooks_view_is_updated_in_place(monkeypatch: pytest.MonkeyPatch) -> None:
    pages: list[str] = []
    handle = types.SimpleNamespace(update=pages.append)
    shown = types.ModuleType("IPython.display")
    shown.HTML = str  # type: ignore[attr-defined]
    shown.display = lambda page, display_id: pages.append(page) or handle  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "IPython.display", shown)
    show = to_notebook()
    show(RECORD)
    show(replace(RECORD, step=129))
    assert "no step has ended yet" in pages[0]
    assert pages[2].count("<rect") == 4
