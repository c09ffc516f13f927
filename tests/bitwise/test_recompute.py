"""Training that runs operators again instead of moving bytes is stock's, to the bit, for every workload."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.bitwise.drop_all import DropAll
from tests.bitwise.harness import WORKLOADS, need, pressed, stock
from tests.bitwise.record import assert_identical

# Here no step repeats an earlier one before the training ends, or backward comes after the step.
NOTHING_TO_REPEAT = ("alternating_shapes", "stochastic_depth", "backward_after_the_step")


@pytest.mark.parametrize("once", [True, False], ids=("once", "on the way"))
@pytest.mark.parametrize("name", WORKLOADS)
def test_training_that_drops_all_it_can_is_exact(name: str, once: bool, tmp_path: Path) -> None:
    outcome = pressed(name, share=0.5, spill=tmp_path, policy=DropAll(once=once))
    assert_identical(stock(name), outcome.record)
    assert outcome.stats["peak_reserved_bytes"] <= outcome.stats["budget_bytes"] < need(name).peak_bytes
    if name not in NOTHING_TO_REPEAT:
        assert outcome.stats["recomputed_ops"] > 0, "nothing ran again: this test shows nothing"


@pytest.mark.parametrize("policy", ["auto", "capuchin", "superneurons", "pooch", "meng"])
@pytest.mark.parametrize("name", ["cnn", "resnet", "transformer", "unet"])
def test_policies_that_recompute_are_exact(name: str, policy: str, tmp_path: Path) -> None:
    outcome = pressed(name, share=0.6, spill=tmp_path, policy=policy, recompute=True)
    assert_identical(stock(name), outcome.record)
    assert outcome.stats["peak_reserved_bytes"] <= outcome.stats["budget_bytes"]


def test_a_paper_that_recomputes_does(tmp_path: Path) -> None:
    outcome = pressed("transformer", share=0.6, spill=tmp_path, policy="superneurons")
    assert_identical(stock("transformer"), outcome.record)
    assert outcome.stats["recomputed_ops"] > 0
