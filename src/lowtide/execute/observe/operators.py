"""Watchers of a thread's operators, and of the backward passes that it starts.

PyTorch's observer tells of them in C++ (`native/observer.cpp`, which says which operators are told). Nothing can be
raised there: a watcher is told of its own errors, and keeps them until they can be raised.
"""

from __future__ import annotations

import ctypes
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any, Protocol

import torch

from lowtide.compiled import Torch, loaded
from lowtide.errors import NativeUnavailable
from lowtide.execute.observe.library import OBSERVER

Operator = torch._ops.OpOverload


class Watcher(Protocol):
    """A watcher of operators."""

    @property
    def device(self) -> torch.device:
        """Where the operators are that it is told of."""
        ...

    @property
    def wants_operands(self) -> bool:
        """Whether it is told of operators (False: it only asks for the name of the one that runs)."""
        ...

    def began(self, operator: Operator, args: tuple[Any, ...], kwargs: dict[str, Any]) -> object:
        """Take note of an operator before it runs; what this returns is handed to `ended` (None: no need to)."""
        ...

    def ended(self, token: Any, results: tuple[Any, ...] | None) -> None:
        """Take note of its end (None: it raised)."""
        ...

    def failed(self, error: Exception) -> None:
        """Keep an error of `began` or `ended` until it can be raised."""
        ...


class _Native:
    def __init__(self, path: Path) -> None:
        self.path = path
        library, holding_gil = ctypes.CDLL(str(path)), ctypes.PyDLL(str(path))
        self.set_devices = library.lo_set_devices
        self.set_devices.argtypes = [ctypes.c_uint64]
        self.start = library.lo_start
        self.start.argtypes, self.start.restype = [ctypes.c_int], ctypes.c_uint64
        self.stop = library.lo_stop
        self.stop.argtypes, self.stop.restype = [ctypes.c_uint64], None
        self.device_type = library.lo_device_type
        self.device_type.argtypes, self.device_type.restype = [ctypes.c_char_p], ctypes.c_int
        self.look_away = holding_gil.lo_look_away
        self.look_away.argtypes, self.look_away.restype = [ctypes.c_int], None
        self.running = holding_gil.lo_running
        self.running.restype = ctypes.c_char_p
        tell = holding_gil.lo_tell
        tell.argtypes, tell.restype = [ctypes.py_object, ctypes.py_object], None
        tell(_began, _ended)


_loaded: _Native | None = None


def library_path() -> Path:
    """Return the library that is loaded. Raises NativeUnavailable with the reason."""
    return _native().path


@cache
def _tried() -> _Native | str:
    global _loaded
    try:
        _loaded = loaded(OBSERVER, _Native, Torch.here())
    except NativeUnavailable as error:
        return str(error)
    return _loaded


def load() -> None:
    """Build the observer where it is not in the cache yet. Raises NativeUnavailable with the reason."""
    _native()


def _native() -> _Native:
    found = _tried()
    if isinstance(found, str):
        raise NativeUnavailable(found)
    return found


_watchers: list[Watcher] = []
_lock = threading.Lock()
_thread = threading.local()


# ---- watching ----


def watch(watcher: Watcher, *, first: bool = False) -> None:
    """Tell a watcher of this thread's operators; `first`: before the others. Again: its wants have changed."""
    with _lock:
        if watcher not in _watchers:
            _watchers.insert(0 if first else len(_watchers), watcher)
        _rearrange()


def unwatch(watcher: Watcher) -> None:
    """Tell a watcher no more."""
    with _lock:
        if watcher in _watchers:
            _watchers.remove(watcher)
        _rearrange()


def running() -> str:
    """Return the operator that this thread runs, or an empty string."""
    name: bytes = _native().running()
    return name.decode()


def _rearrange() -> None:
    """Observe this thread as its watchers want, or no more."""
    native = _native()
    wanted = max((2 if watcher.wants_operands else 1 for watcher in _watchers), default=0)
    native.set_devices(sum({1 << _type_number(watcher.device) for watcher in _watchers if watcher.wants_operands}))
    observed, handle = getattr(_thread, "observed", (0, 0))
    if wanted == observed:
        return
    if observed:
        native.stop(handle)
    _thread.observed = (wanted, native.start(wanted == 2) if wanted else 0)


@cache
def _type_number(device: torch.device) -> int:
    return int(_native().device_type(device.type.encode()))


def _began(operator: Operator, values: tuple[Any, ...]) -> list[tuple[Watcher, object]] | None:
    args, kwargs = _sorted(operator, values)
    tokens = []
    for watcher in _watchers.copy():
        try:
            token = watcher.began(operator, args, kwargs) if watcher.wants_operands else None
        except Exception as error:  # noqa: BLE001  # see the module's text
            watcher.failed(error)
        else:
            if token is not None:
                tokens.append((watcher, token))
    return tokens or None


def _ended(tokens: list[tuple[Watcher, object]], results: tuple[Any, ...] | None) -> None:
    for watcher, token in reversed(tokens):
        try:
            watcher.ended(token, results)
        except Exception as error:  # noqa: BLE001  # see the module's text
            watcher.failed(error)


def _sorted(operator: Operator, values: tuple[Any, ...]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return a call's values as they are passed: by position, or by name where they have to be."""
    positional, names = _places(operator)
    return values[:positional], dict(zip(names, values[positional:], strict=True))


@cache
def _places(operator: Operator) -> tuple[int, tuple[str, ...]]:
    arguments = operator._schema.arguments
    names = tuple(each.name for each in arguments if each.kwarg_only)
    return len(arguments) - len(names), names


def can_watch() -> bool:
    """Tell whether every call can be seen: not inside what `torch.compile` made."""
    counters = getattr(sys.modules.get("torch._dynamo.utils"), "counters", {})
    return not counters.get("frames", {}).get("total", 0)


# ---- what is not the program's ----


@contextmanager
def unseen() -> Iterator[None]:
    """Stop reporting the operators that this thread runs."""
    look_away = _loaded.look_away if _loaded is not None else None  # nothing is reported before it is loaded
    if look_away is not None:
        look_away(1)
    try:
        yield
    finally:
        if look_away is not None:
            look_away(-1)


@contextmanager
def aside() -> Iterator[None]:
    """Do not report the operators of this thread: they are Lowtide's own, and need no room."""
    before = is_aside()
    _thread.aside = True
    try:
        with unseen():
            yield
    finally:
        _thread.aside = before


def is_aside() -> bool:
    """Tell whether what this thread runs now is Lowtide's own."""
    return getattr(_thread, "aside", False)
