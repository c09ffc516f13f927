"""Keys on a server that vanish with the process that made them, however it ends."""

from __future__ import annotations

import os
import secrets
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress

from lowtide.tiers.resp import Connection, Refused, command

_AT_ONCE = 512


class Lease:
    """All keys under `prefix`: chunks, and a mark that shows whether the server still has them.

    Each key has an expiry, which a thread of its own renews three times before it passes: what `kill -9` leaves is
    gone after that. `end` removes all. `chunks` says how many keys there may be.
    """

    def __init__(
        self, connect: Callable[[], Connection], *, prefix: str, expiry_s: int, chunks: Callable[[], int]
    ) -> None:
        self.mark = secrets.token_hex(8)
        self.mark_key = f"{prefix}:mark"
        self._connect = connect
        self._prefix = prefix
        self._expiry_s = expiry_s
        self._chunks = chunks
        self._ended = threading.Event()
        self._pid = os.getpid()
        self._thread: threading.Thread | None = None

    def begin(self, connection: Connection) -> None:
        """Leave the mark, and renew all keys from here on."""
        connection.call("SET", self.mark_key, self.mark, "EX", self._expiry_s)
        self._thread = threading.Thread(target=self._keep, name="lowtide-lease", daemon=True)
        self._thread.start()

    def renew(self) -> None:
        """Let all keys live for another while."""
        connection = self._connect()
        try:
            for keys in self._keys():
                connection.pipeline([command("EXPIRE", key, self._expiry_s) for key in keys])
        finally:
            connection.close()

    def end(self) -> None:
        """Remove all keys; a server that is gone has none."""
        if os.getpid() != self._pid:
            return
        self._ended.set()
        with suppress(OSError):
            self.remove([key for keys in self._keys() for key in keys])

    def remove(self, keys: Sequence[str]) -> None:
        """Remove some keys."""
        connection = self._connect()
        try:
            for first in range(0, len(keys), _AT_ONCE):
                some = keys[first : first + _AT_ONCE]
                try:
                    connection.call("UNLINK", *some)
                except Refused:  # a server that does not know it
                    connection.call("DEL", *some)
        finally:
            connection.close()

    def _keep(self) -> None:
        while not self._ended.wait(self._expiry_s / 3):
            with suppress(OSError):  # the next transfer tells; a client that returns in time finds its keys
                self.renew()

    def _keys(self) -> Iterator[list[str]]:
        yield [self.mark_key]
        chunks = self._chunks()
        for first in range(0, chunks, _AT_ONCE):
            yield [f"{self._prefix}:{chunk}" for chunk in range(first, min(first + _AT_ONCE, chunks))]
