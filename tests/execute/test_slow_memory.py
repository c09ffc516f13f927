"""Slow memory under a training: files that are small, removed or cut, and processes that are killed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import lowtide
from lowtide.errors import BadArgument, PlanError, SpillError
from lowtide.execute.tide.tide import Tide
from tests.execute.training import Training

MIB = 2**20
BUDGET = MIB  # less than the largest operator needs
STEPS = 4


def fit(training: Training, slow: str, spill: Path, *, policy: str = "first_touch") -> Tide:
    return lowtide.fit(training.model, training.optimizer, budget=BUDGET, spill=spill, slow=slow, policy=policy)


def assert_as_without(training: Training) -> None:
    assert training.result() == Training().steps(training.done).result()


def test_a_file_that_is_removed_under_way_loses_nothing(tmp_path: Path) -> None:
    path = tmp_path / "device"
    path.write_bytes(bytes(64 * MIB))
    training = Training()
    with fit(training, f"pmem://{path}", tmp_path) as tide:
        training.steps(2, tide.step)
        path.unlink()
        training.steps(STEPS - 2, tide.step)
        assert tide.stats()["in_place_ops"]
    assert_as_without(training)


def test_a_file_that_is_too_small_leaves_the_rest_to_the_spill(tmp_path: Path) -> None:
    path = tmp_path / "device"
    path.write_bytes(bytes(MIB))
    training = Training()
    with fit(training, f"pmem://{path}", tmp_path, policy="auto") as tide:
        training.steps(STEPS, tide.step)
        stats = tide.stats()
        assert stats["peak_slow_bytes"] <= MIB
        assert stats["peak_reserved_bytes"] <= BUDGET
    assert_as_without(training)


def test_a_file_that_is_cut_under_way_raises_instead_of_ending_the_process(tmp_path: Path) -> None:
    path = tmp_path / "device"
    path.write_bytes(bytes(64 * MIB))
    training = Training()
    tide = fit(training, f"pmem://{path}", tmp_path)
    training.steps(3, tide.step)
    assert tide.stats()["slow_bytes"], "nothing is there that could be lost"
    os.truncate(path, 0)
    with pytest.raises(SpillError, match="came back short from tier 'slow'"):
        training.steps(1, tide.step)
    with pytest.raises(SpillError, match="came back short from tier 'slow'"):
        tide.close()


def test_nothing_is_left_of_a_process_that_is_killed(tmp_path: Path) -> None:
    pmem = tmp_path / "pmem"
    pmem.mkdir()
    program = (
        "import sys\nfrom tests.execute.test_slow_memory import fit\nfrom tests.execute.training import Training\n"
        "training = Training()\n"
        f"tide = fit(training, 'pmem://{pmem}', {str(tmp_path)!r})\n"
        "training.steps(3, tide.step)\nassert tide.stats()['slow_bytes']\n"
        "print('there', flush=True)\nsys.stdin.read()\n"
    )
    child = subprocess.Popen(
        [sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=Path(__file__).parents[2]
    )
    assert child.stdout is not None
    assert child.stdout.readline() == b"there\n"
    child.send_signal(signal.SIGKILL)
    child.wait()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["pmem"]
    assert list(pmem.iterdir()) == []


def test_what_cannot_be_used_is_refused_before_anything_is_opened(tmp_path: Path) -> None:
    training = Training()
    with pytest.raises(BadArgument, match="cannot read '/mnt'"):
        fit(training, "/mnt", tmp_path)
    with pytest.raises(BadArgument, match="no memory on node 4096"):
        fit(training, "numa:4096", tmp_path)
    with pytest.raises(BadArgument, match="no slow memory that could be imitated: known are cxl, optane"):
        fit(training, "cxl:?emulate=v100", tmp_path)
    with lowtide.fit(training.model, training.optimizer, budget="1GiB", spill=tmp_path) as tide:
        training.steps(1, tide.step)


def test_parts_of_storages_are_refused_for_real(tmp_path: Path) -> None:
    training = Training()
    with (
        fit(training, "cxl:?emulate=cxl", tmp_path, policy="bandwidth_aware") as tide,
        pytest.raises(PlanError, match="pages move whole"),
    ):
        training.steps(2, tide.step)


def test_a_real_device_is_measured_and_charges_nothing(tmp_path: Path) -> None:
    training = Training()
    with fit(training, f"pmem://{tmp_path}?emulate=none", tmp_path) as tide:
        access = tide.machine_of().links["slow"].access
        assert access is not None
        assert access.read_bytes_per_s > 0 < access.write_bytes_per_s
        training.steps(STEPS, tide.step)
        assert tide.stats()["peak_slow_bytes"]
        assert tide.stats()["slow_s"] == 0
    assert_as_without(training)


def test_inference_uses_weights_in_place(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = torch.nn.Sequential(*(torch.nn.Linear(512, 512) for _ in range(6)))
    x = torch.randn(8, 512)
    with torch.no_grad():
        expected = model(x)
        with lowtide.serve(
            model, budget=2 * MIB, spill=tmp_path, slow="cxl:?emulate=optane", policy="first_touch"
        ) as tide:
            for _ in range(4):
                assert torch.equal(model(x), expected)
            assert tide.stats()["in_place_ops"]
