"""The remote tier: memory of another machine, behind any server that speaks RESP (Redis, Valkey, KeyDB, Dragonfly ...).

Offset o lies in the key `prefix:k`, k = o // chunk_bytes. Plain connections are driven natively (native/resp.cpp);
those with TLS from here, through Python's ssl, which reads and writes the memory in place and holds no GIL meanwhile.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import secrets
import socket
import ssl
import threading
import weakref
from collections.abc import Callable, Iterator

from lowtide.core.units import format_bytes
from lowtide.errors import BadArgument, NativeUnavailable, SpillError
from lowtide.tiers import failures
from lowtide.tiers.lease import Lease
from lowtide.tiers.medium import Engine, PlainMedium
from lowtide.tiers.resp import Connection, NotResp, Refused, Short, command
from lowtide.tiers.resp_engine import RespEngine, Traffic
from lowtide.tiers.server_url import ServerUrl

Pieces = list[tuple[int, int, memoryview]]
"""The chunk, the place in it and the memory of each run that one key holds."""

_BATCH_BYTES = 8 << 20
_FRESH_TRIES = 3
_NO_EVICTION = "noeviction"


class RedisMedium(PlainMedium):
    """Bytes under private keys of a server; all of them are removed at the end.

    `notes` says what a user may want to know, such as a capacity beyond the server's memory.
    """

    name = "redis"
    lossy = False

    def __init__(self, server: ServerUrl, *, capacity_bytes: int | None = None) -> None:
        self.capacity_bytes = failures.checked_capacity(capacity_bytes)
        self.server = server
        self.prefix = f"lowtide:{secrets.token_hex(12)}"
        self._pid = os.getpid()
        self._closed = False
        self._tls = server.tls_context()
        self._counted_before = Traffic()
        tally = _Tally()
        connect = self._connect = _Connect(server, self._tls)
        try:
            with contextlib.closing(connect()) as connection:
                self.notes = tuple(self._remarks(connection))
                self._lease = Lease(connect, prefix=self.prefix, expiry_s=server.expiry_s, chunks=tally.chunks)
                self._lease.begin(connection)
                host = connection.peer
        except OSError as error:
            raise _cannot_open(error, server) from error
        mark = (command("GET", self._lease.mark_key), self._lease.mark.encode())
        handshake = [*connect.introduction(), mark]
        self._pool = _Pool(connect, mark, most_idle=server.sockets, tally=tally)
        self._native: RespEngine | None = None
        if server.tls is None:
            with contextlib.suppress(NativeUnavailable):  # then Python's sockets do, more slowly
                self._native = RespEngine(
                    host=host,
                    port=server.port,
                    handshake=b"".join(request for request, _ in handshake),
                    welcome=b"".join(_framed(reply) for _, reply in handshake),
                    prefix=self.prefix,
                    chunk_bytes=server.chunk_bytes,
                    expiry_s=server.expiry_s,
                    timeout_s=server.timeout_s,
                    sockets=server.sockets + 1,  # one more for the mover of urgent reads
                )
                tally.native = self._native
        self._tally = tally
        self._finalizer = weakref.finalize(self, _release, self._lease, self._native, self._pool)

    @property
    def place(self) -> str:
        """The server, for messages."""
        return self.server.place

    @property
    def engine(self) -> Engine | None:
        """The native way there (None: the connection is encrypted, or there is no compiler)."""
        if self._native is None or self._closed:
            return None
        move, alive = self._native.addresses()
        return Engine(
            move=move, alive=alive, context=self._native.context, threads=self.server.sockets, explain=self._explain
        )

    def __repr__(self) -> str:
        return f"RedisMedium({self.place}{'; closed' if self._closed else ''})"

    def figures(self) -> dict[str, object]:
        """Return the bytes, requests and round trips so far; those of native movers too."""
        now, before = self._tally.traffic(), self._counted_before
        names = ("written_bytes", "read_bytes", "requests", "round_trips", "connections")
        return {f"remote_{name}": getattr(now, name) - getattr(before, name) for name in names}

    def reset_figures(self) -> None:
        """Count from zero again."""
        self._counted_before = self._tally.traffic()

    def write_at(self, offset: int, data: memoryview) -> None:
        """Write all of `data` at `offset`. A forked child may only read."""
        self._check(offset)
        if os.getpid() != self._pid:
            raise failures.other_process("the spill on the server", owner_pid=self._pid)
        failures.check_room(offset, data.nbytes, capacity_bytes=self.capacity_bytes)
        self._move(offset, data, write=True)

    def read_at(self, offset: int, into: memoryview) -> None:
        """Fill all of `into` from `offset`."""
        self._check(offset)
        self._move(offset, into, write=False)

    def renew(self) -> None:
        """Let all keys live for another while; a thread does so all the time."""
        self._lease.renew()

    def discard(self, offset: int, nbytes: int) -> None:
        """Remove the keys of whole chunks that nobody will read any more; the server has their memory back."""
        self._check(offset)
        chunks = range(-(-offset // self.server.chunk_bytes), (offset + nbytes) // self.server.chunk_bytes)
        self._lease.remove([f"{self.prefix}:{chunk}" for chunk in chunks])

    def free_bytes(self) -> int:
        """Return how many more bytes the server has room for; a large number where it states no limit."""
        with contextlib.closing(self._connect()) as connection:
            facts = _memory_facts(connection)
        most = int(facts.get("maxmemory", "0") or 0)
        return max(0, most - int(facts.get("used_memory", "0") or 0)) if most else 1 << 62

    def close(self) -> None:
        """Remove the keys. A forked child only closes its own connections."""
        self._closed = True
        if os.getpid() == self._pid:
            self._finalizer()

    def _check(self, offset: int) -> None:
        failures.check_offset(offset)
        if self._closed:
            raise failures.closed(f"the spill on {self.place}")

    def _move(self, offset: int, view: memoryview, *, write: bool) -> None:
        if not view.nbytes:
            return
        code, said = (self._move_natively if self._native is not None else self._move_here)(offset, view, write=write)
        if code:
            raise failures.server_error(
                code, self._reason(code, said), verb="write" if write else "read", nbytes=view.nbytes
            )

    def _move_natively(self, offset: int, view: memoryview, *, write: bool) -> tuple[int, str]:
        assert self._native is not None
        # Python hides the address of read-only memory; a copy is as good.
        kept = bytearray(view) if view.readonly else view
        address = ctypes.addressof(ctypes.c_char.from_buffer(kept))
        code = self._native.move(write=write, offset=offset, address=address, nbytes=view.nbytes)
        return code, self._native.said() if code else ""

    def _move_here(self, offset: int, view: memoryview, *, write: bool) -> tuple[int, str]:
        for begin in range(0, view.nbytes, _BATCH_BYTES):
            batch = view[begin : begin + _BATCH_BYTES]
            pieces = list(self._pieces(offset + begin, batch))
            try:
                self._pool.exchange(self._put if write else self._get, pieces, write=write)
            except OSError as error:
                return _code_of(error), _said(error)
        return 0, ""

    def _pieces(self, offset: int, view: memoryview) -> Iterator[tuple[int, int, memoryview]]:
        start = 0
        while start < view.nbytes:
            chunk, inside = divmod(offset + start, self.server.chunk_bytes)
            length = min(view.nbytes - start, self.server.chunk_bytes - inside)
            yield chunk, inside, view[start : start + length]
            start += length

    def _put(self, connection: Connection, pieces: Pieces) -> int:
        # See Note [Chunks] in native/resp.cpp.
        replies = 0
        self._tally.count_chunks(pieces[-1][0] + 1)
        for chunk, inside, view in pieces:
            key, expiry = f"{self.prefix}:{chunk}".encode(), b"%d" % self.server.expiry_s
            if view.nbytes == self.server.chunk_bytes:
                frame = command("SET", key, b"", "EX", expiry)
                head, tail = frame.split(b"$0\r\n\r\n", 1)
                connection.send((b"%b$%d\r\n" % (head, view.nbytes), view, b"\r\n" + tail))
                replies += 1
            else:
                head = command("SETRANGE", key, inside, b"").removesuffix(b"$0\r\n\r\n")
                made = command("SET", key, b"", "EX", expiry, "NX")
                connection.send((b"%b%b$%d\r\n" % (made, head, view.nbytes), view, b"\r\n"))
                replies += 2
        for _ in range(replies):
            connection.reply()
        return replies

    def _get(self, connection: Connection, pieces: Pieces) -> int:
        requests = []
        for chunk, inside, view in pieces:
            key = f"{self.prefix}:{chunk}"
            whole = view.nbytes == self.server.chunk_bytes
            requests.append(
                command("GET", key) if whole else command("GETRANGE", key, inside, inside + view.nbytes - 1)
            )
        connection.send([b"".join(requests)])
        for _, _, view in pieces:
            connection.reply_into(view)
        return len(requests)

    def _explain(self, code: int) -> str:
        return self._reason(code, self._native.said() if self._native is not None else "")

    def _reason(self, code: int, said: str) -> str:
        return failures.server_reason(code, said=said, place=self.place, timeout_s=self.server.timeout_s)

    def _remarks(self, connection: Connection) -> Iterator[str]:
        try:
            facts = _memory_facts(connection)
        except Refused as refused:
            yield f"{self.place} does not tell how much memory it has ({refused.said})"
            return
        most = int(facts.get("maxmemory", "0") or 0)
        policy = facts.get("maxmemory_policy", _NO_EVICTION)
        if not most:
            return
        if policy != _NO_EVICTION:
            raise BadArgument(
                f"{self.place} removes keys when its memory is full (maxmemory-policy {policy}), so tensors would be "
                f"lost: set maxmemory-policy {_NO_EVICTION} there, or spill elsewhere"
            )
        room = max(0, most - int(facts.get("used_memory", "0") or 0))
        if self.capacity_bytes is not None and self.capacity_bytes > room:
            yield (
                f"the spill's capacity is {format_bytes(self.capacity_bytes)}, but {self.place} has "
                f"{format_bytes(room)} left"
            )


def _memory_facts(connection: Connection) -> dict[str, str]:
    told = connection.call("INFO", "memory")
    lines = (told if isinstance(told, bytes) else b"").decode(errors="replace").splitlines()
    return dict(line.split(":", 1) for line in lines if ":" in line)


class _Connect:
    """Makes connections that have logged in and chosen their database."""

    def __init__(self, server: ServerUrl, tls: ssl.SSLContext | None) -> None:
        self._server = server
        self._tls = tls

    def __call__(self) -> Connection:
        server = self._server
        connection = Connection(server.host, server.port, timeout_s=server.timeout_s, tls=self._tls, name=server.host)
        try:
            for request, _ in self.introduction():
                connection.pipeline([request])
        except BaseException:
            connection.close()
            raise
        return connection

    def introduction(self) -> list[tuple[bytes, bytes | None]]:
        """Return what a connection begins with, and what the server answers (None: that it is well)."""
        server = self._server
        found: list[tuple[bytes, bytes | None]] = []
        if server.password:
            words = ("AUTH", server.user, server.password) if server.user else ("AUTH", server.password)
            found.append((command(*words), None))
        if server.db:
            found.append((command("SELECT", server.db), None))
        return found


class _Tally:
    """What passed, natively and here."""

    def __init__(self) -> None:
        self.native: RespEngine | None = None
        self._lock = threading.Lock()
        self._here = Traffic()

    def chunks(self) -> int:
        return self.traffic().chunks

    def traffic(self) -> Traffic:
        native = self.native.traffic() if self.native is not None else Traffic()
        sums = Traffic(*(ours + theirs for ours, theirs in zip(self._here, native, strict=True)))
        return sums._replace(chunks=max(self._here.chunks, native.chunks))

    def count_chunks(self, chunks: int) -> None:
        with self._lock:
            self._here = self._here._replace(chunks=max(self._here.chunks, chunks))

    def count(self, *, written: int = 0, read: int = 0, requests: int = 0, trips: int = 0, connected: int = 0) -> None:
        with self._lock:
            old = self._here
            self._here = Traffic(
                old.written_bytes + written,
                old.read_bytes + read,
                old.requests + requests,
                old.round_trips + trips,
                old.connections + connected,
                old.chunks,
            )


class _Forgotten(OSError):
    """The server has not the mark that was left there."""


class _Pool:
    """Connections that are made as needed and kept. A forked child makes its own."""

    def __init__(self, connect: _Connect, mark: tuple[bytes, bytes], *, most_idle: int, tally: _Tally) -> None:
        self._connect = connect
        self._mark = mark
        self._most_idle = most_idle
        self._tally = tally
        self._idle: list[Connection] = []
        self._pid = os.getpid()

    def exchange(self, operation: Callable[[Connection, Pieces], int], pieces: Pieces, *, write: bool) -> None:
        """Run an operation on a connection; again where that turns out to be dead, on a new one a few times."""
        if os.getpid() != self._pid:
            # Not closed: TLS would say goodbye on a connection that is the parent's.
            self._abandoned, self._idle, self._pid = self._idle, [], os.getpid()
        fresh_left = _FRESH_TRIES
        while True:
            fresh = False
            try:
                connection = self._idle.pop()
            except IndexError:
                connection, fresh = self._made(), True
            try:
                requests = operation(connection, pieces)
            except BaseException as error:
                connection.close()
                fresh_left -= fresh
                if isinstance(error, ConnectionError | ssl.SSLError) and fresh_left > 0:
                    continue
                raise
            nbytes = sum(view.nbytes for _, _, view in pieces)
            self._tally.count(written=nbytes * write, read=nbytes * (not write), requests=requests, trips=1)
            if len(self._idle) < self._most_idle:
                self._idle.append(connection)
            else:
                connection.close()
            return

    def _made(self) -> Connection:
        connection = self._connect()
        request, mark = self._mark
        try:
            if connection.pipeline([request]) != [mark]:
                raise _Forgotten(errno.ESTALE, "the mark is gone")
        except BaseException:
            connection.close()
            raise
        self._tally.count(connected=1)
        return connection

    def close(self) -> None:
        """Close the connections that are idle."""
        while self._idle:
            self._idle.pop().close()


def _framed(reply: bytes | None) -> bytes:
    return b"+OK\r\n" if reply is None else b"$%d\r\n%b\r\n" % (len(reply), reply)


def _release(lease: Lease, native: RespEngine | None, pool: _Pool) -> None:
    lease.end()
    pool.close()
    if native is not None:
        native.close()


def _code_of(error: OSError) -> int:
    match error:
        case Refused():
            return errno.ENOSPC if error.said.startswith("OOM") else failures.REFUSED
        case NotResp():
            return failures.NOT_RESP
        case Short():
            return failures.SHORT_READ
        case _Forgotten():
            return failures.FORGOTTEN
        case TimeoutError():
            return errno.ETIMEDOUT
        case ssl.SSLError():
            return errno.ECONNRESET
    return error.errno or errno.ECONNRESET


def _said(error: OSError) -> str:
    return error.said if isinstance(error, Refused | NotResp) else ""


def _cannot_open(error: OSError, server: ServerUrl) -> BadArgument | SpillError:
    place = server.place
    match error:
        case socket.gaierror():
            return BadArgument(f"cannot find host {server.host!r} of {place}: {error.strerror}: check its name")
        case ssl.SSLCertVerificationError():
            return BadArgument(
                f"the certificate of {place} cannot be trusted ({error.verify_message}): name its authority with "
                "?ssl_ca_certs=FILE"
            )
        case ssl.SSLError():
            reason = str(error.reason or error)
            return BadArgument(f"{place} does not speak TLS with us ({reason}): check the port, or write redis://")
        case Refused() if error.said.startswith(("NOAUTH", "WRONGPASS", "ERR invalid password", "ERR AUTH")):
            return BadArgument(
                f"{place} refuses the user or password ({error.said}): write redis://user:password@host, or set "
                "$REDISCLI_AUTH"
            )
    reason = failures.server_reason(_code_of(error), said=_said(error), place=place, timeout_s=server.timeout_s)
    if isinstance(error, ConnectionError):
        reason = f"cannot connect to {place} ({error.strerror or error}): start the server, or check host and port"
    return BadArgument(reason)
