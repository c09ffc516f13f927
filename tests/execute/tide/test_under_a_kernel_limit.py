"""Models of three budgets are created, loaded, called and saved under a limit of the kernel that holds one."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from tests.execute.test_budget import memory_cgroup

pytestmark = pytest.mark.slow

MIB = 2**20
LAYERS, WIDTH = 48, 2048  # 16 MiB each
BUDGET = LAYERS * WIDTH * WIDTH * 4 // 3
SLACK = (
    48 * MIB
)  # of the allocator for small blocks, of threads' stacks and of the three buffers that files are read to

SCRIPT = f"""
    import hashlib, sys
    import torch
    import lowtide
    from lowtide.memory.native import load

    way, spill, path = sys.argv[1:]
    torch.set_num_threads(1)
    torch.set_grad_enabled(False)
    load()

    def build(layers={LAYERS}):
        torch.manual_seed(3)
        return torch.nn.Sequential(*(torch.nn.Linear({WIDTH}, {WIDTH}, bias=False) for _ in range(layers)))

    def digest(model):
        found = hashlib.sha256()
        for parameter in model.parameters():
            found.update(parameter.detach().numpy())
        found.update(model(torch.ones(1, {WIDTH})).numpy())
        return found.hexdigest()

    if way == "idle":
        with lowtide.init(budget={BUDGET}, spill=spill):
            digest(build(1))
        print(next(line.split()[1] for line in open("/proc/self/status") if line.startswith("VmHWM")))
    elif way == "stock":
        model = build()
        if path != "-":
            from safetensors.torch import save_file
            save_file(model.state_dict(), path)
        print(digest(model))
    else:
        with lowtide.init(budget={BUDGET}, spill=spill):
            model = build() if way == "create" else lowtide.load(build, path)
        with lowtide.serve(model, budget={BUDGET}, spill=spill) as tide:
            print(digest(model))
            if way == "create":
                from safetensors.torch import save_file
                save_file(model.state_dict(), path)
"""


def run(script: Path, *arguments: object, group: Path | None = None) -> subprocess.CompletedProcess[str]:
    def join() -> None:
        if group is not None:
            (group / "cgroup.procs").write_text(str(os.getpid()))

    return subprocess.run(
        [sys.executable, str(script), *map(str, arguments)],
        capture_output=True,
        text=True,
        check=False,
        preexec_fn=join,
    )


def test_a_model_of_three_budgets_is_created_loaded_called_and_saved(tmp_path: Path) -> None:
    script, weights, ours = tmp_path / "script.py", tmp_path / "weights.safetensors", tmp_path / "ours.safetensors"
    script.write_text(textwrap.dedent(SCRIPT))
    expected = run(script, "stock", "-", weights)
    assert expected.returncode == 0, expected.stderr
    idle = run(script, "idle", tmp_path, "-")
    assert idle.returncode == 0, idle.stderr
    with memory_cgroup(int(idle.stdout) * 1024 + BUDGET + SLACK) as group:
        assert run(script, "stock", "-", "-", group=group).returncode != 0, "stock fits too: the limit proves nothing"
        for way, path in (("create", ours), ("load", weights)):
            done = run(script, way, tmp_path, path, group=group)
            assert done.returncode == 0, (way, done.stderr)
            assert done.stdout == expected.stdout, way
    assert ours.read_bytes() == weights.read_bytes()
