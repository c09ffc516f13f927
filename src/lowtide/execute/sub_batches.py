"""Parts of a batch, one after the other: for a step of which a single operator does not fit the budget (moDNN's way).

Gradients add up to the whole batch's, but their sums are rounded in another order, and a normalisation over the batch
sees a part: training is not the same to the bit. So nothing splits a batch by itself; a program asks for it:

with tide.step():
    for (x, y), share in lowtide.sub_batches((x, y), parts=4):
        loss = loss_fn(model(x), y) * share
        loss.backward()
    optimizer.step()
    optimizer.zero_grad()
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, TypeVar

import torch

from lowtide.core.trace import Kind, Phase, Trace
from lowtide.errors import BadArgument

Batch = TypeVar("Batch")

# What does not become smaller with the batch.
_FIXED = frozenset({Kind.PARAM, Kind.BUFFER, Kind.GRAD, Kind.OPTIMIZER})


def sub_batches(batch: Batch, parts: int) -> Iterator[tuple[Batch, float]]:
    """Yield a batch in parts, each with its share of the samples, by which the mean of a loss is to be multiplied.

    A batch is a tensor, or tensors in tuples, lists and mappings, all with the samples first. Parts are views.
    """
    samples = {tensor.shape[0] for tensor in _tensors(batch) if tensor.dim()}
    if len(samples) != 1:
        raise BadArgument(
            f"the tensors of a batch have {sorted(samples)} samples: pass those with the same number only"
        )
    (count,) = samples
    if not 1 <= parts <= count:
        raise BadArgument(f"{count} samples cannot be split in {parts}: use a number from 1 to {count}")
    begin = 0
    for part in range(parts):
        end = (part + 1) * count // parts
        yield _cut(batch, begin, end), (end - begin) / count
        begin = end


def parts_that_fit(trace: Trace, budget_bytes: int) -> int | None:
    """Return into how many parts a recorded step's batch has to be split for a budget (None: no number is enough).

    Predicted: what an operator holds of parameters, gradients and state stays, all else shrinks with the part.
    """
    parts = 1
    for op, need_bytes in zip(trace.ops, trace.need_bytes(), strict=True):
        if need_bytes <= budget_bytes:
            continue
        fixed_bytes = sum(
            trace.storages[storage].nbytes
            for storage in {*op.reads, *op.writes}
            if trace.storages[storage].kind in _FIXED
        )
        if op.phase is Phase.UPDATE or fixed_bytes >= budget_bytes:
            return None
        parts = max(parts, -(-(need_bytes - fixed_bytes) // (budget_bytes - fixed_bytes)))
    return parts


def _tensors(batch: object) -> Iterator[torch.Tensor]:
    if isinstance(batch, torch.Tensor):
        yield batch
    elif isinstance(batch, Mapping):
        for value in batch.values():
            yield from _tensors(value)
    elif isinstance(batch, tuple | list):
        for value in batch:
            yield from _tensors(value)


def _cut(batch: Any, begin: int, end: int) -> Any:
    if isinstance(batch, torch.Tensor):
        return batch[begin:end] if batch.dim() else batch
    if isinstance(batch, Mapping):
        return {name: _cut(value, begin, end) for name, value in batch.items()}
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(_cut(value, begin, end) for value in batch))
    if isinstance(batch, tuple | list):
        return type(batch)(_cut(value, begin, end) for value in batch)
    return batch
