"""`lowtide run --emulate`: the device exists before the script does."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from lowtide.cli import main

SCRIPT = """
import torch
device = torch.accelerator.current_accelerator()
torch.manual_seed(0)
model = torch.nn.Sequential(*[torch.nn.Linear(64, 64) for _ in range(8)]).to(device)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
x = torch.randn(256, 64).to(device)
for _ in range(3):
    loss = model(x).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
print(device, loss.item())
"""


@pytest.fixture
def script(tmp_path: Path) -> str:
    path = tmp_path / "train.py"
    path.write_text(SCRIPT)
    return str(path)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--emulate=vax"], "unknown preset 'vax'"),
        (["--emulate=v100", "--capacity=2G"], "GiB (binary) or GB (decimal)"),
        (["--emulate=v100", "--capacity=100TiB"], "machine's memory"),
        (["--capacity=1GiB"], "--emulate"),
        ([], "'--budget'"),
    ],
)
def test_run_refuses_in_one_line(
    capsys: pytest.CaptureFixture[str], script: str, options: list[str], words: str
) -> None:
    assert main(["run", *options, script]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert words in line


def test_a_script_trains_on_the_device_within_its_capacity(script: str, tmp_path: Path) -> None:
    def run(*options: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "lowtide.cli", "run", f"--spill={tmp_path}", *options, script],
            capture_output=True,
            text=True,
            check=False,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
        )

    done = run("--emulate=v100", "--capacity=64MiB")
    assert done.returncode == 0, done.stderr
    device, loss = done.stdout.split()
    assert device == "sim"
    assert "device 'sim' of 64.0 MiB" in done.stderr
    plain = subprocess.run(
        [sys.executable, "-c", SCRIPT.replace("torch.accelerator.current_accelerator()", "'cpu'")],
        capture_output=True,
        text=True,
        check=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    assert loss == plain.stdout.split()[1]
