"""`init`: models that are larger than the memory they are built in."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress

import torch

from lowtide.checkpoint.safe_open import opening_in_place
from lowtide.errors import LowtideError
from lowtide.execute.tide.opening import open_ranges
from lowtide.memory.budget import BudgetLike, parse_budget
from lowtide.memory.ranges import RangeMemory
from lowtide.tiers.open import Spill


@contextmanager
def init(*, budget: BudgetLike, spill: Spill = None, verify: bool = False) -> Iterator[None]:
    """Build a model inside `budget` bytes of tensor memory; parameters that do not fit go to `spill`.

    Any constructor works unchanged, and every parameter gets the same value as without Lowtide. Afterwards the model
    stays inside the budget until `lowtide.fit` or `lowtide.serve` takes it over with its own budget. Until then,
    parameters come back when they are touched.

    Weights of safetensors files that are opened here, by `lowtide.load` or by `from_pretrained`, stay in these files.
    """
    memory = open_ranges(parse_budget(budget), spill=spill, verify=verify).memory
    try:
        memory.open(parse_budget(budget).fast_bytes)
        memory.announce(True)
        with _raising_refusals(memory), opening_in_place(memory):
            yield
    except BaseException:
        with suppress(LowtideError):  # what cannot be read has been told
            memory.close()
        raise
    memory.linger()


@contextmanager
def _raising_refusals(memory: RangeMemory) -> Iterator[None]:
    refusals = memory.refusals
    try:
        yield
    except torch.OutOfMemoryError as error:
        interruption = memory.interruption()
        if interruption is not None:
            raise interruption from error
        trouble, _ = memory.take_errors()
        if trouble is None and memory.refusals == refusals:
            raise
        raise (trouble or memory.too_small()) from error
    trouble, _ = memory.take_errors()
    if trouble is not None:
        raise trouble
