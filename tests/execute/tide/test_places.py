"""A refused allocation says where it was: in an optimizer's step, or in a layer by its name."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import lowtide


class Wide(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = torch.nn.Linear(1024, 1024)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.inner(x)
        return out


def test_a_refusal_in_a_layer_names_the_layer(tmp_path: Path) -> None:
    model = Wide()
    with lowtide.fit(model, budget="16MiB", spill=tmp_path) as tide:
        with pytest.raises(lowtide.BudgetTooSmall, match=r"in inner, in a step that needs .*shrink the batch"):
            with tide.step():
                model(torch.randn(2048, 1024)).sum().backward()


def test_a_refusal_in_an_optimizer_names_it(tmp_path: Path) -> None:
    model = Wide()
    with lowtide.fit(model, budget="10MiB", spill=tmp_path) as tide:
        with pytest.raises(lowtide.BudgetTooSmall, match=r"in AdamW's step, which needs .*less state"):
            optimizer = torch.optim.AdamW(model.parameters())
            with tide.step():
                model(torch.randn(2, 1024)).sum().backward()
                optimizer.step()


def test_a_floor_that_rounds_like_the_budget_is_told_in_bytes() -> None:
    error = lowtide.BudgetTooSmall(budget_bytes=2**30, needed_bytes=2**30 + 1, op="aten::mm")
    assert "budget 1.00 GiB (1073741824 bytes)" in str(error)
    assert "1.00 GiB (1073741825 bytes)" in str(error)


def test_only_an_operator_is_quoted() -> None:
    def said(op: str) -> str:
        return str(lowtide.BudgetTooSmall(budget_bytes=2**20, needed_bytes=2**30, op=op))

    assert "cannot run the first step, which" in said("the first step")
    assert "cannot run 'aten::mm', which" in said("aten::mm")


def test_a_forward_pass_that_did_not_fit_is_not_called_the_optimizers(tmp_path: Path) -> None:
    model = Wide()
    optimizer = torch.optim.AdamW(model.parameters())
    with lowtide.fit(budget="28MiB", spill=tmp_path) as tide:  # as `lowtide run`: nobody has named the model
        with pytest.raises(lowtide.BudgetTooSmall) as refused:
            with tide.step():
                model(torch.randn(4096, 1024)).sum().backward()
                optimizer.step()  # where the step is stopped, before anything changes
    assert refused.value.op == "aten::linear"
    assert refused.value.place == ""
    assert "shrink the batch" in str(refused.value)
