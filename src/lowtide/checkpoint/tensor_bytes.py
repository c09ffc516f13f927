"""A tensor's bytes, to be read or filled in pieces, wherever its pages are."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from lowtide.checkpoint.shard import PIECE_BYTES
from lowtide.errors import BadArgument
from lowtide.memory.lent import lent_to_read


def nbytes_of(tensor: torch.Tensor) -> int:
    """Return the bytes that a tensor takes in a file."""
    return tensor.numel() * tensor.element_size()


def check_storable(name: str, tensor: torch.Tensor) -> None:
    """Raise `BadArgument` for a tensor that is not a plain block of numbers."""
    if type(tensor) not in (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer) or tensor.layout is not torch.strided:
        raise BadArgument(f"'{name}' is a {type(tensor).__name__} ({tensor.layout}): a checkpoint holds plain tensors")
    if tensor.is_quantized or tensor.is_meta:
        kind = "quantized" if tensor.is_quantized else "on the meta device"
        raise BadArgument(f"'{name}' is {kind}: a checkpoint holds plain tensors")


def read_in_pieces(tensor: torch.Tensor) -> Iterator[memoryview]:
    """Yield a tensor's bytes in row-major order; of a range its pages come back and stay until the last is read."""
    if not nbytes_of(tensor):
        return
    if tensor.device.type == "cpu" and tensor.is_contiguous() and not (tensor.is_conj() or tensor.is_neg()):
        with lent_to_read(tensor):
            # Not `Tensor.numpy`, which lends for writing.
            yield from _cut(_view(torch._C.TensorBase.numpy(_as_bytes(tensor))))
        return
    for part in _parts(tensor.resolve_conj().resolve_neg()):
        yield from _cut(_view(_as_bytes(part.contiguous().cpu()).numpy()))


@contextmanager
def to_fill(tensor: torch.Tensor) -> Iterator[memoryview]:
    """Lend a tensor's bytes to be written, in row-major order; one that is not laid out so gets them at the end."""
    if not nbytes_of(tensor):
        yield memoryview(bytearray())
        return
    direct = tensor.device.type == "cpu" and tensor.is_contiguous()
    buffer = tensor if direct else torch.empty(tensor.shape, dtype=tensor.dtype)
    array = _as_bytes(buffer).numpy()
    view = _view(array)
    try:
        yield view
    finally:
        view.release()
        del array  # the borrower's pages may leave again
    if not direct:
        with torch.no_grad():
            tensor.copy_(buffer)


def _view(array: Any) -> memoryview:  # numpy does not say that its arrays are buffers
    return memoryview(array)


def _as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().reshape(-1).view(torch.uint8)


def _parts(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """Cut a tensor along its first dimension into parts of about a piece."""
    if tensor.dim() == 0:
        yield tensor
        return
    rows = max(1, PIECE_BYTES * len(tensor) // nbytes_of(tensor))
    yield from torch.split(tensor, rows)


def _cut(whole: memoryview) -> Iterator[memoryview]:
    for at in range(0, len(whole), PIECE_BYTES):
        yield whole[at : at + PIECE_BYTES]
