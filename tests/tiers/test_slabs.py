"""Slabs on servers: even load, headroom, and a server that dies loses nothing (Infiniswap)."""

from __future__ import annotations

import random
import threading
from pathlib import Path

import pytest

from lowtide.errors import BadArgument, SpillError
from lowtide.testing.stores import MediumTests, some_bytes
from lowtide.tiers import Direction, Fault, FaultKind, Faulty, FileMedium, Medium, NullMedium, PlainMedium, open_medium
from lowtide.tiers.slabs import Slabs
from tests.tiers.resp_server import RespServer, resp_server

_SLAB = 1 << 20


def on_disk(tmp_path: Path, *, servers: int = 3, **settings: int) -> Slabs:
    media = [FileMedium([tmp_path]) for _ in range(servers)]
    return Slabs(media, backup=FileMedium([tmp_path]), slab_bytes=_SLAB, **settings)


class TestSlabs(MediumTests):
    def make_medium(self, tmp_path: Path) -> Medium:
        return on_disk(tmp_path)


class TestOneServerWithoutRoom(MediumTests):
    """Nearly everything is in the backup only."""

    def make_medium(self, tmp_path: Path) -> Medium:
        server = FileMedium([tmp_path], capacity_bytes=2 * _SLAB)
        return Slabs([server], backup=FileMedium([tmp_path]), slab_bytes=_SLAB)


def most_loaded(*, choices: int, seed: int) -> float:
    """Return what the fullest of 32 servers holds, of what they hold on average."""
    servers = [NullMedium() for _ in range(32)]
    slabs = Slabs(
        servers, backup=NullMedium(), slab_bytes=4096, choices=choices, draw=random.Random(seed), pending_bytes=1 << 20
    )
    for index in range(320):
        slabs.write_at(index * 4096, memoryview(b"x"))
    loads = [len(server.slabs) for server in slabs.servers]
    slabs.close()
    assert sum(loads) == 320
    return max(loads) / 10


def test_two_choices_even_the_load_out() -> None:
    one, two = (sum(most_loaded(choices=choices, seed=seed) for seed in range(8)) / 8 for choices in (1, 2))
    assert one > 1.6, "one choice is balls into bins"
    assert two < 1.3


def test_a_server_that_dies_loses_nothing(tmp_path: Path) -> None:
    with resp_server() as first, resp_server() as second:
        slabs = Slabs(
            [open_medium(first.url), open_medium(second.url)], backup=FileMedium([tmp_path]), slab_bytes=_SLAB
        )
        contents = {index * _SLAB: some_bytes(_SLAB, seed=index) for index in range(8)}
        for offset, content in contents.items():
            slabs.write_at(offset, memoryview(content))
        assert all(server.slabs for server in slabs.servers), "both hold some"
        first.stop()
        for offset, content in contents.items():
            into = bytearray(_SLAB)
            slabs.read_at(offset, memoryview(into))
            assert into == content
        figures = slabs.figures()
        assert figures["servers_lost"] == 1
        assert 0 < figures["backup_read_bytes"] < 8 * _SLAB  # type: ignore[operator]
        second.stop()
        renewed = some_bytes(_SLAB, seed=99)
        slabs.write_at(0, memoryview(renewed))
        into = bytearray(_SLAB)
        slabs.read_at(0, memoryview(into))
        assert into == renewed
        slabs.close()


def test_bytes_come_from_servers_while_those_live(tmp_path: Path) -> None:
    slabs = on_disk(tmp_path)
    slabs.write_at(0, memoryview(some_bytes(5 * _SLAB)))
    slabs.read_at(0, memoryview(bytearray(5 * _SLAB)))
    figures = slabs.figures()
    assert figures["remote_written_bytes"] == figures["remote_read_bytes"] == 5 * _SLAB
    assert figures["backup_read_bytes"] == 0
    assert figures["slabs_mapped"] == 5
    slabs.close()


class Cramped(PlainMedium):
    """Memory whose owner needs it: `free` falls by what is written there, and rises by what is taken off."""

    name, lossy, capacity_bytes = "cramped", False, None

    def __init__(self, free: int) -> None:
        self.free = free
        self.kept: dict[int, bytes] = {}

    def free_bytes(self) -> int:
        return self.free

    def write_at(self, offset: int, data: memoryview) -> None:
        self.free -= data.nbytes
        self.kept[offset] = bytes(data)

    def read_at(self, offset: int, into: memoryview) -> None:
        into[:] = self.kept[offset]

    def discard(self, offset: int, nbytes: int) -> None:
        for at in [at for at in self.kept if offset <= at < offset + nbytes]:
            self.free += len(self.kept.pop(at))

    def close(self) -> None:
        self.kept.clear()


def test_a_server_keeps_its_headroom_and_gives_up_what_is_least_active(tmp_path: Path) -> None:
    server = Cramped(free=6 * _SLAB)
    slabs = Slabs(
        [server], backup=FileMedium([tmp_path]), slab_bytes=_SLAB, headroom_bytes=2 * _SLAB, draw=random.Random(1)
    )
    contents = [some_bytes(_SLAB, seed=index) for index in range(12)]
    into = bytearray(_SLAB)
    for index, content in enumerate(contents):
        slabs.write_at(index * _SLAB, memoryview(content))
        assert server.free >= 2 * _SLAB
        for _ in range(3):
            slabs.read_at(0, memoryview(into))  # the first is asked for all the time
    assert slabs.figures()["slabs_evicted"] == 8
    assert 0 in slabs.servers[0].slabs, "the most active stays"
    for index, content in enumerate(contents):
        slabs.read_at(index * _SLAB, memoryview(into))
        assert into == content
    slabs.close()


def test_writes_do_not_wait_for_the_backup(tmp_path: Path) -> None:
    goes_on = threading.Event()

    class Held(PlainMedium):
        name, lossy, capacity_bytes = "held", False, None

        def __init__(self) -> None:
            self.file = FileMedium([tmp_path])

        def write_at(self, offset: int, data: memoryview) -> None:
            assert goes_on.wait(60)
            self.file.write_at(offset, data)

        def read_at(self, offset: int, into: memoryview) -> None:
            self.file.read_at(offset, into)

        def close(self) -> None:
            self.file.close()

    broken = Faulty(
        FileMedium([tmp_path]), script=[Fault(direction=Direction.READ, nth=1, kind=FaultKind.EIO, lasting=True)]
    )
    slabs = Slabs([broken], backup=Held(), slab_bytes=_SLAB)
    content = some_bytes(_SLAB)
    slabs.write_at(0, memoryview(content))  # returns although the backup has nothing yet
    goes_on.set()
    into = bytearray(_SLAB)
    slabs.read_at(0, memoryview(into))  # the server fails, and the backup is read once it has all
    assert into == content
    slabs.close()


def test_a_backup_that_fails_is_told(tmp_path: Path) -> None:
    full = Faulty(
        FileMedium([tmp_path]), script=[Fault(direction=Direction.WRITE, nth=1, kind=FaultKind.ENOSPC, lasting=True)]
    )
    slabs = Slabs([FileMedium([tmp_path])], backup=full, slab_bytes=_SLAB, pending_bytes=1)
    with pytest.raises(SpillError, match="No space left"):
        slabs.write_at(0, memoryview(some_bytes(_SLAB)))
        slabs.write_at(_SLAB, memoryview(some_bytes(_SLAB)))
        slabs.write_at(2 * _SLAB, memoryview(some_bytes(_SLAB)))
    slabs.close()


def test_a_list_of_servers_and_a_directory(tmp_path: Path) -> None:
    with resp_server() as first, resp_server() as second:
        slabs = open_medium([first.url, second.url, str(tmp_path)])
        assert isinstance(slabs, Slabs)
        assert slabs.directories == (tmp_path,)
        slabs.close()
        with pytest.raises(BadArgument, match="data on several servers is lost if one dies: also name a directory"):
            open_medium([first.url, second.url])


def test_discarded_chunks_leave_the_server() -> None:
    with resp_server() as server:
        medium = open_medium(server.url)
        medium.write_at(0, memoryview(some_bytes(4 << 20)))
        kept = chunks_of(server)
        medium.discard(1 << 20, 2 << 20)  # type: ignore[attr-defined]
        assert chunks_of(server) == kept - 4
        medium.close()


def chunks_of(server: RespServer) -> int:
    return sum(not key.endswith(b":mark") for key in server.values)
