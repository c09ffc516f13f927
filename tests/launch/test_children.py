"""Nothing that `lowtide run` starts trains outside its budget without a word: launchers, shells, spawned processes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import venv
from pathlib import Path
from typing import Any

import pytest

from lowtide.launch.settings import SITE

TRAIN = """
import os, sys
import torch
import torch.distributed as dist

torch.manual_seed(0)
if int(os.environ.get("WORLD_SIZE", "1")) > 1:
    dist.init_process_group("gloo")
model = torch.nn.Sequential(*[torch.nn.Sequential(torch.nn.Linear(256, 256), torch.nn.ReLU()) for _ in range(8)])
if dist.is_initialized():
    model = torch.nn.parallel.DistributedDataParallel(model)
optimizer = torch.optim.AdamW(model.parameters())
for _ in range(3):
    optimizer.zero_grad()
    model(torch.randn(2048, 256)).square().mean().backward()
    optimizer.step()
total = sum(parameter.double().sum().item() for parameter in model.parameters())
os.write(1, f"{total!r} {' '.join(sys.argv[1:])}\\n".encode())
if dist.is_initialized():
    dist.destroy_process_group()
"""
# What the script needs at once is far more than this, so whoever stays below it was budgeted.
BUDGET = "30MiB"
BUDGET_BYTES = 30 << 20


@pytest.fixture
def train(tmp_path: Path) -> Path:
    path = tmp_path / "train.py"
    path.write_text(TRAIN)
    return path


def lowtide(*arguments: object, cwd: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    known = {name: value for name, value in os.environ.items() if name not in ("LOCAL_WORLD_SIZE", "RANK")}
    path = os.pathsep.join((str(Path(sys.executable).parent), known["PATH"]))
    return subprocess.run(
        [sys.executable, "-m", "lowtide", *map(str, arguments)],
        cwd=cwd,
        env={**known, "OMP_NUM_THREADS": "1", "PATH": path, **environment},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


def run_json(tmp_path: Path, *command: object, options: tuple[str, ...] = ()) -> dict[str, Any]:
    out = tmp_path / "stats.json"
    done = lowtide("run", "--budget", BUDGET, "--json", out, *options, *command, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(out.read_text())
    found["printed"], found["told"] = done.stdout, done.stderr
    return found


def assert_budgeted(process: dict[str, Any]) -> None:
    stats = process["stats"]
    assert stats["steps"] == 3
    assert stats["budget_bytes"] == BUDGET_BYTES
    assert 0 < stats["peak_reserved_bytes"] <= BUDGET_BYTES
    assert stats["swapped_out_bytes"] > 0, "without a budget nothing would have moved"


def stock(train: Path, *command: str) -> list[str]:
    done = subprocess.run(
        command or (sys.executable, str(train)), capture_output=True, text=True, check=True, timeout=300
    )
    return sorted(done.stdout.split())


def test_each_rank_of_torchrun_has_the_budget_and_the_same_bits(train: Path, tmp_path: Path) -> None:
    launcher = ("torch.distributed.run", "--nproc-per-node", "2", "--standalone", str(train))
    found = run_json(tmp_path, "torchrun", *launcher[1:])
    assert [process["rank"] for process in found["processes"]] == [0, 1]
    for process in found["processes"]:
        assert_budgeted(process)
    assert found["outside_the_budget"] == []
    assert "rank 0: 3 steps" in found["told"]
    assert sorted(found["printed"].split()) == stock(train, sys.executable, "-m", *launcher)


def test_each_rank_may_run_lowtide_itself(train: Path, tmp_path: Path) -> None:
    command = ["--nproc-per-node", "2", "--standalone", "--no-python", sys.executable, "-m", "lowtide", "run"]
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", *command, "--budget", BUDGET, str(train), "--epochs", "3"],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("--epochs 3") == 2
    for rank in (0, 1):
        (line,) = [line for line in done.stderr.splitlines() if f"rank {rank}: peak" in line]
        assert "of 30.0 MiB" in line
        assert "swapped out 0 B" not in line


def test_python_before_the_script_is_understood(train: Path, tmp_path: Path) -> None:
    found = run_json(tmp_path, "python", "-u", train, "--epochs", "3")
    assert found["processes"] == [], "it runs in the process of lowtide itself"
    assert_budgeted({"stats": found})
    assert found["printed"].split()[1:] == ["--epochs", "3"]


def test_a_module_is_run_as_python_does(train: Path, tmp_path: Path) -> None:
    package = tmp_path / "package"
    package.mkdir()
    train.rename(package / "train.py")
    found = run_json(tmp_path, "package.train", "--epochs", "3", options=("-m",))
    assert_budgeted({"stats": found})
    assert found["printed"].split()[1:] == ["--epochs", "3"]


def test_a_shell_that_starts_python_passes_the_budget_on(train: Path, tmp_path: Path) -> None:
    found = run_json(tmp_path, "sh", "-c", f"{sys.executable} -c 'print(1)'; exec {sys.executable} {train}")
    (process,) = found["processes"]
    assert_budgeted(process)


def test_children_of_a_script_that_starts_python_have_the_budget_each(train: Path, tmp_path: Path) -> None:
    launcher = tmp_path / "launch.py"
    launcher.write_text(
        "import subprocess, sys\n"
        f"ranks = [subprocess.Popen([sys.executable, '-u', {str(train)!r}]) for _ in range(2)]\n"
        "sys.exit(max(rank.wait() for rank in ranks))\n"
    )
    found = run_json(tmp_path, launcher)
    assert len(found["processes"]) == 2
    for process in found["processes"]:
        assert_budgeted(process)
    assert "no optimizer step" not in found["told"], "the launcher itself has nothing to say"


SPAWN = """
import runpy, sys
import torch.multiprocessing as mp
from torch.utils.data import DataLoader

def rank(index):
    runpy.run_path(sys.argv[1])

if __name__ == "__main__":
    list(DataLoader(list(range(4)), num_workers=1, multiprocessing_context="spawn"))
    mp.start_processes(rank, nprocs=2, start_method=sys.argv[2])
"""


@pytest.mark.parametrize("method", ["spawn", "forkserver"])
def test_spawned_ranks_have_the_budget_and_spawned_loaders_do_not(method: str, train: Path, tmp_path: Path) -> None:
    spawn = tmp_path / "spawn.py"
    spawn.write_text(SPAWN)
    found = run_json(tmp_path, spawn, train, method)
    assert len(found["processes"]) == 2, "the loader's worker trains nothing"
    for process in found["processes"]:
        stats = process["stats"]
        assert stats["steps"] == 3
        # The model was there before the budget, which began with the optimizer: it is kept outside, and named.
        assert 0 < stats["peak_reserved_bytes"] <= BUDGET_BYTES
        assert stats["swapped_out_bytes"] > 0


@pytest.mark.parametrize(
    ("start", "reason"),
    [
        ("[sys.executable, '-I', sys.argv[1]]", "-I, -E or -S"),
        ("[sys.executable, sys.argv[1]], env={'PATH': os.environ['PATH']}", "without LOWTIDE_RUN"),
    ],
)
def test_a_python_that_cannot_be_reached_is_named_or_refused(
    start: str, reason: str, train: Path, tmp_path: Path
) -> None:
    script = tmp_path / "start.py"
    script.write_text(f"import os, subprocess, sys\nsys.exit(subprocess.Popen({start}).wait())\n")
    nothing = tmp_path / "nothing.py"
    nothing.write_text("")
    found = run_json(tmp_path, script, nothing)
    (told,) = found["outside_the_budget"]
    assert reason in told
    assert f"outside the budget: {told}" in found["told"]
    strict = lowtide("run", "--budget", BUDGET, "--strict", script, nothing, cwd=tmp_path)
    assert strict.returncode == 2
    assert "--strict forbids" in strict.stderr


def test_a_python_without_lowtide_ends_where_it_would_import_torch(tmp_path: Path) -> None:
    bare = tmp_path / "bare"
    venv.create(bare, with_pip=False)
    (packages,) = bare.glob("lib/python*/site-packages")
    (packages / "torch.py").write_text("print('trains')\n")
    script = tmp_path / "start.py"
    start = f"[{str(bare / 'bin' / 'python')!r}, '-c', sys.argv[1]], env={{**os.environ, 'PYTHONPATH': {str(SITE)!r}}}"
    script.write_text(f"import os, subprocess, sys\nsys.exit(subprocess.call({start}))\n")
    trains = lowtide("run", "--budget", BUDGET, script, "import torch", cwd=tmp_path)
    assert trains.returncode == 2
    assert trains.stdout == ""
    assert f"{bare / 'bin' / 'python'} has no Lowtide" in trains.stderr
    assert "would train outside the budget: install lowtide there" in trains.stderr
    helps = lowtide("run", "--budget", BUDGET, script, "print('helps')", cwd=tmp_path)
    assert (helps.returncode, helps.stdout) == (0, "helps\n"), helps.stderr


FORK = """
import os, runpy, sys
child = os.fork()
if child == 0:
    runpy.run_path(sys.argv[1])
    os._exit(0)
os.waitpid(child, 0)
"""


def test_a_fork_that_trains_is_named(train: Path, tmp_path: Path) -> None:
    script = tmp_path / "fork.py"
    script.write_text(FORK)
    found = run_json(tmp_path, script, train)
    (told,) = found["outside_the_budget"]
    assert "a fork has no budget" in told


def test_a_rank_that_does_not_fit_is_refused_in_one_line(train: Path, tmp_path: Path) -> None:
    done = lowtide("run", "--budget", "1MiB", "torchrun", "--standalone", "--nproc-per-node", "1", train, cwd=tmp_path)
    assert done.returncode != 0
    (line,) = [line for line in done.stderr.splitlines() if "cannot run" in line]
    assert line.startswith("lowtide: rank 0: budget 1.00 MiB ")


def test_an_advisory_budget_is_an_error_where_strictness_was_asked_for(train: Path, tmp_path: Path) -> None:
    nowhere = {"CXX": "no-such-compiler", "LOWTIDE_CACHE": str(tmp_path / "cache")}
    advisory = lowtide("run", "--budget", BUDGET, train, cwd=tmp_path, **nowhere)
    assert advisory.returncode == 0
    assert "advisory" in advisory.stderr
    strict = lowtide("run", "--budget", BUDGET, "--strict", train, cwd=tmp_path, **nowhere)
    assert strict.returncode == 2
    assert "--strict forbids" in strict.stderr
    assert strict.stdout == "", "the script did not begin"


def test_stated_budgets_that_the_ranks_cannot_have_together_are_refused(train: Path, tmp_path: Path) -> None:
    done = lowtide("run", "--budget", "100TiB", train, cwd=tmp_path, LOCAL_WORLD_SIZE="2")
    assert done.returncode == 2
    assert "2 ranks share this machine" in done.stderr
    assert "'auto' to divide what there is" in done.stderr


def test_processes_whose_number_nobody_stated_are_refused_once_they_are_too_many(train: Path, tmp_path: Path) -> None:
    total = next(
        int(line.split()[1]) * 1024 for line in Path("/proc/meminfo").read_text().splitlines() if "MemTotal" in line
    )
    # Each is started while the one before is alive and inside its budget.
    script = tmp_path / "nested.py"
    script.write_text(
        "import subprocess, sys, torch\n"
        "more = int(sys.argv[1])\n"
        "sys.exit(subprocess.call([sys.executable, __file__, str(more - 1)]) if more else 0)\n"
    )
    done = lowtide("run", "--budget", f"{total * 2 // 3}B", "sh", "-c", f"{sys.executable} {script} 1", cwd=tmp_path)
    assert done.returncode == 2
    assert "2 processes of this run would have budgets of" in done.stderr
