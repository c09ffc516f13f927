"""On the CPU too, a step whose every byte moves takes PyTorch's own formulas: the same bits for every operator."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch.testing._internal.common_methods_invocations import op_db
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

import lowtide
from lowtide.execute.tide.cpu import CpuTide
from tests.formulas import OTHERWISE_IN_A_MODE, differing

CPU = torch.device("cpu")


@pytest.fixture
def tide(tmp_path: Path) -> Iterator[CpuTide]:
    """A tide that may run operators again, under which all that may leave does at every operator."""
    with (
        warnings.catch_warnings(),
        lowtide.fit(budget="512MiB", spill=tmp_path, policy="auto", recompute=True) as tide,
    ):
        warnings.simplefilter("ignore")
        assert isinstance(tide, CpuTide)
        tide.memory.native.stress(1, 3)
        yield tide
        tide.memory.native.stress(0, 0)


def test_operators_that_a_dispatch_mode_would_change_are_the_same(tide: CpuTide) -> None:
    ops = [op for op in op_db if op.name in OTHERWISE_IN_A_MODE]
    compared, others = differing(ops, tide, CPU, samples=24)
    assert not others
    assert compared > 8 * len(OTHERWISE_IN_A_MODE)


def test_a_sample_of_all_operators_is_the_same(tide: CpuTide) -> None:
    compared, others = differing(list(op_db)[::16], tide, CPU, samples=1)
    assert not others
    assert compared > 15


@pytest.mark.slow  # minutes
def test_every_operator_is_the_same(tide: CpuTide) -> None:
    compared, others = differing(list(op_db), tide, CPU, samples=4)
    assert not others
    assert compared > 1000


def test_no_dispatch_mode_is_on(tide: CpuTide) -> None:
    with tide.step():
        assert _get_current_dispatch_mode_stack() == []
        assert not torch._C._is_torch_function_mode_enabled()
