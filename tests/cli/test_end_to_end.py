"""The verbs on a real script, each in a process of its own, as a user runs them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from lowtide.cli.demo import parse_step
from lowtide.memory import native

TRAIN = """
import sys, torch
from torch import nn
torch.manual_seed(0)
model = nn.Sequential(*(nn.Sequential(nn.Linear(256, 256), nn.GELU()) for _ in range(12)), nn.Linear(256, 8))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
for step in range(4):
    loss = model(torch.randn(512, 256)).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    print("step", step, float(loss.detach()).hex(), 0.0, flush=True)
sys.exit(int(sys.argv[1]))
"""


@pytest.fixture(autouse=True, scope="module")
def built() -> None:
    """Have the native part built before: a verb that builds it says so, which these tests are not about."""
    native.status()


@pytest.fixture(scope="module")
def script(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("train") / "train.py"
    path.write_text(TRAIN)
    return path


def python(*argv: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, *map(str, argv)], capture_output=True, text=True, env=os.environ)


def losses(text: str) -> list[str]:
    return [step.loss_hex for line in text.splitlines() if (step := parse_step(line))]


def test_an_unmodified_script_gives_the_same_losses_inside_a_budget_it_would_pass(script: Path, tmp_path: Path) -> None:
    trace, stats_path, spill = tmp_path / "step.trace", tmp_path / "stats.json", tmp_path / "spill"
    spill.mkdir()
    captured = python("-m", "lowtide.cli", "capture", "-o", trace, "--json", script, "0")
    assert captured.returncode == 0, captured.stderr
    need = json.loads(captured.stdout[captured.stdout.index("{") :])
    assert need["floor_bytes"] < need["static_bytes"] < need["peak_bytes"], "parameters and their state may leave too"
    budget = (need["floor_bytes"] + need["peak_bytes"]) // 2

    plain = python(script, "5")
    run = ("-m", "lowtide.cli", "run", "--budget", str(budget), "--spill", spill, "--json", stats_path, script, "5")
    managed = python(*run)
    assert plain.returncode == managed.returncode == 5, managed.stderr
    assert len(losses(plain.stdout)) == 4
    assert losses(managed.stdout) == losses(plain.stdout)
    stats = json.loads(stats_path.read_text())
    assert stats["peak_reserved_bytes"] <= budget == stats["budget_bytes"] < need["peak_bytes"]
    assert stats["swapped_out_bytes"] > 0
    assert list(spill.iterdir()) == []
    assert [line for line in managed.stderr.splitlines() if line.startswith("lowtide: 4 steps")]


@pytest.mark.parametrize("verb", [("run", "--budget", "1GiB", "--quiet"), ("capture", "-o", "step.trace")])
def test_a_script_that_raises_shows_its_traceback_and_exit_code_1(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, verb: tuple[str, ...]
) -> None:
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "broken.py"
    path.write_text("import torch\nx = torch.ones(3)\nx @ torch.ones(4)\n")
    done = python("-m", "lowtide.cli", *verb, path)
    assert done.returncode == 1
    lines = done.stderr.splitlines()
    assert lines[0] == "Traceback (most recent call last):"
    assert f'File "{path}", line 3' in lines[1]
    assert lines[-1].startswith("RuntimeError")
    assert [entry.name for entry in tmp_path.iterdir()] == ["broken.py"]


def test_a_script_without_training_cannot_be_captured(tmp_path: Path) -> None:
    path = tmp_path / "idle.py"
    path.write_text("print('nothing to see')\n")
    done = python("-m", "lowtide.cli", "capture", "-o", tmp_path / "t", path)
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
    assert "no training step" in done.stderr


def test_a_compiler_that_is_missing_is_one_line_and_the_peak_is_marked(script: Path, tmp_path: Path) -> None:
    environment = os.environ | {"CXX": "no-such-compiler", "LOWTIDE_CACHE": str(tmp_path / "cache")}
    run = ["-m", "lowtide.cli", "run", "--budget", "1GiB", "--spill", str(tmp_path), str(script), "0"]
    done = subprocess.run([sys.executable, *run], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    assert len(losses(done.stdout)) == 4
    lines = done.stderr.splitlines()
    assert [line.split(":")[0] for line in lines] == ["lowtide"] * 5
    assert lines[1].startswith("lowtide: warning: no C++ compiler found: CXX names no-such-compiler")
    assert "(advisory: accounted in Python, not enforced)" in lines[4]
