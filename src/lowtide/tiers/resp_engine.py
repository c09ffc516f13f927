"""The native way to a server that speaks RESP: shipped or built on first use; without torch or the GIL."""

from __future__ import annotations

import ctypes
from functools import cache
from pathlib import Path
from typing import NamedTuple

from lowtide.compiled import Library, loaded
from lowtide.errors import NativeUnavailable

RESP = Library(
    name="liblowtide_resp.so",
    title="the way to a Redis server",
    build_s=3,
    directory=Path(__file__).parent / "native",
    sources=("resp.cpp",),
)


class Traffic(NamedTuple):
    """What passed so far; `chunks` are those up to the last that was written."""

    written_bytes: int = 0
    read_bytes: int = 0
    requests: int = 0
    round_trips: int = 0
    connections: int = 0
    chunks: int = 0


class RespEngine:
    """A pool of connections that native movers use."""

    def __init__(
        self,
        *,
        host: str,
        port: int,
        handshake: bytes,
        welcome: bytes,
        prefix: str,
        chunk_bytes: int,
        expiry_s: int,
        timeout_s: float,
        sockets: int,
    ) -> None:
        self._library = _library()
        timeout_ms = max(1, round(timeout_s * 1000))
        self.context: int = self._library.lr_open(
            host.encode(),
            port,
            handshake,
            len(handshake),
            welcome,
            len(welcome),
            prefix.encode(),
            chunk_bytes,
            expiry_s,
            timeout_ms,
            sockets,
        )
        assert self.context, f"{host} is not an address"

    def move(self, *, write: bool, offset: int, address: int, nbytes: int) -> int:
        """Move bytes; return 0, an errno or a code of failures.py."""
        code: int = self._library.lr_move(self.context, write, offset, address, nbytes)
        return code

    def addresses(self) -> tuple[int, int]:
        """Return where the functions are that move bytes and tell whether the server is alive."""
        return _address(self._library.lr_move), _address(self._library.lr_alive)

    def is_alive(self) -> bool:
        """Return whether nothing is known against the server."""
        return bool(self._library.lr_alive(self.context))

    def traffic(self) -> Traffic:
        """Return what passed so far."""
        out = (ctypes.c_int64 * len(Traffic._fields))()
        self._library.lr_counters(self.context, out)
        return Traffic(*out)

    def said(self) -> str:
        """Return the server's answer when something failed last."""
        out = ctypes.create_string_buffer(600)
        self._library.lr_error(self.context, out, len(out))
        return out.value.decode(errors="replace")

    def close(self) -> None:
        """Close the connections."""
        self._library.lr_close(self.context)


def _address(function: object) -> int:
    found = ctypes.cast(function, ctypes.c_void_p).value  # type: ignore[arg-type]  # ctypes is untyped
    assert found is not None
    return found


@cache
def _tried() -> ctypes.CDLL | str:
    try:
        return loaded(RESP, lambda path: _declared(ctypes.CDLL(str(path))))
    except NativeUnavailable as error:
        return str(error)


def _library() -> ctypes.CDLL:
    found = _tried()
    if isinstance(found, str):
        raise NativeUnavailable(found)
    return found


def _declared(library: ctypes.CDLL) -> ctypes.CDLL:
    pointer, text, i64, integer = ctypes.c_void_p, ctypes.c_char_p, ctypes.c_int64, ctypes.c_int
    library.lr_open.restype = pointer
    library.lr_open.argtypes = [text, integer, text, i64, text, i64, text, i64, i64, integer, integer]
    library.lr_move.argtypes, library.lr_move.restype = [pointer, integer, i64, pointer, i64], integer
    library.lr_alive.argtypes, library.lr_alive.restype = [pointer], integer
    library.lr_counters.argtypes, library.lr_counters.restype = [pointer, pointer], None
    library.lr_error.argtypes, library.lr_error.restype = [pointer, text, i64], None
    library.lr_close.argtypes, library.lr_close.restype = [pointer], None
    return library
