"""`init`: models that are larger than the memory they are built in."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress

import torch

from lowtide.checkpoint.safe_open import opening_in_place
from lowtide.checkpoint.torch_load import loading_in_place
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

    Weights of safetensors files that are opened here, by `lowtide.load` or by `from_pretrained`, stay in these files,
    and so do those that `torch.load` reads here with `mmap=True`.
    """
    # Nothing is planned here: `fit` and `serve` measure the disk when they plan.
    memory = open_ranges(parse_budget(budget), spill=spill, verify=verify, measures=False).memory
    try:
        memory.open(parse_budget(budget).fast_bytes)
        memory.announce(True)
        with _raising_refusals(memory), reading_in_place(memory), memory.room_ahead():
            yield
    except BaseException:
        with suppress(LowtideError):  # what cannot be read has been told
            memory.close()
        raise
    memory.linger()


@contextmanager
def reading_in_place(memory: RangeMemory) -> Iterator[None]:
    """Leave the tensors of files that a program opens in them until they are touched, whichever way it opens them."""
    with opening_in_place(memory), loading_in_place(memory):
        yield


@contextmanager
def _raising_refusals(memory: RangeMemory) -> Iterator[None]:
    refusals = memory.refusals
    try:
        yield
    except RuntimeError as error:  # a refusal, or what a library has made of one
        if not isinstance(error, torch.OutOfMemoryError) and memory.refusals == refusals:
            raise
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
