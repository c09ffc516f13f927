"""A checkpoint whose object, optimizer or extra state is of another kind: one clear error, nothing changed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import lowtide
from lowtide.errors import CheckpointMismatch


class Counter:
    def __init__(self) -> None:
        self.count = 1

    def state_dict(self) -> dict[str, Any]:
        return {"count": self.count}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.count = state["count"]


class Extra(torch.nn.Linear):
    def get_extra_state(self) -> Any:
        return {"version": 3}

    def set_extra_state(self, state: Any) -> None:
        pass


def refused(tmp_path: Path, model: torch.nn.Module, optimizer: Any = None, **objects: Any) -> None:
    before = [tensor.clone() for tensor in model.parameters()]
    with pytest.raises(CheckpointMismatch, match="Nothing was loaded"):
        lowtide.load_checkpoint(tmp_path, model, optimizer, **objects)
    for ours, theirs in zip(model.parameters(), before, strict=True):
        assert torch.equal(ours, theirs), "nothing was changed"


def test_an_object_of_another_kind_is_refused_before_anything_changes(tmp_path: Path) -> None:
    lowtide.save_checkpoint(tmp_path, torch.nn.Linear(3, 3), loader=Counter())
    refused(tmp_path, torch.nn.Linear(3, 3), loader=torch.Generator())


def test_a_value_where_an_object_was_saved_is_refused_before_anything_changes(tmp_path: Path) -> None:
    lowtide.save_checkpoint(tmp_path, torch.nn.Linear(3, 3), loader=torch.Generator())
    refused(tmp_path, torch.nn.Linear(3, 3), loader=Counter())


def test_a_model_where_an_object_was_saved_is_refused_before_anything_changes(tmp_path: Path) -> None:
    lowtide.save_checkpoint(tmp_path, torch.nn.Linear(3, 3), average=Counter())
    refused(tmp_path, torch.nn.Linear(3, 3), average=torch.nn.Linear(2, 2))


def test_the_state_of_another_kind_of_optimizer_is_refused_before_anything_changes(tmp_path: Path) -> None:
    model = torch.nn.Linear(3, 3)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1.0)
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    lowtide.save_checkpoint(tmp_path, model, optimizer)
    other = torch.nn.Linear(3, 3)
    refused(tmp_path, other, torch.optim.SGD(other.parameters(), lr=0.1, momentum=0.9))
