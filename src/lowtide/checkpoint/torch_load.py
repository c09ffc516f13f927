"""Programs that call `torch.load(..., mmap=True)` themselves: what they get is read in place, too.

PyTorch would map the file, whose pages count as the kernel's cache and not in the budget. Here each storage is a range
whose bytes are in the file until it is touched. As with PyTorch's mapping, what a program changes never reaches the
file.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from lowtide.checkpoint.tensor_bytes import to_fill
from lowtide.checkpoint.torch_file import is_torch_file
from lowtide.memory.ranges import InFile, RangeMemory


class _Unsuited(Exception):
    """A file holds what is not read in place."""


@contextmanager
def loading_in_place(memory: RangeMemory) -> Iterator[None]:
    """Let `torch.load` with `mmap=True` hand out tensors on the CPU that are read when they are touched."""
    original = torch.load

    def loading(f: Any, map_location: Any = None, pickle_module: Any = None, **options: Any) -> Any:
        others = {name for name, value in options.items() if value is not None} - {"mmap", "weights_only"}
        if (
            options.get("mmap")
            and options.get("weights_only") is not False
            and isinstance(f, str | os.PathLike)
            and (map_location is None or (isinstance(map_location, str | torch.device) and str(map_location) == "cpu"))
            and pickle_module is None
            and not others
            and is_torch_file(Path(f))
        ):
            try:
                return _Loading(Path(f), memory).loaded()
            except _Unsuited:
                pass
        return original(f, map_location, pickle_module, **options)

    torch.load = loading
    try:
        yield
    finally:
        torch.load = original


class _Loading:
    """One file on its way: first its tensors without memory, then the storages behind them."""

    def __init__(self, path: Path, memory: RangeMemory) -> None:
        self._path, self._memory = path, memory
        self._fakes: dict[int, Tensor] = {}
        self._made: dict[int, Tensor] = {}

    def loaded(self) -> Any:
        """Return what the file holds."""
        with FakeTensorMode():
            found = torch.load(self._path, weights_only=True)
        self._collect(found)
        self._make()
        return self._replaced(found)

    def _collect(self, value: Any) -> None:
        if isinstance(value, Tensor):
            plain = value.layout is torch.strided and value.device.type == "cpu" and not value.is_quantized
            if not plain or value.is_conj() or value.is_neg() or _offset(value) is None:
                raise _Unsuited
            self._fakes[id(value)] = value
        elif isinstance(value, dict):
            for one in value.values():
                self._collect(one)
        elif isinstance(value, list | tuple | set | frozenset):
            for one in value:
                self._collect(one)

    def _make(self) -> None:
        """Make all tensors, those that share a storage as views of one."""
        sharing: dict[int, list[Tensor]] = {}
        for fake in self._fakes.values():
            sharing.setdefault(_begin(fake), []).append(fake)
        groups = list(sharing.values())
        places = [InFile(begin=begin, nbytes=group[0].untyped_storage().nbytes()) for begin, group in sharing.items()]
        source = self._memory.read_in_place(self._path, places)
        for number, (group, place) in enumerate(zip(groups, places, strict=True)):
            first = group[0]
            whole = first.is_contiguous() and first.numel() * first.element_size() == place.nbytes
            alone = len(group) == 1 and whole
            base = (
                torch.empty(first.shape, dtype=first.dtype) if alone else torch.empty(place.nbytes, dtype=torch.uint8)
            )
            if not self._memory.refer(base, source, number):
                self._read(base, place)
            for fake in group:
                self._made[id(fake)] = _like(fake, base if alone else _view(fake, base))

    def _read(self, tensor: Tensor, place: InFile) -> None:
        with to_fill(tensor) as into, self._path.open("rb") as file:
            file.seek(place.begin)
            if file.readinto(into) != place.nbytes:
                raise _Unsuited  # PyTorch says what is wrong with it

    def _replaced(self, value: Any) -> Any:
        """Return a value with its tensors; dictionaries and lists stay the same objects, with what they carry."""
        if isinstance(value, Tensor):
            return self._made[id(value)]
        if isinstance(value, dict):
            for key in value:
                value[key] = self._replaced(value[key])
        elif isinstance(value, list):
            value[:] = [self._replaced(one) for one in value]
        elif type(value) is tuple:
            return tuple(self._replaced(one) for one in value)
        return value


def _offset(fake: Tensor) -> int | None:
    found: int | None = getattr(fake.untyped_storage(), "_checkpoint_offset", None)
    return found


def _begin(fake: Tensor) -> int:
    begin = _offset(fake)
    assert begin is not None
    return begin


def _view(fake: Tensor, base: Tensor) -> Tensor:
    return base.view(fake.dtype).as_strided(fake.shape, fake.stride(), fake.storage_offset()).detach()


def _like(fake: Tensor, tensor: Tensor) -> Tensor:
    if isinstance(fake, torch.nn.Parameter):
        return torch.nn.Parameter(tensor, requires_grad=fake.requires_grad)
    return tensor.requires_grad_(fake.requires_grad)
