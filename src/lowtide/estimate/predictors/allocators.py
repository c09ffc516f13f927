"""How much memory an allocator reserves for a stream of allocations and frees.

Tensors are one thing, what the framework takes from the device another: blocks are rounded, pools kept apart, segments
never given back. Following DNNMem (Gao et al., FSE 2020), the stream that a trace's lifetimes make is replayed through
a model of the allocator:

- `exact`: no rounding, no fragmentation: the liveness of the tensors itself;
- `arena`: one address range that grows at its end, best fit, neighbours merged, whole pages from 64 KiB on;
- `pytorch`: the caching allocator of PyTorch's accelerators with its default settings;
- `bfc`: TensorFlow's best fit with coalescing, growing on demand.

All take the smallest free chunk that is large enough, and of equal ones that of the lowest address.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

from lowtide.core.trace import Trace
from lowtide.errors import BadArgument, BudgetTooSmall

KIB, MIB = 1 << 10, 1 << 20


class Request(NamedTuple):
    """An allocation (bytes above zero) or a free (below) of a block, at a time that is told for reports only."""

    at_s: float
    nbytes: int
    block: int


class Rules:
    """What sets an allocator apart; these are the arena's, the others change them."""

    name = "arena"

    def rounded(self, nbytes: int) -> int:
        """Return the bytes a block of `nbytes` takes."""
        return _up(nbytes, 64) if nbytes < 64 * KIB else _up(nbytes, 4096)

    def pool(self, _size: int) -> int:
        """Return which chunks may serve a block of `size`: those of one pool never serve another's."""
        return 0

    def splits(self, chunk: int, size: int) -> bool:
        """Tell whether what a block leaves of a chunk is kept as a chunk of its own."""
        return chunk > size

    def segment(self, size: int, *, left: int | None) -> int:
        """Return how much to take from the device for a block of `size`, of which it has `left` (None: enough)."""
        del left
        return size


class PyTorchRules(Rules):
    """The constants of c10/cuda/CUDACachingAllocator: 512 B, 1, 2, 10 and 20 MiB."""

    name = "pytorch"

    def rounded(self, nbytes: int) -> int:
        """Round to 512 bytes."""
        return _up(nbytes, 512)

    def pool(self, size: int) -> int:
        """Keep blocks of up to 1 MiB apart."""
        return 0 if size <= MIB else 1

    def splits(self, chunk: int, size: int) -> bool:
        """Split small chunks always, large ones if more than 1 MiB is left."""
        return chunk - size >= 512 if size <= MIB else chunk - size > MIB

    def segment(self, size: int, *, left: int | None) -> int:
        """Take 2 MiB for small blocks, 20 MiB for those below 10 MiB, and whole 2 MiB above."""
        del left
        if size <= MIB:
            return 2 * MIB
        return 20 * MIB if size < 10 * MIB else _up(size, 2 * MIB)


class BfcRules(Rules):
    """The constants of TensorFlow's BFCAllocator with growth allowed: 256 B, regions that double from 1 MiB."""

    name = "bfc"

    def __init__(self) -> None:
        self._region = MIB

    def rounded(self, nbytes: int) -> int:
        """Round to 256 bytes."""
        return _up(nbytes, 256)

    def splits(self, chunk: int, size: int) -> bool:
        """Split what is twice as large, or would waste 128 MiB."""
        return chunk >= 2 * size or chunk - size >= 128 * MIB

    def segment(self, size: int, *, left: int | None) -> int:
        """Take the next region, which is twice the last one, or what is left if that is enough."""
        grown = False
        while self._region < size:
            self._region *= 2
            grown = True
        region = self._region
        if left is not None and size <= left < region:
            return left // 256 * 256
        if not grown:
            self._region *= 2
        return region


@dataclass(slots=True, eq=False)
class _Chunk:
    """A piece of a segment; `before` and `after` are its neighbours in it."""

    address: int
    size: int
    pool: int
    free: bool = True
    before: _Chunk | None = None
    after: _Chunk | None = None


class Allocator:
    """A model of an allocator: allocate and free blocks by number, and ask what is reserved.

    With `capacity_bytes`, a device of that size: segments that nothing uses are given back before it refuses.
    """

    def __init__(self, rules: Rules, *, capacity_bytes: int | None = None) -> None:
        self._rules = rules
        self._capacity_bytes = capacity_bytes
        self._free: dict[int, list[tuple[int, int]]] = {0: [], 1: []}
        self._chunk_at: dict[int, _Chunk] = {}
        self._chunk_of: dict[int, _Chunk | None] = {}
        self._end = 0
        self._last: _Chunk | None = None
        self.reserved_bytes = 0
        self.peak_reserved_bytes = 0

    def allocate(self, block: int, nbytes: int) -> None:
        """Take a block; zero bytes take nothing."""
        if block in self._chunk_of:
            raise ValueError(f"block {block} is allocated already: free it first")
        if nbytes <= 0:
            self._chunk_of[block] = None
            return
        size = self._rules.rounded(nbytes)
        chunk = self._find(size) or self._grow(size)
        chunk.free = False
        if self._rules.splits(chunk.size, size):
            self._split(chunk, size)
        self._chunk_of[block] = chunk

    def free(self, block: int) -> None:
        """Give a block back; its neighbours that are free become one chunk with it."""
        if block not in self._chunk_of:
            raise ValueError(f"block {block} is not allocated: it cannot be freed")
        chunk = self._chunk_of.pop(block)
        if chunk is None:
            return
        chunk.free = True
        if chunk.before is not None and chunk.before.free:
            self._unlist(chunk.before)
            chunk = self._join(chunk.before, chunk)
        if chunk.after is not None and chunk.after.free:
            self._unlist(chunk.after)
            chunk = self._join(chunk, chunk.after)
        self._list(chunk)

    def _find(self, size: int) -> _Chunk | None:
        chunks = self._free[self._rules.pool(size)]
        at = bisect_left(chunks, (size, -1))
        return self._chunk_at[chunks.pop(at)[1]] if at < len(chunks) else None

    def _grow(self, size: int) -> _Chunk:
        """Take a segment for a block of `size`, and return its chunk, which is not listed."""
        pool = self._rules.pool(size)
        tail = self._last if self._rules.name == "arena" else None
        if tail is not None and tail.free:  # the arena only lacks what its last chunk is short of
            self._take(size - tail.size)
            self._unlist(tail)
            tail.size = size
            self._end = tail.address + size
            return tail
        chunk = _Chunk(address=0, size=self._take_segment(size), pool=pool)
        chunk.address = self._end
        if tail is not None:
            chunk.before, tail.after = tail, chunk
        self._last = chunk
        self._end += chunk.size
        self._chunk_at[chunk.address] = chunk
        return chunk

    def _take_segment(self, size: int) -> int:
        left = None if self._capacity_bytes is None else self._capacity_bytes - self.reserved_bytes
        segment = self._rules.segment(size, left=left)
        self._take(segment)
        return segment

    def _take(self, nbytes: int) -> None:
        if self._capacity_bytes is not None and self.reserved_bytes + nbytes > self._capacity_bytes:
            self._release_cached()
            if self.reserved_bytes + nbytes > self._capacity_bytes:
                raise BudgetTooSmall(
                    budget_bytes=self._capacity_bytes,
                    needed_bytes=self.reserved_bytes + nbytes,
                    op=f"an allocation under {self._rules.name}",
                )
        self.reserved_bytes += nbytes
        self.peak_reserved_bytes = max(self.peak_reserved_bytes, self.reserved_bytes)

    def _release_cached(self) -> None:
        """Give back the segments that nothing uses, as PyTorch does before it gives up."""
        if self._rules.name != "pytorch":
            return
        for chunk in [c for c in self._chunk_at.values() if c.free and c.before is None and c.after is None]:
            self._unlist(chunk)
            del self._chunk_at[chunk.address]
            self.reserved_bytes -= chunk.size

    def _split(self, chunk: _Chunk, size: int) -> None:
        rest = _Chunk(
            address=chunk.address + size, size=chunk.size - size, pool=chunk.pool, before=chunk, after=chunk.after
        )
        if chunk.after is not None:
            chunk.after.before = rest
        if self._last is chunk:
            self._last = rest
        chunk.after, chunk.size = rest, size
        self._chunk_at[rest.address] = rest
        self._list(rest)

    def _join(self, first: _Chunk, second: _Chunk) -> _Chunk:
        first.size += second.size
        first.after = second.after
        if second.after is not None:
            second.after.before = first
        if self._last is second:
            self._last = first
        del self._chunk_at[second.address]
        return first

    def _list(self, chunk: _Chunk) -> None:
        insort(self._free[chunk.pool], (chunk.size, chunk.address))

    def _unlist(self, chunk: _Chunk) -> None:
        chunks = self._free[chunk.pool]
        del chunks[bisect_left(chunks, (chunk.size, chunk.address))]


class ExactAllocator(Allocator):
    """Reserves what is alive and nothing else."""

    def __init__(self, *, capacity_bytes: int | None = None) -> None:
        super().__init__(Rules(), capacity_bytes=capacity_bytes)
        self._sizes: dict[int, int] = {}

    def allocate(self, block: int, nbytes: int) -> None:
        """Count a block."""
        if block in self._sizes:
            raise ValueError(f"block {block} is allocated already: free it first")
        self._take(nbytes)
        self._sizes[block] = nbytes

    def free(self, block: int) -> None:
        """Count a block no more."""
        if block not in self._sizes:
            raise ValueError(f"block {block} is not allocated: it cannot be freed")
        self.reserved_bytes -= self._sizes.pop(block)


MODELS = ("exact", "arena", "pytorch", "bfc")


def allocator(model: str, *, capacity_bytes: int | None = None) -> Allocator:
    """Return an empty allocator of that model."""
    match model:
        case "exact":
            return ExactAllocator(capacity_bytes=capacity_bytes)
        case "arena":
            return Allocator(Rules(), capacity_bytes=capacity_bytes)
        case "pytorch":
            return Allocator(PyTorchRules(), capacity_bytes=capacity_bytes)
        case "bfc":
            return Allocator(BfcRules(), capacity_bytes=capacity_bytes)
    raise BadArgument(f"unknown allocator {model!r}: choose one of {', '.join(MODELS)}")


def reserved_peak(
    stream: Iterable[tuple[float, int, int]], model: str = "pytorch", *, capacity_bytes: int | None = None
) -> int:
    """Return the most bytes the allocator reserves while it serves `stream`: (time, +bytes or -bytes, block).

    Raises `BudgetTooSmall` where a device of `capacity_bytes` could not serve it.
    """
    memory = allocator(model, capacity_bytes=capacity_bytes)
    for _, nbytes, block in stream:
        if nbytes >= 0:
            memory.allocate(block, nbytes)
        else:
            memory.free(block)
    return memory.peak_reserved_bytes


def stream_of(trace: Trace) -> list[Request]:
    """Return the allocations and frees of the unmanaged step, in order.

    Within an operator, what it allocates comes before what it frees: the order in which most do, and the worse one.
    What was alive before the step and that no operator touches is one block.
    """
    begins: list[list[int]] = [[] for _ in range(len(trace.ops) + 1)]
    ends: list[list[int]] = [[] for _ in range(len(trace.ops) + 1)]
    stream, known_bytes = [], 0
    for index, storage in enumerate(trace.storages):
        if storage.nbytes == 0:
            continue
        if storage.first_op < 0:
            stream.append(Request(0.0, storage.nbytes, index))
            known_bytes += storage.nbytes
        else:
            begins[storage.first_op].append(index)
        if storage.last_op < len(trace.ops):
            ends[max(storage.last_op, 0)].append(index)
    if trace.static_bytes > known_bytes:
        stream.append(Request(0.0, trace.static_bytes - known_bytes, -1))
    for index, op in enumerate(trace.ops):
        stream += [Request(op.start_s, trace.storages[block].nbytes, block) for block in begins[index]]
        stream += [Request(op.start_s, -trace.storages[block].nbytes, block) for block in ends[index]]
    return stream


def _up(nbytes: int, unit: int) -> int:
    return -(-nbytes // unit) * unit
