"""`lowtide run --emulate`: the device exists before the script does."""

from __future__ import annotations

import json
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


SPLIT = """
import torch
torch.manual_seed(0)
layers = [torch.nn.Sequential(*[torch.nn.Linear(64, 64) for _ in range(8)]).to(f"sim:{index}") for index in range(2)]
optimizer = torch.optim.SGD([parameter for part in layers for parameter in part.parameters()], lr=0.01)
x = torch.randn(1024, 64)
for _ in range(4):
    loss = layers[1](layers[0](x.to("sim:0")).to("sim:1")).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
"""


def test_a_script_trains_on_as_many_devices_as_the_budget_names(tmp_path: Path) -> None:
    path, stats = tmp_path / "train.py", tmp_path / "stats.json"
    path.write_text(SPLIT)
    options = [f"--spill={tmp_path}", f"--json={stats}", "--emulate=v100", "--capacity=64MiB"]
    done = subprocess.run(
        [sys.executable, "-m", "lowtide.cli", "run", *options, "--budget=sim:0=2MiB,sim:1=3MiB", str(path)],
        capture_output=True,
        text=True,
        check=False,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr
    assert "2 devices 'sim', each of 64.0 MiB" in done.stderr
    devices = json.loads(stats.read_text())["devices"]
    for name, budget in (("sim:0", "2.00 MiB"), ("sim:1", "3.00 MiB")):
        assert f"{name}: peak " in done.stderr
        assert f"of {budget}; swapped out" in done.stderr
        assert devices[name]["peak_reserved_bytes"] <= devices[name]["budget_bytes"]
        assert devices[name]["swapped_in_bytes"] > 0
