"""Lowtide's dispatch modes come and go in any order, below the program's own, and leave nothing behind."""

from __future__ import annotations

from itertools import permutations
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import (
    TorchDispatchMode,
    _get_current_dispatch_mode_stack,
    is_in_torch_dispatch_mode,
)

from lowtide.execute.recompute.modes import OwnMode


class Passes(OwnMode):
    """Lets everything pass."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


class Programs(TorchDispatchMode):
    """Counts what it sees."""

    seen = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("order", list(permutations(range(3))))
def test_modes_are_left_in_any_order(order: tuple[int, ...]) -> None:
    modes = [Passes() for _ in range(3)]
    for mode in modes:
        mode.__enter__()
    for index in order:
        modes[index].leave()
        assert not modes[index].is_on
    assert _get_current_dispatch_mode_stack() == []
    assert not is_in_torch_dispatch_mode()


def test_a_mode_of_the_program_above_stays() -> None:
    below, above = Passes(), Passes()
    with Programs() as theirs:
        pass
    below.__enter__()
    with theirs:
        above.__enter__()
        below.leave()
        assert _get_current_dispatch_mode_stack() == [theirs, above]
        above.leave()
        torch.ones(1)
        assert theirs.seen > 0
    assert _get_current_dispatch_mode_stack() == []
