"""The budget holds, for any model and any budget; where it cannot, the error says why and nothing is lost."""

from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import lowtide
from lowtide.memory.native import load
from tests import models
from tests.bitwise.discard_all import DiscardAll
from tests.execute.training import NO_PRESSURE_BYTES, Training, away_bytes, digest, need, other_bytes

STEPS = 3
MIB = 2**20


# ---- random models ----


class Residual(nn.Module):
    """Something beside a shortcut."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.inner(x)
        return out


def dense_layer(kind: str, width: int) -> nn.Module:
    layers: dict[str, Callable[[], nn.Module]] = {
        "linear": lambda: nn.Linear(width, width),
        "gelu": nn.GELU,
        "relu_": lambda: nn.Sequential(nn.Linear(width, width), nn.ReLU(inplace=True)),
        "norm": lambda: nn.LayerNorm(width),
        "dropout": lambda: nn.Dropout(0.2),
        "softmax": lambda: nn.Softmax(dim=-1),
        "residual": lambda: Residual(
            nn.Sequential(nn.Linear(width, 2 * width), nn.SiLU(), nn.Linear(2 * width, width))
        ),
    }
    return layers[kind]()


def image_layer(kind: str, channels: int) -> nn.Module:
    layers: dict[str, Callable[[], nn.Module]] = {
        "linear": lambda: nn.Conv2d(channels, channels, 3, padding=1),
        "gelu": nn.GELU,
        "relu_": lambda: nn.Sequential(nn.BatchNorm2d(channels), nn.ReLU(inplace=True)),
        "norm": lambda: nn.GroupNorm(1, channels),
        "dropout": lambda: nn.Dropout2d(0.2),
        "softmax": lambda: nn.Softmax(dim=1),
        "residual": lambda: Residual(nn.Sequential(nn.Conv2d(channels, channels, 1), nn.SiLU(inplace=True))),
    }
    return layers[kind]()


KINDS = ("linear", "gelu", "relu_", "norm", "dropout", "softmax", "residual")


@st.composite
def trainings(draw: st.DrawFn) -> Callable[[], Training]:
    kinds = draw(st.lists(st.sampled_from(KINDS), min_size=3, max_size=12))
    if draw(st.booleans()):
        width, batch = draw(st.sampled_from([32, 60, 128])), draw(st.integers(40, 700))
        return lambda: Training(
            lambda: nn.Sequential(*(dense_layer(kind, width) for kind in kinds), nn.Linear(width, 10)),
            shape=(batch, width),
        )
    channels, batch, side = draw(st.sampled_from([3, 8])), draw(st.integers(2, 12)), draw(st.sampled_from([16, 23]))
    return lambda: Training(
        lambda: nn.Sequential(
            *(image_layer(kind, channels) for kind in kinds), nn.Flatten(), nn.Linear(channels * side * side, 10)
        ),
        shape=(batch, channels, side, side),
    )


def outcome(training: Training) -> dict[str, object]:
    """What must be equal even if a step was tried twice: BatchNorm's running statistics count tries."""
    parameters = [digest(parameter) for parameter in training.model.parameters()]
    return {"losses": training.losses, "gradients": training.gradients, "parameters": parameters}


# The last two run operators again.
POLICIES = ("auto", "lru", "swap_all", "belady", "superneurons", DiscardAll(once=True))


@given(make=trainings(), share=st.floats(-0.3, 1.2), policy=st.sampled_from(POLICIES))
@settings(
    max_examples=25,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
def test_any_model_under_any_budget_is_exact_and_within_it_or_says_what_is_missing(
    make: Callable[[], Training], share: float, policy: str | DiscardAll, tmp_path_factory: pytest.TempPathFactory
) -> None:
    spill = tmp_path_factory.mktemp("spill")
    expected = make().steps(STEPS)
    static, peak = _need(make, spill)
    budget = max(1, static + int(share * (peak - static)))
    training = make()
    message, during_update = "", False
    try:
        with lowtide.fit(training.model, training.optimizer, budget=budget, spill=spill, policy=policy) as tide:
            try:
                for _ in range(STEPS):
                    with tide.step():
                        during_update = False
                        training.backward_only()
                        during_update = True
                        training.optimizer.step()
                        training.optimizer.zero_grad()
                        training.done += 1
                during_update = False
            finally:
                stats: dict[str, Any] = tide.stats()
                assert stats["peak_reserved_bytes"] <= budget
    except lowtide.BudgetTooSmall as error:
        assert error.op
        assert error.needed_bytes > error.budget_bytes == budget
        assert error.op in str(error)
        message = str(error)
        error.__traceback__ = error.__cause__ = error.__context__ = None
    if share >= 1.05:
        assert not message, "refused what fits"
    assert away_bytes() == 0
    assert list(spill.iterdir()) == []
    if during_update:
        return  # an update half done is as lost as it is without Lowtide
    # What failed had changed nothing: the rest of the training is that of a run that never failed.
    del training.losses[training.done :], training.gradients[training.done :]
    training.optimizer.zero_grad()
    training.steps(STEPS - training.done)
    assert outcome(training) == outcome(expected)


def _need(make: Callable[[], Training], spill: Path) -> tuple[int, int]:
    """Return the static bytes and the peak of a training, with whatever else the process holds now."""
    training = make()
    with lowtide.fit(training.model, training.optimizer, budget=NO_PRESSURE_BYTES, spill=spill) as tide:
        training.steps(STEPS, tide.step)
        stats: dict[str, Any] = tide.stats()
    return stats["static_bytes"], stats["peak_bytes"]


# ---- the smallest budget ----


def cnn() -> Training:
    return Training(models.cnn, shape=(8, 3, 32, 32))


def transformer() -> Training:
    return Training(models.Transformer, shape=(8, 64), labels=256, vocabulary=256)


@pytest.mark.parametrize("policy", ["auto", "lru"])
@pytest.mark.parametrize("make", [cnn, transformer])
def test_the_smallest_budget_that_works_is_at_most_1_15_times_the_floor(
    make: Callable[[], Training], policy: str, tmp_path: Path
) -> None:
    expected = make().steps(6).result()
    needed = need(make, tmp_path)
    assert needed.floor_bytes < 0.8 * needed.peak_bytes, "this model has no pressure to speak of"
    budget = needed.floor(1.15)
    training = make()
    with lowtide.fit(training.model, training.optimizer, budget=budget, spill=tmp_path, policy=policy) as tide:
        training.steps(6, tide.step)
        assert tide.stats()["peak_reserved_bytes"] <= budget  # type: ignore[operator]
    assert training.result() == expected


@pytest.mark.parametrize("make", [cnn, transformer])
def test_less_than_the_floor_is_refused_with_the_operator_and_its_bytes(
    make: Callable[[], Training], tmp_path: Path
) -> None:
    needed = need(make, tmp_path)
    budget = needed.floor(0.5)
    training = make()
    with pytest.raises(lowtide.BudgetTooSmall) as raised:
        with lowtide.fit(training.model, training.optimizer, budget=budget, spill=tmp_path) as tide:
            training.steps(3, tide.step)
    assert raised.value.op.startswith("aten::")
    assert raised.value.needed_bytes > budget


def test_a_budget_below_what_cannot_leave_is_refused_before_the_first_step(tmp_path: Path) -> None:
    training = Training()
    small = torch.ones(30_000, dtype=torch.uint8)  # less than a range is
    with pytest.raises(lowtide.BudgetTooSmall, match="exist already and cannot leave take that much") as raised:
        lowtide.fit(training.model, budget=16 << 10, spill=tmp_path)
    assert small.nbytes < raised.value.needed_bytes < other_bytes()
    assert list(tmp_path.iterdir()) == []
    torch.empty(MIB)  # no budget is in force any more
    with lowtide.fit(training.model, training.optimizer, budget=NO_PRESSURE_BYTES, spill=tmp_path) as tide:
        training.steps(1, tide.step)


def test_a_larger_budget_takes_up_where_a_smaller_one_failed(tmp_path: Path) -> None:
    expected = Training().steps(5).result()
    needed = need(Training, tmp_path)
    training = Training()
    with lowtide.fit(training.model, training.optimizer, budget=needed.share(0.5), spill=tmp_path) as tide:
        training.steps(2, tide.step)
    with pytest.raises(lowtide.BudgetTooSmall):
        with lowtide.fit(training.model, training.optimizer, budget=needed.floor(0.4), spill=tmp_path) as tide:
            training.steps(1, tide.step)
    training.optimizer.zero_grad()
    training.losses.pop(), training.gradients.pop()  # the step that was refused came as far as its update
    with lowtide.fit(training.model, training.optimizer, budget=needed.share(0.7), spill=tmp_path) as tide:
        training.steps(3, tide.step)
    assert training.result() == expected


def test_without_pressure_nothing_moves_at_all(tmp_path: Path) -> None:
    needed = need(Training, tmp_path)
    training = Training()
    with lowtide.fit(training.model, training.optimizer, budget=needed.share(1.3), spill=tmp_path) as tide:
        training.steps(4, tide.step)
        stats: dict[str, Any] = tide.stats()
    assert stats["swapped_out_bytes"] == stats["swapped_in_bytes"] == 0
    assert stats["stall_s"] == 0
    assert stats["planned_swaps"] == 0


def test_repeated_steps_map_no_fresh_memory_under_pressure(tmp_path: Path) -> None:
    def large() -> Training:
        return Training(shape=(2048, 128))

    needed = need(large, tmp_path)
    training = large()
    grown = []
    with lowtide.fit(training.model, training.optimizer, budget=needed.share(0.5), spill=tmp_path) as tide:
        training.steps(6, tide.step)
        # Which block is trimmed depends on when transfers land, so on what else the machine does: the calmest counts.
        while len(grown) < 12 and min(grown, default=2 * needed.peak_bytes) > needed.peak_bytes // 2:
            before = load().counters().fresh_bytes
            training.steps(6, tide.step)
            grown.append(load().counters().fresh_bytes - before)
    # Of six steps, which take six times the peak; pages of small parameters are not worth moving, and are mapped anew.
    assert min(grown) <= needed.peak_bytes // 2


def test_the_peak_of_the_last_step_is_told_beside_that_of_all(tmp_path: Path) -> None:
    needed = need(Training, tmp_path)
    training = Training()
    with lowtide.fit(training.model, training.optimizer, budget=needed.share(1.3), spill=tmp_path) as tide:
        training.steps(2, tide.step)
        whole: dict[str, Any] = tide.stats()
        with tide.step():
            pass
        empty: dict[str, Any] = tide.stats()
    assert whole["last_step_peak_bytes"] == whole["peak_bytes"] > whole["static_bytes"]
    assert empty["peak_bytes"] == whole["peak_bytes"]
    assert empty["last_step_peak_bytes"] == empty["static_bytes"]


# ---- under the kernel's own limits ----


SCRIPT = """
    import json, sys
    from pathlib import Path
    import torch

    torch.manual_seed(1)
    torch.set_num_threads(1)
    layers = [layer for _ in range(24) for layer in (torch.nn.Linear(128, 128), torch.nn.Tanh(), torch.nn.SiLU())]
    model = torch.nn.Sequential(*layers)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9)
    losses = []
    for step in range(3):
        x = torch.randn(8192, 128, generator=torch.Generator().manual_seed(step))
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item().hex())
    Path(sys.argv[1]).write_text(json.dumps(losses))
"""
# 48 saved activations of 4 MiB each: 192 MiB in all.
BUDGET = 64 * MIB
SLACK = 48 * MIB  # thread stacks, the interpreter's own growth, and what libraries take besides tensors

IDLE = """
    import torch
    torch.set_num_threads(1)
    from lowtide.memory.native import load
    import lowtide.execute.tide.script
    load()
    model = torch.nn.Linear(8, 8)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9)  # which imports a compiler: some 60 MB
    model(torch.randn(8, 8)).sum().backward()
    optimizer.step()
    status = open("/proc/self/status").read()
    print(*(int(status.split(name)[1].split()[0]) * 1024 for name in ("VmData:", "RssAnon:")))
"""


def python(*arguments: object, before: Callable[[], None] | None = None) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(entry for entry in sys.path if entry)}
    environment["OMP_NUM_THREADS"] = "1"
    return subprocess.run(
        [sys.executable, *map(str, arguments)],
        capture_output=True,
        text=True,
        env=environment,
        preexec_fn=before,
        timeout=120,
    )


@pytest.fixture(scope="module")
def idle_bytes() -> tuple[int, int]:
    """What a process with torch and Lowtide loaded takes: its data, and of that what is resident."""
    run = python("-c", textwrap.dedent(IDLE))
    assert run.returncode == 0, run.stderr
    data, resident = map(int, run.stdout.split())
    return data, resident


@pytest.fixture(scope="module")
def script(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("script") / "train.py"
    path.write_text(textwrap.dedent(SCRIPT))
    return path


@pytest.fixture(scope="module")
def stock_losses(script: Path, tmp_path_factory: pytest.TempPathFactory) -> str:
    out = tmp_path_factory.mktemp("stock") / "losses"
    run = python(script, out)
    assert run.returncode == 0, run.stderr
    return out.read_text()


def assert_only_lowtide_fits(script: Path, stock_losses: str, tmp_path: Path, before: Callable[[], None]) -> None:
    out, spill, stats = tmp_path / "losses", tmp_path / "spill", tmp_path / "stats.json"
    spill.mkdir()
    plain = python(script, out, before=before)
    assert plain.returncode != 0, "plain PyTorch fits too: the limit proves nothing"
    assert not out.exists()
    options = ["--budget", BUDGET, "--spill", spill, "--json", stats]
    managed = python("-m", "lowtide.cli", "run", *options, script, out, before=before)
    assert managed.returncode == 0, managed.stderr
    assert out.read_text() == stock_losses
    written = json.loads(stats.read_text())
    assert written["peak_reserved_bytes"] <= BUDGET
    assert written["steps"] == 3
    assert list(spill.iterdir()) == []


def test_under_a_limit_on_data_plain_pytorch_fails_and_lowtide_run_gives_the_same_losses(
    script: Path, stock_losses: str, idle_bytes: tuple[int, int], tmp_path: Path
) -> None:
    limit = idle_bytes[0] + BUDGET + SLACK

    def set_limit() -> None:
        resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))

    assert_only_lowtide_fits(script, stock_losses, tmp_path, set_limit)


@contextmanager
def memory_cgroup(limit: int) -> Iterator[Path]:
    """Make a control group that holds no more than `limit` bytes of memory, or skip."""
    if os.geteuid() != 0:
        pytest.skip("only root can make a control group")
    name = f"lowtide-test-{os.getpid()}"
    kinds = [
        (Path("/sys/fs/cgroup/memory"), "memory.limit_in_bytes", "memory.memsw.limit_in_bytes"),
        (Path("/sys/fs/cgroup"), "memory.max", "memory.swap.max"),
    ]
    for root, bound, swap in kinds:
        group = root / name
        try:
            group.mkdir()
        except OSError:
            continue
        try:
            if not (group / bound).exists():
                continue
            (group / bound).write_text(str(limit))
            if (group / swap).exists():
                (group / swap).write_text(str(limit) if "memsw" in swap else "0")
            yield group
            return
        except PermissionError:
            continue
        finally:
            _remove(group)
    pytest.skip("no control group with a memory limit can be made here")


def _remove(group: Path) -> None:
    """Remove a control group once the processes that were killed in it are gone."""
    for _ in range(500):
        left = (group / "cgroup.procs").read_text().split()
        for number in left:
            with suppress(ProcessLookupError):
                os.kill(int(number), signal.SIGKILL)
        with suppress(OSError):
            group.rmdir()
            return
        time.sleep(0.01)
    group.rmdir()


def test_under_a_memory_cgroup_plain_pytorch_is_killed_and_lowtide_run_gives_the_same_losses(
    script: Path, stock_losses: str, idle_bytes: tuple[int, int], tmp_path: Path
) -> None:
    with memory_cgroup(idle_bytes[1] + BUDGET + SLACK) as group:
        procs = group / "cgroup.procs"

        def join() -> None:
            procs.write_text(str(os.getpid()))

        assert_only_lowtide_fits(script, stock_losses, tmp_path, join)


STATE_SCRIPT = """
    import sys
    import torch
    torch.set_num_threads(1)
    torch.manual_seed(5)
    model = torch.nn.Sequential(*(torch.nn.Linear(1024, 1024, bias=False) for _ in range(24)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses = []
    for step in range(3):
        loss = model(torch.randn(32, 1024)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    open(sys.argv[1], "w").write(" ".join(map(str, losses)))
"""
STATE_BYTES = 24 * 4 * 4 * MIB  # parameters, gradients and two moments


@pytest.mark.slow  # a minute
def test_under_a_memory_cgroup_an_automatic_budget_trains_or_refuses_and_is_never_killed(
    idle_bytes: tuple[int, int], tmp_path: Path
) -> None:
    """Its parameters and Adam's moments do not fit in any of these limits."""
    script, expected = tmp_path / "train.py", tmp_path / "expected"
    script.write_text(textwrap.dedent(STATE_SCRIPT))
    assert python(script, expected).returncode == 0
    ended = {}
    for room in (32 * MIB, 96 * MIB, 160 * MIB, 224 * MIB, 272 * MIB):
        out = tmp_path / f"losses {room}"
        assert room < 3 * STATE_BYTES // 4
        with memory_cgroup(idle_bytes[1] + room) as group:
            procs = group / "cgroup.procs"

            def join(procs: Path = procs) -> None:
                procs.write_text(str(os.getpid()))

            managed = python(
                "-m", "lowtide.cli", "run", "--budget", "auto", "--spill", tmp_path, script, out, before=join
            )
        assert managed.returncode in (0, 2), (room, managed.returncode, managed.stderr)
        assert "budget" in managed.stderr or managed.returncode == 0
        if managed.returncode == 0:
            assert out.read_text() == expected.read_text()
        ended[room] = managed.returncode
    assert ended[272 * MIB] == 0, "none of the limits lets it train: this shows little"
