"""What Lowtide's own dispatch modes have in common: they leave compiled code alone, and Lowtide's own operators.

Note [Order of modes]: the mode that numbers calls stands above the one that runs an operator again which found no room:
such an operator is one call, however often it is tried.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from torch.utils._python_dispatch import (
    TorchDispatchMode,
    _get_current_dispatch_mode,
    _get_current_dispatch_mode_stack,
    _pop_mode,
    _push_mode,
)

_thread = threading.local()


class OwnMode(TorchDispatchMode):
    """A dispatch mode of Lowtide's."""

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Leave compiled code alone: with any other mode on, PyTorch would run the code it was compiled from."""
        return True

    def enter_below(self) -> None:
        """Be on, below those of our modes that stand on top: see Note [Order of modes]."""
        above: list[OwnMode] = []
        while isinstance(mode := _get_current_dispatch_mode(), OwnMode):
            mode.__exit__(None, None, None)  # type: ignore[no-untyped-call]  # torch leaves modes untyped
            above.append(mode)
        for mode in (self, *reversed(above)):
            mode.__enter__()  # type: ignore[no-untyped-call]

    def leave(self) -> None:
        """Be off, on this thread, where it is on; modes above stay.

        Ours are left and entered again: each remembers what it found below it. The program's are not told.
        """
        above: list[TorchDispatchMode] = []
        while (mode := _get_current_dispatch_mode()) is not self:
            assert mode is not None, "it is not on"
            above.append(mode)
            if isinstance(mode, OwnMode):
                mode.__exit__(None, None, None)  # type: ignore[no-untyped-call]
            else:
                _pop_mode()
        self.__exit__(None, None, None)  # type: ignore[no-untyped-call]
        for mode in reversed(above):
            if isinstance(mode, OwnMode):
                mode.__enter__()  # type: ignore[no-untyped-call]
            else:
                _push_mode(mode)

    @property
    def is_on(self) -> bool:
        """Whether it is on, on this thread."""
        return self in _get_current_dispatch_mode_stack()

    @property
    def is_on_below_ours(self) -> bool:
        """Whether it is on, on this thread, with nothing but modes of ours above it."""
        stack = _get_current_dispatch_mode_stack()
        return self in stack and all(isinstance(mode, OwnMode) for mode in stack[stack.index(self) :])


def can_watch() -> bool:
    """Tell whether every call can be seen: not inside what `torch.compile` made, nor where it would not be let run."""
    counters = getattr(sys.modules.get("torch._dynamo.utils"), "counters", {})
    return hasattr(TorchDispatchMode, "ignore_compile_internals") and not counters.get("frames", {}).get("total", 0)


def program_has_modes() -> bool:
    """Tell whether a dispatch mode is on, on this thread, that is not ours."""
    return not all(isinstance(mode, OwnMode) for mode in _get_current_dispatch_mode_stack())


@contextmanager
def aside() -> Iterator[None]:
    """Let this thread's operators pass our modes unseen: they are Lowtide's own."""
    before = is_aside()
    _thread.aside = True
    try:
        yield
    finally:
        _thread.aside = before


def is_aside() -> bool:
    """Tell whether what this thread runs now is Lowtide's own."""
    return getattr(_thread, "aside", False)
