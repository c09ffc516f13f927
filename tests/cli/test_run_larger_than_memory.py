"""`lowtide run` of a script whose state is larger than its budget."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

SCRIPT = """
import torch

torch.manual_seed(0)
torch.set_num_threads(1)
model = torch.nn.Sequential(*(torch.nn.Linear(512, 512) for _ in range(8)))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
for _ in range(4):
    loss = model(torch.randn(64, 512)).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
print(loss.item().hex(), sum(p.double().sum().item() for p in model.parameters()).hex())
"""


def run(*command: str) -> str:
    done = subprocess.run([sys.executable, *command], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_script_trains_whose_state_is_larger_than_its_budget(tmp_path: Path) -> None:
    script, stats = tmp_path / "train.py", tmp_path / "stats.json"
    script.write_text(SCRIPT)
    spill = tmp_path / "spill"
    spill.mkdir()
    expected = run(str(script))
    options = ("--budget", "12MiB", "--spill", str(spill), "--json", str(stats))
    assert run("-m", "lowtide", "run", *options, str(script)).splitlines()[0] == expected.strip()
    told = json.loads(stats.read_text())
    assert told["peak_reserved_bytes"] <= told["budget_bytes"] < told["static_bytes"]
    assert told["swapped_out_bytes"] > 0


def test_a_script_trains_by_running_operators_again(tmp_path: Path) -> None:
    script, stats = tmp_path / "train.py", tmp_path / "stats.json"
    layer = "torch.nn.Linear(512, 512)"
    activated = SCRIPT.replace(layer, f"torch.nn.Sequential({layer}, torch.nn.GELU())")
    # One step is recorded, and in the first that follows its plan nothing is given up yet.
    script.write_text(
        activated.replace("torch.randn(64, 512)", "torch.randn(512, 512)").replace("range(4)", "range(6)")
    )
    expected = run(str(script))
    options = ("--budget", "40MiB", "--spill", str(tmp_path), "--policy", "superneurons", "--verify")
    done = run("-m", "lowtide", "run", *options, "--json", str(stats), str(script))
    assert done.splitlines()[0] == expected.strip()
    told = json.loads(stats.read_text())
    assert told["peak_reserved_bytes"] <= told["budget_bytes"]
    assert told["recomputed_ops"] > 0
    assert told["discarded_bytes"] > 0
