"""A connection to a server that speaks RESP, the protocol of Redis, in its version 2.

Requests are arrays of byte strings. What a server refuses is raised as `Refused`, what is no RESP as `NotResp`. A
connection on which anything failed is of no use any more.
"""

from __future__ import annotations

import errno
import socket
import ssl
from collections.abc import Iterable, Sequence

Reply = bytes | int | None

_LONGEST_LINE = 500


class Refused(OSError):
    """The server answers with an error: `said`, in its words."""

    def __init__(self, said: str) -> None:
        super().__init__(errno.EIO, said)
        self.said = said


class NotResp(OSError):
    """The server answers with something else than RESP: `said`, with dots for what cannot be shown."""

    def __init__(self, line: bytes) -> None:
        self.said = "".join(chr(letter) if 32 <= letter < 127 else "." for letter in line[:40])
        super().__init__(errno.EPROTO, self.said)


class Short(OSError):
    """The server has fewer bytes under a key than were asked for."""


def command(*words: bytes | str | int) -> bytes:
    """Return a request, framed."""
    encoded = [word if isinstance(word, bytes) else str(word).encode() for word in words]
    return b"".join((b"*%d\r\n" % len(encoded), *(b"$%d\r\n%b\r\n" % (len(word), word) for word in encoded)))


class Connection:
    """A connection; used by one thread at a time."""

    def __init__(
        self, host: str, port: int, *, timeout_s: float, tls: ssl.SSLContext | None = None, name: str = ""
    ) -> None:
        plain = socket.create_connection((host, port), timeout=timeout_s)
        try:
            plain.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._socket = plain if tls is None else tls.wrap_socket(plain, server_hostname=name or host)
        except BaseException:
            plain.close()
            raise
        self._replies = self._socket.makefile("rb")

    @property
    def peer(self) -> str:
        """The address of the other end, as a number."""
        return str(self._socket.getpeername()[0])

    def call(self, *words: bytes | str | int) -> Reply:
        """Make one request and return its reply."""
        return self.pipeline([command(*words)])[0]

    def pipeline(self, requests: Sequence[bytes]) -> list[Reply]:
        """Make requests at once and return their replies."""
        self._socket.sendall(b"".join(requests))
        return [self.reply() for _ in requests]

    def send(self, pieces: Iterable[bytes | memoryview]) -> None:
        """Send bytes one after the other, large ones from where they are."""
        for piece in pieces:
            self._socket.sendall(piece)

    def reply(self) -> Reply:
        """Return the next reply."""
        line = self._line()
        kind, rest = line[:1], line[1:]
        if kind == b"+":
            return rest
        if kind == b"-":
            raise Refused(rest.decode(errors="replace"))
        if kind in (b":", b"$") and rest.lstrip(b"-").isdigit():
            number = int(rest)
            if kind == b":":
                return number
            if number < 0:
                return None
            body = self._replies.read(number + 2)
            if len(body) < number + 2:
                raise ConnectionResetError(errno.ECONNRESET, "the connection was closed")
            return body[:-2]
        raise NotResp(line)

    def reply_into(self, into: memoryview) -> None:
        """Receive a byte string of exactly this length into memory; raise `Short` where it is another."""
        line = self._line()
        if line != b"$%d" % into.nbytes:
            if line[:1] == b"-":
                raise Refused(line[1:].decode(errors="replace"))
            if line[:1] == b"$":
                raise Short(errno.EIO, "a key is gone or was cut off")
            raise NotResp(line)
        done = 0
        while done < into.nbytes:
            got = self._replies.readinto(into[done:])
            if not got:
                raise ConnectionResetError(errno.ECONNRESET, "the connection was closed")
            done += got
        if self._replies.read(2) != b"\r\n":
            raise NotResp(b"a byte string without its end")

    def close(self) -> None:
        """Close it."""
        self._replies.close()
        self._socket.close()

    def _line(self) -> bytes:
        line = self._replies.readline(_LONGEST_LINE)
        if line.endswith(b"\r\n"):
            return line[:-2]
        if line.endswith(b"\n") or len(line) == _LONGEST_LINE:
            raise NotResp(line)
        raise ConnectionResetError(errno.ECONNRESET, "the connection was closed")
