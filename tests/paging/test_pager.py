"""On-demand paging through faults: every system's own mechanism, exact values, and memory that is never exceeded."""

from __future__ import annotations

import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest
import torch

from lowtide.errors import BadArgument
from lowtide.paging import Access, Pager, Prefetch
from lowtide.paging.library import majority, tree_evicted, tree_fetched
from lowtide.paging.pager import PAGE_BYTES

CAPACITY = 64 * PAGE_BYTES
PAGES = 512
LEAF_PAGES = 16


def scanned(pager: Pager, pages: range) -> None:
    """Touch pages one after the other."""
    memory = pager.array()
    for page in pages:
        _ = memory[page * PAGE_BYTES]


# ---- what is exact, and within its memory ----


@pytest.mark.parametrize("prefetch", Prefetch)
@pytest.mark.parametrize("tree_evicts", [False, True])
@pytest.mark.parametrize("line_bytes", [0, 64])
def test_whatever_is_written_is_what_is_read_and_memory_is_never_exceeded(
    prefetch: Prefetch, tree_evicts: bool, line_bytes: int, tmp_path: Path
) -> None:
    draw = np.random.default_rng(0)
    expected = np.zeros(PAGES * PAGE_BYTES, np.uint8)
    with Pager(
        expected.nbytes,
        capacity_bytes=CAPACITY,
        directory=tmp_path,
        prefetch=prefetch,
        tree_evicts=tree_evicts,
        line_bytes=line_bytes,
    ) as pager:
        memory = pager.array()
        for _ in range(150):
            begin = int(draw.integers(expected.nbytes - 1))
            end = min(expected.nbytes, begin + int(draw.integers(1, 5 * PAGE_BYTES)))
            if draw.integers(2):
                expected[begin:end] = memory[begin:end] = draw.integers(256, size=end - begin)
            else:
                assert np.array_equal(memory[begin:end], expected[begin:end])
        assert np.array_equal(memory, expected)
        stats = pager.stats()
        assert stats.evicted > PAGES // 2
        assert stats.peak * PAGE_BYTES <= CAPACITY
        pager.check()
        assert list(tmp_path.iterdir()) == []  # nothing that a process which is killed could leave


def test_a_training_whose_state_is_paged_computes_the_same_bits(tmp_path: Path) -> None:
    def trained(place: Pager | None) -> list[torch.Tensor]:
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(192, 320), torch.nn.ReLU(), torch.nn.Linear(320, 192))
        offset = 0
        for parameter in model.parameters() if place is not None else ():
            assert place is not None
            paged = place.tensor(parameter.dtype, tuple(parameter.shape), offset=offset)
            offset += parameter.nbytes
            paged.copy_(parameter.data)
            parameter.data = paged
            parameter.grad = place.tensor(parameter.dtype, tuple(parameter.shape), offset=offset).zero_()
            offset += parameter.nbytes
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        for _ in range(4):
            model(torch.randn(8, 192)).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=False)
        return [parameter.detach().clone() for parameter in model.parameters()]

    expected = trained(None)
    with Pager(2**20, capacity_bytes=CAPACITY, directory=tmp_path, prefetch=Prefetch.TREE) as pager:
        assert all(map(torch.equal, trained(pager), expected))
        stats = pager.stats()
        assert stats.evicted > 0
        assert stats.peak * PAGE_BYTES <= CAPACITY


def test_threads_that_fault_at_once_are_served_in_batches(tmp_path: Path) -> None:
    with Pager(
        PAGES * PAGE_BYTES, capacity_bytes=CAPACITY, directory=tmp_path, batch_faults=80, batch_s=20e-6
    ) as pager:
        memory = pager.array().reshape(PAGES, PAGE_BYTES)

        def own(k: int) -> None:
            for page in range(k, PAGES, 4):
                memory[page] = page % 251

        threads = [threading.Thread(target=own, args=(k,)) for k in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert all((memory[page] == page % 251).all() for page in range(PAGES))
        stats = pager.stats()
        assert stats.batches <= stats.faults + stats.write_faults
        assert stats.peak * PAGE_BYTES <= CAPACITY


def test_what_cannot_be_written_stays_and_is_told(tmp_path: Path) -> None:
    program = f"""
import resource, signal
import numpy as np
from lowtide.errors import SpillError
from lowtide.paging import Pager
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
pager = Pager({PAGES * PAGE_BYTES}, capacity_bytes={CAPACITY}, directory={str(tmp_path)!r})
resource.setrlimit(resource.RLIMIT_FSIZE, ({16 * PAGE_BYTES}, {16 * PAGE_BYTES}))
memory = pager.array(np.int64)
memory[:] = np.arange(memory.size)
assert (memory == np.arange(memory.size)).all()
for action in (pager.check, pager.close):
    try:
        action()
    except SpillError as error:
        print(error)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("File too large") == 2


def test_a_child_that_is_forked_dies_rather_than_read_zeros(tmp_path: Path) -> None:
    program = f"""
import os
from lowtide.paging import Pager
pager = Pager({PAGES * PAGE_BYTES}, capacity_bytes={CAPACITY}, directory={str(tmp_path)!r})
memory = pager.array()
memory[:] = 7
child = os.fork()
if not child:
    os._exit(int(memory[0]))
print(os.WTERMSIG(os.waitpid(child, 0)[1]))
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "11\n"), done.stderr


def test_system_calls_reach_pages_that_are_away(tmp_path: Path) -> None:
    with Pager(PAGES * PAGE_BYTES, capacity_bytes=CAPACITY, directory=tmp_path) as pager:
        if not pager.serves_kernel:
            pytest.skip("this process may not serve the kernel's faults (vm.unprivileged_userfaultfd)")
        memory = pager.array()
        memory[:] = np.arange(memory.size, dtype=np.uint8)
        path = tmp_path / "copy"
        path.write_bytes(memory)  # write(2) of all of it
        assert np.array_equal(np.frombuffer(path.read_bytes(), np.uint8), memory)


# ---- the tree of neighbours, entry 28 ----


def test_the_tree_fetches_what_its_golden_vectors_say() -> None:
    there: set[int] = set()
    for leaf, expected in ((0, {0}), (1, {1}), (3, {2, 3}), (4, {4, 5, 6, 7}), (8, set(range(8, 16)))):
        come = tree_fetched(there, leaf)
        assert come == expected
        there |= come


def test_the_tree_empties_what_is_less_than_half_there() -> None:
    assert tree_evicted({0, 1, 2, 3}, 0, leaves=4) == {0}  # three of four are left
    assert tree_evicted({0, 1, 2}, 0, leaves=4) == {0}  # a half is left
    assert tree_evicted({0, 2}, 0, leaves=4) == {0, 2}
    assert tree_evicted(set(range(16)), 5, leaves=32) == set(range(16))


def test_on_a_stream_the_tree_faults_least_and_random_pages_hardly_help(tmp_path: Path) -> None:
    faults = {}
    for prefetch in (Prefetch.NONE, Prefetch.RANDOM, Prefetch.SEQUENTIAL, Prefetch.TREE):
        with Pager(
            PAGES * PAGE_BYTES, capacity_bytes=2 * PAGES * PAGE_BYTES, directory=tmp_path, prefetch=prefetch
        ) as pager:
            scanned(pager, range(PAGES))
            faults[prefetch] = pager.stats().faults
    assert faults[Prefetch.NONE] == PAGES
    assert faults[Prefetch.SEQUENTIAL] == PAGES // LEAF_PAGES
    assert faults[Prefetch.TREE] < faults[Prefetch.SEQUENTIAL] < faults[Prefetch.RANDOM] < PAGES


# ---- Leap, entry 27 ----


@pytest.mark.parametrize("window", [8, 16, 32])
def test_leap_finds_a_trend_through_noise_of_less_than_half_and_none_through_more(window: int) -> None:
    for noise in range(window // 2):
        deltas = [3] * (window - noise) + [100 + k for k in range(noise)]
        assert majority(deltas) == 3
    noisy = [(3 if k % 2 else 100 + k) for k in range(window)]
    assert majority(noisy) is None


def test_leap_follows_a_turn_within_a_quarter_of_its_history() -> None:
    forward = [1] * 32
    for turned in range(1, 9):
        if majority(forward + [-1] * turned) == -1:
            break
    assert turned <= 8


def test_leap_foresees_a_stream_in_both_directions_and_no_jump_to_another_tensor(tmp_path: Path) -> None:
    with Pager(PAGES * PAGE_BYTES, capacity_bytes=CAPACITY, directory=tmp_path, prefetch=Prefetch.LEAP) as pager:
        scanned(pager, range(64))
        learnt = pager.stats()
        assert learnt.hits >= 64 - 32 // 4  # all but what it takes to see the trend
        scanned(pager, range(256, 257))
        jump = pager.stats()
        assert (jump.faults, jump.hits) == (learnt.faults + 1, learnt.hits)
        scanned(pager, range(500, 436, -1))
        back = pager.stats()
        assert back.hits - jump.hits >= 64 - 2 * (32 // 4)


# ---- ETC's proactive eviction, entry 21 ----


def test_with_room_made_ahead_no_fault_waits_for_an_eviction(tmp_path: Path) -> None:
    waited = {}
    for free_bytes in (0, 4 * PAGE_BYTES):
        with Pager(PAGES * PAGE_BYTES, capacity_bytes=CAPACITY, directory=tmp_path, free_bytes=free_bytes) as pager:
            memory = pager.array().reshape(PAGES, PAGE_BYTES)
            for page in range(PAGES):
                memory[page] = page % 251
            assert all((memory[page] == page % 251).all() for page in range(PAGES))
            waited[free_bytes] = pager.stats().evicted_waiting
            assert pager.stats().evicted >= 2 * PAGES - CAPACITY // PAGE_BYTES
    assert waited[0] >= 2 * PAGES - CAPACITY // PAGE_BYTES
    assert waited[4 * PAGE_BYTES] == 0


# ---- DRAGON's maps, entry 25 ----


def test_a_file_four_times_as_large_as_memory_is_read_in_place_and_changed(tmp_path: Path) -> None:
    path = tmp_path / "data"
    values = np.random.default_rng(1).integers(256, size=4 * CAPACITY, dtype=np.uint8)
    path.write_bytes(values.tobytes())
    with Pager(capacity_bytes=CAPACITY, path=path, access=Access.READ_ONLY, prefetch=Prefetch.SEQUENTIAL) as pager:
        assert np.array_equal(pager.array(), values)
        stats = pager.stats()
        assert (stats.fetched, stats.written) == (values.size // PAGE_BYTES, 0)
        assert stats.peak * PAGE_BYTES <= CAPACITY
    with Pager(capacity_bytes=CAPACITY, path=path) as pager:
        pager.array()[5000:5010] = 1
    values[5000:5010] = 1
    assert path.read_bytes() == values.tobytes()


def test_what_is_only_written_is_never_read(tmp_path: Path) -> None:
    path = tmp_path / "data"
    path.write_bytes(bytes(4 * CAPACITY))
    with Pager(capacity_bytes=CAPACITY, path=path, access=Access.WRITE_ONLY) as pager:
        pager.array()[:] = 9
        stats = pager.stats()
        assert (stats.fetched, stats.read_calls) == (0, 0)
        assert stats.written > 0
    assert path.read_bytes() == b"\x09" * (4 * CAPACITY)


def test_what_is_volatile_is_not_written_at_the_end(tmp_path: Path) -> None:
    for access, left in ((Access.VOLATILE, bytes(CAPACITY)), (Access(0), b"\x09" * CAPACITY)):
        path = tmp_path / "data"
        path.write_bytes(bytes(CAPACITY))
        with Pager(capacity_bytes=CAPACITY, path=path, access=access) as pager:
            pager.array()[:] = 9
            assert pager.stats().written == 0
        assert path.read_bytes() == left


# ---- Kona's lines, entry 58 ----


def updated(tmp_path: Path, *, line_bytes: int, rows: int) -> tuple[np.ndarray, int]:  # type: ignore[type-arg]
    """Change so many rows of 64 bytes, each on a page of its own; return all values and the bytes written for them."""
    path = tmp_path / "table"
    path.write_bytes(bytes(range(256)) * (PAGES * PAGE_BYTES // 256))
    with Pager(capacity_bytes=CAPACITY, path=path, line_bytes=line_bytes) as pager:
        table = pager.array().reshape(PAGES, -1, 64)
        for page in range(PAGES):
            table[page, :rows] = page % 251
        assert pager.stats().peak * PAGE_BYTES <= CAPACITY
        scanned(pager, range(PAGES))  # all that changed has gone
        written = pager.stats().written_bytes
        assert all((table[page, :rows] == page % 251).all() for page in range(PAGES))
    return np.frombuffer(path.read_bytes(), np.uint8), written


def test_of_sparse_updates_lines_are_written_and_of_dense_ones_pages(tmp_path: Path) -> None:
    for rows, saving in ((1, 5.0), (64, 1.0)):
        by_line, lines = updated(tmp_path, line_bytes=64, rows=rows)
        by_page, pages = updated(tmp_path, line_bytes=0, rows=rows)
        assert np.array_equal(by_line, by_page)
        assert lines <= rows * 64 * PAGES
        assert pages >= saving * lines
        if rows == 64:
            assert lines >= 0.9 * pages


# ---- HUM, entry 24 ----


def test_a_consumer_begins_before_the_copy_ends_and_every_page_comes_once(tmp_path: Path) -> None:
    path = tmp_path / "data"
    values = np.arange(64 * 2**20 // 8)
    path.write_bytes(values.tobytes())
    with Pager(capacity_bytes=values.nbytes, path=path) as pager:
        memory = pager.array(np.int64)
        pager.push()
        assert memory[-1] == values[-1]  # the last page first
        assert pager.stats().push_left > 0
        assert np.array_equal(memory, values)
        stats = pager.stats()
        assert stats.faults + stats.pushed == stats.fetched == values.nbytes // PAGE_BYTES
        assert stats.pushed > 0


def test_what_is_pushed_takes_nobodys_place(tmp_path: Path) -> None:
    with Pager(PAGES * PAGE_BYTES, capacity_bytes=CAPACITY, directory=tmp_path) as pager:
        scanned(pager, range(32))
        pager.push()
        while pager.stats().push_left:
            pass
        before = pager.stats()
        assert before.evicted == 0
        scanned(pager, range(32))
        assert pager.stats().faults == before.faults


# ---- Sentinel's profile by write protection, entry 17 ----


def test_writes_are_counted_by_interval_and_reads_cost_no_fault(tmp_path: Path) -> None:
    with Pager(8 * PAGE_BYTES, capacity_bytes=CAPACITY, directory=tmp_path) as pager:
        memory = pager.array().reshape(8, PAGE_BYTES)
        memory[:] = 1
        for interval in range(3):
            pager.arm()
            memory[2] = interval  # often, but one interval
            memory[2] = interval + 1
            if interval == 1:
                memory[5, 0] = 1
            assert int(memory[7, 0]) == 1
        assert pager.write_counts().tolist() == [1, 1, 4, 1, 1, 2, 1, 1]
        assert pager.stats().write_faults == 4


# ---- what is refused ----


def test_what_makes_no_sense_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BadArgument, match=r"64.0 KiB is too small: pass at least 256 KiB"):
        Pager(PAGES * PAGE_BYTES, capacity_bytes=16 * PAGE_BYTES)
    with pytest.raises(BadArgument, match="needs a file to read"):
        Pager(PAGES * PAGE_BYTES, capacity_bytes=CAPACITY, access=Access.READ_ONLY)
    with pytest.raises(BadArgument, match="cannot be paged: No such file"):
        Pager(PAGES * PAGE_BYTES, capacity_bytes=CAPACITY, directory=tmp_path / "nowhere")
    with pytest.raises(BadArgument, match="has nothing to page"):
        Pager(capacity_bytes=CAPACITY, path=tmp_path / "empty")
    with Pager(PAGES * PAGE_BYTES, capacity_bytes=CAPACITY, directory=tmp_path) as pager:
        with pytest.raises(BadArgument, match="more than the pager's"):
            pager.array(np.int64, (PAGES * PAGE_BYTES,))
        kept = pager
    with pytest.raises(BadArgument, match="is closed"):
        kept.stats()

    assert [path.name for path in tmp_path.iterdir()] == ["empty"]
