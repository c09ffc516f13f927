"""Memory that is reached by its address: pages stay while they are lent.

A program's own access to pages that are away faults and is served. A system call's is not: `write(2)` from a tensor
that is away returns EFAULT. So asking Python for an address brings the pages back first and pins them: for
an array, until it is gone; for DLPack, as long as the storage lives; for a bare address, until enough others have been
asked for.
"""

from __future__ import annotations

import sys
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any

import torch

from lowtide.memory.native.bindings import Native
from lowtide.memory.replaced_files import ReplacedFiles
from lowtide.memory.streamed_files import StreamedFiles

_Way = tuple[type, str]
# Who asks for addresses only to compare them, by module and function (None: any): to find tied weights.
_COMPARING: Mapping[str, tuple[str, ...] | None] = {
    "torch.serialization": None,
    "safetensors.torch": ("storage_ptr", "_end_ptr", "_filter_shared_not_shared", "_is_complete"),
    "huggingface_hub.serialization._torch": None,
    "transformers.modeling_utils": None,
}
_native: Native | None = None  # of the memory that lends now


@contextmanager
def lent_to_read(tensor: torch.Tensor) -> Iterator[None]:
    """Have a tensor's pages here, for readers only: they stay as clean as they are."""
    native = _native
    with nullcontext() if native is None else _pinned(native, native.lend_to_read(tensor._cdata)):
        yield


@contextmanager
def _pinned(native: Native, serial: int) -> Iterator[None]:
    """Take pages back that were lent to a reader."""
    if serial < 0:
        # A writer must not go on: what is in their place now is not the tensor.
        raise torch.OutOfMemoryError("lowtide: a tensor cannot be read back to memory")
    try:
        yield
    finally:
        if serial:
            native.unpin(serial)


def _only_compares(module: str, function: str) -> bool:
    if module not in _COMPARING:
        return False
    functions = _COMPARING[module]
    return functions is None or function in functions


def version_of(tensor: torch.Tensor) -> int:
    """Return a number that stays as long as a tensor's bytes do (0: it is not known whether they changed)."""
    return 0 if _native is None else _native.version(tensor._cdata)


class Lent:
    """Replaces the ways in which Python hands out addresses, in the whole process, while it is on."""

    def __init__(self, native: Native, *, most_bytes: int, is_source: Callable[[tuple[int, int]], bool]) -> None:
        self._native = native
        self._most_bytes = most_bytes
        self._bare: deque[tuple[int, int]] = deque()  # serial and bytes of ranges whose address the program asked for
        self._bare_bytes = 0
        self._originals: dict[_Way, tuple[Any, bool]] = {}
        self._streamed = StreamedFiles(lent_to_read, most_bytes=most_bytes)
        self._replaced = ReplacedFiles(is_source)

    def on(self) -> None:
        """Start to pin what is lent."""
        global _native
        _native = self._native
        self._replace(torch.Tensor, "numpy", self._array)
        self._replace(torch.Tensor, "__dlpack__", self._for_good)
        for owner in (torch.Tensor, torch.UntypedStorage):
            self._replace(owner, "data_ptr", self._address)
        self._replace(torch.UntypedStorage, "_set_from_file", self._call)
        self._replace(torch.UntypedStorage, "_write_file", self._reading_call)
        self._replace(torch._C.PyTorchFileWriter, "write_record", self._reading_call, argument=2)
        self._streamed.on()
        self._replaced.on()

    def off(self) -> None:
        """Put everything back; what is lent is its borrower's from here on."""
        global _native
        _native = None
        for (owner, name), (original, own) in self._originals.items():
            if own:
                setattr(owner, name, original)
            else:
                delattr(owner, name)
        self._originals.clear()
        self._replaced.off()
        self._streamed.off()
        while self._bare:
            self._take_oldest_back()

    def _replace(self, owner: type, name: str, lend: Callable[..., Any], *, argument: int = 0) -> None:
        """Lend the `argument`-th of what a method is called with, itself the first, where that is memory."""
        original = getattr(owner, name)
        self._originals[owner, name] = (original, name in vars(owner))

        def lending(*args: Any, **kwargs: Any) -> Any:
            owned = args[argument] if len(args) > argument else None
            if not isinstance(owned, torch.Tensor | torch.UntypedStorage):
                return original(*args, **kwargs)
            return lend(owned, lambda: original(*args, **kwargs))

        lending.__doc__ = original.__doc__
        setattr(owner, name, lending)

    def _pin(self, owned: torch.Tensor | torch.UntypedStorage) -> int:
        """Have the pages back, and keep them; return the range's serial (0: it is none, or cannot be read)."""
        if isinstance(owned, torch.UntypedStorage):
            return self._native.lend_storage(owned._cdata) if owned.device.type == "cpu" else 0
        if owned.device.type != "cpu" or owned.layout is not torch.strided:
            return 0
        return self._native.lend(owned._cdata)

    def _array(self, owned: torch.Tensor, make: Callable[[], Any]) -> Any:
        serial = self._pin(owned)
        try:
            array = make()
        except BaseException:
            self._native.take_back(serial)
            raise
        if serial:
            weakref.finalize(array, self._native.take_back, serial).atexit = False
        return array

    def _for_good(self, owned: torch.Tensor, make: Callable[[], Any]) -> Any:
        self._pin(owned)
        return make()

    def _address(self, owned: torch.Tensor | torch.UntypedStorage, make: Callable[[], Any]) -> Any:
        caller = sys._getframe(2)  # beyond the replaced method
        if _only_compares(caller.f_globals.get("__name__", ""), caller.f_code.co_name):
            return make()
        serial = self._pin(owned)
        if serial:
            storage = owned.untyped_storage() if isinstance(owned, torch.Tensor) else owned
            nbytes = storage.nbytes()
            self._bare.append((serial, nbytes))
            self._bare_bytes += nbytes
            while self._bare_bytes > self._most_bytes and len(self._bare) > 1:
                self._take_oldest_back()
        return make()

    def _call(self, owned: torch.UntypedStorage, make: Callable[[], Any]) -> Any:
        serial = self._pin(owned)
        try:
            return make()
        finally:
            self._native.take_back(serial)

    def _reading_call(self, owned: torch.UntypedStorage, make: Callable[[], Any]) -> Any:
        here = owned.device.type == "cpu"
        with _pinned(self._native, self._native.lend_storage_to_read(owned._cdata) if here else 0):
            return make()

    def _take_oldest_back(self) -> None:
        serial, nbytes = self._bare.popleft()
        self._bare_bytes -= nbytes
        self._native.take_back(serial)
