"""`lowtide run --serve` of a script that loads a checkpoint: it is read in place, as inside `lowtide.init`."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

SCRIPT = """
import sys
import torch
from safetensors import safe_open

torch.set_num_threads(1)
path = sys.argv[1]
with torch.device("meta"):
    model = torch.nn.Sequential(*(torch.nn.Linear(512, 512) for _ in range(12)))
if path.endswith(".pt"):
    state = torch.load(path, mmap=True)
else:
    with safe_open(path, "pt") as file:
        state = {name: file.get_tensor(name) for name in file.keys()}
model.load_state_dict(state, assign=True)
del state
x = torch.ones(1, 512)
with torch.no_grad():
    for _ in range(8):
        x = model(x).tanh()
"""


@pytest.mark.parametrize(("name", "save"), [("weights.safetensors", save_file), ("weights.pt", torch.save)])
def test_weights_of_a_checkpoint_are_read_in_place_and_count_in_the_budget(
    name: str, save: Callable[..., None], tmp_path: Path
) -> None:
    script, stats, weights = tmp_path / "infer.py", tmp_path / "stats.json", tmp_path / name
    script.write_text(SCRIPT)
    torch.manual_seed(0)
    save(torch.nn.Sequential(*(torch.nn.Linear(512, 512) for _ in range(12))).state_dict(), weights)
    options = ("--budget", "6MiB", "--spill", str(tmp_path), "--serve", "--json", str(stats))
    done = subprocess.run(
        [sys.executable, "-m", "lowtide", "run", *options, str(script), str(weights)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    told = json.loads(stats.read_text())
    assert told["swapped_in_bytes"] > 8 * 6 * 2**20 * 0.9, "weights are streamed, not left to somebody else's mapping"
    assert told["swapped_out_bytes"] == 0, "there is no second copy"
