"""Programs that open safetensors files themselves, as `from_pretrained` does: their tensors are read in place, too."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from types import EllipsisType
from typing import Any

import torch

from lowtide.checkpoint.in_place import InPlaceFile
from lowtide.memory.ranges import RangeMemory

_memory: RangeMemory | None = None  # in which tensors of files that are opened now have their ranges


@contextmanager
def opening_in_place(memory: RangeMemory) -> Iterator[None]:
    """Let every `safe_open` of PyTorch tensors on the CPU hand out ones that are read when they are touched."""
    global _memory
    if find_spec("safetensors") is None:
        yield
        return
    import safetensors.torch

    original = safetensors.safe_open

    def opening(filename: Any, framework: str, device: Any = "cpu", **options: Any) -> Any:
        file = original(filename, framework, device, **options)
        # A module that was imported meanwhile goes on to call this.
        if _memory is None or framework not in ("pt", "torch", "pytorch") or torch.device(device).type != "cpu":
            return file
        return _Opened(file, InPlaceFile(Path(filename), _memory))

    holders = [module for module in list(sys.modules.values()) if getattr(module, "safe_open", None) is original]
    for module in holders:
        module.safe_open = opening  # type: ignore[attr-defined]
    _memory = memory
    try:
        yield
    finally:
        _memory = None
        for module in holders:
            module.safe_open = original  # type: ignore[attr-defined]


class _Slice:
    """A tensor of a file that is not read yet, as `safe_open` has them: all of it is read in place."""

    def __init__(self, file: InPlaceFile, name: str, original: Any) -> None:
        self._file, self._name, self._original = file, name, original

    def __getitem__(self, index: Any) -> torch.Tensor:
        if isinstance(index, EllipsisType) or index == slice(None):
            return self._file.tensor(self._name)
        read: torch.Tensor = self._original[index]
        return read

    def __getattr__(self, name: str) -> Any:
        return getattr(self._original, name)


class _Opened:
    """What `safe_open` returns, but for its tensors."""

    def __init__(self, original: Any, file: InPlaceFile) -> None:
        self._original, self._file = original, file

    def get_tensor(self, name: str) -> torch.Tensor:
        """Return a tensor that is read when it is touched."""
        if self._file.knows(name):
            return self._file.tensor(name)
        other: torch.Tensor = self._original.get_tensor(name)  # of a type that is not read in place, or to raise
        return other

    def get_tensors(self, names: Any = None) -> dict[str, torch.Tensor]:
        """Return all tensors, or those of the names."""
        return {name: self.get_tensor(name) for name in (self._original.keys() if names is None else names)}

    def get_slice(self, name: str) -> Any:
        """Return a tensor to be sliced."""
        original = self._original.get_slice(name)
        return _Slice(self._file, name, original) if self._file.knows(name) else original

    def __getattr__(self, name: str) -> Any:
        return getattr(self._original, name)

    def __enter__(self) -> _Opened:
        self._original.__enter__()
        return self

    def __exit__(self, *exception: Any) -> None:
        self._original.__exit__(*exception)
