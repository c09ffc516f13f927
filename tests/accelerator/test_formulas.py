"""A step that is watched, recorded and recomputed takes PyTorch's own formulas: the same bits for every operator."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch.testing._internal.common_methods_invocations import op_db

import lowtide
from lowtide.execute.tide.tide import Tide
from tests.formulas import OTHERWISE_IN_A_MODE, differing


@pytest.fixture
def tide(device: torch.device, tmp_path: Path) -> Iterator[Tide]:
    """A tide whose every step is of a new kind, and so recorded, with its calls numbered."""
    with (
        warnings.catch_warnings(),
        lowtide.fit(budget={str(device): "512MiB"}, spill=tmp_path, policy="auto", recompute=True) as tide,
    ):
        warnings.simplefilter("ignore")
        yield tide


def test_operators_that_a_dispatch_mode_would_change_are_the_same(tide: Tide, device: torch.device) -> None:
    ops = [op for op in op_db if op.name in OTHERWISE_IN_A_MODE]
    compared, others = differing(ops, tide, device, samples=24)
    assert not others
    assert compared > 8 * len(OTHERWISE_IN_A_MODE)


def test_a_sample_of_all_operators_is_the_same(tide: Tide, device: torch.device) -> None:
    compared, others = differing(list(op_db)[::16], tide, device, samples=1)
    assert not others
    assert compared > 15


@pytest.mark.slow  # minutes
def test_every_operator_is_the_same(tide: Tide, device: torch.device) -> None:
    compared, others = differing(list(op_db), tide, device, samples=4)
    assert not others
    assert compared > 1000
