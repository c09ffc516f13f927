"""A server that speaks RESP and does what a test wants to go wrong; and a real one, where it is installed."""

from __future__ import annotations

import contextlib
import shutil
import socket
import socketserver
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

Words = list[bytes]
DROP = b"\x00drop"
"""What a script answers with to close the connection instead."""
HANG = b"\x00hang"
"""What a script answers with to say nothing until the server ends."""

needs_redis = pytest.mark.skipif(
    shutil.which("redis-server") is None, reason="redis-server is not installed (apt-get install redis-server)"
)


def _hang_up(handler: socketserver.StreamRequestHandler) -> None:
    """Say no more, and read until the client hangs up: a socket closed with requests unread loses its last answer."""
    handler.connection.shutdown(socket.SHUT_WR)
    while handler.rfile.read(1 << 16):
        pass


@dataclass
class RespServer:
    """Keys and values, with their expiries in seconds; `script(words)` may give another answer than theirs.

    An answer that begins with `DROP` closes the connection after what follows that; `seen` are all requests.
    """

    script: Callable[[Words], bytes | None] = lambda words: None
    values: dict[bytes, bytearray] = field(default_factory=dict)
    expiries: dict[bytes, int] = field(default_factory=dict)
    seen: list[Words] = field(default_factory=list)
    connections: int = 0
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _ended: threading.Event = field(default_factory=threading.Event)

    def __post_init__(self) -> None:
        self._sockets: set[socket.socket] = set()
        owner = self

        class Handler(socketserver.StreamRequestHandler):
            disable_nagle_algorithm = True

            def handle(self) -> None:
                owner._serve(self)

        class Server(socketserver.ThreadingTCPServer):
            daemon_threads = True
            allow_reuse_address = True
            block_on_close = False

        self._server = Server(("127.0.0.1", 0), Handler)
        self.port: int = self._server.server_address[1]
        threading.Thread(target=self._server.serve_forever, args=(0.01,), daemon=True).start()

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}"

    def count(self, name: bytes) -> int:
        return sum(words[0] == name for words in self.seen)

    def stop(self) -> None:
        """Die: close what listens and every connection."""
        self._ended.set()
        self._server.shutdown()
        self._server.server_close()
        self.drop_all()

    def drop_all(self) -> None:
        with self._lock:
            for each in self._sockets:
                with contextlib.suppress(OSError):
                    each.shutdown(socket.SHUT_RDWR)

    def _serve(self, handler: socketserver.StreamRequestHandler) -> None:
        with self._lock:
            self.connections += 1
            self._sockets.add(handler.connection)
        try:
            while words := _request(handler.rfile):  # type: ignore[arg-type]
                with self._lock:
                    self.seen.append(words if len(words[-1]) < 1000 else [*words[:2], b"..."])
                scripted = self.script(words)
                if scripted == HANG:
                    self._ended.wait()
                    return
                if scripted is not None and scripted.startswith(DROP):
                    handler.wfile.write(scripted[len(DROP) :])
                    _hang_up(handler)
                    return
                handler.wfile.write(self._answer(words) if scripted is None else scripted)
        except OSError:
            return
        finally:
            with self._lock:
                self._sockets.discard(handler.connection)

    def _answer(self, words: Words) -> bytes:
        name, *rest = words
        with self._lock:
            match name:
                case b"SET":
                    key, value, *options = rest
                    if b"NX" in options and key in self.values:
                        return b"$-1\r\n"
                    self.values[key] = bytearray(value)
                    self.expiries[key] = int(options[options.index(b"EX") + 1])
                    return b"+OK\r\n"
                case b"SETRANGE":
                    key, begin, value = rest[0], int(rest[1]), rest[2]
                    kept = self.values.setdefault(key, bytearray())
                    kept.extend(bytes(max(0, begin - len(kept))))
                    kept[begin : begin + len(value)] = value
                    return b":%d\r\n" % len(kept)
                case b"GET":
                    value = self.values.get(rest[0])
                    return b"$-1\r\n" if value is None else b"$%d\r\n%b\r\n" % (len(value), value)
                case b"GETRANGE":
                    value = self.values.get(rest[0], bytearray())[int(rest[1]) : int(rest[2]) + 1]
                    return b"$%d\r\n%b\r\n" % (len(value), value)
                case b"EXPIRE":
                    if rest[0] not in self.values:
                        return b":0\r\n"
                    self.expiries[rest[0]] = int(rest[1])
                    return b":1\r\n"
                case b"UNLINK" | b"DEL":
                    return b":%d\r\n" % sum(self.values.pop(key, None) is not None for key in rest)
                case b"INFO":
                    return b"$23\r\n# Memory\r\nmaxmemory:0\r\n\r\n"
                case b"AUTH" | b"SELECT":
                    return b"+OK\r\n"
        return b"-ERR unknown command\r\n"


def _request(stream: socketserver._BufferedIOBase) -> Words | None:  # type: ignore[name-defined]
    line = stream.readline()
    if not line:
        return None
    words = []
    for _ in range(int(line[1:])):
        length = int(stream.readline()[1:])
        words.append(stream.read(length))
        stream.read(2)
    return words


@contextlib.contextmanager
def resp_server(script: Callable[[Words], bytes | None] = lambda words: None) -> Iterator[RespServer]:
    """Give a server that does what `script` says."""
    server = RespServer(script=script)
    try:
        yield server
    finally:
        server.stop()


@dataclass
class RealRedis:
    """A redis-server of this machine's, on the loopback."""

    process: subprocess.Popen[bytes]
    port: int

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}"

    def ask(self, *words: str, password: str = "") -> str:
        """Return what redis-cli prints for a command."""
        login = ["-a", password, "--no-auth-warning"] if password else []
        command = ["redis-cli", "-p", str(self.port), *login, *words]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()


@contextlib.contextmanager
def real_redis(directory: Path, *options: str) -> Iterator[RealRedis]:
    """Start a redis-server that keeps nothing on disk."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port: int = probe.getsockname()[1]
    fixed = ["--bind", "127.0.0.1", "--save", "", "--appendonly", "no", "--dir", str(directory)]
    ports = [] if "--tls-port" in options else ["--port", str(port)]
    stated = [str(port) if option == "PORT" else option for option in options]
    process = subprocess.Popen(
        ["redis-server", *fixed, *ports, *stated], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    server = RealRedis(process, port)
    try:
        _wait_for(port, process)
        yield server
    finally:
        server.kill()


def _wait_for(port: int, process: subprocess.Popen[bytes]) -> None:
    while process.poll() is None:
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port)):
            return
        time.sleep(0.01)
    raise RuntimeError(f"redis-server ended with {process.returncode}")
