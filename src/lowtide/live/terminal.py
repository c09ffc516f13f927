"""The last row of a terminal, kept for one line of status while a program prints above it.

Note [The last row]: the terminal is told to scroll only the rows above the last one (DECSTBM), so whatever the program,
its children or its C++ code print goes on as ever, and nothing of the program's (sys.stdout, file descriptors) is
replaced. Each update is one write, with the cursor saved before and restored after.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import suppress

_SAVE, _RESTORE = "\x1b7", "\x1b8"
_BAR, _PLAIN, _CLEAR = "\x1b[7m", "\x1b[0m", "\x1b[K"
# Down one row, which scrolls at the last one, and up again: the row below the cursor is free then, its column kept.
_MAKE_ROOM = "\x1bD\x1b[1A"
_FEWEST_ROWS = 5


def is_terminal(descriptor: int) -> bool:
    """Tell whether a file descriptor is a terminal that understands more than plain text."""
    return os.environ.get("TERM", "dumb") != "dumb" and os.isatty(descriptor)


class LastRow:
    """The last row of the terminal behind `descriptor`; it is taken at the first `show` and given back by `close`."""

    def __init__(self, descriptor: int, *, size: Callable[[int], os.terminal_size] = os.get_terminal_size) -> None:
        self._descriptor, self._size = descriptor, size
        self._taken: os.terminal_size | None = None
        self._pid = os.getpid()

    @property
    def columns(self) -> int:
        """The characters that fit: one less than the terminal has, so that no terminal wraps the row."""
        try:
            return self._size(self._descriptor).columns - 1
        except OSError:
            return 0

    def show(self, text: str) -> None:
        """Put a text in the row, in place of the one before."""
        if os.getpid() != self._pid:
            return  # a fork: the row is its parent's
        try:
            size = self._size(self._descriptor)
        except OSError:
            return
        if size.lines < _FEWEST_ROWS or size.columns < 2:
            self.close()
            return
        take = "" if size == self._taken else self._give_back() + _take(size)
        self._taken = size
        row = f"{_BAR}{text[: size.columns - 1]:<{size.columns - 1}}{_PLAIN}{_CLEAR}"
        self._write(f"{take}{_SAVE}\x1b[{size.lines};1H{row}{_RESTORE}")

    def close(self) -> None:
        """Give the row back to the program."""
        if self._taken is not None and os.getpid() == self._pid:
            self._write(self._give_back())
            self._taken = None

    def _give_back(self) -> str:
        if self._taken is None:
            return ""
        # Setting the region moves the cursor: it is saved before.
        return f"{_SAVE}\x1b[r\x1b[{self._taken.lines};1H{_CLEAR}{_RESTORE}"

    def _write(self, text: str) -> None:
        with suppress(OSError):  # the terminal is gone: the program is not
            os.write(self._descriptor, text.encode())


def _take(size: os.terminal_size) -> str:
    return f"{_MAKE_ROOM}{_SAVE}\x1b[1;{size.lines - 1}r{_RESTORE}"
