"""What autograd holds instead of a saved tensor that may move, and the checks it would have made."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch

from lowtide.autograd.kept import changed_in_place

if TYPE_CHECKING:
    from lowtide.execute.step.runtime import Runtime


class UseWait(NamedTuple):
    """A use that waited for its bytes: of which key, at which event, when; `demanded`: without an earlier request."""

    key: int
    event: int
    start_s: float
    end_s: float
    demanded: bool


class SavedTensor:
    """A saved tensor whose storage is a record of the runtime."""

    __slots__ = ("dtype", "key", "pack", "record", "runtime", "shape", "version")

    def __init__(
        self,
        runtime: Runtime,
        *,
        pack: int,
        record: int,
        version: int,
        shape: tuple[int, ...],
        dtype: torch.dtype,
    ) -> None:
        self.runtime = runtime
        self.pack = pack
        self.record = record
        self.key = -1  # the runtime numbers it
        self.version = version
        self.shape = shape
        self.dtype = dtype

    def __del__(self) -> None:
        self.runtime.backend.close_pack(self.pack)

    def is_changed(self) -> bool:
        """Tell whether the tensor was changed since it was saved, or may have been: it was lent to numpy, for one."""
        backend = self.runtime.backend
        lent = backend.remakes is not None and backend.remakes.is_lent(self.record)
        return lent or backend.version(self.pack) != self.version

    def check_version(self, version_now: int) -> None:
        """Raise what stock autograd raises for a saved tensor that was changed in place."""
        if version_now != self.version:
            kind = torch.empty(0, dtype=self.dtype, device=self.runtime.backend.device).type()
            raise changed_in_place(kind, self.shape, version_now, self.version)


def unmanaged_reason(tensor: torch.Tensor, device: torch.device) -> str | None:
    """Return why a saved tensor cannot be managed on a device, or None if it can."""
    if type(tensor) is not torch.Tensor and type(tensor) is not torch.nn.Parameter:
        return f"tensor subclass {type(tensor).__name__}"
    if tensor.layout is not torch.strided:
        return f"{tensor.layout} tensor"
    if tensor.device != device:
        same_type = tensor.device.type == device.type
        return f"tensor on {tensor.device}" if same_type else f"tensor on {tensor.device.type}"
    if tensor.is_nested:
        return "nested tensor"
    if tensor.is_quantized or tensor.is_conj() or tensor.is_neg():
        return "quantized tensor" if tensor.is_quantized else "conjugate or negative view"
    if torch._C._functorch.is_functorch_wrapped_tensor(tensor):
        return "tensor of a torch.func transform"
    return None
