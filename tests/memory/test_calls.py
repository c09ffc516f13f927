"""Calls that are remembered and run again make the same: every operator of PyTorch's own list, and their gradients."""

from __future__ import annotations

import collections
import itertools
import warnings
from collections.abc import Callable, Iterator

import pytest
import torch
from torch.testing._internal.common_methods_invocations import op_db
from torch.testing._internal.opinfo.core import OpInfo, SampleInput

from tests.memory.engine import Engine

Opened = Callable[..., Engine]
# Their kernels leave parts of what they make unset: what was in memory is found there.
UNSET = frozenset({"aten::mkldnn_rnn_layer"})


def tensors(value: object) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for item in value:
            yield from tensors(item)


def run(op: OpInfo, sample: SampleInput, *, twice: bool) -> None:
    """Run an operator forward and backward, and through its backward once more."""
    torch.manual_seed(0)
    outputs = [one for one in tensors(op(sample.input, *sample.args, **sample.kwargs)) if one.requires_grad]
    inputs = [one for one in tensors((sample.input, sample.args, tuple(sample.kwargs.values()))) if one.requires_grad]
    if not outputs or not inputs:
        return
    grads = torch.autograd.grad(
        outputs, inputs, [torch.ones_like(one) for one in outputs], create_graph=twice, allow_unused=True
    )
    again = [one for one in grads if one is not None and one.requires_grad]
    if twice and again:
        torch.autograd.grad(again, inputs, [torch.ones_like(one) for one in again], allow_unused=True)


def swept(engine: Engine, *, samples: int, twice: bool) -> tuple[int, collections.Counter[str]]:
    """Return how many calls made the same, and the names of those that did not, with who made them."""
    same, others = 0, collections.Counter[str]()
    for op in op_db:
        if torch.float32 not in op.dtypes:
            continue
        inputs = op.sample_inputs("cpu", torch.float32, requires_grad=op.supports_autograd)
        for sample in itertools.islice(inputs, samples):
            engine.native.check_calls(1)
            try:
                run(op, sample, twice=twice)
            except Exception:  # noqa: BLE001  # some samples are there to fail
                pass
            finally:
                engine.native.check_calls(0)
            alike, _, _, names = engine.native.take_checked()
            same += alike
            others.update(f"{name} in {op.name}" for name in names if name not in UNSET)
    return same, others


@pytest.fixture
def engine(opened: Opened) -> Iterator[Engine]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield opened(budget=1 << 33)


def test_every_operator_makes_the_same_again(engine: Engine) -> None:
    same, others = swept(engine, samples=1, twice=False)
    assert not others
    assert same > 2000


@pytest.mark.slow  # minutes
def test_every_operator_makes_the_same_again_in_double_backward(engine: Engine) -> None:
    same, others = swept(engine, samples=8, twice=True)
    assert not others
    assert same > 20000
