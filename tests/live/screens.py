"""A terminal of 80 columns that a test can look at: what a program writes to it, and the screen that a person sees."""

from __future__ import annotations

import fcntl
import os
import pty
import struct
import subprocess
import termios
from collections.abc import Sequence
from pathlib import Path

import pyte


class Screen:
    """A terminal with its screen; give `descriptor` to whoever writes to it, and ask for `rows`."""

    def __init__(self, *, columns: int = 80, rows: int = 24) -> None:
        self._screen = pyte.Screen(columns, rows)
        self._stream = pyte.ByteStream(self._screen)
        self._reader, self.descriptor = pty.openpty()
        self.resize(columns=columns, rows=rows)
        os.set_blocking(self._reader, False)
        self.last_rows: list[str] = []

    def resize(self, *, columns: int, rows: int) -> None:
        """Change the terminal's size, as dragging its window does."""
        fcntl.ioctl(self.descriptor, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
        self._screen.resize(rows, columns)

    def write(self, text: str) -> None:
        """Write as a program does."""
        os.write(self.descriptor, text.encode())

    def rows(self) -> list[str]:
        """Return the screen after everything that was written, row by row."""
        while True:
            try:
                data = os.read(self._reader, 65536)
            except (BlockingIOError, OSError):
                break
            if not data:
                break
            self._stream.feed(data)
            self._note()
        return [row.rstrip() for row in self._screen.display]

    def run(self, command: Sequence[str], *, cwd: Path, env: dict[str, str]) -> int:
        """Run a command on the terminal until it ends; `last_rows` are the texts that were in the last row."""
        process = subprocess.Popen(
            command, cwd=cwd, env=env, stdin=self.descriptor, stdout=self.descriptor, stderr=self.descriptor
        )
        os.set_blocking(self._reader, True)
        os.close(self.descriptor)
        while True:
            try:
                data = os.read(self._reader, 65536)
            except OSError:  # the last writer is gone
                break
            self._stream.feed(data)
            self._note()
        self.display = [row.rstrip() for row in self._screen.display]
        os.close(self._reader)
        return process.wait()

    def _note(self) -> None:
        row = self._screen.display[-1].rstrip()
        if row and row not in self.last_rows:
            self.last_rows.append(row)

    def close(self) -> None:
        """Close both ends."""
        os.close(self.descriptor)
        os.close(self._reader)
