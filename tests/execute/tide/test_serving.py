"""Inference beyond memory: weights stream through each call, read ahead, and only what changes is written."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lowtide
from lowtide.errors import BadArgument, BudgetTooSmall
from lowtide.execute.tide.serving import serving
from tests.execute.training import away_bytes

MIB = 2**20
WIDTH, DEPTH = 512, 12  # a MiB a layer


class Decoder(nn.Module):
    """A stack whose state grows with each call, as a cache of keys and values does."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(DEPTH))

    def forward(self, x: Tensor, past: list[Tensor] | None = None) -> tuple[Tensor, list[Tensor]]:
        kept = []
        for index, layer in enumerate(self.layers):
            x = layer(x).tanh()
            kept.append(x if past is None else torch.cat([past[index], x]))
            x = x + kept[-1].mean(0, keepdim=True)
        return x, kept


def generate(model: nn.Module, words: int) -> list[Tensor]:
    x, past, out = torch.ones(1, WIDTH), None, []
    with torch.no_grad():
        for _ in range(words):
            x, past = model(x, past)
            out.append(x)
    return out


def same(ours: list[Tensor], theirs: list[Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


@pytest.mark.parametrize("share", [0.25, 0.5, 0.75])
def test_what_does_not_fit_is_read_once_a_call_and_nothing_is_written(share: float, tmp_path: Path) -> None:
    expected = generate(Decoder(), 12)
    model, budget = Decoder(), int(share * DEPTH * MIB)
    with lowtide.serve(model, budget=budget, spill=tmp_path) as tide:
        assert same(generate(model, 6), expected[:6])
        # A write that a touch calls back is begun again, so how soon all weights are on the disk is a matter of time.
        for _ in range(10):
            before: dict[str, Any] = tide.stats()
            assert same(generate(model, 12), expected)
            after: dict[str, Any] = tide.stats()
            if after["swapped_out_bytes"] == before["swapped_out_bytes"]:
                break
        plan = tide.plan()
    assert after["peak_reserved_bytes"] <= budget
    assert after["swapped_out_bytes"] == before["swapped_out_bytes"], "weights do not change: they are on the disk"
    read = (after["swapped_in_bytes"] - before["swapped_in_bytes"]) / 12
    assert plan is not None
    assert plan.prediction is not None
    assert read <= 1.1 * plan.prediction.moved_in_bytes + MIB, "the plan is followed"
    assert away_bytes() == 0
    assert not model._forward_hooks
    assert not model._forward_pre_hooks


def test_a_cache_larger_than_the_budget_leaves_and_returns(tmp_path: Path) -> None:
    def generate_many(model: nn.Module) -> list[Tensor]:
        x, past, out = torch.ones(64, WIDTH), None, []
        with torch.no_grad():
            for _ in range(10):
                x, past = model(x, past)
                x = x[-64:]
                out.append(x)
        return [*out, *past]

    expected = generate_many(Decoder())
    cache = sum(one.nbytes for one in expected[10:])
    model, budget = Decoder(), 12 * MIB
    with lowtide.serve(model, budget=budget, spill=tmp_path) as tide:
        got = generate_many(model)
        stats: dict[str, Any] = tide.stats()
        assert same(got, expected)
    assert cache > budget
    assert stats["peak_reserved_bytes"] <= budget
    assert stats["swapped_out_bytes"] > DEPTH * MIB, "more than the weights"


def test_a_batch_shares_a_pass(tmp_path: Path) -> None:
    model, read = Decoder(), {}
    with lowtide.serve(model, budget=6 * MIB, spill=tmp_path) as tide, torch.no_grad():
        for batch in (1, 32):
            for _ in range(6):
                model(torch.ones(batch, WIDTH))
            before: dict[str, Any] = tide.stats()
            for _ in range(6):
                model(torch.ones(batch, WIDTH))
            after: dict[str, Any] = tide.stats()
            read[batch] = after["swapped_in_bytes"] - before["swapped_in_bytes"]
    assert read[32] <= 1.2 * read[1], "weights are read for a batch as for one"


def test_a_cache_that_grows_keeps_the_plan_for_the_weights(tmp_path: Path) -> None:
    model = Decoder()
    with lowtide.serve(model, budget=6 * MIB, spill=tmp_path) as tide:
        generate(model, 8)
        before: dict[str, Any] = tide.stats()
        generate(model, 40)
        after: dict[str, Any] = tide.stats()
        plan = tide.plan()
    assert after["faults"] == before["faults"], "operators announce what they use"
    assert plan is not None
    assert plan.prediction is not None
    read = (after["swapped_in_bytes"] - before["swapped_in_bytes"]) / 40
    assert read <= 1.1 * plan.prediction.moved_in_bytes + MIB, "the plan for the weights is followed"


def test_a_call_that_raises_is_no_step_and_the_next_one_is_exact(tmp_path: Path) -> None:
    model, expected = Decoder(), generate(Decoder(), 3)
    with lowtide.serve(model, budget=6 * MIB, spill=tmp_path) as tide:
        with pytest.raises(RuntimeError):
            model(torch.ones(1, WIDTH + 1))
        assert same(generate(model, 3), expected)
        assert tide.stats()["steps"] == 3


def test_a_budget_below_a_layer_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BudgetTooSmall), lowtide.serve(model := Decoder(), budget=MIB // 2, spill=tmp_path):
        generate(model, 1)
    assert same(generate(model, 2), generate(Decoder(), 2)), "the model is whole"


def test_only_a_module_can_be_served() -> None:
    with pytest.raises(BadArgument, match=r"pass a torch\.nn\.Module"), lowtide.serve(len, budget="1GiB"):  # type: ignore[arg-type]
        pass


def test_calls_inside_a_call_belong_to_its_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # `lowtide run --serve` sees every module's call: only the outermost begins a step.
    model = nn.Sequential(nn.Linear(8, 8), nn.Sequential(nn.Linear(8, 8), nn.Tanh()))
    with lowtide.fit(budget="64MiB", spill=tmp_path) as tide:
        begun = []
        begin_step = tide.begin_step
        monkeypatch.setattr(tide, "begin_step", lambda: (begun.append(True), begin_step()))
        with serving(tide), torch.no_grad():
            for _ in range(3):
                model(torch.ones(1, 8))
        assert len(begun) == tide.stats()["steps"] == 3
