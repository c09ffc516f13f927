"""Disks that fail, programs that raise, processes that are killed: nothing is lost silently, nothing is left behind."""

from __future__ import annotations

import errno
import gc
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

import lowtide
from lowtide.memory.native import load
from lowtide.tiers import Direction, Fault, FaultKind, Faulty, FileMedium, Latency
from lowtide.tiers.medium import Medium
from tests.execute.training import Need, Training, away_bytes
from tests.interrupts import feel_interrupts

STEPS = 5


@pytest.fixture(scope="module")
def stock() -> dict[str, object]:
    return Training().steps(STEPS).result()


def faulty(directory: Path, *faults: Fault) -> Faulty:
    return Faulty(FileMedium([directory]), script=faults)


def fault(direction: Direction, kind: FaultKind, nth: int = 1, *, lasting: bool = False, hang_s: float = 0.0) -> Fault:
    return Fault(direction=direction, nth=nth, kind=kind, lasting=lasting, hang_s=hang_s)


def train(medium: Medium | Path, budget_bytes: int, *, policy: str = "auto", verify: bool = False) -> dict[str, Any]:
    """Train inside a budget; return the results and the statistics."""
    training = Training()
    with lowtide.fit(
        training.model, training.optimizer, budget=budget_bytes, spill=medium, policy=policy, verify=verify
    ) as tide:
        training.steps(STEPS, tide.step)
        stats = dict(tide.stats())
        with tide.step():
            pass  # lets the tide hear of what the last step let go
        taken = tide.memory.native.tier_counters(tide.memory.first_tier)[2]  # type: ignore[attr-defined]
        assert taken <= stats["static_bytes"]  # copies of what lives on, and of nothing else
    assert away_bytes() == 0
    assert stats["peak_reserved_bytes"] <= budget_bytes
    return {"result": training.result(), "stats": stats}


def assert_nothing_left(directory: Path) -> None:
    assert list(directory.rglob("*")) == []


# ---- writes ----


@pytest.mark.parametrize("kind", [FaultKind.ENOSPC, FaultKind.EIO])
@pytest.mark.parametrize("policy", ["auto", "lru"])
def test_a_failed_write_keeps_the_value_warns_once_and_training_stays_exact(
    kind: FaultKind, policy: str, mlp_need: Need, stock: dict[str, object], tmp_path: Path
) -> None:
    medium = faulty(tmp_path, fault(Direction.WRITE, kind, 2), fault(Direction.WRITE, kind, 5))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        out = train(medium, mlp_need.share(0.6), policy=policy)
    assert len(medium.fired) == 2
    kept = [str(warning.message) for warning in caught if "keeping the data in memory" in str(warning.message)]
    assert len(kept) == 1
    assert os.strerror(errno.ENOSPC if kind is FaultKind.ENOSPC else errno.EIO) in kept[0]
    assert out["result"] == stock
    assert out["stats"]["swapped_out_bytes"] > 0


def test_a_disk_that_takes_nothing_raises_budget_too_small_and_says_why(mlp_need: Need, tmp_path: Path) -> None:
    medium = faulty(tmp_path, fault(Direction.WRITE, FaultKind.ENOSPC, lasting=True))
    with pytest.warns(RuntimeWarning, match="keeping the data in memory"):
        with pytest.raises(lowtide.BudgetTooSmall, match=os.strerror(errno.ENOSPC)) as raised:
            train(medium, mlp_need.share(0.5))
    assert raised.value.op.startswith("aten::")
    assert_nothing_left(tmp_path)


def test_a_disk_that_takes_nothing_does_no_harm_where_memory_suffices(
    mlp_need: Need, stock: dict[str, object], tmp_path: Path
) -> None:
    medium = faulty(tmp_path, fault(Direction.WRITE, FaultKind.EIO, lasting=True))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        out = train(medium, mlp_need.share(1.2), policy="swap_all")
    assert medium.fired
    assert out["result"] == stock
    assert out["stats"]["swapped_out_bytes"] == 0


def test_a_warning_that_is_an_error_is_raised_and_leaves_the_tide_in_order(
    mlp_need: Need, stock: dict[str, object], tmp_path: Path
) -> None:
    training, raised = Training(), 0
    medium = faulty(tmp_path, fault(Direction.WRITE, FaultKind.EIO, 2))
    with lowtide.fit(training.model, training.optimizer, budget=mlp_need.share(0.5), spill=medium) as tide:
        while training.done < STEPS:
            try:
                with warnings.catch_warnings():
                    warnings.simplefilter("error")
                    training.steps(1, tide.step)
            except RuntimeWarning:
                raised += 1
                training.optimizer.zero_grad()
    assert raised == 1
    assert training.result()["state"] == stock["state"]


@contextmanager
def tmpfs(at: Path, *, nbytes: int) -> Iterator[Path]:
    if os.geteuid() != 0:
        pytest.skip("only root can mount a small filesystem")
    at.mkdir()
    mount = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={nbytes}", "tmpfs", str(at)], capture_output=True, text=True
    )
    if mount.returncode != 0:
        pytest.skip(f"cannot mount: {mount.stderr.strip()}")
    try:
        yield at
        assert_nothing_left(at)
    finally:
        subprocess.run(["umount", str(at)], check=True)


def test_a_full_disk_keeps_values_in_memory(mlp_need: Need, stock: dict[str, object], tmp_path: Path) -> None:
    with tmpfs(tmp_path / "small", nbytes=1 << 20) as small:
        with pytest.warns(RuntimeWarning, match="No space left"):
            out = train(small, mlp_need.share(1.2), policy="swap_all")
        assert out["result"] == stock
        assert out["stats"]["swapped_out_bytes"] > 0
        with pytest.warns(RuntimeWarning), pytest.raises(lowtide.BudgetTooSmall, match="No space left"):
            train(small, mlp_need.share(0.3))


def test_a_small_disk_budget_is_kept_and_the_rest_stays_in_memory(
    mlp_need: Need, stock: dict[str, object], tmp_path: Path
) -> None:
    training, capacity = Training(), 1 << 20
    budget: dict[str, str | int] = {"cpu": mlp_need.share(1.2), "disk": capacity}
    with (
        pytest.warns(RuntimeWarning, match="No space left"),
        lowtide.fit(training.model, training.optimizer, budget=budget, spill=tmp_path, policy="swap_all") as tide,
    ):
        training.steps(STEPS, tide.step)
        assert tide.stats()["swapped_out_bytes"] > 0  # type: ignore[operator]
    assert training.result() == stock
    with pytest.warns(RuntimeWarning), pytest.raises(lowtide.BudgetTooSmall, match="No space left"):
        training = Training()
        with lowtide.fit(
            training.model, training.optimizer, budget={"cpu": mlp_need.share(0.3), "disk": capacity}, spill=tmp_path
        ) as tide:
            training.steps(STEPS, tide.step)


# ---- reads ----


@pytest.mark.parametrize("kind", [FaultKind.EIO, FaultKind.SHORT_READ])
def test_a_failed_read_raises_from_backward_and_the_next_try_is_exact(
    kind: FaultKind, mlp_need: Need, stock: dict[str, object], tmp_path: Path
) -> None:
    training, failed = Training(), 0
    medium = faulty(tmp_path)
    with lowtide.fit(
        training.model, training.optimizer, budget=mlp_need.floor(1.1), spill=medium, policy="lru"
    ) as tide:
        while training.done < STEPS:
            # An update half done is as lost as it is without Lowtide: the disk fails in forward and backward.
            if failed < 2:
                medium.script = (fault(Direction.READ, kind, lasting=True),)
            try:
                with tide.step():
                    training.backward_only()
                    medium.script = ()
                    training.optimizer.step()
                    training.optimizer.zero_grad()
                    training.done += 1
            except lowtide.SpillError as error:
                failed += 1
                assert "of a tensor" in str(error)
                assert error.errno == errno.EIO
                medium.script = ()
                del training.losses[training.done :], training.gradients[training.done :]
                training.optimizer.zero_grad()
    assert failed == 2
    assert len(medium.fired) >= 2
    assert training.result() == stock
    assert away_bytes() == 0


def test_a_disk_that_gives_nothing_back_raises_and_says_what_is_lost(mlp_need: Need, tmp_path: Path) -> None:
    medium = faulty(tmp_path)
    training = Training()
    weights = [parameter for parameter in training.model.parameters() if parameter.nbytes >= 64 << 10]
    with pytest.raises(lowtide.SpillError, match="cannot be read back"):
        with lowtide.fit(training.model, training.optimizer, budget=mlp_need.share(1.2), spill=medium) as tide:
            training.steps(1, tide.step)
            load().leave_all()
            load().settle()
            assert away_bytes() > 0
            medium.script = (fault(Direction.READ, FaultKind.EIO, lasting=True),)
    # What went with the disk reads as NaN, never as numbers that look right.
    assert weights
    assert all(weight.detach().flatten()[weight.numel() // 2].isnan() for weight in weights)


def test_a_file_that_was_cut_off_raises_spill_error(mlp_need: Need, tmp_path: Path) -> None:
    training = Training()
    medium = FileMedium([tmp_path])
    with pytest.raises(lowtide.SpillError, match="came back short"):
        with lowtide.fit(training.model, budget=mlp_need.floor(1.2), spill=medium, policy="lru") as tide, tide.step():
            loss = training.loss()
            load().leave_all()
            load().settle()
            os.ftruncate(medium.fds[0], 0)
            loss.backward()


def test_a_read_that_failed_may_be_tried_again_on_the_same_graph(mlp_need: Need, tmp_path: Path) -> None:
    expected = Training()
    expected.backward_only()
    training = Training()
    medium = faulty(tmp_path)
    with lowtide.fit(training.model, training.optimizer, budget="64MiB", spill=medium, policy="lru") as tide:
        with pytest.raises(lowtide.SpillError), tide.step():
            loss = training.loss()
            load().leave_all()
            load().settle()
            medium.script = (fault(Direction.READ, FaultKind.EIO, medium._counts[Direction.READ] + 1),)
            loss.backward(retain_graph=True)
        training.optimizer.zero_grad()
        with tide.step():
            loss.backward()
        assert [p.grad.tolist() for p in training.model.parameters()] == [  # type: ignore[union-attr]
            p.grad.tolist()
            for p in expected.model.parameters()  # type: ignore[union-attr]
        ]


@pytest.mark.parametrize("direction", [Direction.WRITE, Direction.READ])
def test_a_flipped_bit_is_found_when_verify_is_on(direction: Direction, mlp_need: Need, tmp_path: Path) -> None:
    medium = faulty(tmp_path, fault(direction, FaultKind.FLIP, 3))
    with pytest.raises(lowtide.SpillCorrupted, match="checksum differs"):
        train(medium, mlp_need.share(0.5), verify=True)
    gc.collect()
    assert away_bytes() == 0


def test_verify_finds_nothing_wrong_on_a_good_disk(mlp_need: Need, stock: dict[str, object], tmp_path: Path) -> None:
    out = train(tmp_path, mlp_need.share(0.5), verify=True)
    assert out["result"] == stock
    assert out["stats"]["swapped_in_bytes"] > 0


@pytest.mark.parametrize("policy", ["auto", "lru"])
def test_a_slow_disk_stalls_and_stays_exact(
    policy: str, mlp_need: Need, stock: dict[str, object], tmp_path: Path
) -> None:
    out = train(Latency(FileMedium([tmp_path]), write_s=0.01, read_s=0.01), mlp_need.share(0.5), policy=policy)
    assert out["result"] == stock
    assert out["stats"]["stall_s"] > 0


# ---- the user's own exceptions ----


class UserError(Exception):
    pass


def fail_in_forward(training: Training) -> None:
    loss = training.loss()
    raise UserError(f"after a forward pass that gave {loss.item()}")


def fail_in_backward(training: Training) -> None:
    x, _ = training.batch(training.done)
    layers: list[torch.nn.Module] = list(training.model)  # type: ignore[call-overload]
    half = len(layers) // 2
    for layer in layers[:half]:
        x = layer(x)

    def refuse(_grad: Tensor) -> Tensor:
        raise UserError("in the middle of backward")

    x.register_hook(refuse)
    for layer in layers[half:]:
        x = layer(x)
    x.sum().backward()


@pytest.mark.parametrize("failure", [fail_in_forward, fail_in_backward])
@pytest.mark.parametrize("when", [0, 2])
@pytest.mark.parametrize("policy", ["auto", "lru"])
def test_after_an_exception_of_the_user_the_next_step_is_exact_and_nothing_leaks(
    failure: Callable[[Training], None],
    when: int,
    policy: str,
    mlp_need: Need,
    stock: dict[str, object],
    tmp_path: Path,
) -> None:
    training = Training()
    with lowtide.fit(
        training.model, training.optimizer, budget=mlp_need.share(0.5), spill=tmp_path, policy=policy
    ) as tide:
        training.steps(when, tide.step)
        with pytest.raises(UserError), tide.step():
            failure(training)
        training.optimizer.zero_grad()
        training.steps(STEPS - when, tide.step)
        with tide.step():
            pass
        held = tide.memory.native.tier_counters(tide.memory.first_tier)[2]  # type: ignore[attr-defined]
        assert held <= tide.stats()["static_bytes"]  # type: ignore[operator]
        assert tide.stats()["swapped_out_bytes"] > 0  # type: ignore[operator]
    assert training.result() == stock
    assert_nothing_left(tmp_path)


# ---- graphs that outlive their tide ----


def test_backward_after_close_is_exact(mlp_need: Need, tmp_path: Path) -> None:
    expected = Training()
    expected.backward_only()
    training = Training()
    with lowtide.fit(training.model, budget=mlp_need.share(0.5), spill=tmp_path, policy="lru") as tide, tide.step():
        loss = training.loss()
    loss.backward()
    training.losses.append(loss.item())
    got = [p.grad for p in training.model.parameters()]
    assert all(torch.equal(a, b.grad) for a, b in zip(got, expected.model.parameters(), strict=True))  # type: ignore[arg-type]
    del loss
    assert away_bytes() == 0


@pytest.mark.parametrize("policy", ["auto", "swap_all"])
def test_a_graph_of_a_closed_tide_and_one_of_the_next_do_not_disturb_each_other(
    policy: str, mlp_need: Need, stock: dict[str, object], tmp_path: Path
) -> None:
    expected = Training()
    expected.backward_only()
    old = Training()
    with lowtide.fit(old.model, budget=mlp_need.share(0.5), spill=tmp_path, policy=policy) as tide:
        for _ in range(2):  # the second one follows a plan
            with tide.step():
                old.loss().backward()
                old.optimizer.zero_grad()
        with tide.step():
            loss = old.loss()
    training = Training()
    with lowtide.fit(
        training.model, training.optimizer, budget=mlp_need.share(3.0), spill=tmp_path, policy=policy
    ) as tide:
        training.steps(2, tide.step)
        with tide.step():
            inner = training.loss()
            loss.backward()
            inner.backward()
            training.losses.append(inner.item())
            training.gradients.append("")
            training.optimizer.step()
            training.optimizer.zero_grad()
            training.done += 1
        training.steps(STEPS - 3, tide.step)
    got = [p.grad for p in old.model.parameters()]
    assert all(torch.equal(a, b.grad) for a, b in zip(got, expected.model.parameters(), strict=True))  # type: ignore[arg-type]
    assert training.result()["state"] == stock["state"]
    del loss, inner
    assert away_bytes() == 0


# ---- processes ----


PROGRAM = """
    import os, sys
    from pathlib import Path
    import torch
    import lowtide
    from lowtide.tiers import FileMedium, Latency
    from tests.execute.training import Training

    torch.set_num_threads(1)
    budget, spill = int(sys.argv[1]), Path(sys.argv[2])
    medium = Latency(FileMedium([spill]), write_s=0.05, read_s=0.05)
    training = Training()
    with lowtide.fit(training.model, training.optimizer, budget=budget, spill=medium) as tide:
        for index in range(10_000):
            training.steps(1, tide.step)
            if index == 1:
                print("going", flush=True)
"""


def start(program: str, *arguments: object) -> subprocess.Popen[str]:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(Path(__file__).parents[2]), *sys.path])}
    return subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(program), *map(str, arguments)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
        preexec_fn=feel_interrupts,
    )


@pytest.mark.parametrize(("number", "expected"), [(signal.SIGINT, "KeyboardInterrupt"), (signal.SIGKILL, "")])
def test_a_training_that_is_killed_ends_at_once_and_leaves_nothing(
    number: signal.Signals, expected: str, mlp_need: Need, tmp_path: Path
) -> None:
    base = mlp_need.share(0.5) - mlp_need.share(0.0)
    process = start(PROGRAM, base + mlp_need.static_bytes - mlp_need.base_bytes, tmp_path)
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        assert line == "going\n", process.communicate()[1]
        time.sleep(0.37)
        process.send_signal(number)
        started = time.monotonic()
        _, errors = process.communicate(timeout=20)
    finally:
        process.kill()
        process.wait()
    assert time.monotonic() - started < 5
    assert expected in errors
    assert "BudgetTooSmall" not in errors
    assert process.returncode == (-number if number is signal.SIGKILL else 130 if process.returncode > 0 else -number)
    assert_nothing_left(tmp_path)


HANG = """
    import sys
    from pathlib import Path
    import torch
    import lowtide
    from lowtide.tiers import Direction, Fault, FaultKind, Faulty, FileMedium
    from tests.execute.training import Training

    torch.set_num_threads(1)
    budget, spill = int(sys.argv[1]), Path(sys.argv[2])
    hang = Fault(direction=Direction.WRITE, nth=1, kind=FaultKind.HANG, hang_s=2.0, lasting=True)
    training = Training()
    try:
        with lowtide.fit(training.model, budget=budget, spill=Faulty(FileMedium([spill]), script=[hang])) as tide:
            print("going", flush=True)
            training.steps(1000, tide.step)
    except KeyboardInterrupt:
        print("interrupted", flush=True)
"""


def test_ctrl_c_reaches_a_program_that_waits_for_a_disk_that_hangs(mlp_need: Need, tmp_path: Path) -> None:
    base = mlp_need.share(0.5) - mlp_need.share(0.0)
    process = start(HANG, base + mlp_need.static_bytes - mlp_need.base_bytes, tmp_path)
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "going\n"
        time.sleep(1.0)
        process.send_signal(signal.SIGINT)
        started = time.monotonic()
        out, errors = process.communicate(timeout=30)
    finally:
        process.kill()
        process.wait()
    assert out == "interrupted\n", errors
    # The writes that hang have to end, those behind them are not begun.
    assert time.monotonic() - started < 6


# ---- fork ----


def fork(work: Callable[[], object]) -> int:
    """Do something in a forked child, which never comes back into the test; return its number."""
    child = os.fork()
    if child == 0:
        code = 1
        try:
            work()
            code = 0
        finally:
            os._exit(code)
    return child


def wait_for(child: int) -> None:
    """Wait for a child, which must have done its work; one that hangs is ended."""
    for _ in range(2000):
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            assert os.waitstatus_to_exitcode(status) == 0
            return
        time.sleep(0.01)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    pytest.fail("a forked child hangs")


@pytest.mark.parametrize("direct", [True, False])
def test_forked_loader_workers_neither_hang_nor_disturb_the_spill(direct: bool, mlp_need: Need, tmp_path: Path) -> None:
    dataset = TensorDataset(torch.randn(2048, 128, generator=torch.Generator().manual_seed(1)))

    def run(step: Callable[[], Any] | None) -> list[float]:
        torch.manual_seed(3)
        training, losses = Training(), []
        loader = DataLoader(dataset, batch_size=512, num_workers=2, multiprocessing_context="fork", timeout=60)
        for _ in range(2):
            for (x,) in loader:
                if step is None:
                    training_step(training, x, losses)
                else:
                    with step():
                        training_step(training, x, losses)
        return losses

    def training_step(training: Training, x: Tensor, losses: list[float]) -> None:
        loss = training.model(x).square().mean()
        loss.backward()
        training.optimizer.step()
        training.optimizer.zero_grad()
        losses.append(loss.item())

    expected = run(None)
    medium: Medium = FileMedium([tmp_path])
    if not direct:
        medium = Latency(medium, write_s=0.002, read_s=0.002)
    with lowtide.fit(budget=mlp_need.share(0.8), spill=medium) as tide:
        assert run(tide.step) == expected
        assert tide.stats()["swapped_out_bytes"] > 0  # type: ignore[operator]
    assert_nothing_left(tmp_path)


def test_a_fork_in_the_middle_of_transfers_loses_no_bytes(
    mlp_need: Need, stock: dict[str, object], tmp_path: Path
) -> None:
    training, children = Training(), []
    keep: list[Tensor] = []

    def allocate_and_forget() -> None:
        # A child may allocate, free and forget its parent's tensors; none of that is the parent's business.
        del keep[:]
        torch.ones(1 << 20).sum()

    with lowtide.fit(training.model, training.optimizer, budget=mlp_need.share(0.5), spill=tmp_path) as tide:
        for _ in range(STEPS):
            with tide.step():
                loss = training.loss()
                keep[:] = [loss]
                children.append(fork(allocate_and_forget))
                loss.backward()
                children.append(fork(allocate_and_forget))
                training.losses.append(loss.item())
                training.gradients.append("")
                del keep[:], loss
                training.optimizer.step()
                training.optimizer.zero_grad()
                training.done += 1
    for child in children:
        wait_for(child)
    assert training.result()["state"] == stock["state"]
    assert training.losses == stock["losses"]


def test_forks_from_a_busy_process_never_deadlock(mlp_need: Need, tmp_path: Path) -> None:
    program = """
        import faulthandler, os, sys, threading
        faulthandler.dump_traceback_later(60, exit=True)
        import torch
        import lowtide
        from tests.execute.training import Training

        torch.set_num_threads(1)
        budget, spill = int(sys.argv[1]), sys.argv[2]
        training, done = Training(shape=(511, 128)), threading.Event()  # odd sizes: the last page is not full

        def forks():
            while not done.is_set():
                child = os.fork()
                if child == 0:
                    torch.ones(100_000)
                    os._exit(0)
                assert os.waitpid(child, 0)[1] == 0

        with lowtide.fit(training.model, training.optimizer, budget=budget, spill=spill, policy="swap_all") as tide:
            training.steps(2, tide.step)
            forking = threading.Thread(target=forks)
            forking.start()
            training.steps(40, tide.step)
            done.set()
            forking.join()
        print("exact" if training.result() == Training(shape=(511, 128)).steps(42).result() else "different")
    """
    base = mlp_need.share(0.6) - mlp_need.share(0.0)
    process = start(program, base + mlp_need.static_bytes - mlp_need.base_bytes, tmp_path)
    out, errors = process.communicate(timeout=90)
    assert out == "exact\n", errors


def test_a_child_forked_while_another_thread_runs_backward_can_run_operators() -> None:
    program = """
        import faulthandler, os, signal, threading, time
        faulthandler.dump_traceback_later(60, exit=True)
        import torch
        from lowtide.memory.native import load

        torch.set_num_threads(1)
        native, stuck = load(), []
        native.observe(1)
        x = torch.ones(4, requires_grad=True)
        heap = bytearray(50 << 20)  # much to copy: a fork takes long
        heap[::4096] = bytes([1]) * len(heap[::4096])

        def forks():
            for _ in range(200):
                child = os.fork()
                if child == 0:
                    signal.alarm(10)
                    torch.ones(10)
                    os._exit(0)
                while (ended := os.waitpid(child, os.WNOHANG))[0] == 0:
                    time.sleep(0.0005)
                if ended[1]:
                    stuck.append(child)
                    break

        forking = threading.Thread(target=forks)
        forking.start()
        while forking.is_alive():
            y = x
            for _ in range(50):
                y = y * 2
            y.sum().backward()  # copies PyTorch's observers at each node
        assert not stuck
        print("done")
    """
    out, errors = start(program).communicate(timeout=90)
    assert out == "done\n", errors


def test_a_log_in_which_operators_may_be_missing_is_not_whole() -> None:
    program = """
        import os, threading
        import torch
        from lowtide.memory.native import load

        native = load()

        def fork():
            if (child := os.fork()) == 0:
                os._exit(0)
            os.waitpid(child, 0)

        def logged(work):
            native.observe(2)
            native.log_start()
            torch.ones(10)
            work()
            torch.ones(10)
            if (log := native.log_stop()) is not None:
                return sum(native.names()[entry.a] == "aten::ones" for entry in log if entry.kind == 4)

        def elsewhere():
            forking = threading.Thread(target=fork)
            forking.start()
            forking.join()

        print(logged(lambda: None), logged(fork), logged(elsewhere), logged(lambda: None))
    """
    out, errors = start(program).communicate(timeout=90)
    assert out == "2 2 None 2\n", errors


def test_a_child_forked_while_observing_begins_or_ends_can_run_operators() -> None:
    program = """
        import faulthandler, itertools, os, signal, threading, time
        faulthandler.dump_traceback_later(60, exit=True)
        import torch
        from lowtide.memory.native import load

        torch.set_num_threads(1)
        native, stuck = load(), []

        def forks():
            for _ in range(250):
                child = os.fork()
                if child == 0:
                    signal.alarm(10)
                    torch.ones(10)
                    os._exit(0)
                while (ended := os.waitpid(child, os.WNOHANG))[0] == 0:
                    time.sleep(0.0005)
                if ended[1]:
                    stuck.append(child)
                    break

        forking, ones = threading.Thread(target=forks), torch.ones(100)
        forking.start()
        for detail in itertools.cycle((1, 2)):
            native.observe(detail)
            for _ in range(3):
                ones + 1  # lets go of the GIL before PyTorch looks at its observers
            if not forking.is_alive():
                break
        assert not stuck
        print("done")
    """
    out, errors = start(program).communicate(timeout=90)
    assert out == "done\n", errors


def test_a_forked_child_does_not_close_descriptors_that_are_not_the_spills(tmp_path: Path) -> None:
    medium = FileMedium([tmp_path])
    with lowtide.fit(budget=1 << 30, spill=medium):

        def open_one_and_close_the_spill() -> None:
            mine = os.open("/dev/zero", os.O_RDONLY)
            medium.close()
            assert os.read(mine, 1) == b"\0"

        wait_for(fork(open_one_and_close_the_spill))


def test_a_child_forked_after_the_end_keeps_descriptors_that_were_the_spills(tmp_path: Path) -> None:
    reading, writing = os.pipe()
    medium = FileMedium([tmp_path])
    spilled_to = medium.fds[0]
    with lowtide.fit(budget=1 << 30, spill=medium):
        pass
    os.dup2(writing, spilled_to)
    wait_for(fork(lambda: os.write(spilled_to, b"here")))
    os.close(spilled_to)
    os.close(writing)
    assert os.read(reading, 4) == b"here"
    os.close(reading)


def test_one_thread_may_close_a_tide_that_another_one_opened(mlp_need: Need, tmp_path: Path) -> None:
    training = Training()
    tide = lowtide.fit(training.model, training.optimizer, budget=mlp_need.share(0.5), spill=tmp_path)
    training.steps(1, tide.step)
    closing = threading.Thread(target=tide.close)
    closing.start()
    closing.join(30)
    assert not closing.is_alive()
    assert_nothing_left(tmp_path)
