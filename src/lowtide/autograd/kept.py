"""Saved tensors that stay where they are, and the check that autograd leaves to hooks."""

from __future__ import annotations

import torch


class KeptTensor:
    """A saved tensor that stays where it is: small, a parameter, or of a kind that is not managed.

    An output is detached: if it held its own graph through us, neither would ever be freed. A leaf is kept as it is,
    so that a program which gives it other data meanwhile (`p.data = ...`) sees that in backward, as stock does.
    """

    __slots__ = ("tensor", "version")

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor if tensor.grad_fn is None else tensor.detach()
        self.version = tensor._version

    def get(self) -> torch.Tensor:
        """Return the tensor, unless it was changed since it was saved."""
        if self.tensor._version != self.version:
            raise changed_in_place(self.tensor.type(), tuple(self.tensor.shape), self.tensor._version, self.version)
        return self.tensor


def changed_in_place(kind: str, shape: tuple[int, ...], version_now: int, version_saved: int) -> RuntimeError:
    """Return autograd's own error, which it leaves to the hooks when there are any (R5)."""
    return RuntimeError(
        "one of the variables needed for gradient computation has been modified by an inplace operation: "
        f"[{kind} {list(shape)}] is at version {version_now}; expected version {version_saved} instead. "
        "Hint: enable anomaly detection to find the operation that failed to compute its gradient, "
        "with torch.autograd.set_detect_anomaly(True)."
    )


def is_parameter(tensor: torch.Tensor) -> bool:
    """Tell whether a saved tensor is a leaf that requires a gradient, or a view of one: never moved."""
    base = tensor._base if tensor._base is not None else tensor
    return base.requires_grad and base.is_leaf
