"""Models of three budgets are created, loaded, called and saved under a limit of the kernel that holds one."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

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

    def build(layers={LAYERS}, seed=3):
        torch.manual_seed(seed)
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
    elif way in ("save", "resume"):
        with lowtide.init(budget={BUDGET}, spill=spill):
            model = build(seed=3 if way == "save" else 4)
        with lowtide.fit(model, budget={BUDGET}, spill=spill) as tide:
            if way == "save":
                tide.save(path)
            else:
                tide.load(path)
            print(digest(model))
    else:
        with lowtide.init(budget={BUDGET}, spill=spill):
            model = build() if way == "create" else lowtide.load(build, path)
        with lowtide.serve(model, budget={BUDGET}, spill=spill) as tide:
            print(digest(model))
            if way == "create":
                from safetensors.torch import save_file
                save_file(model.state_dict(), path)
                torch.save(model.state_dict(), path + ".pt")
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
    expected_tensors, saved = load_file(weights), torch.load(f"{ours}.pt", mmap=True)
    assert expected_tensors.keys() == saved.keys()
    assert all(torch.equal(one, saved[name]) for name, one in expected_tensors.items())


def test_a_training_of_three_budgets_is_saved_and_resumed(tmp_path: Path) -> None:
    script, path = tmp_path / "script.py", tmp_path / "checkpoint"
    script.write_text(textwrap.dedent(SCRIPT))
    expected, idle = run(script, "stock", "-", "-"), run(script, "idle", tmp_path, "-")
    assert expected.returncode == idle.returncode == 0, expected.stderr + idle.stderr
    with memory_cgroup(int(idle.stdout) * 1024 + BUDGET + SLACK) as group:
        for way in ("save", "resume"):
            done = run(script, way, tmp_path, path, group=group)
            assert done.returncode == 0, (way, done.stderr)
            assert done.stdout == expected.stdout, way


TRAINER = """
    import hashlib, sys
    import torch, transformers
    from torch import nn
    import lowtide
    from lowtide.integrations.huggingface import TideCallback
    from lowtide.memory.native import load

    way, out = sys.argv[1:]
    torch.set_num_threads(1)
    load()
    WIDTH, DEPTH, BUDGET = 1024, 3 if way == "idle" else 24, 128 << 20  # 4 MiB a layer, 16 with its state

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(DEPTH)))

        def forward(self, x):
            return {"loss": self.net(x).square().mean()}

    def built():
        transformers.set_seed(0)
        return Net()

    if way == "stock":
        model = built()
    else:
        with lowtide.init(budget=BUDGET, spill=out):
            model = built()
    settings = transformers.TrainingArguments(
        out, max_steps=2, per_device_train_batch_size=2, save_steps=1, use_cpu=True, report_to=[], disable_tqdm=True,
        remove_unused_columns=False,
    )
    rows = [{"x": torch.randn(WIDTH)} for _ in range(8)]
    tides = [] if way == "stock" else [TideCallback(budget=BUDGET, spill=out)]
    trainer = transformers.Trainer(model, settings, train_dataset=rows, callbacks=tides)
    trainer.train()
    found = hashlib.sha256()
    for parameter in model.parameters():
        found.update(parameter.detach().numpy())
    print(next(line.split()[1] for line in open("/proc/self/status") if line.startswith("VmHWM")), found.hexdigest())
"""


def test_trainers_checkpoints_stay_inside_the_limit_that_its_training_has(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    script = tmp_path / "script.py"
    script.write_text(textwrap.dedent(TRAINER))
    for way in ("idle", "stock", "ours"):
        (tmp_path / way).mkdir()
    idle, stock = (run(script, way, tmp_path / way) for way in ("idle", "stock"))
    assert idle.returncode == stock.returncode == 0, idle.stderr + stock.stderr
    (idle_kib, _), (stock_kib, expected) = idle.stdout.split()[-2:], stock.stdout.split()[-2:]
    # An eighth of the training is in the idle figure already: that much is slack.
    limit = int(idle_kib) * 1024 + 128 * MIB + SLACK
    assert int(stock_kib) * 1024 > limit + 64 * MIB, "stock fits too: the limit proves nothing"
    with memory_cgroup(limit) as group:
        ours = run(script, "ours", tmp_path / "ours", group=group)
        assert ours.returncode == 0, ours.stderr
    assert ours.stdout.split()[-1] == expected
    theirs = sorted(file for file in (tmp_path / "stock").rglob("*.safetensors"))
    assert len(theirs) == 2
    for file in theirs:
        name = file.relative_to(tmp_path / "stock")
        assert (tmp_path / "ours" / name).read_bytes() == file.read_bytes()


LIGHTNING = """
    import hashlib, sys
    import lightning, torch
    from torch import nn
    import lowtide
    from lowtide.integrations.lightning import TideStrategy
    from lowtide.memory.native import load

    way, out = sys.argv[1:]
    torch.set_num_threads(1)
    load()
    WIDTH, DEPTH, BUDGET = 1024, 3 if way == "idle" else 24, 128 << 20  # 4 MiB a layer, 16 with its state

    class Module(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.net = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(DEPTH)))

        def training_step(self, batch, index):
            return self.net(batch[0]).square().mean()

        def configure_optimizers(self):
            return torch.optim.AdamW(self.parameters(), lr=1e-3)

    if way == "stock":
        model, strategy = Module(), "auto"
    else:
        with lowtide.init(budget=BUDGET, spill=out):
            model = Module()
        strategy = TideStrategy(budget=BUDGET, spill=out)
    torch.manual_seed(1)
    data = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.randn(8, WIDTH)), batch_size=2)
    saving = lightning.pytorch.callbacks.ModelCheckpoint(out, filename="{step}", every_n_train_steps=1, save_top_k=-1)
    lightning.Trainer(
        accelerator="cpu", max_steps=2, strategy=strategy, callbacks=[saving], logger=False, default_root_dir=out,
        enable_progress_bar=False, enable_model_summary=False,
    ).fit(model, data)
    found = hashlib.sha256()
    for parameter in model.parameters():
        found.update(parameter.detach().numpy())
    print(next(line.split()[1] for line in open("/proc/self/status") if line.startswith("VmHWM")), found.hexdigest())
"""


def test_lightnings_checkpoints_stay_inside_the_limit_that_its_training_has(tmp_path: Path) -> None:
    pytest.importorskip("lightning")
    script = tmp_path / "script.py"
    script.write_text(textwrap.dedent(LIGHTNING))
    for way in ("idle", "stock", "ours"):
        (tmp_path / way).mkdir()
    idle, stock = (run(script, way, tmp_path / way) for way in ("idle", "stock"))
    assert idle.returncode == stock.returncode == 0, idle.stderr + stock.stderr
    (idle_kib, _), (stock_kib, expected) = idle.stdout.split()[-2:], stock.stdout.split()[-2:]
    limit = int(idle_kib) * 1024 + 128 * MIB + SLACK
    assert int(stock_kib) * 1024 > limit + 64 * MIB, "stock fits too: the limit proves nothing"
    with memory_cgroup(limit) as group:
        ours = run(script, "ours", tmp_path / "ours", group=group)
        assert ours.returncode == 0, ours.stderr
    assert ours.stdout.split()[-1] == expected
    for step in (1, 2):
        theirs, mine = (next((tmp_path / way).rglob(f"*step={step}.ckpt")) for way in ("stock", "ours"))
        assert_same_state(theirs, mine)


def assert_same_state(theirs: Path, mine: Path) -> None:
    from lowtide.integrations.lightning import TideCheckpointIO

    expected = torch.load(theirs, mmap=True, weights_only=False)
    found = TideCheckpointIO().load_checkpoint(mine)
    assert expected["state_dict"].keys() == found["state_dict"].keys()
    assert all(torch.equal(one, found["state_dict"][name]) for name, one in expected["state_dict"].items())
