"""Plans that round activations, for those who ask for it: what backward reads is within the bound, the rest exact."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import nn

import lowtide
from lowtide.codecs import FP8_E5M2, Cast, codec
from lowtide.core.plan import Plan, Problem, Swap
from lowtide.core.trace import Kind, Phase
from lowtide.errors import BadArgument
from lowtide.execute.tide import encoding
from lowtide.execute.tide.encoding import relative_error
from lowtide.plan.policies.swap_all import SwapAll
from tests.execute.test_encoded_plans import slow_disk
from tests.execute.training import Need, Training, need

SHAPE = (512, 256)


class Cubed(torch.autograd.Function):
    """Keeps what backward was given, to be looked at."""

    seen: ClassVar[dict[int, NDArray[np.float32]]] = {}

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, number: int) -> torch.Tensor:
        ctx.save_for_backward(x)
        ctx.number = number
        return x * x * x

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        (x,) = ctx.saved_tensors
        Cubed.seen[ctx.number] = np.array(x.numpy())  # no tensor: the budget would count it
        return gradients[0] * 3 * x * x, None


class Layer(nn.Module):
    def __init__(self, number: int) -> None:
        super().__init__()
        self.linear = nn.Linear(SHAPE[1], SHAPE[1])
        self.number = number

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(Cubed.apply(torch.relu(self.linear(x)), self.number))


def training() -> Training:
    return Training(lambda: nn.Sequential(*(Layer(k) for k in range(6)), nn.Linear(SHAPE[1], 10)), shape=SHAPE)


@pytest.fixture(scope="module")
def needed(tmp_path_factory: pytest.TempPathFactory) -> Need:
    return need(training, tmp_path_factory.mktemp("spill"))


class Rounds(SwapAll):
    """Swaps everything, and rounds all that may be."""

    def __init__(self, name: str) -> None:
        self._name = name

    def plan(self, problem: Problem) -> Plan:
        plan, trace = super().plan(problem), problem.trace
        touches = trace.touches()

        def may_be(swap: Swap) -> bool:
            later = [op for op in touches[swap.gap.storage] if op >= swap.gap.before_op]
            block = trace.storages[swap.gap.storage]
            return (
                block.kind is Kind.ACTIVATION
                and bool(later)
                and all(trace.ops[op].phase is Phase.BACKWARD for op in later)
            )

        swaps = tuple(replace(one, codec=self._name) if may_be(one) else one for one in plan.swaps)
        return replace(plan, swaps=swaps)


def run(spill: Any, needed: Need, *, steps: int = 4, **options: Any) -> tuple[Training, dict[str, Any], Plan | None]:
    mine = training()
    budget = needed.share(0.5)
    with lowtide.fit(mine.model, mine.optimizer, budget=budget, spill=spill, recompute=False, **options) as tide:
        mine.steps(steps, tide.step)
        stats: dict[str, Any] = tide.stats()
        plan = tide.plan()
    assert stats["peak_bytes"] <= budget
    return mine, stats, plan


@pytest.mark.parametrize("name", ["bf16", "fp8_e5m2"])
def test_backward_sees_every_value_within_the_bound_and_zeros_as_zeros(tmp_path: Path, needed: Need, name: str) -> None:
    error = relative_error(codec(name))
    exact = training()
    exact.steps(3)
    Cubed.seen.clear()
    exact.steps(1)
    before = dict(Cubed.seen)
    # The first three steps are the same to the bit: the plan is followed from the fourth on.
    mine, stats, plan = run(tmp_path, needed, policy=Rounds(name), codecs=[name], max_error=error, steps=4)
    assert plan is not None
    rounded = [swap for swap in plan.swaps if swap.codec == name]
    assert rounded
    assert stats["encoded_bytes"] > 0
    del mine
    off = 0
    for number, x in before.items():
        back = Cubed.seen[number]
        assert np.abs(back - x).max() <= error * np.abs(x).max(), "each is smaller than a frame"
        assert ((back == 0) | (x != 0)).all()
        off += int((back != x).sum())
    assert off > 0, "something was rounded"


def test_nothing_is_rounded_by_default(tmp_path: Path, needed: Need) -> None:
    stock = training().steps(4).result()
    mine, _, plan = run(slow_disk(tmp_path), needed)
    assert mine.result() == stock
    assert plan is not None
    assert {swap.codec for swap in plan.swaps} <= {"identity", "zvc", "zvc2", "bits", "pack32", "pack16"}


def test_auto_rounds_on_a_slow_disk_where_an_error_is_admitted(tmp_path: Path, needed: Need) -> None:
    losses = training().steps(6).losses
    mine, stats, plan = run(slow_disk(tmp_path, 3e6), needed, max_error=2**-8, steps=6)
    assert plan is not None
    assert {swap.codec for swap in plan.swaps} & {"bf16", "fp16"}
    assert stats["encoded_bytes"] > 0
    assert mine.losses[0] == losses[0]
    assert mine.losses == pytest.approx(losses, rel=0.05)


class Liar(Cast):
    """Says that it is off by less than it is."""

    def bound(self, values: NDArray[Any]) -> NDArray[np.float64]:
        return np.full(values.shape, 2**-20)


def test_a_frame_that_would_be_too_far_off_goes_as_it_is(
    tmp_path: Path, needed: Need, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody relies on what a codec promises: each value is compared."""
    stock = training().steps(4).result()
    with pytest.raises(BadArgument, match=r"pass max_error=0\.125"):
        run(tmp_path, needed, codecs=["fp8_e5m2"], max_error=0.1)
    liar = Liar("fp8_e5m2", 5, 2, FP8_E5M2.largest)
    monkeypatch.setattr(encoding, "codec", lambda name: liar if name == "fp8_e5m2" else codec(name))
    encoding._cost.cache_clear()
    try:
        mine, stats, _ = run(tmp_path, needed, policy=Rounds("fp8_e5m2"), codecs=["fp8_e5m2"], max_error=2**-8)
    finally:
        encoding._cost.cache_clear()
    assert mine.result() == stock
    assert stats["encoded_bytes"] == 0
    assert stats["unencoded_bytes"] > 0


def test_an_error_that_is_none_and_codecs_that_keep_signs_only_are_refused(tmp_path: Path) -> None:
    for wrong in (-0.1, 1.0):
        with pytest.raises(BadArgument, match="not a relative error"):
            lowtide.fit(budget="1GiB", spill=tmp_path, max_error=wrong)
    with pytest.raises(BadArgument, match="keeps signs only"):
        lowtide.fit(budget="1GiB", spill=tmp_path, codecs=["binarize"], max_error=0.5)
