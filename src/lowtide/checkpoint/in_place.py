"""Tensors whose bytes stay in a checkpoint's file until they are touched."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

import torch

from lowtide.checkpoint.manifest import NAME as MANIFEST
from lowtide.checkpoint.manifest import read_manifest
from lowtide.checkpoint.shard import TYPES, ShardReader, Stored
from lowtide.checkpoint.tensor_bytes import to_fill
from lowtide.checkpoint.torch_file import is_torch_file, tensors_of
from lowtide.errors import BadArgument, CheckpointError, CheckpointMismatch
from lowtide.memory import ranges
from lowtide.memory.ranges import Conversion, InFile, RangeMemory, Source

M = TypeVar("M", bound=torch.nn.Module)

# By the type in the file and the one in memory.
_CONVERSIONS = {
    (torch.bfloat16, torch.float32): Conversion.FROM_BFLOAT16,
    (torch.float16, torch.float32): Conversion.FROM_HALF,
    (torch.float32, torch.bfloat16): Conversion.TO_BFLOAT16,
    (torch.float32, torch.float16): Conversion.TO_HALF,
}
# The files of weights that a folder may hold, the first kind before the others: the usual name of one that holds all,
# what shards are called, and their index.
_KINDS = (
    ("model.safetensors", "*.safetensors", "model.safetensors.index.json"),
    ("pytorch_model.bin", "pytorch_model*.bin", "pytorch_model.bin.index.json"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Located:
    """Where a model's tensor is: the name of it in a file, and its type and shape where the file cannot say them."""

    file: Path
    key: str
    dtype: str | None = None
    shape: tuple[int, ...] = ()

    def described(self, stored: Stored) -> Stored:
        """Return what the file says of the tensor, put right."""
        return stored if self.dtype is None else replace(stored, dtype=self.dtype, shape=self.shape)


class InPlaceFile:
    """A file whose tensors are made without being read; `memory` is where their ranges are."""

    def __init__(self, path: Path, memory: RangeMemory | None, located: Iterable[Located] = ()) -> None:
        self.path = path
        self._memory = memory
        self._reader = reader_of(path)
        known = {one.key: one for one in located}
        self.tensors: Mapping[str, Stored] = {
            name: known[name].described(stored) if name in known else stored
            for name, stored in self._reader.tensors.items()
        }
        self._names = [name for name, stored in self.tensors.items() if stored.dtype in TYPES]
        self._numbers = {name: number for number, name in enumerate(self._names)}
        self._sources: dict[torch.dtype | None, Source] = {}
        self._lock = threading.Lock()

    def knows(self, name: str) -> bool:
        """Tell whether a tensor is in the file, and of a type that can be read in place."""
        return name in self._numbers

    def dtype(self, name: str) -> torch.dtype:
        """Return the type of a tensor in the file."""
        stored = self.tensors[name]
        if stored.dtype not in TYPES:
            raise CheckpointError(f"'{name}' in {self.path} is of type {stored.dtype}, which PyTorch does not have")
        return TYPES[stored.dtype]

    def tensor(self, name: str) -> torch.Tensor:
        """Return a tensor of the file, as it is there."""
        tensor = torch.empty(self.tensors[name].shape, dtype=self.dtype(name))
        self.give(name, tensor)
        return tensor

    def give(self, name: str, tensor: torch.Tensor) -> None:
        """Have a tensor's bytes be those of the file's, in its own type; a small one is read at once."""
        stored, dtype = self.tensors[name], self.dtype(name)
        if tuple(tensor.shape) != stored.shape:
            raise CheckpointMismatch(f"'{name}' is {list(stored.shape)} in {self.path}, and {list(tensor.shape)} here")
        converted = None if tensor.dtype == dtype else tensor.dtype
        whole = tensor.is_contiguous() and tensor.untyped_storage().nbytes() == tensor.numel() * tensor.element_size()
        if whole and stored.stride is None and (converted is None or (dtype, converted) in _CONVERSIONS):
            memory = self._memory
            if memory is not None and memory.refer(tensor, self._source(memory, converted), self._numbers[name]):
                return
        self._read(stored, dtype, tensor)

    def _source(self, memory: RangeMemory, converted: torch.dtype | None) -> Source:
        """Return the source that tensors are in as they are, or as another type."""
        with self._lock:
            if converted not in self._sources:
                places = [self._place(self.tensors[name], converted) for name in self._names]
                self._sources[converted] = memory.read_in_place(self.path, places)
            return self._sources[converted]

    @staticmethod
    def _place(stored: Stored, converted: torch.dtype | None) -> InFile:
        dtype = TYPES[stored.dtype]
        conversion = Conversion.NONE if converted is None else _CONVERSIONS.get((dtype, converted), Conversion.NONE)
        return InFile(begin=stored.begin, nbytes=conversion.in_memory(stored.nbytes), conversion=conversion)

    def _read(self, stored: Stored, dtype: torch.dtype, tensor: torch.Tensor) -> None:
        as_it_is = tensor.dtype == dtype and stored.stride is None
        read = tensor if as_it_is else torch.empty(stored.nbytes // dtype.itemsize, dtype=dtype)
        with to_fill(read) as into:
            for _piece in self._reader.pieces(stored, into):
                pass
        if not as_it_is:
            found = read.view(stored.shape) if stored.stride is None else read.as_strided(stored.shape, stored.stride)
            with torch.no_grad():
                tensor.copy_(found)

    def close(self) -> None:
        """Close the file; tensors that are in it stay."""
        self._reader.close()


def load(model: M | Callable[[], M], path: str | os.PathLike[str]) -> M:
    """Load a checkpoint into a model and return it; large weights stay in the files until they are touched.

    `path`: a safetensors or `torch.save` file, a folder with such a file or with shards and an index as Hugging Face
    writes them, or a folder written by `Tide.save`. `model`: a module, or a callable that creates one; Lowtide calls it
    without initialising the parameters, since the checkpoint contains all of them.

    Inside `lowtide.init`, `lowtide.fit` or `lowtide.serve` weights are read when they are first used. Unchanged weights
    are never written to the spill; they are read from the file again. float16 and bfloat16 become float32 as they are
    read, and float32 becomes either, if the model has that type; other conversions are made while loading. Elsewhere
    all weights are read now.
    """
    files = files_of(Path(path))
    memory = ranges.current()
    opened: dict[Path, InPlaceFile] = {}
    try:
        for file in dict.fromkeys(one.file for one in files.values()):
            opened[file] = InPlaceFile(file, memory, [one for one in files.values() if one.file == file])
        made = _module_of(model)
        _give_all(made, {name: (opened[one.file], one.key) for name, one in files.items()}, Path(path))
    finally:
        for one in opened.values():
            one.close()
    return made


def _module_of(model: M | Callable[[], M]) -> M:
    if isinstance(model, torch.nn.Module):
        return model  # type: ignore[return-value]  # mypy takes it for a callable of another kind
    with without_values():
        made = model()
    if not isinstance(made, torch.nn.Module):
        raise BadArgument(f"the callable returned a {type(made).__name__}: pass one that makes a torch.nn.Module")
    return made


def _give_all(model: torch.nn.Module, stored: Mapping[str, tuple[InPlaceFile, str]], path: Path) -> None:
    wanted = {name: one for name, one in model.state_dict(keep_vars=True).items() if isinstance(one, torch.Tensor)}
    needed = set(wanted)
    wanted |= dict(model.named_buffers())  # those, too, that no state dict has
    given = {id(wanted[name]) for name in stored if name in wanted}
    missing = [name for name in needed if name not in stored and id(wanted[name]) not in given]
    unexpected = [name for name in stored if name not in wanted]
    if missing or unexpected:
        troubles = [f"{len(missing)} missing there ({_some(missing)})"] if missing else []
        troubles += [f"{len(unexpected)} unknown here ({_some(unexpected)})"] if unexpected else []
        raise CheckpointMismatch(f"{path} is not of this {type(model).__name__}: {', '.join(troubles)}")
    for name, (file, key) in stored.items():
        shape = tuple(wanted[name].shape)
        if file.tensors[key].shape != shape:
            raise CheckpointMismatch(
                f"{path} is not of this {type(model).__name__}: '{name}' is {list(file.tensors[key].shape)} there, "
                f"{list(shape)} here"
            )
        file.dtype(key)  # raises for one that is not known, before anything changes
    done: set[int] = set()
    # In the model's order, which is as a rule the order of their use: see Note [Reading ahead] in read_ahead.h.
    for name, value in wanted.items():
        if name not in stored:
            continue
        file, key = stored[name]
        if id(value) in done:
            continue  # a weight with two names
        done.add(id(value))
        if value.is_meta:
            value = _put(model, name, torch.empty(value.shape, dtype=value.dtype))
        file.give(key, value.detach())


def _put(model: torch.nn.Module, name: str, tensor: torch.Tensor) -> torch.Tensor:
    """Give a parameter or buffer that has no memory yet some, wherever the model has it."""
    owner_name, _, own_name = name.rpartition(".")
    owner = model.get_submodule(owner_name)
    old = getattr(owner, own_name)
    new = torch.nn.Parameter(tensor, requires_grad=old.requires_grad) if isinstance(old, torch.nn.Parameter) else tensor
    for module in model.modules():
        for held in (module._parameters, module._buffers):
            for key, value in held.items():
                if value is old:
                    held[key] = new  # type: ignore[assignment]  # a parameter for one, a buffer for the other
    return new


@contextmanager
def without_values() -> Iterator[None]:
    """Make parameters without memory: what a constructor does to them does nothing."""
    register = torch.nn.Module.register_parameter

    def registering(module: torch.nn.Module, name: str, param: torch.nn.Parameter | None) -> None:
        register(module, name, param)
        if param is None or param.is_meta or type(param) is not torch.nn.Parameter:
            return
        module._parameters[name] = torch.nn.Parameter(param.to("meta"), requires_grad=param.requires_grad)

    torch.nn.Module.register_parameter = registering  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        torch.nn.Module.register_parameter = register  # type: ignore[method-assign]


def files_of(path: Path) -> dict[str, Located]:
    """Return where the tensors of a checkpoint are, by the names that a model has for them."""
    if path.is_file():
        return _whole(path)
    if (path / MANIFEST).exists():
        manifest = read_manifest(path)
        models = manifest.values["models"]
        if len(models) != 1:
            raise CheckpointMismatch(f"{path} holds {len(models)} models: load it with lowtide.load_checkpoint")
        names = {name: value["of"] for name, value in models[0].items() if isinstance(value, dict) and "of" in value}
        entries = {name: manifest.tensors[of] for name, of in names.items()}
        return {
            name: Located(file=path / entry.file, key=entry.key, dtype=entry.dtype, shape=entry.shape)
            for name, entry in entries.items()
        }
    for usual, pattern, index_name in _KINDS:
        if (path / usual).exists():  # before any other, as Hugging Face has it
            return _whole(path / usual)
        if (path / index_name).exists():
            return _indexed(path, index_name)
        found = sorted(path.glob(pattern))
        if len(found) == 1:
            return _whole(found[0])
        if found:
            break
    what = "no safetensors file" if not found else f"{len(found)} files of weights and no {index_name}"
    raise CheckpointError(f"{path} holds {what}: pass a file, or a folder with one or with an index")


def _indexed(path: Path, index_name: str) -> dict[str, Located]:
    try:
        index = json.loads((path / index_name).read_text())["weight_map"]
        if not index or not all(isinstance(file, str) for file in index.values()):
            raise TypeError("its weight_map does not map names of tensors to names of files")
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{path / index_name} is not an index of shards ({error})") from error
    for file in sorted(set(index.values())):
        held = _whole(path / file)
        absent = [name for name, of in index.items() if of == file and name not in held]
        if absent:
            raise CheckpointError(f"{path / file} has no '{absent[0]}', which {index_name} says it holds")
    return {name: Located(file=path / file, key=name) for name, file in index.items()}


def reader_of(path: Path) -> ShardReader:
    """Return the reader of a file of tensors, by what is in it."""
    return ShardReader(path, tensors_of(path) if is_torch_file(path) else None)


def _whole(path: Path) -> dict[str, Located]:
    with reader_of(path) as reader:
        return {name: Located(file=path, key=name) for name in reader.tensors}


def _some(names: Iterable[str]) -> str:
    listed = list(names)
    return ", ".join(listed[:3]) + (", ..." if len(listed) > 3 else "")
