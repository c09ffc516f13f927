"""Floating-point operations of operators, by PyTorch's own formulas; 0 where there is none, as for elementwise ones.

One is ours: PyTorch's count of a convolution's backward forgets groups. The gradient of a depthwise convolution's
weight comes out as many times too large as there are channels.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from math import prod
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from lowtide.core.trace import Trace

_aten = torch.ops.aten
# The registry knows the GPU's attention only; the CPU's has the same leading arguments.
_SAME_AS: dict[str, Any] = {
    "aten::_scaled_dot_product_flash_attention_for_cpu": _aten._scaled_dot_product_flash_attention,
    "aten::_scaled_dot_product_flash_attention_for_cpu_backward": _aten._scaled_dot_product_flash_attention_backward,
}


def flops_of(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], out: Any) -> float:
    """Return the floating-point operations of one call of an operator, a multiplication and an addition being two."""
    packet = _SAME_AS.get(func._schema.name, func._overloadpacket)
    formula = flop_registry.get(packet)
    if formula is None:
        return 0.0
    try:
        if packet is _aten.convolution_backward:
            return convolution_backward_flops(*args, **kwargs)
        return float(formula(*args, **kwargs, out_val=out))
    except (AssertionError, TypeError, ValueError):
        return 0.0  # shapes the formula does not know, such as nested tensors


def convolution_backward_flops(
    gradient: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor,
    _bias_sizes: object,
    _stride: object,
    _padding: object,
    _dilation: object,
    transposed: bool,
    _output_padding: object,
    _groups: int,
    output_mask: Sequence[bool],
) -> float:
    """Return the operations of a convolution's backward: those of its forward, for each of the two gradients asked for.

    A weight of `groups` has as many fewer channels, so its elements tell how often each place is multiplied.
    """
    places = x if transposed else gradient
    forward = 2.0 * places.shape[0] * prod(places.shape[2:]) * weight.numel()
    return forward * sum(map(bool, output_mask[:2]))


class CountFlops(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch leaves it untyped
    """Lists the operations of every operator that runs inside it, by name, in order."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.counted: list[tuple[str, float]] = []

    def __torch_dispatch__(
        self, func: Any, types: Iterable[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run the operator, and count it if there is a formula."""
        del types
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        if hasattr(func, "_schema") and (flops := flops_of(func, args, kwargs, out)):
            self.counted.append((func._schema.name, flops))
        return out


def with_flops(trace: Trace, counted: Iterable[tuple[str, float]]) -> Trace:
    """Return the trace with the operations that another run of the same step counted.

    The k-th operator of a name gets the k-th count of that name; a name whose numbers differ is left alone, since the
    two runs did not do the same then.
    """
    by_name: dict[str, list[float]] = {}
    for name, flops in counted:
        by_name.setdefault(name, []).append(flops)
    seen: dict[str, int] = {}
    for op in trace.ops:
        seen[op.name] = seen.get(op.name, 0) + 1
    usable = {name: iter(flops) for name, flops in by_name.items() if seen.get(name) == len(flops)}
    ops = tuple(replace(op, flops=next(usable[op.name])) if op.name in usable else op for op in trace.ops)
    return replace(trace, ops=ops)
