"""Memory that is reached by its address: pages stay while they are lent.

A program's own access to pages that are away faults and is served. A system call's is not: `write(2)` from a tensor
that is away returns EFAULT. So asking Python for an address brings the pages back first and pins them: for
an array, until it is gone; for DLPack, as long as the storage lives; for a bare address, until enough others have been
asked for.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from lowtide.memory.native.bindings import Native
from lowtide.memory.streamed_files import StreamedFiles

_Way = tuple[type, str]
_native: Native | None = None  # of the memory that lends now


@contextmanager
def lent_to_read(tensor: torch.Tensor) -> Iterator[None]:
    """Have a tensor's pages here, for readers only: they stay as clean as they are."""
    native = _native
    serial = 0 if native is None else native.lend_to_read(tensor._cdata)
    if serial < 0:
        raise torch.OutOfMemoryError("lowtide: a tensor cannot be read back to memory")
    try:
        yield
    finally:
        if native is not None and serial:
            native.unpin(serial)


def version_of(tensor: torch.Tensor) -> int:
    """Return a number that stays as long as a tensor's bytes do (0: it is not known whether they changed)."""
    return 0 if _native is None else _native.version(tensor._cdata)


class Lent:
    """Replaces the ways in which Python hands out addresses, in the whole process, while it is on."""

    def __init__(self, native: Native, *, most_bytes: int) -> None:
        self._native = native
        self._most_bytes = most_bytes
        self._bare: deque[tuple[int, int]] = deque()  # serial and bytes of ranges whose address somebody asked for
        self._bare_bytes = 0
        self._originals: dict[_Way, tuple[Any, bool]] = {}
        self._streamed = StreamedFiles(lent_to_read, most_bytes=most_bytes)

    def on(self) -> None:
        """Start to pin what is lent."""
        global _native
        _native = self._native
        self._replace(torch.Tensor, "numpy", self._array)
        self._replace(torch.Tensor, "__dlpack__", self._for_good)
        for owner in (torch.Tensor, torch.UntypedStorage):
            self._replace(owner, "data_ptr", self._address)
        for name in ("_write_file", "_set_from_file"):
            self._replace(torch.UntypedStorage, name, self._call)
        self._replace(torch._C.PyTorchFileWriter, "write_record", self._call, argument=2)
        self._streamed.on()

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

    def _take_oldest_back(self) -> None:
        serial, nbytes = self._bare.popleft()
        self._bare_bytes -= nbytes
        self._native.take_back(serial)
