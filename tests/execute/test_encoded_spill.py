"""Training over a tier with a codec: the same bits, fewer bytes written; a lossy codec is refused."""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Any

import pytest
from torch import nn

import lowtide
from lowtide.errors import BadArgument, SpillCorrupted
from lowtide.plan.policies.flashneuron import FlashNeuron
from lowtide.plan.policy import Policy
from lowtide.tiers import Direction, Encoded, Fault, FaultKind, Faulty, FileMedium, Medium, Throttle
from lowtide.tiers.open import Spill
from tests.execute.training import Need, Training, need

WIDTH, DEPTH, BATCH, STEPS = 128, 6, 1024, 4
LAYER_BYTES = 4 * WIDTH * BATCH


def relu_net() -> nn.Sequential:
    layers: list[nn.Module] = []
    for _ in range(DEPTH):
        layers += [nn.Linear(WIDTH, WIDTH), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(WIDTH, 10))


def training() -> Training:
    return Training(relu_net, shape=(BATCH, WIDTH))


@pytest.fixture(scope="module")
def needed(tmp_path_factory: pytest.TempPathFactory) -> Need:
    return need(training, tmp_path_factory.mktemp("spill"))


@pytest.fixture(scope="module")
def stock() -> dict[str, object]:
    return training().steps(STEPS).result()


def managed(
    spill: Spill, needed: Need, *, policy: str | Policy = "auto", **options: Any
) -> tuple[dict[str, object], dict[str, Any]]:
    mine = training()
    budget = needed.share(0.5)  # what leaves are activations, as a rule
    with lowtide.fit(mine.model, mine.optimizer, budget=budget, spill=spill, policy=policy, **options) as tide:
        mine.steps(STEPS, tide.step)
        stats: dict[str, Any] = tide.stats()
    assert stats["peak_bytes"] <= budget
    return mine.result(), stats


@pytest.mark.parametrize("policy", ["auto", FlashNeuron(csr=True)], ids=["auto", "flashneuron"])
def test_relu_outputs_are_written_without_their_zeros_and_training_is_the_same(
    tmp_path: Path, needed: Need, stock: dict[str, object], policy: str | Policy
) -> None:
    result, stats = managed(f"file+zvc://{tmp_path}", needed, policy=policy)
    assert result == stock
    assert stats["swapped_out_bytes"] >= STEPS * LAYER_BYTES
    # Half of a ReLU's results are zeros at the start, and a bit a value is added.
    assert stats["disk_written_bytes"] < 0.85 * stats["swapped_out_bytes"], "and parameters have no zeros"
    assert stats["disk_read_bytes"] < 0.85 * stats["swapped_in_bytes"]


def test_memory_as_a_tier_is_a_part_of_the_budget(needed: Need, stock: dict[str, object]) -> None:
    mine = training()
    room = 8 << 20
    budget = needed.share(0.5) + room
    with lowtide.fit(mine.model, mine.optimizer, budget=budget, spill=f"dram+zvc:{room}B", recompute=False) as tide:
        mine.steps(STEPS, tide.step)
        stats: dict[str, Any] = tide.stats()
    assert mine.result() == stock
    assert 0 < stats["dram_used_bytes"] <= stats["dram_most_bytes"] == room
    assert stats["budget_bytes"] == budget - room
    assert stats["peak_bytes"] <= budget - room
    assert stats["disk_written_bytes"] < stats["before_codec_bytes"]
    with pytest.raises(BadArgument, match="it is a part of the budget"):
        lowtide.fit(budget="1GiB", spill="dram+zvc:2GiB")


def test_without_a_codec_nothing_is_encoded(tmp_path: Path, needed: Need, stock: dict[str, object]) -> None:
    result, stats = managed(tmp_path, needed)
    assert result == stock
    assert "disk_written_bytes" not in stats


def test_a_lossy_codec_is_refused_before_training(tmp_path: Path) -> None:
    with pytest.raises(BadArgument, match="codec 'fp16' is lossy, so gradients would change"):
        lowtide.fit(budget="1GiB", spill=f"file+fp16://{tmp_path}")


def test_a_full_disk_under_the_codec_keeps_the_data_in_memory(tmp_path: Path) -> None:
    disk = Faulty(FileMedium([tmp_path]), script=[])
    mine, expected = training(), training().steps(2).result()
    with pytest.warns(RuntimeWarning, match="keeping the data in memory"):
        with lowtide.fit(mine.model, mine.optimizer, budget="64MiB", spill=Encoded(disk), policy="swap_all") as tide:
            # Only now: opening measures the link.
            disk.script = (Fault(direction=Direction.WRITE, nth=1, kind=FaultKind.ENOSPC, lasting=True),)
            mine.steps(2, tide.step)
    assert disk.fired
    assert mine.result() == expected


def test_a_bit_that_changed_on_the_disk_is_noticed(tmp_path: Path) -> None:
    disk = Faulty(FileMedium([tmp_path]), script=[])
    mine, spill = training(), Encoded(disk)
    tide = lowtide.fit(mine.model, mine.optimizer, budget="64MiB", spill=spill, policy="swap_all", verify=True)
    disk.script = (Fault(direction=Direction.READ, nth=1, kind=FaultKind.FLIP, lasting=True),)
    with pytest.raises(SpillCorrupted), tide:
        mine.steps(3, tide.step)
    assert disk.fired


@pytest.mark.slow
def test_on_a_slow_disk_steps_are_shorter_without_zeros(tmp_path: Path, needed: Need) -> None:
    """A disk of 20 MB/s each way, far below what the codec does on any machine."""

    def disk() -> Medium:
        return Throttle(FileMedium([tmp_path]), write_bytes_per_s=2e7, read_bytes_per_s=2e7)

    steps: dict[bool, list[float]] = {False: [], True: []}
    for _ in range(3):
        for encoded in steps:
            _, stats = managed(Encoded(disk()) if encoded else disk(), needed, policy="swap_all")
            steps[encoded].append(stats["step_s"])
    assert statistics.median(steps[True]) < 0.85 * statistics.median(steps[False])
