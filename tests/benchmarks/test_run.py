"""What the contenders of a comparison are made of: settings, policies, and a disk that is held to a rate."""

from __future__ import annotations

import argparse
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch

import lowtide
from benchmarks import contenders, run
from benchmarks.jobs import Answer, Job
from benchmarks.slow_disk import SlowDisk


class _FakeTide:
    def __enter__(self) -> _FakeTide:
        return self

    def __exit__(self, *_exception: object) -> None:
        pass

    step = staticmethod(nullcontext)


def settings_of(job: Job, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Return what `fit` is called with."""
    asked: dict[str, Any] = {}

    def fit(*_trained: object, **settings: Any) -> _FakeTide:
        asked.update(settings)
        return _FakeTide()

    monkeypatch.setattr(lowtide, "fit", fit)
    module = torch.nn.Linear(1, 1)
    with contenders.open_session(job, module, torch.optim.SGD(module.parameters(), lr=0.1)):
        return asked


def test_swaps_neither_recompute_nor_encode(monkeypatch: pytest.MonkeyPatch) -> None:
    job = Job(model="gpt", contender="swaps", spill="there", budget_bytes=1)
    asked = settings_of(job, monkeypatch)
    assert asked == {"budget": 1, "spill": "there", "policy": "auto", "recompute": False, "codecs": []}


def test_lowtide_has_its_defaults_and_the_policy_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    job = Job(model="gpt", contender="lowtide", spill="there", budget_bytes=1, policy="capuchin")
    assert settings_of(job, monkeypatch) == {"budget": 1, "spill": "there", "policy": "capuchin"}


def test_a_throttled_disk_moves_no_more_than_its_rate_each_way(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    job = Job(model="gpt", contender="swaps", spill=str(tmp_path), budget_bytes=1, disk_bytes_per_s=8e6)
    disk = settings_of(job, monkeypatch)["spill"]
    assert isinstance(disk, SlowDisk)
    assert disk.directories == (), "it is measured, and not taken for the disk below it"
    data = memoryview(bytearray(1 << 20))
    for move in (disk.write_at, disk.read_at):
        begun = time.monotonic()
        move(0, data)
        assert time.monotonic() - begun >= data.nbytes / 8e6
    disk.close()


def test_every_policy_asked_for_runs_at_every_share(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    jobs: list[Job] = []
    static_bytes, peak_bytes = 100, 1100

    def launch(job: Job) -> Answer:
        jobs.append(job)
        facts = {"step_s": [1.0], "losses": [], "rss_peak_bytes": 1, "moved_out_bytes_per_step": 0}
        facts |= {"moved_in_bytes_per_step": 0, "moved_out_bytes_total": 0, "moved_in_bytes_total": 0}
        facts |= {"static_bytes": static_bytes, "peak_bytes": peak_bytes, "peak_reserved_bytes": 0, "floor_bytes": 0}
        facts |= {"title": "", "parameters": 0, "floor_op": "", "torch": "", "threads": 1}
        return Answer(facts=facts)

    monkeypatch.setattr(run, "launch", launch)
    out = ["--out", str(tmp_path / "out.json"), "--spill", str(tmp_path)]
    asked = ["--models", "gpt", "--contenders", "lowtide", "swaps", "as_checkpoint", "--policies", "capuchin", "vdnn"]
    run.main([*asked, "--shares", "0.6", "0.45", "--rounds", "1", "--throttle", "300MB/s", *out])
    trained = [job for job in jobs if not job.count_live]
    budgets = {(job.contender, job.policy, job.budget_bytes) for job in trained if job.contender != "stock"}
    at_shares = [("lowtide", "auto"), ("lowtide", "capuchin"), ("lowtide", "vdnn"), ("swaps", "auto")]
    assert budgets == {(*who, nbytes) for who in at_shares for nbytes in (700, 550)} | {("lowtide", "auto", peak_bytes)}
    assert {job.disk_bytes_per_s for job in trained} == {300e6}


def test_a_rate_that_cannot_be_read_is_refused() -> None:
    with pytest.raises(argparse.ArgumentTypeError, match="fast is not a rate: write one such as 300MB/s"):
        run._rate("fast")
