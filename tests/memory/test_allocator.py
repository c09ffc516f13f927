"""The native allocator: the budget is a bound at every instant, and every block is its owner's alone."""

from __future__ import annotations

import gc
import random
import statistics
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lowtide.memory.native import Native, load

PAGE = 4096
LARGE = 64 * 1024
KIB, MIB = 1024, 1024 * 1024
RAMP = np.arange(4 * MIB // 8, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)


@pytest.fixture(autouse=True)
def native() -> Iterator[Native]:
    """The allocator, installed without a budget; gone again afterwards."""
    library = load()
    gc.collect()
    library.install()
    library.reset_peaks()
    yield library
    gc.collect()
    library.uninstall()


def cost(nbytes: int) -> int:
    """What a block of `nbytes` takes of the budget."""
    return -(-nbytes // PAGE) * PAGE if nbytes >= LARGE else nbytes


@dataclass(slots=True)
class Marked:
    """A tensor full of a pattern that is its own and different in every word."""

    tensor: torch.Tensor
    mark: int

    @classmethod
    def take(cls, nbytes: int, mark: int) -> Marked:
        made = cls(torch.empty(nbytes, dtype=torch.uint8), mark)
        words, rest = made._parts()
        np.add(RAMP[: words.size], np.uint64(mark), out=words)
        rest[:] = mark % 256
        return made

    def check(self) -> None:
        words, rest = self._parts()
        assert np.array_equal(words - np.uint64(self.mark), RAMP[: words.size]), "another block wrote into this one"
        assert (rest == self.mark % 256).all(), "another block wrote into this one"

    def _parts(self) -> tuple[np.ndarray, np.ndarray]:
        raw = self.tensor.numpy()  # numpy's own temporaries are not under the budget
        whole = raw.size // 8 * 8
        return raw[:whole].view(np.uint64), raw[whole:]


sizes = st.one_of(
    st.integers(1, 4 * KIB),
    st.sampled_from([LARGE - 1, LARGE, LARGE + 1, 256 * KIB - 1, 256 * KIB, 300 * KIB + 8, MIB, 3 * MIB + 13]),
    st.integers(LARGE, 2 * MIB),
)


@given(steps=st.lists(st.one_of(sizes, st.floats(0, 1)), min_size=10, max_size=120), limit=st.integers(2, 8))
@settings(deadline=None, max_examples=60)
def test_blocks_never_overlap_counters_are_exact_and_only_what_cannot_fit_is_refused(
    steps: list[int | float], limit: int
) -> None:
    native = load()
    base = native.counters().live_bytes
    native.trim()
    native.reset_peaks()
    budget = native.counters().reserved_bytes + limit * MIB
    native.set_budget(budget)
    held: list[Marked] = []
    live = peak = base
    for mark, step in enumerate(steps):
        if isinstance(step, float):
            if held:
                block = held.pop(int(step * (len(held) - 1)))
                block.check()
                live -= cost(block.tensor.nbytes)
                del block
        elif live + cost(step) > budget:
            with pytest.raises(torch.OutOfMemoryError):
                torch.empty(step, dtype=torch.uint8)
        else:
            # Whatever is cached, and however fragmented it is, a block for which there is room is granted.
            held.append(Marked.take(step, mark * 0x01000193))
            live += cost(step)
            peak = max(peak, live)
        now = native.counters()
        assert now.live_bytes == live
        assert live <= now.reserved_bytes <= budget
    now = native.counters()
    assert now.peak_live_bytes == peak
    assert peak <= now.peak_reserved_bytes <= budget
    for block in held:
        block.check()
    native.set_budget(0)


@pytest.mark.parametrize("seed", [1, 2])
def test_threads_share_the_budget_without_passing_it_or_touching_each_others_blocks(native: Native, seed: int) -> None:
    budget = native.counters().reserved_bytes + 12 * MIB
    before = native.counters().live_bytes
    native.set_budget(budget)
    native.reset_peaks()
    failures: list[BaseException] = []

    def churn(number: int) -> None:
        rng = random.Random(seed * 100 + number)
        held: list[Marked] = []
        try:
            for turn in range(300):
                if len(held) > 12 or (held and rng.random() < 0.4):
                    held.pop(rng.randrange(len(held))).check()
                size = rng.choice([500, 9 * KIB, LARGE, 200 * KIB, 256 * KIB, MIB, 2 * MIB + 5])
                try:
                    held.append(Marked.take(size, number << 32 | turn))
                except torch.OutOfMemoryError:
                    del held[: len(held) // 2]
                if turn % 30 == 0:
                    assert native.counters().reserved_bytes <= budget
            for block in held:
                block.check()
        except BaseException as error:  # noqa: BLE001  # a thread has nobody to raise to
            failures.append(error)

    threads = [threading.Thread(target=churn, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not failures
    assert not any(thread.is_alive() for thread in threads)
    gc.collect()
    now = native.counters()
    assert now.peak_reserved_bytes <= budget
    assert now.live_bytes == before


def test_pages_moved_from_small_ranges_into_a_large_one_keep_no_trace_of_other_blocks(native: Native) -> None:
    native.trim()
    native.set_budget(native.counters().reserved_bytes + 8 * MIB)
    blocks = [Marked.take(512 * KIB, number) for number in range(16)]
    kept = blocks[::2]
    del blocks[1::2]
    del blocks
    moved_before = native.counters().moved_bytes
    large = Marked.take(3 * MIB, 99)  # the freed 4 MiB lie in eight pieces
    assert native.counters().moved_bytes > moved_before
    large.check()
    for block in kept:
        block.check()
    del large, kept, block
    again = [Marked.take(MIB + number * PAGE, number) for number in range(7)]
    for block in again:
        block.check()


@pytest.mark.parametrize("nbytes", [LARGE, LARGE + 1, 100_000, MIB, 3 * MIB + 7])
def test_a_block_of_64_kib_or_more_starts_at_a_page(nbytes: int) -> None:
    blocks = [torch.empty(nbytes, dtype=torch.uint8) for _ in range(5)]
    del blocks[1::2]
    blocks += [torch.empty(nbytes, dtype=torch.uint8) for _ in range(5)]
    assert [block.data_ptr() % PAGE for block in blocks] == [0] * len(blocks)


def test_a_smaller_block_is_aligned_as_pytorch_expects_and_never_at_a_page() -> None:
    blocks = [torch.empty(nbytes, dtype=torch.uint8) for nbytes in (1, 63, 4096, 8192, LARGE - 1) for _ in range(50)]
    assert all(block.data_ptr() % 64 == 0 and block.data_ptr() % PAGE != 0 for block in blocks)


def test_a_refused_allocation_names_its_bytes_and_the_budget(native: Native) -> None:
    native.trim()
    budget = native.counters().reserved_bytes + MIB
    native.set_budget(budget)
    refusals = native.counters().refusals
    with pytest.raises(torch.OutOfMemoryError, match=rf"asked for {2 * MIB} bytes.*budget is {budget} bytes"):
        torch.empty(2 * MIB, dtype=torch.uint8)
    assert native.counters().refusals == refusals + 1
    refusal = native.last_refusal()
    assert (refusal.requested_bytes, refusal.budget_bytes) == (2 * MIB, budget)
    torch.empty(MIB // 2, dtype=torch.uint8)  # the next one that fits is granted


def test_a_refused_allocation_names_the_operator_when_operators_are_watched(native: Native) -> None:
    native.trim()
    x = torch.ones(300_000)
    native.set_budget(native.counters().reserved_bytes + MIB)
    native.observe(1)
    try:
        with pytest.raises(torch.OutOfMemoryError, match="aten::sigmoid asked for"):
            torch.sigmoid(x)
    finally:
        native.observe(0)
    assert native.last_refusal().op == "aten::sigmoid"


@pytest.mark.parametrize("wanted", [40 * KIB, LARGE, 700 * KIB, 4 * MIB])
def test_cached_pages_make_way_before_anything_is_refused(native: Native, wanted: int) -> None:
    native.trim()
    native.set_budget(native.counters().reserved_bytes + 4 * MIB)
    fill = [torch.empty(256 * KIB, dtype=torch.uint8) for _ in range(16)]
    del fill
    live = native.counters().live_bytes
    blocks = [torch.empty(wanted, dtype=torch.uint8) for _ in range(4 * MIB // wanted)]
    assert native.counters().live_bytes == live + sum(cost(block.nbytes) for block in blocks)


def test_a_block_freed_after_uninstall_goes_back_to_the_kernel(native: Native) -> None:
    block = Marked.take(3 * MIB, 7)
    native.uninstall()
    reserved = native.counters().reserved_bytes
    torch.empty(MIB)  # from PyTorch's own allocator again: it counts nowhere
    assert native.counters().reserved_bytes == reserved
    block.check()
    del block
    assert native.counters().reserved_bytes == reserved - 3 * MIB


def test_installing_again_after_uninstall_counts_what_stayed_alive(native: Native) -> None:
    block = Marked.take(MIB, 3)
    native.uninstall()
    native.install()
    live = native.counters().live_bytes
    block.check()
    del block
    assert native.counters().live_bytes == live - MIB


def test_a_step_that_repeats_its_sizes_maps_no_fresh_memory(native: Native) -> None:
    rng = random.Random(3)
    wanted = [rng.choice([70 * KIB, 128 * KIB, 300 * KIB, MIB, 2 * MIB + 4096]) for _ in range(60)]
    native.trim()
    native.set_budget(native.counters().reserved_bytes + 40 * MIB)

    def step() -> None:
        held: list[torch.Tensor] = []
        for number, nbytes in enumerate(wanted):
            held.append(torch.empty(nbytes, dtype=torch.uint8))
            if number % 3 == 2:
                del held[0]
        while held:
            held.pop()

    step()
    step()
    warm = native.counters()
    for _ in range(5):
        step()
    now = native.counters()
    assert now.fresh_bytes == warm.fresh_bytes
    assert now.trimmed_bytes == warm.trimmed_bytes


def test_foreign_bytes_count_against_the_budget(native: Native) -> None:
    native.trim()
    live = native.counters().live_bytes
    native.set_budget(native.counters().reserved_bytes + 4 * MIB)
    native.set_foreign(3 * MIB)
    try:
        assert native.counters().live_bytes == live + 3 * MIB
        with pytest.raises(torch.OutOfMemoryError):
            torch.empty(2 * MIB, dtype=torch.uint8)
    finally:
        native.set_foreign(0)
    torch.empty(2 * MIB, dtype=torch.uint8)


def test_lowering_the_budget_returns_cached_pages_at_once(native: Native) -> None:
    native.trim()
    base = native.counters().reserved_bytes
    native.set_budget(base + 8 * MIB)
    fill = [torch.empty(MIB, dtype=torch.uint8) for _ in range(8)]
    del fill[2:]
    native.set_budget(base + 4 * MIB)
    assert native.counters().reserved_bytes <= base + 4 * MIB
    assert len(fill) == 2


CHURN = """
    import random, resource, sys
    import torch
    from lowtide.memory.native import load

    native, mode, limited = load(), sys.argv[1], sys.argv[2] == "limited"
    torch.set_num_threads(1)
    torch.empty(10).fill_(1)
    native.install()
    budget = 48 << 20
    native.set_budget(native.counters().reserved_bytes + budget)

    def resident() -> int:
        fields = open("/proc/self/statm").read().split()
        return int(fields[1]) * resource.getpagesize()

    def data() -> int:
        status = open("/proc/self/status").read()
        return int(status.split("VmData:")[1].split()[0]) * 1024

    small, large = [100, 5000, 20_000, 60_000], [64 << 10, 100 << 10, 1 << 20, 3 << 20, 7 << 20]
    if limited:
        bound = data() + budget + (12 << 20)
        resource.setrlimit(resource.RLIMIT_DATA, (bound, bound))
    before, highest, rng, held = resident(), 0, random.Random(1), []
    for turn in range(3000):
        if mode == "waves":  # everything in small blocks, then everything in large ones
            sizes = small if turn // 750 % 2 == 0 else large
            if turn % 750 == 0:
                held.clear()
        else:
            sizes = large if mode == "large" else small + large
        size = rng.choice(sizes)
        for _ in range(4 if size < 64 << 10 else 1):
            while True:
                try:
                    held.append(torch.empty(size, dtype=torch.uint8).fill_(1))
                    break
                except torch.OutOfMemoryError:
                    if native.last_refusal().live_bytes + size <= native.counters().budget_bytes:
                        sys.exit(f"refused {size} bytes with {native.counters()}")
                    del held[rng.randrange(len(held))]
        if turn % 10 == 0:
            highest = max(highest, resident())
    print(highest - before - budget)
"""


# Not waves under a limit: RLIMIT_DATA bounds addresses, and malloc gives back pages, not addresses.
@pytest.mark.parametrize(
    ("mode", "limited"),
    [("large", "free"), ("mixed", "free"), ("waves", "free"), ("large", "limited"), ("mixed", "limited")],
)
def test_the_kernel_sees_no_more_resident_memory_than_the_budget(mode: str, limited: str) -> None:
    run = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(CHURN), mode, limited], capture_output=True, text=True, timeout=120
    )
    assert run.returncode == 0, run.stderr
    assert int(run.stdout) < 10 * MIB


def test_small_blocks_cost_no_more_than_one_and_a_half_times_stock(native: Native) -> None:
    def allocate() -> float:
        started = time.perf_counter()
        for _ in range(4000):
            torch.empty(1000)
        return time.perf_counter() - started

    def interleaved(*variants: Callable[[], None]) -> list[float]:
        times: list[list[float]] = [[] for _ in variants]
        for _ in range(15):
            for switch, taken in zip(variants, times, strict=True):
                switch()
                allocate()
                taken.append(allocate())
        return [statistics.median(taken) for taken in times]

    def budgeted() -> None:
        native.install()
        native.set_budget(native.counters().reserved_bytes + MIB)

    stock_s, ours_s = interleaved(native.uninstall, budgeted)
    assert ours_s < 1.5 * stock_s
