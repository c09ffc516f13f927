"""What every medium and every store has to do, as pytest classes to subclass.

class TestMyMedium(MediumTests):
    def make_medium(self, tmp_path): ...

Pytest collects the subclass if its name starts with `Test`.
"""

from __future__ import annotations

import mmap
import random
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from threading import Event

import pytest

from lowtide.errors import SpillFull
from lowtide.tiers.extents import Extent
from lowtide.tiers.medium import ALIGN_BYTES, Medium
from lowtide.tiers.store import Store, Transfer
from lowtide.tiers.wrappers import Direction, Fault, FaultKind, Faulty, Latency

_MIB = 2**20
_SIZES = (1, 511, ALIGN_BYTES, ALIGN_BYTES + 1, 3 * ALIGN_BYTES, 65_539, 2 * _MIB + 1, 3 * _MIB)
# Long enough for a loaded machine, short enough to notice a hang.
_PATIENCE_S = 60.0


def some_bytes(nbytes: int, *, seed: int = 0) -> bytes:
    """Return `nbytes` that look like nothing else: neither zeros nor a short pattern."""
    return random.Random(seed).randbytes(nbytes)


def page_aligned(content: bytes) -> memoryview:
    """Return writable memory that starts at a page and holds `content`."""
    view = memoryview(mmap.mmap(-1, max(len(content), 1)))[: len(content)]
    view[:] = content
    return view


def misaligned(content: bytes) -> memoryview:
    """Return writable memory that starts one byte after a page and holds `content`."""
    view = memoryview(mmap.mmap(-1, len(content) + 1))[1:]
    view[:] = content
    return view


class MediumTests(ABC):
    """The contract of `Medium`. Contents are compared unless the medium says that it is lossy."""

    @abstractmethod
    def make_medium(self, tmp_path: Path) -> Medium:
        """Return a fresh medium that can hold 64 MiB; the suite closes it."""

    @contextmanager
    def medium(self, tmp_path: Path) -> Iterator[Medium]:
        """Give a medium and close it."""
        medium = self.make_medium(tmp_path)
        try:
            yield medium
        finally:
            medium.close()

    def same(self, medium: Medium, got: memoryview | bytearray, expected: bytes) -> bool:
        """Return whether a read gave what it should."""
        return medium.lossy or bytes(got) == expected

    def test_it_is_a_medium(self, tmp_path: Path) -> None:
        """It has every attribute of the protocol, of the right type."""
        with self.medium(tmp_path) as medium:
            assert isinstance(medium, Medium)
            assert medium.name
            assert medium.capacity_bytes is None or medium.capacity_bytes > 0

    @pytest.mark.parametrize("nbytes", _SIZES)
    @pytest.mark.parametrize("memory", [page_aligned, misaligned])
    def test_bytes_come_back(self, tmp_path: Path, nbytes: int, memory: Callable[[bytes], memoryview]) -> None:
        """Any length from any memory is returned as it was."""
        content = some_bytes(nbytes, seed=nbytes)
        with self.medium(tmp_path) as medium:
            medium.write_at(ALIGN_BYTES, memory(content))
            into = memory(bytes(nbytes))
            medium.read_at(ALIGN_BYTES, into)
            assert self.same(medium, into, content)

    def test_reads_stay_inside_their_memory(self, tmp_path: Path) -> None:
        """A read of an odd length touches no byte after it."""
        content = some_bytes(5000)
        with self.medium(tmp_path) as medium:
            medium.write_at(0, memoryview(content))
            memory = page_aligned(b"\xee" * 2 * ALIGN_BYTES)
            medium.read_at(0, memory[:5000])
            assert bytes(memory[5000:]) == b"\xee" * (2 * ALIGN_BYTES - 5000)
            assert self.same(medium, memory[:5000], content)

    def test_neighbours_are_left_alone(self, tmp_path: Path) -> None:
        """Extents side by side, written in any order and rewritten, keep their own bytes."""
        draw = random.Random(7)
        sizes = [draw.randrange(1, 3 * ALIGN_BYTES) for _ in range(40)]
        contents = {index * 3 * ALIGN_BYTES: some_bytes(size, seed=index) for index, size in enumerate(sizes)}
        with self.medium(tmp_path) as medium:
            for offset in draw.sample(sorted(contents), len(contents)):
                medium.write_at(offset, memoryview(contents[offset]))
            for offset in draw.sample(sorted(contents), 10):
                contents[offset] = some_bytes(len(contents[offset]), seed=offset + 1)
                medium.write_at(offset, memoryview(contents[offset]))
            for offset, content in contents.items():
                into = bytearray(len(content))
                medium.read_at(offset, memoryview(into))
                assert self.same(medium, into, content), f"at {offset}"

    def test_a_large_write_can_be_read_in_parts(self, tmp_path: Path) -> None:
        """Offsets mean the same for every length: what is written at once is read back piecewise."""
        content = some_bytes(20 * _MIB + 77)
        start = 5 * _MIB + ALIGN_BYTES
        with self.medium(tmp_path) as medium:
            medium.write_at(start, page_aligned(content))
            for inside in (0, ALIGN_BYTES, 3 * _MIB, 11 * _MIB - ALIGN_BYTES, 20 * _MIB):
                expected = content[inside : inside + 2 * _MIB]
                into = page_aligned(bytes(len(expected)))
                medium.read_at(start + inside, into)
                assert self.same(medium, into, expected), f"{inside} bytes in"

    def test_no_bytes_are_no_work(self, tmp_path: Path) -> None:
        """An empty view is neither an error nor a write."""
        with self.medium(tmp_path) as medium:
            medium.write_at(0, memoryview(b""))
            medium.read_at(0, memoryview(bytearray()))

    def test_reading_past_the_end_is_an_error(self, tmp_path: Path) -> None:
        """What was never written is not made up."""
        with self.medium(tmp_path) as medium:
            if medium.lossy:
                pytest.skip("a lossy medium makes up what it reads")
            medium.write_at(0, memoryview(some_bytes(ALIGN_BYTES)))
            with pytest.raises(OSError, match="short read"):
                medium.read_at(0, memoryview(bytearray(3 * ALIGN_BYTES)))
            with pytest.raises(OSError, match="short read"):
                medium.read_at(16 * _MIB, memoryview(bytearray(1)))

    def test_threads_do_not_mix_their_bytes(self, tmp_path: Path) -> None:
        """Operations on distinct extents at the same time are as good as one after the other."""
        nbytes = 300_001
        stride = 128 * ALIGN_BYTES

        def round_trip(index: int) -> bool:
            content = some_bytes(nbytes, seed=index)
            medium.write_at(index * stride, memoryview(content))
            into = bytearray(nbytes)
            medium.read_at(index * stride, memoryview(into))
            return self.same(medium, into, content)

        with self.medium(tmp_path) as medium, ThreadPoolExecutor(4) as pool:
            assert all(pool.map(round_trip, range(32)))

    def test_close_is_final_and_idempotent(self, tmp_path: Path) -> None:
        """A second close is harmless; an operation after it is an error, not a write somewhere else."""
        medium = self.make_medium(tmp_path)
        medium.write_at(0, memoryview(b"x"))
        medium.close()
        medium.close()
        with pytest.raises(OSError, match="closed"):
            medium.write_at(0, memoryview(b"x"))
        with pytest.raises(OSError, match="closed"):
            medium.read_at(0, memoryview(bytearray(1)))


class StoreTests(ABC):
    """The contract of `Store`. Set `lossy` for a store over a lossy medium: contents are then not compared."""

    lossy = False

    @abstractmethod
    def make_store(self, tmp_path: Path, *, capacity_bytes: int | None = None) -> Store:
        """Return a fresh store; the suite closes it."""

    def make_wrapped_store(self, tmp_path: Path, wrap: Callable[[Medium], Medium]) -> Store:  # noqa: ARG002  a hook
        """Return a store over `wrap(medium)`, which is slow or faulty. Tests that need one are skipped without it."""
        pytest.skip("this store takes no wrapped medium")

    @contextmanager
    def store(
        self, tmp_path: Path, *, capacity_bytes: int | None = None, wrap: Callable[[Medium], Medium] | None = None
    ) -> Iterator[Store]:
        """Give a store and close it."""
        if wrap is None:
            store = self.make_store(tmp_path, capacity_bytes=capacity_bytes)
        else:
            store = self.make_wrapped_store(tmp_path, wrap)
        try:
            yield store
        finally:
            store.close()

    def succeed(self, transfer: Transfer) -> None:
        """Wait for `transfer` and require that it went well."""
        assert transfer.wait(_PATIENCE_S), "the transfer hangs"
        assert transfer.done()
        if transfer.error is not None:
            raise transfer.error

    def fail(self, transfer: Transfer) -> OSError:
        """Wait for `transfer` and require that it failed."""
        assert transfer.wait(_PATIENCE_S), "the transfer hangs"
        assert transfer.done()
        assert transfer.error is not None, "the transfer should have failed"
        return transfer.error

    def holds(self, store: Store, extent: Extent, content: bytes) -> bool:
        """Return whether a get of `extent` gives `content`."""
        into = bytearray(extent.nbytes)
        self.succeed(store.get(extent, memoryview(into)))
        return self.lossy or bytes(into) == content

    def test_it_is_a_store(self, tmp_path: Path) -> None:
        """It and its transfers have every member of their protocols."""
        with self.store(tmp_path) as store:
            assert isinstance(store, Store)
            extent, put = store.put(memoryview(b"x"))
            assert isinstance(put, Transfer)
            assert (extent.nbytes, put.nbytes) == (1, 1)
            self.succeed(put)

    @pytest.mark.parametrize("memory", [page_aligned, misaligned])
    def test_bytes_come_back(self, tmp_path: Path, memory: Callable[[bytes], memoryview]) -> None:
        """Any length from any memory is returned as it was, as often as asked; none at all and several chunks too."""
        with self.store(tmp_path) as store:
            for nbytes in (0, *_SIZES, 17 * _MIB + 3):
                content = some_bytes(nbytes, seed=nbytes)
                extent, put = store.put(memory(content))
                self.succeed(put)
                for _ in range(2):
                    into = memory(bytes(nbytes))
                    self.succeed(store.get(extent, into))
                    assert self.lossy or bytes(into) == content
                store.free(extent)

    def test_bytes_are_counted(self, tmp_path: Path) -> None:
        """The counters are exact in bytes of the caller's."""
        with self.store(tmp_path) as store:
            content = some_bytes(70_001)
            extent, put = store.put(memoryview(content))
            self.succeed(put)
            assert (store.written_bytes, store.read_bytes) == (70_001, 0)
            assert all(self.holds(store, extent, content) for _ in range(3))
            assert (store.written_bytes, store.read_bytes) == (70_001, 210_003)

    def test_many_transfers_at_once(self, tmp_path: Path) -> None:
        """Dozens of transfers under way keep their bytes apart, and their extents never overlap."""
        contents = [some_bytes(10_000 + 4_111 * index, seed=index) for index in range(40)]
        with self.store(tmp_path) as store:
            puts = [store.put(memoryview(content)) for content in contents]
            extents = sorted(extent for extent, _ in puts)
            for first, second in pairwise(extents):
                assert first.offset + first.nbytes <= second.offset
            intos = [bytearray(len(content)) for content in contents]
            gets = [store.get(extent, memoryview(into)) for (extent, _), into in zip(puts, intos, strict=True)]
            for transfer in [*reversed(gets), *(put for _, put in puts)]:
                self.succeed(transfer)
            assert self.lossy or [bytes(into) for into in intos] == contents

    def test_threads_share_a_store(self, tmp_path: Path) -> None:
        """Any thread may submit."""

        def round_trip(seed: int) -> bool:
            content = some_bytes(50_000 + seed, seed=seed)
            extent, _ = store.put(memoryview(content))
            try:
                return self.holds(store, extent, content)
            finally:
                store.free(extent)

        with self.store(tmp_path) as store, ThreadPoolExecutor(4) as pool:
            assert all(pool.map(round_trip, range(40)))

    def test_freed_room_is_used_again(self, tmp_path: Path) -> None:
        """A bounded store serves any number of extents one after the other."""
        with self.store(tmp_path, capacity_bytes=_MIB) as store:
            for seed in range(30):
                content = some_bytes(600_000, seed=seed)
                extent, put = store.put(memoryview(content))
                self.succeed(put)
                assert self.holds(store, extent, content)
                store.free(extent)

    def test_capacity_is_a_bound(self, tmp_path: Path) -> None:
        """What does not fit is refused at once, with numbers, and the rest stays as it is."""
        content = some_bytes(600_000)
        with self.store(tmp_path, capacity_bytes=_MIB) as store:
            extent, put = store.put(memoryview(content))
            self.succeed(put)
            with pytest.raises(SpillFull, match=r"1\.00 MiB"):
                store.put(memoryview(content))
            assert self.holds(store, extent, content)

    def test_extents_freed_in_flight_are_not_overwritten(self, tmp_path: Path) -> None:
        """A free waits for the transfers of its extent: neither they nor the next owner see foreign bytes."""
        with self.store(tmp_path) as store:
            for seed in range(20):
                first = some_bytes(200_000, seed=seed)
                second = some_bytes(200_000, seed=seed + 1000)
                into = bytearray(len(first))
                extent, _ = store.put(memoryview(first))
                get = store.get(extent, memoryview(into))
                store.free(extent)
                other, put = store.put(memoryview(second))
                self.succeed(put)
                self.succeed(get)
                assert self.lossy or bytes(into) == first
                assert self.holds(store, other, second)
                store.free(other)

    def test_misuse_is_refused(self, tmp_path: Path) -> None:
        """A freed or foreign extent, a view of another size, and read-only memory to read into are errors."""
        with self.store(tmp_path) as store:
            extent, put = store.put(memoryview(some_bytes(100)))
            with pytest.raises(ValueError, match="100"):
                store.get(extent, memoryview(bytearray(99)))
            with pytest.raises(ValueError, match="read-only"):
                store.get(extent, memoryview(bytes(100)))
            self.succeed(put)
            store.free(extent)
            with pytest.raises(ValueError, match="not live"):
                store.free(extent)
            with pytest.raises(ValueError, match="not live"):
                store.get(extent, memoryview(bytearray(100)))

    def test_a_done_transfer_lets_go_of_the_memory(self, tmp_path: Path) -> None:
        """The memory can be freed once the transfer is done, even while the handle lives on."""
        with self.store(tmp_path) as store:
            memory = bytearray(some_bytes(9 * _MIB))
            extent, put = store.put(memoryview(memory))
            self.succeed(put)
            memory.append(0)  # raises BufferError while anybody holds a view
            get = store.get(extent, memoryview(memory)[:-1])
            self.succeed(get)
            memory.append(0)

    def test_submitting_never_waits_for_the_medium(self, tmp_path: Path) -> None:
        """However slow the tier, put, get and free return at once, and the handles tell the truth."""
        opened = Event()
        with self.store(tmp_path, wrap=lambda medium: Latency(medium, write_s=5, read_s=5, sleep=opened.wait)) as store:
            puts = [store.put(memoryview(some_bytes(1000))) for _ in range(4)]
            get = store.get(puts[0][0], memoryview(bytearray(1000)))
            store.free(puts[1][0])
            transfers = [get, *(put for _, put in puts)]
            assert not any(transfer.done() or transfer.wait(0.001) for transfer in transfers)
            opened.set()
            for transfer in transfers:
                self.succeed(transfer)

    @pytest.mark.parametrize("kind", [FaultKind.ENOSPC, FaultKind.EIO])
    def test_a_failed_write_is_told_and_contained(self, tmp_path: Path, kind: FaultKind) -> None:
        """The transfer carries the error, so does a get of it; other extents are well, and the room comes back."""
        script = [Fault(direction=Direction.WRITE, nth=2, kind=kind)]
        content = some_bytes(1000)
        with self.store(tmp_path, wrap=lambda medium: Faulty(medium, script=script)) as store:
            puts = []
            for _ in range(3):
                puts.append(store.put(memoryview(content)))
                assert puts[-1][1].wait(_PATIENCE_S)
            error = self.fail(puts[1][1])
            assert isinstance(error, SpillFull) == (kind is FaultKind.ENOSPC)
            assert "1000 bytes" in str(error)
            self.fail(store.get(puts[1][0], memoryview(bytearray(1000))))
            assert self.holds(store, puts[0][0], content)
            assert self.holds(store, puts[2][0], content)
            store.free(puts[1][0])

    @pytest.mark.parametrize("kind", [FaultKind.EIO, FaultKind.SHORT_READ])
    def test_a_failed_read_is_told_and_can_be_repeated(self, tmp_path: Path, kind: FaultKind) -> None:
        """The transfer carries the error; the extent is still there."""
        script = [Fault(direction=Direction.READ, nth=1, kind=kind)]
        content = some_bytes(1000)
        with self.store(tmp_path, wrap=lambda medium: Faulty(medium, script=script)) as store:
            extent, put = store.put(memoryview(content))
            self.succeed(put)
            self.fail(store.get(extent, memoryview(bytearray(1000))))
            assert self.holds(store, extent, content)

    def test_close_is_final_and_wakes_everybody(self, tmp_path: Path) -> None:
        """No transfer hangs after close, a second close is harmless, and what comes later is refused."""
        store = self.make_store(tmp_path)
        puts = [store.put(memoryview(some_bytes(_MIB, seed=seed))) for seed in range(12)]
        get = store.get(puts[-1][0], memoryview(bytearray(_MIB)))
        store.close()
        store.close()
        assert all(put.done() for _, put in puts)
        assert get.done()
        with pytest.raises(OSError, match="closed"):
            store.put(memoryview(b"x"))
        with pytest.raises(OSError, match="closed"):
            store.get(puts[0][0], memoryview(bytearray(_MIB)))
