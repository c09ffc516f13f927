"""Plans that swap through codecs, executed: the same bits, fewer bytes, and steps that are shorter on a slow disk."""

from __future__ import annotations

import random
import statistics
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from torch import nn

import lowtide
from lowtide.capture.builder import Recorded
from lowtide.core.plan import Plan, Problem, SampledRatio
from lowtide.core.trace import Kind, Phase, Storage
from lowtide.errors import BadArgument, PlanError
from lowtide.execute.tide.encoding import USUAL_CODECS, Samples
from lowtide.plan.policies.flashneuron import FlashNeuron
from lowtide.plan.policies.swap_all import SwapAll
from lowtide.plan.policies.vdnn_pp import VdnnPlusPlus
from lowtide.plan.policy import Policy
from lowtide.testing.traces import Step, make_trace
from lowtide.tiers import Encoded, FileMedium, Medium, Throttle
from tests.execute.training import Need, Training, need

WIDTH, DEPTH, BATCH, STEPS = 128, 6, 1024, 5


def net() -> nn.Sequential:
    layers: list[nn.Module] = []
    for _ in range(DEPTH):
        layers += [nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Dropout(0.1)]
    return nn.Sequential(*layers, nn.Linear(WIDTH, 10))


def training() -> Training:
    return Training(net, shape=(BATCH, WIDTH))


@pytest.fixture(scope="module")
def needed(tmp_path_factory: pytest.TempPathFactory) -> Need:
    return need(training, tmp_path_factory.mktemp("spill"))


@pytest.fixture(scope="module")
def stock() -> dict[str, object]:
    return training().steps(STEPS).result()


class SlowDisk(Throttle):
    """A disk that is not known again by its directory: what was measured of that one is another's rate."""

    directories: tuple[Path, ...] = ()


def slow_disk(directory: Path, bytes_per_s: float = 2e7) -> Medium:
    return SlowDisk(FileMedium([directory]), write_bytes_per_s=bytes_per_s, read_bytes_per_s=bytes_per_s)


def managed(
    spill: Any, needed: Need, *, policy: str | Policy = "auto", share: float = 0.5, **options: Any
) -> tuple[dict[str, object], dict[str, Any], Plan]:
    mine = training()
    budget = needed.share(share)
    with lowtide.fit(mine.model, mine.optimizer, budget=budget, spill=spill, policy=policy, **options) as tide:
        mine.steps(STEPS, tide.step)
        stats: dict[str, Any] = tide.stats()
        plan = tide.plan()
    assert stats["peak_bytes"] <= budget
    assert plan is not None
    return mine.result(), stats, plan


class AnyCodec(SwapAll):
    """Swaps everything, each time through another codec."""

    def __init__(self, names: tuple[str, ...]) -> None:
        self._names = names

    def plan(self, problem: Problem) -> Plan:
        plan, draw = super().plan(problem), random.Random(1)
        return replace(plan, swaps=tuple(replace(swap, codec=draw.choice(self._names)) for swap in plan.swaps))


@pytest.mark.parametrize("verify", [False, True])
def test_training_through_every_codec_is_the_same_to_the_bit(
    tmp_path: Path, needed: Need, stock: dict[str, object], verify: bool
) -> None:
    pytest.importorskip("blosc2")
    names = (*USUAL_CODECS, "ssdc", "zvc+blosc2")
    result, stats, plan = managed(
        tmp_path, needed, policy=AnyCodec(("identity", *names)), share=0.7, codecs=names, verify=verify
    )
    assert result == stock
    assert {swap.codec for swap in plan.swaps} == {"identity", *names}
    assert stats["encoded_bytes"] > 0
    assert stats["decoded_bytes"] > 0
    assert stats["unencoded_bytes"] > 0, "what does not shrink goes as it is"


def test_on_a_slow_disk_auto_swaps_through_what_the_values_allow(
    tmp_path: Path, needed: Need, stock: dict[str, object]
) -> None:
    result, stats, plan = managed(slow_disk(tmp_path), needed, recompute=False)
    assert result == stock
    codecs = {swap.codec for swap in plan.swaps}
    assert codecs & {"zvc", "pack32", "bits"}
    # The disk had less than what left: all of it that was encoded was shorter by a page at least.
    assert stats["encoded_bytes"] > 0
    assert stats["decoded_bytes"] > 0


@pytest.mark.parametrize(
    ("policy", "codecs"),
    [(FlashNeuron(csr=True), ["ssdc"]), (VdnnPlusPlus(offload="all", codec="zvc"), None)],
    ids=["flashneuron", "vdnn_pp"],
)
def test_policies_whose_papers_compress_do_so_and_training_is_the_same(
    tmp_path: Path, needed: Need, stock: dict[str, object], policy: Policy, codecs: list[str] | None
) -> None:
    result, stats, plan = managed(tmp_path, needed, policy=policy, codecs=codecs)
    assert result == stock
    assert {swap.codec for swap in plan.swaps} & {"ssdc", "zvc"}
    assert stats["encoded_bytes"] > 0


def test_without_codecs_nothing_is_encoded(tmp_path: Path, needed: Need, stock: dict[str, object]) -> None:
    result, stats, plan = managed(slow_disk(tmp_path), needed, codecs=[])
    assert result == stock
    assert {swap.codec for swap in plan.swaps} <= {"identity"}
    assert "encoded_bytes" not in stats


def test_a_codec_that_the_tide_does_not_have_is_refused_before_the_step(tmp_path: Path, needed: Need) -> None:
    with pytest.raises(PlanError, match=r"uses codec 'ssdc', .* executor has 2, \['identity', 'zvc'\]"):
        managed(tmp_path, needed, policy=AnyCodec(("ssdc",)), codecs=["zvc"])


def test_lossy_codecs_and_texts_are_refused_when_the_tide_opens(tmp_path: Path) -> None:
    with pytest.raises(BadArgument, match="codec 'bf16' is lossy"):
        lowtide.fit(budget="1GiB", spill=tmp_path, codecs=["bf16"])
    with pytest.raises(BadArgument, match=r"pass a list of names, such as \['zvc'\]"):
        lowtide.fit(budget="1GiB", spill=tmp_path, codecs="zvc")
    with pytest.raises(BadArgument, match="unknown codec 'zip'"):
        lowtide.fit(budget="1GiB", spill=tmp_path, codecs=["zip"])


def test_a_spill_with_a_codec_of_its_own_gets_no_second(tmp_path: Path, needed: Need) -> None:
    _, stats, plan = managed(Encoded(slow_disk(tmp_path)), needed)
    assert {swap.codec for swap in plan.swaps} <= {"identity"}
    assert "encoded_bytes" not in stats


def test_what_was_not_sampled_is_taken_for_what_the_same_operator_made() -> None:
    storages = [Storage(nbytes=8, kind=Kind.ACTIVATION, first_op=op, last_op=3, producer=op) for op in range(3)]
    steps = [Step(name=name, phase=Phase.FORWARD, duration_s=1.0) for name in ("relu", "relu", "linear")]
    recorded = Recorded(trace=make_trace(steps, storages, ()), positions=(), use_events=(), serials=(7, 8, 9))
    samples = Samples()
    samples.note(recorded, {7: {"zvc": 0.25}})
    assert samples.ratios(recorded) == (
        SampledRatio(storage=0, codec="zvc", ratio=0.25),
        SampledRatio(storage=1, codec="zvc", ratio=0.25),
    )
    samples.note(recorded, {8: {"zvc": 0.75}, 9: {"zvc": 1.0}})
    assert [one.ratio for one in samples.ratios(recorded)] == [0.25, 0.75, 1.0], "the first is not forgotten"


def test_what_a_step_made_is_known_again_by_its_birth() -> None:
    storages = [Storage(nbytes=8, kind=Kind.ACTIVATION, first_op=0, last_op=1, producer=0)]
    trace = make_trace([Step(name="relu", phase=Phase.FORWARD, duration_s=1.0)], storages, ())
    first = Recorded(trace=trace, positions=(), use_events=(), serials=(7,), births=((0, 0),))
    samples = Samples()
    samples.note(first, {7: {"zvc": 0.5}})
    assert [one.ratio for one in samples.ratios(replace(first, serials=(70,)))] == [0.5]


@pytest.mark.slow
def test_on_a_slow_disk_steps_are_shorter_through_codecs(tmp_path: Path, needed: Need) -> None:
    """A disk of 20 MB/s each way, far below what codecs do on any machine."""
    steps: dict[bool, list[float]] = {False: [], True: []}
    for _ in range(3):
        for encoded in steps:
            codecs = None if encoded else []
            _, stats, _ = managed(slow_disk(tmp_path), needed, recompute=False, codecs=codecs)
            steps[encoded].append(stats["last_step_s"])
    assert statistics.median(steps[True]) < 0.9 * statistics.median(steps[False])
