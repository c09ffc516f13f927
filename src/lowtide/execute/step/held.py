"""What a program holds from step to step: the tensors of its models and optimizers."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch

from lowtide.capture.schema import tensors_in

Owner = torch.nn.Module | torch.optim.Optimizer

PARAMETER, BUFFER, STATE, GRADIENT = "a parameter", "a buffer", "optimizer state", "a gradient"
KINDS = (PARAMETER, BUFFER, STATE, GRADIENT)
"""In the order in which they have to come back, where not everything can."""


def held_by(owner: Owner) -> Iterator[tuple[torch.Tensor, str]]:
    """Yield the tensors of a model or an optimizer, and what each is."""
    if isinstance(owner, torch.nn.Module):
        parameters: Iterable[torch.Tensor] = owner.parameters()
        yield from ((buffer, BUFFER) for buffer in owner.buffers())
    else:
        parameters = [parameter for group in owner.param_groups for parameter in group["params"]]
        for state in owner.state.values():
            yield from ((value, STATE) for value in tensors_in(state))
    for parameter in parameters:
        yield parameter, PARAMETER
        if parameter.is_leaf and parameter.grad is not None:
            yield parameter.grad, GRADIENT
