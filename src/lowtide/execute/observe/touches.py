"""Storages whose block may be elsewhere, and notifications before an operator touches one.

The native side (`native/touches.cpp`, Note [Shells]) looks at the operators of all threads while a listener is
set. Nothing can be raised from there: a storage that cannot be put back stays a shell, and an operator that touches it
raises.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import NamedTuple, Protocol

import torch
from torch.utils._python_dispatch import _disable_current_modes

from lowtide.execute.observe import addresses
from lowtide.execute.observe.operators import library_path

Token = list[tuple["Toucher", object]]


class Touch(NamedTuple):
    """An operator's use of a storage, by the storage's address as PyTorch's object has it (`_cdata`)."""

    storage: int
    writes: bool


class Toucher(Protocol):
    """The listener that puts blocks back."""

    @property
    def device(self) -> torch.device:
        """Where the storages are."""
        ...

    def touched(self, operator: str, touches: Sequence[Touch]) -> object:
        """Put back what an operator is about to use; what this returns is handed to `left` (None: nothing of ours)."""
        ...

    def left(self, token: object) -> None:
        """Take note that the operator has ended."""
        ...

    def ticked(self, number: int) -> None:
        """Do what the plan that is followed wants at a tick of the step. Raises nothing."""
        ...

    def address_asked(self, storage: int) -> None:
        """Give a storage its block for good: a program asks for its address."""
        ...


class _Native:
    def __init__(self) -> None:
        path = str(library_path())
        library, holding_gil = ctypes.CDLL(path), ctypes.PyDLL(path)
        pointer, text = ctypes.c_void_p, ctypes.c_char_p
        self.can_be_shell = library.lo_can_be_shell
        self.start = library.lo_start_touches
        self.start.argtypes, self.start.restype = [ctypes.c_int, ctypes.c_uint64], ctypes.c_uint64
        self.stop = library.lo_stop_touches
        self.stop.argtypes, self.stop.restype = [ctypes.c_uint64], None
        self.device_type = library.lo_device_type
        self.device_type.argtypes = [text]
        self.is_used, self.is_shell = holding_gil.lo_is_used, holding_gil.lo_is_shell
        self.is_used.argtypes = self.is_shell.argtypes = [pointer]
        self.take_block, self.put_block = holding_gil.lo_take_block, holding_gil.lo_put_block
        self.take_block.argtypes = [pointer, pointer, text]
        self.put_block.argtypes, self.put_block.restype = [pointer, pointer, ctypes.c_int], None
        self.end_lending = holding_gil.lo_end_lending
        self.end_lending.argtypes = [pointer]
        self.say = holding_gil.lo_say
        self.say.argtypes, self.say.restype = [pointer, text], None
        self.streams = holding_gil.lo_streams
        self.streams.argtypes = [ctypes.c_int, ctypes.POINTER(ctypes.c_int64), ctypes.c_int]
        tell = holding_gil.lo_tell_touches
        tell.argtypes, tell.restype = [ctypes.py_object, ctypes.py_object], None
        tell(_touched, _left)
        tell_ticks = holding_gil.lo_tell_ticks
        tell_ticks.argtypes, tell_ticks.restype = [ctypes.py_object], None
        tell_ticks(_ticked)
        self.begin_ticks = holding_gil.lo_begin_ticks
        self.begin_ticks.argtypes, self.begin_ticks.restype = [ctypes.c_int], None
        looks, stops = ctypes.POINTER(ctypes.c_uint64), ctypes.POINTER(ctypes.c_int64)
        self.follow_ticks = holding_gil.lo_follow_ticks
        self.follow_ticks.argtypes = [ctypes.c_int, looks, ctypes.c_size_t, stops, ctypes.c_size_t]
        self.tick = holding_gil.lo_tick
        self.tick.argtypes, self.tick.restype = [ctypes.c_int, text], ctypes.c_int64
        self.end_ticks = holding_gil.lo_end_ticks
        self.end_ticks.argtypes = [ctypes.c_int, looks, ctypes.c_size_t, ctypes.POINTER(ctypes.c_int)]
        self.end_ticks.restype = ctypes.c_size_t


@cache
def _native() -> _Native:
    return _Native()


LEAST_BYTES = 4096
"""Smaller storages are not looked at: none is worth to be taken."""
_MOST_STREAMS = 1024
_touchers: list[Toucher] = []
_lock = threading.Lock()
_handle: int | None = None


def can_take_blocks() -> bool:
    """Tell whether this torch lets a storage be without its block, and raises if code asks for its address."""
    return bool(_native().can_be_shell())


def watch(toucher: Toucher) -> None:
    """Set the listener that hears of operators that are about to use shells, on any thread."""
    global _handle
    with _lock:
        if toucher not in _touchers:
            _touchers.append(toucher)
        if _handle is None:
            addresses.watch(_address_asked, is_shell=is_shell, using=_using)
            _handle = int(_native().start(_native().device_type(toucher.device.type.encode()), LEAST_BYTES))


def unwatch(device: torch.device) -> None:
    """Remove the listener for the storages of a device."""
    global _handle
    with _lock:
        _touchers[:] = [toucher for toucher in _touchers if toucher.device != device]
        if not _touchers and _handle is not None:
            addresses.unwatch()
            _native().stop(_handle)
            _handle = None


def is_watching(device: torch.device) -> bool:
    """Tell whether a listener puts back the storages of a device: otherwise none may be taken."""
    return any(toucher.device == device for toucher in _touchers)


@contextmanager
def _apart() -> Iterator[None]:
    """Run what is Lowtide's own apart from the program's modes."""
    with torch._C.DisableTorchFunction(), _disable_current_modes():
        yield


def _touched(operator: str, touches: list[tuple[int, bool]]) -> Token | None:
    told = [Touch(*touch) for touch in touches]
    with _apart():
        tokens = [
            (toucher, token) for toucher in _touchers.copy() if (token := toucher.touched(operator, told)) is not None
        ]
    return tokens or None


def _left(tokens: Token, _nothing: None) -> None:
    with _apart():
        for toucher, token in reversed(tokens):
            toucher.left(token)


def _ticked(device: int, number: int) -> None:
    with _apart():
        for toucher in _touchers.copy():
            if toucher.device.index == device:
                toucher.ticked(number)


@contextmanager
def _using(name: str, storages: list[tuple[int, bool]]) -> Iterator[None]:
    """Bring back the storages that a call uses which is not an operator."""
    tokens = _touched(name, [touch for touch in storages if is_shell(touch[0])])
    try:
        yield
    finally:
        if tokens is not None:
            _left(tokens, None)


def _address_asked(storage: int) -> None:
    with _apart():
        for toucher in _touchers.copy():
            toucher.address_asked(storage)


# ---- ticks: see Note [Ticks] ----


class Ticks(NamedTuple):
    """The ticks of a step that has ended, by what they looked like; `followed`: they were those of the plan."""

    looks: tuple[int, ...]
    followed: bool


def begin_ticks(device: torch.device) -> None:
    """Begin to count the operators of a step that a listener looks at."""
    _native().begin_ticks(device.index)


def follow_ticks(device: torch.device, looks: Sequence[int], stops: Sequence[int]) -> bool:
    """Call `ticked` at these ticks, while they look like this; False: those so far did not. `stops` are ascending."""
    expected, chosen = (ctypes.c_uint64 * len(looks))(*looks), (ctypes.c_int64 * len(stops))(*stops)
    return bool(_native().follow_ticks(device.index, expected, len(looks), chosen, len(stops)))


def tick(device: torch.device, operator: str) -> int:
    """Return the tick that the operator is that this thread begins, or else the next one (-1: no step runs)."""
    return int(_native().tick(device.index, operator.encode()))


def end_ticks(device: torch.device) -> Ticks:
    """Count no more."""
    followed, most = ctypes.c_int(), 1 << 12
    while True:
        seen = (ctypes.c_uint64 * most)()
        count = int(_native().end_ticks(device.index, seen, most, ctypes.byref(followed)))
        if count <= most:
            return Ticks(tuple(seen[:count]), bool(followed.value))
        most = count


# ---- blocks ----


def is_used(storage: int) -> bool:
    """Tell whether an operator that runs uses a storage."""
    return bool(_native().is_used(storage))


def is_shell(storage: int) -> bool:
    """Tell whether a storage is without its block."""
    return bool(_native().is_shell(storage))


def take_block(storage: int, into: torch.UntypedStorage, *, why: str) -> bool:
    """Take a storage's block into an empty one; False if an operator uses it. `why`: the error for its address."""
    return bool(_native().take_block(storage, into._cdata, why.encode()))


def put_block(storage: int, block: torch.UntypedStorage, *, lend: bool) -> None:
    """Put a block back, which leaves `block` empty; `lend`: watch whether it is written, until `end_lending`."""
    _native().put_block(storage, block._cdata, lend)


def end_lending(storage: int) -> bool:
    """Tell whether a storage was written since its block was put back."""
    return bool(_native().end_lending(storage))


def say(storage: int, why: str) -> None:
    """Set the error for code that asks a shell for its address."""
    _native().say(storage, why.encode())


def streams(device: torch.device) -> list[torch.Stream]:
    """Return the streams of a device on which storages were used while a listener was set."""
    numbers = (ctypes.c_int64 * _MOST_STREAMS)()
    count = min(_native().streams(device.index, numbers, _MOST_STREAMS), _MOST_STREAMS)
    kind = int(_native().device_type(device.type.encode()))
    return [torch.Stream(stream_id=number, device_index=device.index, device_type=kind) for number in numbers[:count]]
