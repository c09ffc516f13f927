"""`lowtide run --serve`: a script that only infers, with a model larger than its budget."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

SCRIPT = """
import torch

torch.manual_seed(0)
torch.set_num_threads(1)
model = torch.nn.Sequential(*(torch.nn.Linear(512, 512) for _ in range(12)))
x = torch.ones(1, 512)
with torch.no_grad():
    for _ in range(8):
        x = model(x).tanh()
print(x.double().sum().item().hex())
"""


def run(*command: str) -> subprocess.CompletedProcess[str]:
    done = subprocess.run([sys.executable, *command], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done


def test_each_call_of_the_model_is_a_step_and_the_answer_is_the_same(tmp_path: Path) -> None:
    script, stats = tmp_path / "infer.py", tmp_path / "stats.json"
    script.write_text(SCRIPT)
    expected = run(str(script)).stdout
    options = ("--budget", "6MiB", "--spill", str(tmp_path), "--serve", "--json", str(stats))
    done = run("-m", "lowtide", "run", *options, str(script))
    assert done.stdout == expected
    assert "no optimizer step" not in done.stderr
    told = json.loads(stats.read_text())
    assert told["steps"] == 8
    assert told["peak_reserved_bytes"] <= 6 * 2**20 < told["static_bytes"]
    assert told["swapped_out_bytes"] <= 12 * 2**20 * 1.1, "weights are written once"
