"""Files of `torch.save`: a zip archive whose tensors lie in it as they are, at offsets that PyTorch tells."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from lowtide.checkpoint.shard import Stored, damaged
from lowtide.errors import CheckpointError

_ARCHIVE = b"PK\x03\x04"
_NESTED = ("state_dict", "model", "module", "model_state_dict")  # where trainers put the weights


def is_torch_file(path: Path) -> bool:
    """Tell whether `torch.save` wrote a file, since PyTorch 1.6."""
    try:
        with path.open("rb") as file:
            return file.read(len(_ARCHIVE)) == _ARCHIVE
    except OSError:
        return False


def tensors_of(path: Path) -> dict[str, Stored]:
    """Return what is in a file, by name: nothing of its tensors is read, and no code of its pickle is run."""
    try:
        with FakeTensorMode():
            loaded = torch.load(path, weights_only=True)
    except UnpicklingError as error:
        raise CheckpointError(
            f"{path} holds more than tensors and plain values, which only its own program may load: "
            f"save model.state_dict() alone ({str(error).splitlines()[0]})"
        ) from error
    except (RuntimeError, EOFError) as error:  # PyTorch's reader of archives
        raise damaged(path, f"PyTorch cannot read it ({str(error).splitlines()[0]})") from error
    except OSError as error:
        raise CheckpointError(error.errno, f"cannot open {path}: {error.strerror}") from error
    return {name: _stored(path, name, tensor) for name, tensor in _weights(path, loaded).items()}


def _weights(path: Path, loaded: Any) -> Mapping[str, torch.Tensor]:
    found = loaded
    for key in _NESTED:
        if isinstance(loaded, Mapping) and isinstance(loaded.get(key), Mapping):
            found = loaded[key]
            break
    tensors = {}
    if isinstance(found, Mapping):
        tensors = {str(name): one for name, one in found.items() if isinstance(one, torch.Tensor)}
    if not tensors:
        raise CheckpointError(f"{path} holds no mapping of names to tensors: save model.state_dict()")
    return tensors


def _stored(path: Path, name: str, tensor: torch.Tensor) -> Stored:
    plain = tensor.layout is torch.strided and not (tensor.is_quantized or tensor.is_conj() or tensor.is_neg())
    offset = getattr(tensor.untyped_storage(), "_checkpoint_offset", None) if plain else None
    if offset is None:
        raise CheckpointError(
            f"'{name}' in {path} is not a plain block of numbers ({tensor.dtype}, {tensor.layout}): load it with "
            "torch.load"
        )
    packed = tensor.is_contiguous()
    # From its first number to its last, whatever lies between.
    span = sum((length - 1) * step for length, step in zip(tensor.shape, tensor.stride(), strict=True)) + 1
    return Stored(
        dtype=str(tensor.dtype).removeprefix("torch."),
        shape=tuple(tensor.shape),
        begin=offset + tensor.storage_offset() * tensor.element_size(),
        nbytes=(tensor.numel() if packed else span) * tensor.element_size(),
        stride=None if packed else tuple(tensor.stride()),
    )
