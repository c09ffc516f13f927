"""Which threads run backward: a gradient may be taken only while one alone does.

Two runs of backward on two threads may add to one gradient, and who finds none there while it is taken puts his own in
its place. So a second run must not begin before everything is back. PyTorch has no hook for that, but
`torch.autograd.backward` and `torch.autograd.grad` start the engine through one function of their module, which is
replaced while somebody wants to know.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch

_autograd: Any = torch.autograd
# Held while a gradient is taken or given back, and while a run is counted.
lock = threading.RLock()
_running: Counter[int] = Counter()  # runs, one inside the other, by thread
_told: list[Callable[[], None]] = []
_engines: list[Any] = []


def tell(before_second: Callable[[], None]) -> None:
    """Call this whenever backward is about to run on one thread while it does on another."""
    with lock:
        if not _told and hasattr(_autograd, "_engine_run_backward"):  # else nobody ever runs alone, as far as is known
            _engines.append(_autograd._engine_run_backward)
            _autograd._engine_run_backward = _run
        _told.append(before_second)


def tell_no_more(before_second: Callable[[], None]) -> None:
    """Take back `tell`; after the last one everything is as it was."""
    with lock:
        if before_second in _told:
            _told.remove(before_second)
            if not _told and _engines:
                _autograd._engine_run_backward = _engines.pop()


def runs_alone() -> bool:
    """Tell whether this thread runs backward, and no other does."""
    return set(_running) == {threading.get_ident()}


def _run(*args: Any, **kwargs: Any) -> Any:
    thread = threading.get_ident()
    with lock:
        engine = _engines[-1] if _engines else _autograd._engine_run_backward
        _running[thread] += 1
    try:
        with lock:
            if len(_running) > 1:
                for before_second in _told.copy():
                    before_second()
        return engine(*args, **kwargs)
    finally:
        with lock:
            _running[thread] -= 1
            if not _running[thread]:
                del _running[thread]
