"""A saved state is whole or the one before, is written once, and is refused where it does not belong."""

from __future__ import annotations

import errno
import os
import random
import resource
import select
import shutil
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import lowtide
from lowtide.checkpoint.directory import Directory
from lowtide.errors import BadArgument, CheckpointCorrupted, CheckpointError, CheckpointMismatch
from tests.checkpoint.trainings import Run

MIB = 2**20


def state_files(path: Path) -> set[str]:
    return {file.name for file in path.iterdir()}


def save(path: Path, run: Run, **more: Any) -> Any:
    return lowtide.save_checkpoint(path, run.model, run.optimizer, **run.objects, **more)


def load(path: Path, run: Run) -> Any:
    return lowtide.load_checkpoint(path, run.model, run.optimizer, **run.objects)


# ---- whole or not at all ----


def in_a_child(work: Callable[[], None]) -> int:
    """Run `work` in a forked process; return how it ended."""
    child = os.fork()
    if child == 0:
        try:
            work()
            os._exit(0)
        finally:
            os._exit(1)
    return os.waitpid(child, 0)[1]


def killed_at(call: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Kill the process when it is about to make its `call`-th system call that changes a disk."""
    calls = 0

    def counted(original: Callable[..., Any]) -> Callable[..., Any]:
        def counting(*args: Any, **kwargs: Any) -> Any:
            nonlocal calls
            calls += 1
            if calls == call:
                os.kill(os.getpid(), signal.SIGKILL)
            return original(*args, **kwargs)

        return counting

    for name in ("fsync", "replace"):
        monkeypatch.setattr(os, name, counted(getattr(os, name)))
    monkeypatch.setattr(Path, "unlink", counted(Path.unlink))
    monkeypatch.setattr("lowtide.checkpoint.shard._write_all", counted(lowtide.checkpoint.shard._write_all))


def test_a_save_that_is_killed_at_any_point_leaves_the_state_before_or_the_new_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Run(depth=2)
    run.steps(1)
    save(tmp_path / "saved", run, steps=1)
    before = [tensor.clone() for tensor in run.model.parameters()]
    run.steps(1)
    after = [tensor.clone() for tensor in run.model.parameters()]
    seen: set[int] = set()
    ended, call = -1, 0
    while ended != 0:
        call += 1
        # Each begins with the state before, and what the one that was killed has left.
        ended = in_a_child(lambda call=call: (killed_at(call, monkeypatch), save(tmp_path / "saved", run, steps=2)))  # type: ignore[misc]
        assert ended in (0, signal.SIGKILL), f"call {call}"
        loaded = Run(depth=2, seed=77)
        steps = load(tmp_path / "saved", loaded)["steps"]
        seen.add(steps)
        expected = before if steps == 1 else after
        for ours, theirs in zip(loaded.model.parameters(), expected, strict=True):
            assert torch.equal(ours, theirs), f"call {call}"
        if ended != 0 and steps == 2:
            run.model.load_state_dict(dict(loaded.model.state_dict()))
            continue
    assert seen == {1, 2}
    assert call > 20, "there are many moments to be killed at"
    manifest = (tmp_path / "saved" / "manifest.json").read_text()
    left = {name for name in state_files(tmp_path / "saved") if name not in manifest}
    assert left == {"manifest.json"}, "nothing is left of those that were killed"


class Life:
    """A training in a forked process that saves after every step, and goes on from the last state when it begins."""

    def __init__(self, saved: Path, spill: Path, steps: int) -> None:
        self.process = os.fork()
        if self.process:
            return
        try:
            run = Run(depth=2)
            with lowtide.fit(run.model, run.optimizer, budget=2 * MIB, spill=spill) as tide:
                if (saved / "manifest.json").exists():
                    tide.load(saved, **run.objects)
                while tide.steps < steps:
                    run.steps(1, tide.step)
                    tide.save(saved, **run.objects)
            os._exit(0)
        finally:
            os._exit(1)

    def end(self, after_s: float) -> bool:
        """Kill it `after_s` seconds from now, unless it is done by then; tell whether it was."""
        watched = os.pidfd_open(self.process)
        try:
            done = bool(select.select([watched], [], [], after_s)[0])
            os.kill(self.process, signal.SIGKILL)
        finally:
            os.close(watched)
        status = os.waitpid(self.process, 0)[1]
        assert status in (0, signal.SIGKILL)
        return done


@pytest.mark.parametrize(
    ("times", "steps", "seed"),
    [(3, 2, 0), *(pytest.param(10, 5, seed, marks=pytest.mark.slow) for seed in range(1, 11))],
)
def test_a_training_that_is_killed_again_and_again_goes_on_from_its_last_state(
    times: int, steps: int, seed: int, tmp_path: Path
) -> None:
    stock = Run(depth=2)
    digests = {}
    for done in range(1, steps + 1):
        stock.steps(1)
        digests[done] = stock.digest()
    began = time.perf_counter()
    assert Life(tmp_path / "whole", tmp_path, steps).end(after_s=60)
    whole_s = time.perf_counter() - began
    moments = random.Random(seed)
    killed, reached, saved = 0, set(), tmp_path / "saved"
    while killed < times or steps not in reached:
        done = Life(saved, tmp_path, steps).end(after_s=moments.random() * whole_s)
        killed += not done
        if not (saved / "manifest.json").exists():
            continue
        run = Run(depth=2, seed=55)
        at = lowtide.load_checkpoint(saved, run.model, run.optimizer, **run.objects)["steps"]
        assert run.digest() == digests[at], f"after {killed} kills, at step {at}"
        reached.add(at)
        if at == steps:
            shutil.rmtree(saved)


def test_a_first_save_that_is_killed_leaves_nothing_that_loads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run(depth=1)
    assert in_a_child(lambda: (killed_at(3, monkeypatch), save(tmp_path / "saved", run))) == signal.SIGKILL  # type: ignore[arg-type]
    with pytest.raises(CheckpointError, match="holds no saved state"):
        load(tmp_path / "saved", run)
    save(tmp_path / "saved", run)
    load(tmp_path / "saved", Run(depth=1, seed=2))


def test_a_full_disk_keeps_the_state_before_and_says_so(tmp_path: Path) -> None:
    run = Run()
    save(tmp_path / "saved", run)
    before, files = run.digest(), state_files(tmp_path / "saved")
    run.steps(1)

    def on_a_full_disk() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (MIB, MIB))
        with pytest.raises(CheckpointError, match=r"failed: File too large; the state that was saved.* is still there"):
            save(tmp_path / "saved", run)

    assert in_a_child(on_a_full_disk) == 0
    assert state_files(tmp_path / "saved") == files
    loaded = Run(seed=8)
    load(tmp_path / "saved", loaded)
    assert loaded.digest() == before


def test_a_disk_that_fails_at_the_manifest_keeps_the_state_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Run()
    save(tmp_path / "saved", run)
    files = state_files(tmp_path / "saved")
    run.steps(1)

    def full(_self: Directory, _manifest: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(Directory, "commit", full)
        with pytest.raises(CheckpointError, match=r"is still there\. Make room on the disk") as told:
            save(tmp_path / "saved", run)
    assert told.value.errno == errno.ENOSPC
    assert state_files(tmp_path / "saved") == files


def test_only_one_process_saves_to_a_directory(tmp_path: Path) -> None:
    run = Run(depth=1)
    save(tmp_path, run)
    held, hold = os.pipe()
    told, tell = os.pipe()
    child = os.fork()
    if child == 0:
        from lowtide.checkpoint.directory import saving_to

        with saving_to(tmp_path):
            os.write(tell, b"x")
            os.close(hold)
            os.read(held, 1)
        os._exit(0)
    os.read(told, 1)
    with pytest.raises(CheckpointError, match="another process is saving"):
        save(tmp_path, run)
    os.close(hold)
    assert os.waitpid(child, 0)[1] == 0
    save(tmp_path, run)


# ---- incremental ----


def test_what_has_not_changed_is_not_written_again(tmp_path: Path) -> None:
    run = Run()
    first = save(tmp_path / "saved", run)
    again = save(tmp_path / "saved", run)
    assert first.written_bytes == first.total_bytes
    assert again.written_bytes == 0
    files = state_files(tmp_path / "saved")
    run.steps(1)  # makes the optimizer's state, and changes all but what is frozen
    save(tmp_path / "saved", run)
    second = save(tmp_path / "saved", run)
    assert second.written_bytes == 0
    with torch.no_grad():
        run.model.layers[1].bias.add_(1)
    third = save(tmp_path / "saved", run)
    assert third.written_bytes == run.model.layers[1].bias.nbytes
    loaded = Run(seed=6)
    load(tmp_path / "saved", loaded)
    assert loaded.digest() == run.digest()
    assert state_files(tmp_path / "saved") != files


def test_files_that_are_hardly_used_go(tmp_path: Path) -> None:
    model = torch.nn.ModuleList(torch.nn.Linear(512, 512) for _ in range(6))
    lowtide.save_checkpoint(tmp_path, model)
    first = tmp_path / "state-000001-00001.safetensors"
    for layer in list(model)[:5]:
        assert first.exists() == (layer not in list(model)[4:]), "while half of it is in use"
        with torch.no_grad():
            layer.weight.add_(1)
        lowtide.save_checkpoint(tmp_path, model)
    total = sum(tensor.nbytes for tensor in model.state_dict().values())
    assert sum(file.stat().st_size for file in tmp_path.iterdir()) < 1.5 * total
    other = torch.nn.ModuleList(torch.nn.Linear(512, 512) for _ in range(6))
    lowtide.load_checkpoint(tmp_path, other)
    for ours, theirs in zip(other.parameters(), model.parameters(), strict=True):
        assert torch.equal(ours, theirs)


def test_what_is_away_and_unchanged_is_not_even_read(tmp_path: Path) -> None:
    model = torch.nn.Sequential(*(torch.nn.Linear(512, 512, bias=False) for _ in range(8)))
    with lowtide.fit(model, budget=3 * MIB, spill=tmp_path) as tide:
        # Whatever was in memory at the first save has a copy from the second on.
        for _ in range(3):
            with torch.no_grad(), tide.step():
                model(torch.ones(4, 512))
            saved = tide.save(tmp_path / "saved")
        assert saved.written_bytes == 0
        assert saved.unread_bytes >= 5 * MIB
        with torch.no_grad():
            model[0].weight.add_(1)
            model[7].weight.data.numpy()[0, 0] = 5
        changed = tide.save(tmp_path / "saved")
        assert changed.written_bytes == 2 * MIB
        expected = [parameter.clone() for parameter in model.parameters()]
    other = torch.nn.Sequential(*(torch.nn.Linear(512, 512, bias=False) for _ in range(8)))
    lowtide.load_checkpoint(tmp_path / "saved", other)
    for ours, theirs in zip(other.parameters(), expected, strict=True):
        assert torch.equal(ours, theirs)


def test_saving_leaves_clean_what_is_clean(tmp_path: Path) -> None:
    model = torch.nn.Sequential(*(torch.nn.Linear(512, 512, bias=False) for _ in range(8)))
    with lowtide.fit(model, budget=3 * MIB, spill=tmp_path) as tide:
        with torch.no_grad(), tide.step():
            model(torch.ones(4, 512))
        tide.save(tmp_path / "a")
        before: dict[str, Any] = tide.stats()
        tide.save(tmp_path / "b")
        after: dict[str, Any] = tide.stats()
    assert after["swapped_out_bytes"] == before["swapped_out_bytes"], "reading makes nothing dirty"
    assert after["peak_reserved_bytes"] <= 3 * MIB


# ---- refusals ----


def test_a_damaged_file_is_refused_before_anything_changes(tmp_path: Path) -> None:
    run = Run()
    run.steps(1)
    save(tmp_path / "saved", run)
    file = sorted((tmp_path / "saved").glob("state-*"))[0]
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    other = Run(seed=3)
    expected = Run(seed=3).digest()
    Run(seed=3)  # the generators as `other` left them
    with pytest.raises(CheckpointCorrupted, match=r"the bytes of '.*' differ from the saved ones.*Nothing was loaded"):
        load(tmp_path / "saved", other)
    assert other.digest() == expected


@pytest.mark.parametrize("length", [0, 10, -1])
@pytest.mark.parametrize("pattern", ["state-*", "manifest.json"])
def test_a_file_that_is_cut_off_is_refused(pattern: str, length: int, tmp_path: Path) -> None:
    run = Run(depth=1)
    save(tmp_path, run)
    file = sorted(tmp_path.glob(pattern))[0]
    # The last byte of a manifest is the end of its line: without it nothing is missing.
    file.write_bytes(file.read_bytes()[: length - (pattern == "manifest.json" and length < 0)])
    with pytest.raises(CheckpointCorrupted):
        load(tmp_path, run)


def test_a_file_that_is_gone_is_named(tmp_path: Path) -> None:
    run = Run(depth=1)
    save(tmp_path, run)
    file = sorted(tmp_path.glob("state-*"))[0]
    file.unlink()
    with pytest.raises(CheckpointError, match=file.name):
        load(tmp_path, run)


def test_another_model_is_refused_with_its_differences(tmp_path: Path) -> None:
    save(tmp_path, Run(depth=3))
    other = Run(depth=4)
    digest = [tensor.clone() for tensor in other.model.parameters()]
    with pytest.raises(CheckpointMismatch, match=r"is not this Net: not in the checkpoint: layers\.3\.weight, "):
        load(tmp_path, other)
    for ours, before in zip(other.model.parameters(), digest, strict=True):
        assert torch.equal(ours, before)
    with pytest.raises(CheckpointMismatch, match=r"256x256 float32 there, 2x2 float32 here"):
        wrong = Run(depth=3)
        wrong.model.layers[1].weight = torch.nn.Parameter(torch.ones(2, 2))
        load(tmp_path, wrong)


def test_another_optimizer_or_other_objects_are_refused(tmp_path: Path) -> None:
    run = Run(depth=1)
    save(tmp_path, run)
    with pytest.raises(CheckpointMismatch, match="has groups of"):
        lowtide.load_checkpoint(tmp_path, run.model, torch.optim.SGD([run.model.frozen], lr=1), **run.objects)
    with pytest.raises(CheckpointMismatch, match=r"holds the state of scheduler, scaler, loader: pass scheduler="):
        lowtide.load_checkpoint(tmp_path, run.model, run.optimizer)
    lowtide.load_checkpoint(tmp_path, run.model, run.optimizer, scheduler=None, scaler=None, loader=None)
    with pytest.raises(CheckpointMismatch, match="no state for sampler"):
        lowtide.load_checkpoint(tmp_path, run.model, run.optimizer, **run.objects, sampler=run.objects["loader"])


def test_what_has_no_state_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BadArgument, match=r"loader=DataLoader\(\.\.\.\) has no state_dict"):
        lowtide.save_checkpoint(tmp_path, torch.nn.Linear(1, 1), loader=torch.utils.data.DataLoader([1]))
    assert list(tmp_path.iterdir()) == []


def test_saving_inside_a_step_is_refused(tmp_path: Path) -> None:
    model = torch.nn.Linear(2, 2)
    with lowtide.fit(model, budget=2**26, spill=tmp_path) as tide, tide.step():
        with pytest.raises(BadArgument, match="between steps"):
            tide.save(tmp_path / "saved")
        with pytest.raises(BadArgument, match="between steps"):
            tide.load(tmp_path / "saved")


def test_a_manifest_of_a_newer_version_is_not_guessed_at(tmp_path: Path) -> None:
    save(tmp_path, Run(depth=1))
    manifest = tmp_path / "manifest.json"
    manifest.write_text(manifest.read_text().replace('"version": 1', '"version": 9', 1))
    with pytest.raises(CheckpointError, match="of version 9"):
        load(tmp_path, Run(depth=1))
