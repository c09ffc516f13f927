from __future__ import annotations

import errno
import gc
import os
import random
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from lowtide.errors import BadArgument, SpillCorrupted, SpillError
from lowtide.testing.stores import StoreTests, some_bytes
from lowtide.tiers import (
    Direction,
    Fault,
    FaultKind,
    Faulty,
    FileMedium,
    Latency,
    Medium,
    NullMedium,
    Store,
    ThreadStore,
)
from lowtide.tiers.wrappers import Wrapper

MIB = 2**20
PATIENCE_S = 60.0


class TestFileStore(StoreTests):
    def make_store(self, tmp_path: Path, *, capacity_bytes: int | None = None) -> Store:
        return ThreadStore(FileMedium([tmp_path], capacity_bytes=capacity_bytes))

    def make_wrapped_store(self, tmp_path: Path, wrap: Callable[[Medium], Medium]) -> Store:
        return ThreadStore(wrap(FileMedium([tmp_path])))


class TestVerifiedStripedStore(StoreTests):
    def make_medium(self, tmp_path: Path, capacity_bytes: int | None = None) -> Medium:
        (tmp_path / "b").mkdir(exist_ok=True)
        return FileMedium([tmp_path, tmp_path / "b"], capacity_bytes=capacity_bytes)

    def make_store(self, tmp_path: Path, *, capacity_bytes: int | None = None) -> Store:
        return ThreadStore(self.make_medium(tmp_path, capacity_bytes), threads=3, verify=True)

    def make_wrapped_store(self, tmp_path: Path, wrap: Callable[[Medium], Medium]) -> Store:
        return ThreadStore(wrap(self.make_medium(tmp_path)), threads=3, verify=True)


class TestOneThread(TestFileStore):
    def make_store(self, tmp_path: Path, *, capacity_bytes: int | None = None) -> Store:
        return ThreadStore(FileMedium([tmp_path], capacity_bytes=capacity_bytes), threads=1)


class TestNullStore(StoreTests):
    lossy = True

    def make_store(self, tmp_path: Path, *, capacity_bytes: int | None = None) -> Store:
        return ThreadStore(NullMedium(capacity_bytes=capacity_bytes))


class Gate(Wrapper):
    """Holds every operation until it is opened, and logs the order in which they began."""

    def __init__(self, medium: Medium) -> None:
        super().__init__(medium)
        self.open = threading.Event()
        self.began = threading.Event()
        self.log: list[tuple[str, int]] = []

    def _pass(self, verb: str, offset: int) -> None:
        self.log.append((verb, offset))
        self.began.set()
        assert self.open.wait(PATIENCE_S)

    def write_at(self, offset: int, data: memoryview) -> None:
        self._pass("write", offset)
        self.medium.write_at(offset, data)

    def read_at(self, offset: int, into: memoryview) -> None:
        self._pass("read", offset)
        self.medium.read_at(offset, into)


@pytest.fixture
def gate(tmp_path: Path) -> Gate:
    return Gate(FileMedium([tmp_path]))


def test_reads_go_first_and_each_direction_is_first_in_first_out(gate: Gate) -> None:
    store = ThreadStore(gate, threads=1)
    gate.open.set()
    extents = []
    for _ in range(3):
        extent, put = store.put(memoryview(b"x"))
        assert put.wait(PATIENCE_S)
        extents.append(extent)
    gate.open.clear()
    gate.began.clear()
    gate.log.clear()
    blocker, _ = store.put(memoryview(b"x"))
    assert gate.began.wait(PATIENCE_S)
    later = [store.put(memoryview(b"x"))[0] for _ in range(3)]
    gets = [store.get(extent, memoryview(bytearray(1))) for extent in reversed(extents)]
    gate.open.set()
    assert all(get.wait(PATIENCE_S) for get in gets)
    last, put = store.put(memoryview(b"x"))
    assert put.wait(PATIENCE_S)
    store.close()
    expected = [("write", blocker.offset)]
    expected += [("read", extent.offset) for extent in reversed(extents)]
    expected += [("write", extent.offset) for extent in (*later, last)]
    assert gate.log == expected


def test_a_large_transfer_is_shared_by_the_threads(gate: Gate) -> None:
    store = ThreadStore(gate, threads=3)
    extent, put = store.put(memoryview(bytes(20 * MIB)))
    deadline_s = time.monotonic() + PATIENCE_S
    while len(gate.log) < 3 and time.monotonic() < deadline_s:
        time.sleep(0.001)
    assert sorted(gate.log) == [("write", extent.offset + start) for start in (0, 8 * MIB, 16 * MIB)]
    assert not put.done()
    gate.open.set()
    assert put.wait(PATIENCE_S)
    assert put.error is None
    store.close()


def test_a_get_during_its_put_takes_no_thread_from_others(gate: Gate) -> None:
    """With one thread, a get that waited on the thread for its put would wait for ever."""
    store = ThreadStore(gate, threads=1)
    first, _ = store.put(memoryview(b"1"))
    second, _ = store.put(memoryview(b"2"))
    into = bytearray(1)
    get = store.get(second, memoryview(into))
    gate.open.set()
    assert get.wait(PATIENCE_S)
    assert into == b"2"
    assert gate.log == [("write", first.offset), ("write", second.offset), ("read", second.offset)]
    store.close()


def test_room_freed_in_flight_comes_back_after_the_transfer(gate: Gate) -> None:
    store = ThreadStore(gate)
    extent, put = store.put(memoryview(b"x"))
    store.free(extent)
    assert store.used_bytes == 4096
    with pytest.raises(BadArgument, match="not live"):
        store.free(extent)
    other, _ = store.put(memoryview(b"x"))
    assert other.offset != extent.offset
    gate.open.set()
    assert put.wait(PATIENCE_S)
    store.free(other)
    store.close()
    assert store.used_bytes == 0
    assert store.high_bytes == 8192


def test_a_get_waiting_for_a_failing_put_fails_with_it(tmp_path: Path) -> None:
    gate = Gate(Faulty(FileMedium([tmp_path]), script=[Fault(direction=Direction.WRITE, nth=1, kind=FaultKind.ENOSPC)]))
    store = ThreadStore(gate)
    extent, put = store.put(memoryview(b"x"))
    get = store.get(extent, memoryview(bytearray(1)))
    gate.open.set()
    assert get.wait(PATIENCE_S)
    assert put.error is not None
    assert isinstance(get.error, SpillError)
    assert "its write failed" in str(get.error)
    assert get.error.errno == errno.ENOSPC
    assert ("read", extent.offset) not in gate.log
    store.close()


@pytest.mark.parametrize("direction", list(Direction))
@pytest.mark.parametrize("nth", [1, 3])
def test_checksums_catch_one_flipped_bit(tmp_path: Path, direction: Direction, nth: int) -> None:
    content = some_bytes(17 * MIB)
    script = [Fault(direction=direction, nth=nth, kind=FaultKind.FLIP)]
    for verify in (True, False):
        store = ThreadStore(Faulty(FileMedium([tmp_path]), script=script), verify=verify)
        extent, put = store.put(memoryview(content))
        into = bytearray(len(content))
        get = store.get(extent, memoryview(into))
        assert put.wait(PATIENCE_S)
        assert get.wait(PATIENCE_S)
        assert put.error is None
        assert into != content
        if verify:
            assert isinstance(get.error, SpillCorrupted)
            assert "'file' came back changed: checksum" in str(get.error)
        else:
            assert get.error is None
        store.close()


def test_checksums_catch_what_the_null_tier_does() -> None:
    store = ThreadStore(NullMedium(), verify=True)
    extent, _ = store.put(memoryview(some_bytes(1000)))
    get = store.get(extent, memoryview(bytearray(1000)))
    assert get.wait(PATIENCE_S)
    assert isinstance(get.error, SpillCorrupted)
    store.close()


def test_bytes_changed_on_the_disk_are_caught(tmp_path: Path) -> None:
    medium = FileMedium([tmp_path])
    store = ThreadStore(medium, verify=True)
    extent, put = store.put(memoryview(some_bytes(10_000)))
    assert put.wait(PATIENCE_S)
    medium.write_at(extent.offset + 4096, memoryview(bytes(4096)))
    get = store.get(extent, memoryview(bytearray(10_000)))
    assert get.wait(PATIENCE_S)
    assert isinstance(get.error, SpillCorrupted)
    store.close()


class Broken(Wrapper):
    """A medium with a bug."""

    def write_at(self, offset: int, data: memoryview) -> None:
        raise KeyError("bug")


def test_a_bug_in_a_medium_is_an_error_of_the_transfer_and_the_threads_survive() -> None:
    store = ThreadStore(Broken(NullMedium()), threads=1)
    for _ in range(2):
        _, put = store.put(memoryview(b"x"))
        assert put.wait(PATIENCE_S)
        assert isinstance(put.error, SpillError)
        assert "KeyError: 'bug'" in str(put.error)
    store.close()


def test_a_failed_transfer_lets_go_of_the_memory_too(tmp_path: Path) -> None:
    """The error's traceback would otherwise hold the views of the frames it went through."""
    script = [Fault(direction=Direction.READ, nth=1, kind=FaultKind.SHORT_READ)]
    store = ThreadStore(Faulty(FileMedium([tmp_path]), script=script))
    memory = bytearray(some_bytes(100_000))
    extent, put = store.put(memoryview(memory))
    get = store.get(extent, memoryview(memory))
    assert get.wait(PATIENCE_S)
    assert get.error is not None
    memory.append(0)
    del put
    store.close()


def test_close_cancels_what_has_not_begun_and_finishes_what_has(gate: Gate) -> None:
    store = ThreadStore(gate, threads=1)
    _, running = store.put(memoryview(b"x"))
    queued, put = store.put(memoryview(b"x"))
    get = store.get(queued, memoryview(bytearray(1)))
    assert gate.began.wait(PATIENCE_S)
    closing = threading.Thread(target=store.close)
    closing.start()
    assert put.wait(PATIENCE_S), "a cancelled transfer ends without waiting for the disk"
    assert get.wait(PATIENCE_S)
    assert not running.done()
    gate.open.set()
    closing.join(PATIENCE_S)
    assert not closing.is_alive()
    assert running.done()
    assert running.error is None
    for transfer in (put, get):
        assert transfer.error is not None
        assert transfer.error.errno == errno.ECANCELED
    assert gate.log == [("write", 0)]
    store.free(queued)


def test_close_ends_the_threads_and_the_medium(tmp_path: Path) -> None:
    medium = FileMedium([tmp_path])
    before = threading.active_count()
    store = ThreadStore(medium, threads=3)
    assert threading.active_count() == before + 3
    store.close()
    assert threading.active_count() == before
    assert medium.fds == ()


def test_a_forgotten_store_ends_its_threads() -> None:
    before = set(threading.enumerate())
    store = ThreadStore(NullMedium())
    _, put = store.put(memoryview(b"x"))
    assert put.wait(PATIENCE_S)
    its_own = set(threading.enumerate()) - before  # those of other tests may end meanwhile
    assert its_own
    del store, put
    deadline_s = time.monotonic() + PATIENCE_S
    while any(thread.is_alive() for thread in its_own) and time.monotonic() < deadline_s:
        gc.collect()
        time.sleep(0.001)
    assert not [thread for thread in its_own if thread.is_alive()]


def test_no_threads_are_refused() -> None:
    with pytest.raises(BadArgument, match="threads"):
        ThreadStore(NullMedium(), threads=0)


def test_views_of_other_shapes_are_taken_as_their_bytes(tmp_path: Path) -> None:
    import array

    numbers = array.array("d", [1.5, -2.5, 3.0])
    store = ThreadStore(FileMedium([tmp_path]))
    extent, _ = store.put(memoryview(numbers))
    back = array.array("d", [0.0] * 3)
    assert extent.nbytes == 24
    assert store.get(extent, memoryview(back)).wait(PATIENCE_S)
    assert back == numbers
    with pytest.raises(BadArgument, match="contiguous"):
        store.put(memoryview(bytes(10))[::2])
    store.close()


def test_a_random_life_keeps_every_byte(tmp_path: Path) -> None:
    """Puts, gets and frees in any order, over a slow medium so that they overlap, all verified."""
    draw = random.Random(11)
    medium = Latency(FileMedium([tmp_path], capacity_bytes=4 * MIB), write_s=1e-4, read_s=1e-4)
    store = ThreadStore(medium, threads=3, verify=True)
    live = {}
    gets = []
    for step in range(300):
        if len(live) < 12 and draw.random() < 0.6:
            content = some_bytes(draw.randrange(1, 60_000), seed=step)
            extent, _ = store.put(memoryview(content))
            live[extent] = content
        elif live:
            extent = draw.choice(list(live))
            into = bytearray(extent.nbytes)
            gets.append((store.get(extent, memoryview(into)), into, live[extent]))
            if draw.random() < 0.5:
                store.free(extent)
                del live[extent]
    for get, into, content in gets:
        assert get.wait(PATIENCE_S)
        assert get.error is None
        assert into == content
    for extent in live:
        store.free(extent)
    store.close()
    assert store.used_bytes == 0


FORK = """
import os, sys
from pathlib import Path
from lowtide.errors import SpillError
from lowtide.tiers import FileMedium, Latency, ThreadStore
store = ThreadStore(Latency(FileMedium([Path(sys.argv[1])]), write_s=0.2))
extent, put = store.put(memoryview(b"parent"))
pid = os.fork()
if pid == 0:
    for use in (lambda: store.put(memoryview(b"x")), lambda: store.free(extent)):
        try:
            use()
        except SpillError as error:
            assert "belongs to process" in str(error)
        else:
            os._exit(1)
    store.close()
    sys.exit(7)
assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 7
back = bytearray(6)
assert store.get(extent, memoryview(back)).wait(60)
assert back == b"parent"
store.close()
"""


def test_a_fork_with_transfers_under_way_harms_neither_side(tmp_path: Path) -> None:
    subprocess.run([sys.executable, "-c", FORK, str(tmp_path)], check=True, timeout=60)


def test_an_unclosed_store_does_not_keep_the_interpreter(tmp_path: Path) -> None:
    program = "from lowtide.tiers import *; s = ThreadStore(NullMedium()); s.put(memoryview(b'x'))"
    subprocess.run([sys.executable, "-c", program], check=True, timeout=30)


def test_no_torch_is_imported() -> None:
    program = "import sys, lowtide.tiers; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60, env={**os.environ})
