"""A disk that fails at any call of a save, and a manifest that belongs to other files."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import lowtide
import lowtide.checkpoint.shard
from lowtide.errors import CheckpointCorrupted, CheckpointError
from tests.checkpoint.trainings import Run


def failing_at(call: int, error: BaseException, monkeypatch: pytest.MonkeyPatch) -> None:
    """Raise at the `call`-th system call that changes a disk, and at no other."""
    calls = 0

    def counted(original: Callable[..., Any]) -> Callable[..., Any]:
        def counting(*args: Any, **kwargs: Any) -> Any:
            nonlocal calls
            calls += 1
            if calls == call:
                raise error
            return original(*args, **kwargs)

        return counting

    for name in ("fsync", "replace"):
        monkeypatch.setattr(os, name, counted(getattr(os, name)))
    monkeypatch.setattr("lowtide.checkpoint.shard._write_all", counted(lowtide.checkpoint.shard._write_all))


def _full_disk() -> BaseException:
    return OSError(errno.ENOSPC, "No space left on device")


@pytest.mark.parametrize("error", [_full_disk, KeyboardInterrupt], ids=["full", "ctrl-c"])
def test_a_save_that_fails_at_any_call_leaves_a_state_that_loads(
    error: Callable[[], BaseException], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Run(depth=1)
    lowtide.save_checkpoint(tmp_path / "first", run.model, run.optimizer, steps=1)
    before = [tensor.clone() for tensor in run.model.parameters()]
    run.steps(1)
    after = [tensor.clone() for tensor in run.model.parameters()]
    call, done = 0, False
    while not done:
        call += 1
        saved = tmp_path / str(call)
        shutil.copytree(tmp_path / "first", saved)
        with monkeypatch.context() as patched:
            failing_at(call, error(), patched)
            try:
                lowtide.save_checkpoint(saved, run.model, run.optimizer, steps=2)
                done = True
            except (CheckpointError, KeyboardInterrupt):
                pass
        loaded = Run(depth=1, seed=77)
        steps = lowtide.load_checkpoint(saved, loaded.model, loaded.optimizer)["steps"]
        for ours, theirs in zip(loaded.model.parameters(), before if steps == 1 else after, strict=True):
            assert torch.equal(ours, theirs), f"call {call}"
    assert call > 5


def test_a_manifest_of_other_files_is_refused_before_anything_changes(tmp_path: Path) -> None:
    for seed in (1, 2):
        torch.manual_seed(seed)
        lowtide.save_checkpoint(tmp_path / str(seed), torch.nn.Linear(300, 300))
    shutil.copy(tmp_path / "2" / "manifest.json", tmp_path / "1" / "manifest.json")
    model = torch.nn.Linear(300, 300)
    before = model.weight.detach().clone()
    with pytest.raises(CheckpointCorrupted, match="Nothing was loaded"):
        lowtide.load_checkpoint(tmp_path / "1", model)
    assert torch.equal(model.weight, before)


def test_everything_is_on_the_disk_before_the_name_that_makes_it_the_saved_state(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No test can cut the power: this one looks at what was asked of the system, and when."""
    path = tmp_path / "saved"
    run = Run(depth=1)
    lowtide.save_checkpoint(path, run.model, run.optimizer)
    run.steps(1)
    before = (path / "manifest.json").read_bytes()
    on_disk: list[tuple[Path, int]] = []  # with the size that it had then
    fsync, replace = os.fsync, os.replace

    def syncing(descriptor: int) -> None:
        fsync(descriptor)
        on_disk.append((Path(f"/proc/self/fd/{descriptor}").readlink(), os.fstat(descriptor).st_size))

    def replacing(source: Path, target: Path) -> None:
        assert target == path / "manifest.json"
        assert target.read_bytes() == before, "the old state's manifest was not touched"
        new = [file for file in path.iterdir() if file.name.startswith("state-000002-")]
        assert new
        assert {(file, file.stat().st_size) for file in (*new, Path(source))} <= set(on_disk)
        # The files' names come after their bytes and before the manifest's.
        folder = [where for where, _ in on_disk].index(path)
        assert {file for file, _ in on_disk[:folder]} == set(new)
        on_disk.clear()
        replace(source, target)

    monkeypatch.setattr(os, "fsync", syncing)
    monkeypatch.setattr(os, "replace", replacing)
    lowtide.save_checkpoint(path, run.model, run.optimizer)
    assert [where for where, _ in on_disk] == [path], "the renaming is on the disk when a save returns"
