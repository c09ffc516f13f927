"""Allocator models: the published rounding rules to the byte, and what must hold for any stream."""

from __future__ import annotations

import time
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lowtide.core.serialize import load_trace
from lowtide.core.trace import Trace
from lowtide.errors import BadArgument, BudgetTooSmall
from lowtide.estimate.predictors.allocators import MODELS, Allocator, allocator, reserved_peak, stream_of
from lowtide.testing.traces import chain_trace, residual_trace, traces

KIB, MIB = 1 << 10, 1 << 20
RECORDED = sorted((Path(__file__).parents[2] / "data").glob("*.trace"))


def alive(*sizes: int) -> list[tuple[float, int, int]]:
    """Return a stream that allocates these sizes and frees nothing."""
    return [(0.0, nbytes, block) for block, nbytes in enumerate(sizes)]


@pytest.mark.parametrize(
    ("model", "sizes", "reserved"),
    [
        ("exact", [1, 1000, 3], 1004),
        ("arena", [1, 65], 64 + 128),
        ("arena", [64 * KIB + 1], 68 * KIB),
        ("pytorch", [1], 2 * MIB),
        ("pytorch", [1] * 4097, 4 * MIB),  # each takes 512 bytes
        ("pytorch", [512 * KIB] * 4, 2 * MIB),
        ("pytorch", [512 * KIB] * 5, 4 * MIB),
        ("pytorch", [MIB], 2 * MIB),  # still a small block
        ("pytorch", [MIB + 1], 20 * MIB),
        ("pytorch", [5 * MIB] * 4, 20 * MIB),
        ("pytorch", [5 * MIB] * 5, 40 * MIB),
        ("pytorch", [1, MIB + 1], 22 * MIB),  # pools do not mix
        ("pytorch", [10 * MIB], 10 * MIB),
        ("pytorch", [10 * MIB + 1], 12 * MIB),
        ("pytorch", [19 * MIB, MIB + 512], 40 * MIB),  # what is left of 20 MiB is not split off
        ("bfc", [1], MIB),
        ("bfc", [1, 3 * MIB], MIB + 4 * MIB),
        ("bfc", [512 * KIB, 512 * KIB, 1], MIB + 2 * MIB),
        ("bfc", [600 * KIB, 1], MIB + 2 * MIB),  # less than twice as large: given whole
    ],
)
def test_a_stream_takes_what_the_published_rules_say(model: str, sizes: list[int], reserved: int) -> None:
    assert reserved_peak(alive(*sizes), model) == reserved


def test_a_freed_block_is_used_again_and_neighbours_are_one() -> None:
    # Four blocks that fill one segment: 20 MiB of PyTorch's, 1 MiB of TensorFlow's.
    for model, nbytes in (("arena", 5 * MIB), ("pytorch", 5 * MIB), ("bfc", 256 * KIB)):
        memory = allocator(model)
        for block in range(4):
            memory.allocate(block, nbytes)
        before = memory.reserved_bytes
        for block in (1, 0, 2):
            memory.free(block)
        memory.allocate(9, 3 * nbytes)
        assert memory.reserved_bytes == before == 4 * nbytes, model


def test_fragmentation_costs_memory() -> None:
    memory = allocator("arena")
    for block in range(6):
        memory.allocate(block, MIB)
    for block in (0, 2, 4):
        memory.free(block)
    memory.allocate(9, 2 * MIB)  # three are free, but no two side by side
    assert memory.reserved_bytes == 8 * MIB


def test_the_arena_extends_its_last_chunk_if_that_is_free() -> None:
    memory = allocator("arena")
    memory.allocate(0, MIB)
    memory.allocate(1, MIB)
    memory.free(1)
    memory.allocate(2, 3 * MIB)
    assert memory.reserved_bytes == 4 * MIB


def test_a_full_device_gives_unused_segments_back_before_it_refuses() -> None:
    stream = [(0.0, 30 * MIB, 0), (0.0, -30 * MIB, 0), (0.0, 40 * MIB, 1)]
    assert reserved_peak(stream, "pytorch") == 70 * MIB
    assert reserved_peak(stream, "pytorch", capacity_bytes=50 * MIB) == 40 * MIB
    with pytest.raises(BudgetTooSmall, match="raise the budget"):
        reserved_peak(stream, "pytorch", capacity_bytes=39 * MIB)
    assert reserved_peak(alive(MIB, 3 * MIB), "bfc", capacity_bytes=4 * MIB + 256 * KIB) <= 4 * MIB + 256 * KIB


def test_wrong_streams_and_models_are_refused() -> None:
    with pytest.raises(BadArgument, match="exact, arena, pytorch, bfc"):
        reserved_peak([], "jemalloc")
    for model in MODELS:
        with pytest.raises(ValueError, match="not allocated"):
            reserved_peak([(0.0, -1, 7)], model)
        with pytest.raises(ValueError, match="allocated already"):
            reserved_peak([(0.0, 8, 7), (0.0, 8, 7)], model)


@st.composite
def streams(draw: st.DrawFn) -> list[tuple[float, int, int]]:
    """Return allocations and frees in any order; what is freed is alive."""
    stream: list[tuple[float, int, int]] = []
    live: dict[int, int] = {}
    for block in range(draw(st.integers(1, 60))):
        nbytes = draw(st.one_of(st.integers(0, 4 * KIB), st.integers(0, 40 * MIB)))
        stream.append((0.0, nbytes, block))
        if nbytes:
            live[block] = nbytes
        while live and draw(st.booleans()):
            gone = draw(st.sampled_from(sorted(live)))
            stream.append((0.0, -live.pop(gone), gone))
    return stream


@given(streams(), st.sampled_from(("arena", "pytorch", "bfc")))
def test_blocks_never_overlap_and_reserved_covers_what_is_alive(
    stream: list[tuple[float, int, int]], model: str
) -> None:
    memory = allocator(model)
    live = 0
    for _, nbytes, block in stream:
        if nbytes >= 0:
            memory.allocate(block, nbytes)
        else:
            memory.free(block)
        live += nbytes
        assert memory.reserved_bytes >= live
    taken = sorted((c.address, c.address + c.size) for c in memory._chunk_of.values() if c is not None)
    assert all(end <= start for (_, end), (start, _) in pairwise(taken))


@given(streams(), st.sampled_from(("arena", "pytorch", "bfc")))
def test_when_everything_is_freed_no_piece_is_lost(stream: list[tuple[float, int, int]], model: str) -> None:
    memory = allocator(model)
    live = set()
    for _, nbytes, block in stream:
        if nbytes >= 0:
            memory.allocate(block, nbytes)
            live.add(block)
        else:
            memory.free(block)
            live.discard(block)
    for block in live:
        memory.free(block)
    chunks = list(memory._chunk_at.values())
    assert all(chunk.free and chunk.before is None and chunk.after is None for chunk in chunks)
    assert sum(chunk.size for chunk in chunks) == memory.reserved_bytes


@given(streams())
def test_the_exact_model_is_the_most_that_was_alive(stream: list[tuple[float, int, int]]) -> None:
    live, peak = 0, 0
    for _, nbytes, _ in stream:
        live += nbytes
        peak = max(peak, live)
    assert reserved_peak(stream, "exact") == peak
    for model in ("arena", "pytorch", "bfc"):
        assert reserved_peak(stream, model) >= peak


@pytest.mark.parametrize("trace", [chain_trace(8, static_bytes=3 * MIB), residual_trace(3)])
def test_a_traces_stream_has_the_traces_peak(trace: Trace) -> None:
    scratch_bytes = MIB if trace.model == "residual" else 0  # which `residual_trace` has beside its storages
    assert reserved_peak(stream_of(trace), "exact") == trace.peak_bytes - scratch_bytes


@pytest.mark.parametrize("path", RECORDED, ids=lambda path: path.stem)
def test_a_recorded_steps_stream_ends_as_it_began_and_peaks_where_the_step_did_or_a_little_higher(path: Path) -> None:
    """Higher, because within an operator all that it allocates comes before all that it frees."""
    trace = load_trace(path)
    stream = stream_of(trace)
    live: dict[int, int] = {}
    for _, nbytes, block in stream:
        if nbytes > 0:
            assert block not in live
            live[block] = nbytes
        else:
            assert live.pop(block) == -nbytes
    assert sum(live.values()) == trace.static_bytes
    assert trace.peak_bytes <= reserved_peak(stream, "exact") < 1.06 * trace.peak_bytes
    assert reserved_peak(stream, "exact") == min(reserved_peak(stream, model) for model in MODELS)


@given(traces())
def test_any_trace_gives_a_stream_that_every_model_can_serve(trace: Trace) -> None:
    stream = stream_of(trace)
    peaks = {model: reserved_peak(stream, model) for model in MODELS}
    assert peaks["exact"] >= trace.static_bytes
    assert peaks["exact"] == min(peaks.values())


def test_a_hundred_thousand_requests_are_served_in_seconds() -> None:
    begun = time.perf_counter()
    for model in ("arena", "pytorch", "bfc"):
        memory: Allocator = allocator(model)
        for block in range(50_000):
            memory.allocate(block, 1000 + 977 * (block % 5000))
            if block >= 2000:
                memory.free(block - 2000)
    assert time.perf_counter() - begun < 10
