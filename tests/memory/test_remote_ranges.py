"""Pages on a server: exact, without Python on their way, and nothing is lost that was not there only (R4)."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator

import pytest
import torch

import lowtide
from lowtide.memory.native.bindings import Place
from lowtide.tiers import open_medium
from tests.memory.engine import MIB, Engine, filled, pattern
from tests.tiers.resp_server import DROP, RespServer, Words, resp_server

Opened = Callable[..., Engine]


@pytest.fixture
def server() -> Iterator[RespServer]:
    with resp_server() as server:
        yield server


@pytest.mark.parametrize("verify", [False, True])
def test_pages_leave_and_return(opened: Opened, server: RespServer, verify: bool) -> None:
    medium = open_medium(server.url)
    engine = opened(medium, budget=64 * MIB, verify=verify)
    sizes = [20 * MIB, 3 * MIB + 4096, 100_000]
    tensors = [filled(size, seed) for seed, size in enumerate(sizes)]
    for _ in range(3):
        engine.send_away(*tensors)
        for seed, tensor in enumerate(tensors):
            assert torch.equal(tensor, pattern(sizes[seed], seed))
    figures = medium.figures()
    assert figures["remote_written_bytes"] == engine.counted.written, "what came back unchanged is not sent again"
    assert figures["remote_read_bytes"] == engine.counted.read == 3 * figures["remote_written_bytes"]


def test_no_thread_of_python_moves_them(opened: Opened, server: RespServer, monkeypatch: pytest.MonkeyPatch) -> None:
    medium = open_medium(server.url)

    def moved(*arguments: object) -> None:
        raise AssertionError("Python moved bytes")

    monkeypatch.setattr(type(medium), "write_at", moved)
    monkeypatch.setattr(type(medium), "read_at", moved)
    engine = opened(medium)
    x = filled(10 * MIB)
    engine.send_away(x)
    assert torch.equal(x, pattern(10 * MIB))


def test_as_many_movers_as_sockets(opened: Opened, server: RespServer) -> None:
    meeting = threading.Barrier(4)

    def script(words: Words) -> None:
        if words[0] == b"SET" and words[1].rpartition(b":")[2] in (b"0", b"16", b"32", b"48"):
            meeting.wait(60)  # the first key of each piece: nobody is answered before all four are sent

    engine = opened(open_medium(f"{server.url}?sockets=4"), budget=64 * MIB)
    x = filled(32 * MIB)
    server.script = script
    engine.send_away(x)
    server.script = lambda words: None
    assert torch.equal(x, pattern(32 * MIB))


def test_what_is_touched_while_it_leaves_is_called_back(opened: Opened, server: RespServer) -> None:
    reached, goes_on = threading.Event(), threading.Event()

    def script(words: Words) -> None:
        if words[0] == b"SET" and words[1].endswith(b":1"):
            reached.set()
            goes_on.wait(60)

    engine = opened(open_medium(server.url))
    x = filled(6 * MIB)
    server.script = script
    assert engine.start_leaving(x)
    assert reached.wait(60)
    waits = engine.counted.waits

    def go_on_once_somebody_waits() -> None:
        engine.wait_for_waits(waits + 1)
        goes_on.set()

    threading.Thread(target=go_on_once_somebody_waits).start()
    x[5] = 77  # waits until nobody reads the pages
    assert x[5] == 77
    engine.native.settle()
    assert engine.place(x) is Place.HERE
    engine.send_away(x)
    assert x[5] == 77
    assert torch.equal(x[6:], pattern(6 * MIB)[6:])


def test_a_server_that_dies_while_it_is_written_to_keeps_the_value_here(opened: Opened, server: RespServer) -> None:
    engine = opened(open_medium(server.url))
    x = filled(6 * MIB)
    dying = threading.Event()

    def script(words: Words) -> bytes | None:
        if words[0] != b"SET" or not words[1].endswith(b":5"):
            return None
        dying.set()
        server.stop()
        return DROP

    server.script = script
    assert engine.start_leaving(x)
    engine.native.settle()
    assert dying.is_set()
    assert engine.place(x) is Place.HERE
    assert torch.equal(x, pattern(6 * MIB))
    error, warning = engine.memory.take_errors()
    assert error is None
    assert "6.00 MiB" in warning
    assert f"redis://127.0.0.1:{server.port} cannot be reached" in warning


def test_a_server_that_died_raises_with_its_address_and_what_to_do(opened: Opened, server: RespServer) -> None:
    engine = opened(open_medium(server.url))
    x = filled(MIB)
    engine.send_away(x)
    server.stop()
    with pytest.raises(torch.OutOfMemoryError, match="could not be read back"):
        x.add(1)
    error, _ = engine.memory.take_errors()
    assert isinstance(error, lowtide.SpillError)
    text = str(error)
    assert f"1.00 MiB of a tensor cannot be read back from tier 'redis': redis://127.0.0.1:{server.port}" in text
    assert "restart from a checkpoint" in text


def test_what_is_here_too_does_not_go_when_the_server_is_gone(opened: Opened, server: RespServer) -> None:
    engine = opened(open_medium(server.url))
    x, y = filled(MIB, 1), filled(MIB, 2)
    engine.send_away(x)
    assert x[0] == pattern(MIB, 1)[0]  # back, clean: leaving again would cost no write
    server.stop()
    assert engine.start_leaving(x)  # it is written again, which fails
    engine.native.settle()
    assert engine.place(x) is Place.HERE
    assert torch.equal(x, pattern(MIB, 1))
    assert torch.equal(y, pattern(MIB, 2))
    assert "cannot be reached" in engine.memory.take_errors()[1]


def test_what_came_back_unchanged_goes_for_nothing(opened: Opened, server: RespServer) -> None:
    engine = opened(open_medium(server.url))
    x = filled(MIB)
    engine.send_away(x)
    assert x[0] == pattern(MIB)[0]
    engine.send_away(x)
    assert engine.counted.written == MIB
    assert engine.counted.released == MIB
    assert torch.equal(x, pattern(MIB))


def test_a_connection_that_is_cut_costs_nothing_but_a_new_one(opened: Opened, server: RespServer) -> None:
    medium = open_medium(server.url)
    engine = opened(medium)
    x = filled(3 * MIB)
    engine.send_away(x)
    server.drop_all()
    assert torch.equal(x, pattern(3 * MIB))
    assert engine.memory.take_errors() == (None, "")
    assert medium.figures()["remote_connections"] == 2


def test_a_child_serves_itself_on_a_connection_of_its_own(opened: Opened, server: RespServer) -> None:
    engine = opened(open_medium(server.url))
    x, y = filled(2 * MIB, 1), filled(2 * MIB, 2)
    engine.send_away(x, y)
    connections = server.connections
    child = os.fork()
    if child == 0:
        code = 1
        try:
            code = 0 if torch.equal(x, pattern(2 * MIB, 1)) else 2
        finally:
            os._exit(code)
    assert torch.equal(y, pattern(2 * MIB, 2))  # meanwhile, on the parent's own
    assert os.waitpid(child, 0)[1] == 0
    assert server.connections > connections
    assert torch.equal(x, pattern(2 * MIB, 1))


def test_a_read_that_is_waited_for_is_not_held_up_by_reads_ahead(opened: Opened, server: RespServer) -> None:
    """Fastswap's acceptance: what is missed does not queue behind what may be needed later."""
    engine = opened(open_medium(f"{server.url}?sockets=2"), budget=64 * MIB)
    x, *ahead = (filled(MIB, seed) for seed in range(4))
    engine.send_away(x, *ahead)
    held = threading.Semaphore(0)
    goes_on, done = threading.Event(), threading.Event()
    chunks = {b":0", b":1"}  # of x, which left first

    def script(words: Words) -> None:
        if words[0] == b"GET" and words[1][-2:] not in chunks and not words[1].endswith(b":mark"):
            held.release()
            goes_on.wait(60)

    server.script = script
    for tensor in ahead:
        assert engine.native.fetch(tensor._cdata) == 0
    for _ in range(2):
        assert held.acquire(timeout=60), "both movers read ahead, and wait for the server"
    missing = threading.Thread(target=lambda: (x.sum(), done.set()))
    missing.start()
    served = done.wait(30)
    goes_on.set()
    missing.join()
    assert served, "the read that was waited for had to queue"
    for seed, tensor in enumerate((x, *ahead)):
        assert torch.equal(tensor, pattern(MIB, seed))


def test_frames_of_a_codec_go_there_too(opened: Opened, server: RespServer) -> None:
    from lowtide.codecs import ZeroValue

    medium = open_medium(server.url)
    engine = opened(medium, codecs=[ZeroValue(4)])
    x = torch.zeros(MIB)
    x[::4] = 3.0
    engine.send_away(x, codec="zvc")
    assert 0 < medium.figures()["remote_written_bytes"] < x.nbytes / 2  # type: ignore[operator]
    assert float(x.sum()) == 3.0 * MIB / 4
