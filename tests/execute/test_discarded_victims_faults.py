"""Disks that fail and programs that raise while operators run again instead of bytes being moved."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import lowtide
from lowtide.plan.policies.dtr import Dtr
from lowtide.plan.policy import Policy
from lowtide.tiers import Direction, Fault, FaultKind, Faulty, FileMedium, Latency
from lowtide.tiers.medium import Medium
from tests.bitwise.discard_all import DiscardAll
from tests.execute.training import Need, Training, away_bytes

STEPS = 6
POLICIES: dict[str, Callable[[], Policy]] = {"discard_all": lambda: DiscardAll(once=False), "dtr": Dtr}


@pytest.fixture(scope="module")
def stock() -> dict[str, object]:
    return Training().steps(STEPS).result()


def trained(medium: Medium, budget_bytes: int, policy: Policy) -> tuple[Training, int, dict[str, object]]:
    """Train inside a budget, each step anew after a disk that failed; return how often it did, and the statistics."""
    training = Training()
    with lowtide.fit(training.model, training.optimizer, budget=budget_bytes, spill=medium, policy=policy) as tide:
        failed = training.steps_despite_the_disk(STEPS, tide.step)
        stats = tide.stats()
    assert away_bytes() == 0
    # Where a read fails that a fault waits for, nobody can be refused: its pages may pass the budget, and are counted.
    beyond_bytes = int(str(stats["over_budget_bytes"]))
    assert int(str(stats["peak_reserved_bytes"])) <= budget_bytes + beyond_bytes
    assert failed or not beyond_bytes
    assert int(str(stats["recomputed_ops"])) > 0, "nothing ran again: this shows nothing"
    return training, failed, stats


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("kind", [FaultKind.ENOSPC, FaultKind.EIO])
def test_failed_writes_keep_values_and_the_training_exact(
    policy: str, kind: FaultKind, mlp_need: Need, stock: dict[str, object], tmp_path: Path
) -> None:
    faults = [Fault(direction=Direction.WRITE, nth=nth, kind=kind) for nth in (2, 5, 9)]
    medium = Faulty(FileMedium([tmp_path]), script=faults)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        training, failed, _ = trained(medium, mlp_need.share(0.6), POLICIES[policy]())
    assert medium.fired
    assert failed == 0
    assert training.result() == stock


@pytest.mark.parametrize("policy", POLICIES)
def test_failed_reads_raise_and_the_next_try_is_exact(
    policy: str, mlp_need: Need, stock: dict[str, object], tmp_path: Path
) -> None:
    faults = [Fault(direction=Direction.READ, nth=nth, kind=FaultKind.EIO) for nth in (2, 7, 11, 19)]
    medium = Faulty(FileMedium([tmp_path]), script=faults)
    training, failed, _ = trained(medium, mlp_need.share(0.5), POLICIES[policy]())
    assert 1 <= failed <= len(medium.fired)
    assert training.result() == stock


@pytest.mark.parametrize("policy", POLICIES)
def test_a_slow_disk_stays_exact(policy: str, mlp_need: Need, stock: dict[str, object], tmp_path: Path) -> None:
    medium = Latency(FileMedium([tmp_path]), write_s=0.003, read_s=0.003)
    training, failed, _ = trained(medium, mlp_need.share(0.4), POLICIES[policy]())
    assert failed == 0
    assert training.result() == stock


@pytest.mark.parametrize("policy", POLICIES)
def test_an_exception_in_the_middle_of_backward_leaves_the_training_usable(
    policy: str, mlp_need: Need, stock: dict[str, object], tmp_path: Path
) -> None:
    training, raised = Training(), 0
    weight = next(training.model.parameters())
    with lowtide.fit(
        training.model, training.optimizer, budget=mlp_need.share(0.5), spill=tmp_path, policy=POLICIES[policy]()
    ) as tide:
        training.steps(3, tide.step)

        def refuse(_gradient: torch.Tensor) -> None:
            raise LookupError("the program's own")

        for _ in range(2):
            handle = weight.register_hook(refuse)
            try:
                with tide.step():
                    training.loss().backward()  # type: ignore[no-untyped-call]
            except LookupError:
                raised += 1
            handle.remove()
            training.optimizer.zero_grad()
        training.steps(STEPS - 3, tide.step)
        assert int(str(tide.stats()["recomputed_ops"])) > 0
    assert raised == 2
    assert training.result()["state"] == stock["state"]
    assert away_bytes() == 0
