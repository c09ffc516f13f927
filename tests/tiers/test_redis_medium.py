"""The remote tier: exact, private, gone at the end, and clear about every way in which a server can fail."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from lowtide.errors import BadArgument, NativeUnavailable, SpillError, SpillFull
from lowtide.testing.stores import MediumTests, page_aligned, some_bytes
from lowtide.tiers import Medium, open_medium
from lowtide.tiers import redis as redis_module
from lowtide.tiers.redis import RedisMedium
from lowtide.tiers.server_url import hide_password, read_server_url
from tests.tiers.resp_server import DROP, HANG, RealRedis, RespServer, Words, needs_redis, real_redis, resp_server

_CHUNK = 512 << 10


@pytest.fixture
def server() -> Iterator[RespServer]:
    with resp_server() as server:
        yield server


@pytest.fixture(scope="module")
def redis(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealRedis]:
    with real_redis(tmp_path_factory.mktemp("redis")) as redis:
        yield redis


@pytest.fixture(scope="module")
def tls_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    directory = tmp_path_factory.mktemp("tls")
    certificate(directory)
    options = ["--port", "0", "--tls-port", "PORT", "--tls-auth-clients", "no", "--requirepass", "s3cret"]
    for name, file in {"cert": "cert", "key": "key", "ca-cert": "cert"}.items():
        options += [f"--tls-{name}-file", f"{directory}/{file}.pem"]
    with real_redis(directory, *options) as server:
        yield f"rediss://default:s3cret@127.0.0.1:{server.port}/3?ssl_ca_certs={directory}/cert.pem"


@pytest.fixture(params=["native", "python"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Both ways to a server: the native one, and that of a machine without a compiler and of TLS."""
    if request.param == "python":
        no_compiler(monkeypatch)
    return str(request.param)


def no_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(**settings: object) -> None:
        raise NativeUnavailable("no compiler")

    monkeypatch.setattr(redis_module, "RespEngine", refuse)


def opened(url: str, **options: int) -> RedisMedium:
    medium = open_medium(url, **options)
    assert isinstance(medium, RedisMedium)
    return medium


class TestServer(MediumTests):
    @pytest.fixture(autouse=True)
    def _server(self, server: RespServer) -> None:
        self.server = server

    def make_medium(self, tmp_path: Path) -> Medium:
        medium = opened(self.server.url)
        assert medium.engine is not None
        return medium


class TestServerFromPython(MediumTests):
    @pytest.fixture(autouse=True)
    def _server(self, server: RespServer, monkeypatch: pytest.MonkeyPatch) -> None:
        self.server = server
        no_compiler(monkeypatch)

    def make_medium(self, tmp_path: Path) -> Medium:
        medium = opened(self.server.url)
        assert medium.engine is None
        return medium


class TestWithACodec(MediumTests):
    @pytest.fixture(autouse=True)
    def _server(self, server: RespServer) -> None:
        self.server = server

    def make_medium(self, tmp_path: Path) -> Medium:
        medium = open_medium(self.server.url.replace("redis:", "redis+zvc:"))
        assert medium.codecs
        return medium


@needs_redis
class TestRealServer(MediumTests):
    @pytest.fixture(autouse=True)
    def _server(self, redis: RealRedis) -> None:
        self.server = redis

    def make_medium(self, tmp_path: Path) -> Medium:
        return open_medium(self.server.url)


@needs_redis
class TestTls(MediumTests):
    """As a server is reached from another building: encrypted, with a user and a password."""

    @pytest.fixture(autouse=True)
    def _url(self, tls_url: str) -> None:
        self.url = tls_url

    def make_medium(self, tmp_path: Path) -> Medium:
        return open_medium(self.url)

    def test_a_certificate_that_nobody_vouches_for_is_refused(self) -> None:
        with pytest.raises(BadArgument, match=r"cannot be trusted .* name its authority with \?ssl_ca_certs"):
            open_medium(self.url.partition("?")[0])
        medium = open_medium(self.url.partition("?")[0] + "?ssl_cert_reqs=none")
        medium.close()

    def test_a_wrong_password_is_told(self) -> None:
        with pytest.raises(BadArgument, match="refuses the user or password") as told:
            open_medium(self.url.replace("s3cret", "wr0ng"))
        assert "wr0ng" not in str(told.value)

    def test_a_file_that_is_no_certificate_is_told(self, tmp_path: Path) -> None:
        with pytest.raises(BadArgument, match=r"cannot use the certificates of rediss://127\.0\.0\.1"):
            open_medium(f"{self.url.partition('?')[0]}?ssl_ca_certs={tmp_path}/none.pem")


def certificate(directory: Path) -> None:
    command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "1", "-subj", "/CN=127.0.0.1"]
    command += ["-addext", "subjectAltName=IP:127.0.0.1"]
    command += ["-keyout", f"{directory}/key.pem", "-out", f"{directory}/cert.pem"]
    subprocess.run(command, check=True, capture_output=True)


# ---- private, and gone at the end (R7) ----


@needs_redis
def test_keys_are_private_expire_and_are_removed(redis: RealRedis, way: str) -> None:
    medium = opened(f"{redis.url}?expiry=500")
    assert (medium.engine is None) == (way == "python")
    medium.write_at(0, memoryview(some_bytes(3 * _CHUNK + 5000)))
    medium.write_at(40 * _CHUNK + 4096, memoryview(b"x"))
    keys = redis.ask("keys", "*").split()
    assert len(keys) == 6
    assert all(key.startswith(f"{medium.prefix}:") for key in keys)
    assert all(400 < int(redis.ask("ttl", key)) <= 500 for key in keys), "a key without an expiry would stay for ever"
    assert opened(redis.url).prefix != medium.prefix
    medium.close()
    assert not [key for key in keys if redis.ask("exists", key) == "1"]


def test_keys_are_renewed(server: RespServer) -> None:
    medium = opened(f"{server.url}?expiry=500")
    medium.write_at(0, memoryview(some_bytes(2 * _CHUNK + 4096)))
    for key in server.expiries:
        server.expiries[key] = 1
    medium.renew()
    assert set(server.expiries.values()) == {500}
    assert len(server.expiries) == 4
    medium.close()
    assert not server.values


def test_a_thread_renews_them_before_they_expire(server: RespServer) -> None:
    renewed = threading.Event()

    def script(words: Words) -> None:
        if words[0] == b"EXPIRE" and words[1].endswith(b":0"):
            renewed.set()

    server.script = script
    medium = opened(f"{server.url}?expiry=3")
    medium.write_at(0, memoryview(b"x"))
    assert renewed.wait(60), "the keys would have expired"
    medium.close()


@needs_redis
def test_nothing_stays_when_a_program_ends_without_a_word(redis: RealRedis) -> None:
    program = (
        "import sys; from lowtide.tiers import open_medium\n"
        "kept = open_medium(sys.argv[1]); kept.write_at(0, memoryview(bytes(3000000)))\n"
        "print(kept.prefix)"
    )
    done = subprocess.run([sys.executable, "-c", program, redis.url], check=True, capture_output=True, text=True)
    assert redis.ask("keys", f"{done.stdout.strip()}*") == ""


def test_a_server_that_knows_no_unlink(server: RespServer) -> None:
    server.script = lambda words: b"-ERR unknown command\r\n" if words[0] == b"UNLINK" else None
    medium = opened(server.url)
    medium.write_at(0, memoryview(b"x"))
    medium.close()
    assert not server.values


def test_a_child_reads_on_a_connection_of_its_own_and_removes_nothing(server: RespServer, way: str) -> None:
    medium = opened(server.url)
    content = some_bytes(3 * _CHUNK)
    medium.write_at(0, memoryview(content))
    connections = server.connections
    child = os.fork()
    if child == 0:
        code = 1
        try:
            into = bytearray(len(content))
            medium.read_at(0, memoryview(into))
            try:
                medium.write_at(0, memoryview(b"x"))
            except SpillError as error:
                code = 0 if into == content and "belongs to process" in str(error) else 2
            medium.close()
        finally:
            os._exit(code)
    assert os.waitpid(child, 0)[1] == 0
    assert server.connections == connections + 1
    into = bytearray(len(content))
    medium.read_at(0, memoryview(into))
    assert into == content
    medium.close()


# ---- requests ----


def test_requests_are_batched_and_counted(server: RespServer, way: str) -> None:
    medium = opened(server.url)
    content = page_aligned(some_bytes(8 << 20))
    medium.write_at(0, content)
    medium.read_at(0, content)
    figures = medium.figures()
    assert figures["remote_written_bytes"] == figures["remote_read_bytes"] == 8 << 20
    assert figures["remote_requests"] == 32
    assert figures["remote_round_trips"] == 2
    assert figures["remote_connections"] == 1
    assert server.count(b"SET") == 17, "sixteen chunks and the mark"
    medium.reset_figures()
    assert not any(medium.figures().values())
    medium.close()


def test_several_sockets_work_side_by_side(server: RespServer, way: str) -> None:
    meeting = threading.Barrier(3)

    def script(words: Words) -> None:
        if words[0] == b"GETRANGE":
            meeting.wait(60)  # nobody is answered before all three have asked

    medium = opened(f"{server.url}?sockets=3")
    contents = [some_bytes(5000, seed=seed) for seed in range(3)]
    for index, content in enumerate(contents):
        medium.write_at(index * 8192, memoryview(content))
    server.script = script
    intos = [bytearray(5000) for _ in contents]
    with ThreadPoolExecutor(3) as pool:
        list(pool.map(lambda index: medium.read_at(index * 8192, memoryview(intos[index])), range(3)))
    assert [bytes(into) for into in intos] == contents
    medium.close()


# ---- a server that fails ----


def test_a_connection_that_was_dropped_is_made_again(server: RespServer, way: str) -> None:
    medium = opened(server.url)
    content = some_bytes(9 << 20)
    medium.write_at(0, memoryview(content))
    server.drop_all()
    medium.write_at(16 << 20, memoryview(content))
    server.drop_all()
    into = bytearray(len(content))
    medium.read_at(16 << 20, memoryview(into))
    assert into == content
    assert medium.figures()["remote_connections"] == 3
    medium.close()


def test_a_server_that_is_gone(server: RespServer, way: str) -> None:
    medium = opened(server.url)
    medium.write_at(0, memoryview(b"x"))
    server.stop()
    for operation in (medium.read_at, medium.write_at):
        with pytest.raises(SpillError, match=rf"127.0.0.1:{server.port} cannot be reached \(Connection refused\): .*"):
            operation(0, memoryview(bytearray(5000)))
    medium.close()


def test_a_server_that_came_back_empty(server: RespServer, way: str) -> None:
    medium = opened(server.url)
    medium.write_at(0, memoryview(b"x"))
    server.values.clear()
    server.drop_all()
    for operation in (medium.read_at, medium.write_at):
        with pytest.raises(
            SpillError, match="restarted or emptied, so the tensors it held are lost: restart from a chec"
        ):
            operation(0, memoryview(bytearray(1)))
    medium.close()


def test_a_key_that_is_gone(server: RespServer, way: str) -> None:
    medium = opened(server.url)
    medium.write_at(0, memoryview(some_bytes(4 * _CHUNK)))
    del server.values[f"{medium.prefix}:2".encode()]
    with pytest.raises(SpillError, match=r"short read: .* its keys expired or were removed"):
        medium.read_at(0, memoryview(bytearray(4 * _CHUNK)))
    medium.read_at(0, memoryview(bytearray(2 * _CHUNK)))
    medium.close()


@pytest.mark.parametrize("name", [b"GET", b"SET"])
@pytest.mark.parametrize(
    ("answer", "text"),
    [
        (b"-ERR no such luck\r\n", "refused a request: ERR no such luck: check the user's rights"),
        (b"HTTP/1.1 400 Bad Request\r\n\r\n", r"does not speak RESP \(it answered 'HTTP/1.1 400 Bad Request'\): check"),
        (DROP + b"$52", "cannot be reached"),
        (DROP + b"\xff\xfe\r\n", r"does not speak RESP \(it answered '..'\)"),
        (HANG, r"did not answer within 0.2 s: check the server, or allow more time with \?timeout="),
    ],
)
def test_answers_that_are_none(server: RespServer, way: str, name: bytes, answer: bytes, text: str) -> None:
    medium = opened(f"{server.url}?timeout=0.2")
    content = some_bytes(5 * _CHUNK)
    medium.write_at(0, memoryview(content))
    server.script = lambda words: answer if words[0] == name and words[1].endswith(b":3") else None
    operation = medium.read_at if name == b"GET" else medium.write_at
    with pytest.raises(SpillError, match=text) as told:
        operation(0, memoryview(bytearray(5 * _CHUNK)))
    assert "\n" not in str(told.value)
    assert str(server.port) in str(told.value)
    server.script = lambda words: None
    into = bytearray(_CHUNK)
    medium.read_at(4 * _CHUNK, memoryview(into))
    if name == b"GET":
        assert into == content[4 * _CHUNK :], "what comes after a failure must not be its rest"
    medium.close()


def test_half_a_reply_is_no_reply(server: RespServer, way: str) -> None:
    medium = opened(server.url)
    content = some_bytes(2 * _CHUNK)
    medium.write_at(0, memoryview(content))
    half = b"$%d\r\n" % _CHUNK + content[: _CHUNK // 2]
    server.script = lambda words: DROP + half if words[0] == b"GET" and words[1].endswith(b":0") else None
    with pytest.raises(SpillError, match="cannot be reached"):
        medium.read_at(0, memoryview(bytearray(2 * _CHUNK)))
    medium.close()


@needs_redis
def test_a_server_that_is_full(tmp_path: Path, way: str) -> None:
    with real_redis(tmp_path, "--maxmemory", "8mb") as small:
        medium = opened(small.url, capacity_bytes=64 << 20)
        assert any("has" in note and "left" in note for note in medium.notes)
        first = some_bytes(_CHUNK)
        medium.write_at(0, memoryview(first))
        with pytest.raises(SpillFull, match=r"is out of memory \(OOM command not allowed.*\): raise its maxmemory"):
            medium.write_at(_CHUNK, memoryview(some_bytes(16 << 20)))
        into = bytearray(_CHUNK)
        medium.read_at(0, memoryview(into))
        assert into == first
        medium.close()


@needs_redis
def test_a_server_that_would_remove_keys_by_itself_is_refused(tmp_path: Path) -> None:
    with (
        real_redis(tmp_path, "--maxmemory", "8mb", "--maxmemory-policy", "allkeys-lru") as careless,
        pytest.raises(BadArgument, match=r"maxmemory-policy allkeys-lru\), so tensors would be lost: set"),
    ):
        open_medium(careless.url)


# ---- what a user writes ----


def test_a_url_is_read() -> None:
    url = read_server_url(
        "rediss://me:a%40b@[::1]:7000/2?sockets=8&timeout=1.5&expiry=60&chunk=1MiB&ssl_cert_reqs=none"
    )
    assert (url.host, url.port, url.user, url.password, url.db) == ("::1", 7000, "me", "a@b", 2)
    assert (url.sockets, url.timeout_s, url.expiry_s, url.chunk_bytes) == (8, 1.5, 60, 1 << 20)
    assert url.tls == {"ssl_cert_reqs": "none"}
    assert url.place == "rediss://[::1]:7000/2"
    assert "a@b" not in repr(url)
    assert read_server_url("redis://host").port == 6379


def test_the_password_may_be_in_the_environment(server: RespServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("REDISCLI_AUTH", "s3cret")
    open_medium(f"{server.url}/4").close()
    assert [b"AUTH", b"s3cret"] in server.seen
    assert [b"SELECT", b"4"] in server.seen


def test_passwords_are_not_shown() -> None:
    assert hide_password("redis://me:s3cret@host:1/2?x=a@b") == "redis://host:1/2?x=a@b"
    assert hide_password("redis+zvc://:p@host") == "redis+zvc://host"
    assert hide_password("/a/b@c") == "/a/b@c"


@pytest.mark.parametrize(
    ("url", "text"),
    [
        ("redis://", "no server in 'redis://': write redis://host:6379"),
        ("redis://:s3cret@h:99999", "cannot read the port in 'redis://h:99999'"),
        ("redis://:s3cret@h/x", "cannot read the database in 'redis://h/x'"),
        ("redis://:s3cret@h?soket=1", "unknown option 'soket' in .*: known are sockets, timeout, expiry, chunk$"),
        ("redis://h?ssl_ca_certs=x", "unknown option 'ssl_ca_certs'"),
        ("redis://h?sockets=0", "write a number from 1 to 64"),
        ("redis://h?expiry=5.5", "write a number from 3"),
        ("redis://h?chunk=1000", "a multiple of 4096"),
        ("redis://h?chunk=much", "a multiple of 4096"),
        ("rediss://h?ssl_cert_reqs=maybe", "write none or required"),
        ("redis://no-such-host.invalid", "cannot find host 'no-such-host.invalid'"),
    ],
)
def test_what_cannot_be_opened_is_told_in_a_line(url: str, text: str) -> None:
    with pytest.raises(BadArgument, match=text) as told:
        open_medium(url)
    assert "\n" not in str(told.value)
    assert "s3cret" not in str(told.value)


def test_nobody_at_the_port(server: RespServer) -> None:
    server.stop()
    with pytest.raises(BadArgument, match=rf"cannot connect to {server.url} \(Connection refused\): start the server"):
        open_medium(server.url)


@pytest.mark.parametrize(
    ("answer", "text"),
    [
        (b"-WRONGPASS invalid username-password pair\r\n", r"refuses the user or password \(WRONGPASS .*REDISCLI_AUTH"),
        (b"220 mail.example ESMTP\r\n", "does not speak RESP"),
        (HANG, "did not answer within 0.2 s"),
    ],
)
def test_a_server_that_does_not_let_us_in(server: RespServer, answer: bytes, text: str) -> None:
    server.script = lambda words: answer
    with pytest.raises(BadArgument, match=text) as told:
        open_medium(f"redis://:s3cret@127.0.0.1:{server.port}?timeout=0.2")
    assert "s3cret" not in str(told.value)
