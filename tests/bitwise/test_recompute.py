"""Training that runs operators again instead of moving bytes is stock's, to the bit, for every workload."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import lowtide
from lowtide import capture_step, zoo
from lowtide.capture import Training
from tests.bitwise.discard_all import DiscardAll
from tests.bitwise.harness import WORKLOADS, need, pressed, stock
from tests.bitwise.record import assert_identical

QUICK = ("cnn", "transformer", "retain_graph", "autocast_cnn", "gpt2")
SLOW = pytest.mark.slow
# Here no step repeats an earlier one before the training ends, or backward comes after the step.
NOTHING_TO_REPEAT = ("alternating_shapes", "stochastic_depth", "backward_after_the_step")

# Every step is of a kind of its own, so each is recorded, and recorded steps swap.
ALWAYS_RECORDED = ("stochastic_depth",)


@pytest.mark.parametrize("name", WORKLOADS)
def test_training_that_discards_all_it_can_is_exact(name: str, tmp_path: Path) -> None:
    assert_exact_by_running_again(name, once=True, spill=tmp_path)


@pytest.mark.parametrize("name", [name if name in QUICK else pytest.param(name, marks=SLOW) for name in WORKLOADS])
def test_training_that_makes_storages_again_on_the_way_is_exact(name: str, tmp_path: Path) -> None:
    assert_exact_by_running_again(name, once=False, spill=tmp_path)


def assert_exact_by_running_again(name: str, *, once: bool, spill: Path) -> None:
    outcome = pressed(name, share=0.5, spill=spill, policy=DiscardAll(once=once))
    assert_identical(stock(name), outcome.record)
    assert outcome.stats["peak_reserved_bytes"] <= outcome.stats["budget_bytes"] < need(name).peak_bytes
    if name not in NOTHING_TO_REPEAT:
        assert outcome.stats["recomputed_ops"] > 0, "nothing ran again: this test shows nothing"


@pytest.mark.parametrize("name", [name if name in QUICK else pytest.param(name, marks=SLOW) for name in WORKLOADS])
def test_training_that_discards_when_memory_runs_out_is_exact(name: str, tmp_path: Path) -> None:
    outcome = pressed(name, share=0.6, spill=tmp_path, policy="dtr")
    assert_identical(stock(name), outcome.record)
    assert outcome.stats["peak_reserved_bytes"] <= outcome.stats["budget_bytes"] < need(name).peak_bytes
    if name not in ALWAYS_RECORDED:
        assert outcome.stats["recomputed_ops"] > 0, "nothing ran again: this test shows nothing"


@pytest.mark.parametrize("policy", ["auto", "capuchin", "superneurons", "pooch", "meng"])
@pytest.mark.parametrize("name", ["resnet", "transformer"])
def test_policies_that_recompute_are_exact(name: str, policy: str, tmp_path: Path) -> None:
    outcome = pressed(name, share=0.6, spill=tmp_path, policy=policy, recompute=True)
    assert_identical(stock(name), outcome.record)
    assert outcome.stats["peak_reserved_bytes"] <= outcome.stats["budget_bytes"]


@pytest.mark.slow  # five seconds
def test_mengs_pass_runs_additive_attention_again(tmp_path: Path) -> None:
    """It recomputes nothing else: of the models here, only this one has such attention."""

    def training() -> Training:
        torch.manual_seed(0)
        return zoo.build("seq2seq", batch=64, tokens=24, width=128, vocab=1000).training()

    def bits(trained: Training) -> list[bytes]:
        return [parameter.detach().numpy().tobytes() for parameter in trained.model.parameters()]

    run = training()
    trace = capture_step(run.step, model=run.model, optimizer=run.optimizer)
    floor_bytes = trace.floor_bytes()
    budget_bytes = floor_bytes + int(0.8 * (trace.peak_bytes - floor_bytes))
    run = training()
    for _ in range(4):
        run.step()
    expected = bits(run)
    run = training()  # the one before is gone: its tensors would count
    with lowtide.fit(run.model, run.optimizer, budget=budget_bytes, spill=tmp_path, policy="meng") as tide:
        for _ in range(4):
            with tide.step():
                run.step()
        stats = tide.stats()
    assert int(str(stats["recomputed_ops"])) > 0
    assert int(str(stats["peak_reserved_bytes"])) <= budget_bytes < trace.peak_bytes
    assert bits(run) == expected


def test_a_paper_that_recomputes_does(tmp_path: Path) -> None:
    outcome = pressed("transformer", share=0.6, spill=tmp_path, policy="superneurons")
    assert_identical(stock("transformer"), outcome.record)
    assert outcome.stats["recomputed_ops"] > 0
