"""`lowtide run` while it runs: the line in a real terminal, the log on disk, and the script's own output untouched."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.live.screens import Screen

TRAIN = """
import torch
from torch.utils.data import DataLoader, TensorDataset
torch.manual_seed(0)
model = torch.nn.Sequential(*[layer for _ in range(8) for layer in (torch.nn.Linear(128, 128), torch.nn.GELU())])
optimizer = torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9)
for step, (x,) in enumerate(DataLoader(TensorDataset(torch.randn(512 * 6, 128)), batch_size=512)):
    loss = model(x).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    print("loss", loss.item().hex(), flush=True)
"""
LOWTIDE = (sys.executable, "-m", "lowtide", "run", "--budget", "6MiB")


@pytest.fixture
def train(tmp_path: Path) -> Path:
    path = tmp_path / "train.py"
    path.write_text(TRAIN)
    return path


def environment() -> dict[str, str]:
    known = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "LINES", "RANK")}
    return {**known, "OMP_NUM_THREADS": "1", "TERM": "xterm-256color"}


def losses(lines: list[str]) -> list[str]:
    return [line for line in lines if line.startswith("loss")]


def test_a_terminal_shows_steps_in_its_last_row_and_the_scripts_lines_above(train: Path, tmp_path: Path) -> None:
    stock = subprocess.run([sys.executable, str(train)], capture_output=True, text=True, check=True, env=environment())
    screen = Screen()
    assert screen.run([*LOWTIDE, str(train)], cwd=tmp_path, env=environment()) == 0
    assert losses(screen.display) == stock.stdout.splitlines()
    shown = [row for row in screen.last_rows if row.startswith("step")]
    # The first step is shown at once, however quick. (A read may end in the middle of a write: not every row is whole.)
    assert any("/6.00 MiB  moved " in row and "waited" in row for row in shown)
    assert all(len(row) < 80 for row in shown)
    assert "step" not in screen.display[-1], "the row is given back at the end"
    assert any(line.startswith("lowtide: slowdown ") and "predicted" in line for line in screen.display)
    assert all(len(line) < 80 for line in screen.display)


def test_without_a_terminal_nothing_is_shown_and_the_log_has_every_step(train: Path, tmp_path: Path) -> None:
    log = tmp_path / "steps.jsonl"
    log.write_text("of an earlier run\n")
    done = subprocess.run(
        [*LOWTIDE, "--log", str(log), str(train)], capture_output=True, text=True, check=True, env=environment()
    )
    assert "\x1b" not in done.stdout + done.stderr
    records = [json.loads(line) for line in log.read_text().splitlines()]
    assert [record["step"] for record in records] == [1, 2, 3, 4, 5, 6]
    assert [record["planned"] for record in records] == [False, False, True, True, True, True]
    assert all(record["peak_bytes"] <= record["budget_bytes"] == 6 << 20 for record in records)
    assert records[-1]["predicted_unmanaged_s"] > 0


@pytest.mark.slow
def test_the_ranks_of_a_launcher_share_a_log(train: Path, tmp_path: Path) -> None:
    log, launcher = tmp_path / "steps.jsonl", ("torch.distributed.run", "--nproc-per-node", "2", "--standalone")
    subprocess.run(
        [*LOWTIDE, "--log", str(log), "-m", *launcher, str(train)], capture_output=True, check=True, env=environment()
    )
    records = [json.loads(line) for line in log.read_text().splitlines()]
    assert sorted((record["rank"], record["step"]) for record in records) == [
        (r, s) for r in (0, 1) for s in range(1, 7)
    ]


def test_a_log_that_is_the_script_is_refused(train: Path) -> None:
    done = subprocess.run([*LOWTIDE, "--log", str(train), str(train)], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "would overwrite another file of this command" in done.stderr
    assert train.read_text() == TRAIN
