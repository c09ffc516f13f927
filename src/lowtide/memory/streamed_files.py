"""`safetensors.torch.save_file` of tensors that do not fit in memory together: they are written one after another.

safetensors hands the addresses of all tensors to one call that writes the file. What had to leave before it is written
would be at an address that a system call cannot read. The file is the same to the byte.
"""

from __future__ import annotations

import json
import os
import struct
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, BinaryIO

import torch

_PATCHED = ("_flatten_as_ptr", "serialize_file")
# As safetensors sorts what it writes, the last first: each begins at a multiple of its size.
_ORDER = (
    "BOOL", "U8", "I8", "F8_E5M2", "F8_E4M3", "F8_E8M0", "F8_E4M3FNUZ", "F8_E5M2FNUZ",
    "I16", "U16", "F16", "BF16", "I32", "U32", "F32", "C64", "F64", "I64", "U64",
)  # fmt: skip
_PIECE_BYTES = 8 << 20

Lend = Callable[[torch.Tensor], AbstractContextManager[None]]


class _Tensors(dict[str, torch.Tensor]):
    """What is to be streamed, in place of the addresses."""


class StreamedFiles:
    """Replaces how safetensors writes files, in the whole process, while it is on."""

    def __init__(self, lend: Lend, *, most_bytes: int) -> None:
        self._lend = lend
        self._most_bytes = most_bytes
        self._originals: dict[str, Any] = {}
        self._module: Any = None

    def on(self) -> None:
        """Stream what is larger than `most_bytes` from here on."""
        if find_spec("safetensors") is None:
            return
        module: Any = import_module("safetensors.torch")
        if not all(hasattr(module, name) for name in _PATCHED):
            return  # another version, which copies what it writes
        self._module = module
        self._originals = {name: getattr(module, name) for name in _PATCHED}
        module._flatten_as_ptr = self._flatten
        module.serialize_file = self._serialize

    def off(self) -> None:
        """Put everything back."""
        for name, original in self._originals.items():
            setattr(self._module, name, original)
        self._originals = {}

    def _flatten(self, tensors: Mapping[str, Any], keep_alive: list[Any]) -> Any:
        total = sum(int(one.nbytes) for one in tensors.values() if isinstance(one, torch.Tensor))
        plain = all(
            isinstance(one, torch.Tensor)
            and one.layout is torch.strided
            and one.device.type == "cpu"
            and one.is_contiguous()
            and _name_of(one.dtype, self._module) in _ORDER
            for one in tensors.values()
        )
        if total <= self._most_bytes or not plain:
            return self._originals["_flatten_as_ptr"](tensors, keep_alive)
        self._module._evaluate_tensors_for_save(tensors)
        return _Tensors(tensors)

    def _serialize(self, flattened: Any, filename: Any, metadata: dict[str, str] | None = None) -> None:
        if not isinstance(flattened, _Tensors):
            self._originals["serialize_file"](flattened, filename, metadata=metadata)
            return
        names = {name: _name_of(tensor.dtype, self._module) for name, tensor in flattened.items()}
        ordered = sorted(flattened, key=lambda name: (-_ORDER.index(names[name]), name.encode()))
        with self._replacing(Path(os.fspath(filename))) as file:
            file.write(_header(((name, names[name], flattened[name]) for name in ordered), metadata))
            for name in ordered:
                self._write(flattened[name].detach(), file)

    @contextmanager
    def _replacing(self, path: Path) -> Iterator[BinaryIO]:
        """Write a file beside the one of this name, and put it there when it is whole, as safetensors does."""
        beside = path.with_name(f".{path.name}.{os.getpid()}.{threading.get_ident()}.new")
        try:
            self._originals["serialize_file"]({}, str(beside))  # with the permissions that it gives its files
            with beside.open("r+b") as file:
                file.truncate()
                yield file
            beside.replace(path)
        except BaseException:
            beside.unlink(missing_ok=True)
            raise

    def _write(self, tensor: torch.Tensor, file: BinaryIO) -> None:
        if not tensor.numel():
            return
        with self._lend(tensor):
            # Not `Tensor.numpy`, which lends for writing.
            array: Any = torch._C.TensorBase.numpy(tensor.reshape(-1).view(torch.uint8))
            whole = memoryview(array)
            for at in range(0, len(whole), _PIECE_BYTES):
                file.write(whole[at : at + _PIECE_BYTES])


def _name_of(dtype: torch.dtype, module: Any) -> str:
    return next((name for name, known in module._TYPES.items() if known == dtype), "")


def _header(rows: Iterable[tuple[str, str, torch.Tensor]], metadata: Mapping[str, str] | None) -> bytes:
    header: dict[str, Any] = {} if metadata is None else {"__metadata__": metadata}
    end = 0
    for name, dtype, tensor in rows:
        begin, end = end, end + tensor.nbytes
        header[name] = {"dtype": dtype, "shape": list(tensor.shape), "data_offsets": [begin, end]}
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text
