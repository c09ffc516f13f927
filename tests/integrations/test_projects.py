"""Ordinary projects, stock and inside a budget: the same parameters, bit for bit, and something did move.

Each is in examples/. Some know Lowtide, and train without it with `--stock`; `lowtide run` runs the others.
"""

from __future__ import annotations

import json
import os
import re
import runpy
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"
TIMEOUT_S = 600
# Every setting that it would otherwise take from the user's own configuration, or announce that it has chosen.
ACCELERATE: tuple[str, ...] = ("accelerate", "launch", "--cpu", "--num_processes", "1", "--num_machines", "1")
ACCELERATE += ("--mixed_precision", "no", "--dynamo_backend", "no")


@dataclass(frozen=True)
class Found:
    parameters: str
    swapped_out_bytes: int = 0


def read(text: str) -> Found:
    (parameters,) = re.findall(r"^parameters ([0-9a-f]{64})$", text, re.MULTILINE)
    swapped = re.findall(r"swapped out (\d+),", text)
    return Found(parameters, int(swapped[-1]) if swapped else 0)


def run(command: list[str], tmp_path: Path) -> str:
    path = os.pathsep.join((str(Path(sys.executable).parent), os.environ["PATH"]))
    done = subprocess.run(
        command,
        cwd=tmp_path,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PATH": path},
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


# ---- those that know Lowtide ----


@pytest.mark.parametrize(
    "command",
    [
        ("accelerate_loop.py",),
        ("diffusion_unet.py",),
        ("huggingface_trainer.py",),
        ("huggingface_trainer.py", "--resume", "--mixin"),
        ("huggingface_trainer.py", "--lora", "--budget", "20MiB"),
        ("lightning_module.py",),
        ("lightning_module.py", "--strategy", "--resume"),
        ("trl_sft.py",),
    ],
    ids=" ".join,
)
def test_a_project_trains_to_the_same_bits(
    command: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    name, *own = command

    def here(*arguments: str) -> Found:
        monkeypatch.setattr(sys, "argv", [name, *own, *arguments])
        runpy.run_path(str(EXAMPLES / name), run_name="__main__")
        return read(capsys.readouterr().out)

    stock, ours = here("--stock"), here()
    assert ours.parameters == stock.parameters
    assert ours.swapped_out_bytes > stock.swapped_out_bytes == 0


@pytest.mark.slow
@pytest.mark.parametrize(
    "command",
    [("huggingface_trainer.py", "--mixin"), ("huggingface_trainer.py", "--resume"), ("trl_sft.py", "--lora")],
    ids=" ".join,
)
def test_a_project_in_a_process_of_its_own_trains_to_the_same_bits(command: tuple[str, ...], tmp_path: Path) -> None:
    name, *arguments = command
    stock = read(run([sys.executable, str(EXAMPLES / name), *arguments, "--stock"], tmp_path))
    ours = read(run([sys.executable, str(EXAMPLES / name), *arguments], tmp_path))
    assert ours.parameters == stock.parameters
    assert ours.swapped_out_bytes > stock.swapped_out_bytes == 0


@pytest.mark.slow
def test_a_resumed_training_is_the_one_that_was_not_interrupted(tmp_path: Path) -> None:
    example = [sys.executable, str(EXAMPLES / "huggingface_trainer.py")]
    whole = read(run([*example, "--stock", "--out", str(tmp_path / "whole")], tmp_path))
    resumed = read(run([*example, "--resume", "--out", str(tmp_path / "resumed")], tmp_path))
    assert resumed.parameters == whole.parameters


@pytest.mark.slow
def test_a_resumed_lightning_training_is_the_one_that_was_not_interrupted(tmp_path: Path) -> None:
    example = [sys.executable, str(EXAMPLES / "lightning_module.py")]
    whole = read(run([*example, "--stock", "--out", str(tmp_path / "whole")], tmp_path))
    resumed = read(run([*example, "--strategy", "--resume", "--out", str(tmp_path / "resumed")], tmp_path))
    assert resumed.parameters == whole.parameters


# ---- those that do not ----


@pytest.mark.parametrize(
    "command",
    [
        ("gan.py",),
        ("gan.py", "--compile"),
        ("torchrun", "--standalone", "--nproc-per-node", "2", "ddp.py"),
        ("torchrun", "--standalone", "--nproc-per-node", "2", "fsdp2.py"),
        (*ACCELERATE, "gan.py"),
    ],
    ids=" ".join,
)
def test_a_script_that_knows_nothing_of_lowtide_trains_to_the_same_bits(
    command: tuple[str, ...], tmp_path: Path
) -> None:
    said = [str(EXAMPLES / part) if part.endswith(".py") else part for part in command]
    ranks = {"torchrun": 2, "accelerate": 1}.get(said[0], 0)  # processes that the launcher starts
    stock = read(run(said if ranks else [sys.executable, *said], tmp_path))
    stats_path = tmp_path / "stats.json"
    ours = read(
        run(
            [sys.executable, "-m", "lowtide", "run", "--budget", "12MiB", "--json", str(stats_path), *said],
            tmp_path,
        )
    )
    assert ours.parameters == stock.parameters
    stats = json.loads(stats_path.read_text())
    processes = [process["stats"] for process in stats["processes"]]
    assert len(processes) == ranks
    for process in processes or [stats]:
        assert process["budget_bytes"] == 12 << 20
        assert process["peak_reserved_bytes"] <= 12 << 20
        assert process["swapped_out_bytes"] > 0
    assert stats["outside_the_budget"] == []
