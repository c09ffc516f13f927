"""Every operator of PyTorch's own list, forward, backward and through its backward, inside a step and outside."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator

import torch
from torch import Tensor
from torch.testing._internal.opinfo.core import OpInfo, SampleInput

from lowtide.execute.tide.tide import Tide

Values = list[Tensor | None]
ATTEMPTS = 5
# What they make is whatever was in memory.
UNSET = (
    "empty",
    "empty_like",
    "empty_permuted",
    "empty_strided",
    "new_empty",
    "new_empty_strided",
    "nn.functional.ctc_loss",
)
# With a dispatch mode on, PyTorch takes other formulas for their gradients, or for those of their gradients.
OTHERWISE_IN_A_MODE = (
    "cumprod",
    "linalg.det",
    "linalg.lstsq",
    "linalg.vander",
    "masked.prod",
    "masked_fill",
    "ormqr",
    "prod",
)


def tensors(value: object) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for item in value:
            yield from tensors(item)


def values_of(op: OpInfo, sample: SampleInput) -> Values:
    """Return what an operator makes, its gradients, and the gradients of those."""
    torch.manual_seed(0)
    made = list(tensors(op(sample.input, *sample.args, **sample.kwargs)))
    outputs = [one for one in made if one.requires_grad]
    inputs = [one for one in tensors((sample.input, sample.args, tuple(sample.kwargs.values()))) if one.requires_grad]
    values: Values = [one.detach().clone() for one in made]
    if not outputs or not inputs:
        return values
    weights = [torch.linspace(0.5, 1.5, one.numel(), device=one.device).view_as(one).to(one.dtype) for one in outputs]
    grads = torch.autograd.grad(outputs, inputs, weights, create_graph=op.supports_gradgrad, allow_unused=True)
    values += [None if one is None else one.detach().clone() for one in grads]
    again = [one for one in grads if one is not None and one.requires_grad]
    if again:
        twice = torch.autograd.grad(again, inputs, [torch.ones_like(one) for one in again], allow_unused=True)
        values += [None if one is None else one.detach() for one in twice]
    return values


def are_same(one: Tensor | None, other: Tensor | None) -> bool:
    if one is None or other is None:
        return one is other
    return one.shape == other.shape and one.dtype == other.dtype and torch.equal(bytes_of(one), bytes_of(other))


def bytes_of(tensor: Tensor) -> Tensor:
    dense = tensor if tensor.layout is torch.strided else tensor.to_dense()
    plain = dense.resolve_conj().resolve_neg().cpu()
    return plain.clone(memory_format=torch.contiguous_format).flatten().view(torch.uint8)


def attempt(values: Callable[[], Values]) -> Values | str:
    """Return an operator's values, or the class of what it raises: some samples are there to fail."""
    try:
        return values()
    except Exception as error:  # noqa: BLE001
        return type(error).__name__


def samples_of(op: OpInfo, device: torch.device, count: int) -> list[SampleInput]:
    """Return some inputs of an operator, or none where they cannot be had on the device: sparse ones."""
    try:
        inputs = op.sample_inputs(device, torch.float32, requires_grad=op.supports_autograd)
        return list(itertools.islice(inputs, count))
    except Exception:  # noqa: BLE001
        return []


def is_steady(stock: Values, values: Callable[[], Values]) -> bool:
    """Tell whether an operator makes the same without Lowtide each time: else nothing can be told by its bits."""
    for _ in range(4 * ATTEMPTS):
        again = attempt(values)
        if isinstance(again, str) or not all(map(are_same, stock, again)):
            print(f"varies without Lowtide: {again if isinstance(again, str) else 'other bits'}")
            return False
    return True


def differing(ops: list[OpInfo], tide: Tide, device: torch.device, *, samples: int) -> tuple[int, list[str]]:
    """Return how many samples were compared, and the operators that differ inside a step of the tide."""
    compared, others = 0, []
    for op in ops:
        if torch.float32 not in op.dtypes or op.name in UNSET:
            continue
        for sample in samples_of(op, device, samples):
            stock = attempt(lambda op=op, sample=sample: values_of(op, sample))
            if isinstance(stock, str):
                continue
            compared += 1
            # The last bits of some (ormqr, lstsq) vary without Lowtide too: see `is_steady`.
            for _ in range(ATTEMPTS):
                with tide.step():
                    found = attempt(lambda op=op, sample=sample: values_of(op, sample))
                if not isinstance(found, str) and len(found) == len(stock) and all(map(are_same, stock, found)):
                    break
            else:
                if is_steady(stock, lambda op=op, sample=sample: values_of(op, sample)):
                    others.append(op.name if not isinstance(found, str) else f"{op.name}: {found}")
    return compared, others
