"""Unified memory: pages move when they are touched, and the least recently used make room.

There is no planner: a fault brings a page, and if memory is full another goes. The program waits for both. So a step
takes its compute time, a fault for every page that comes (20 to 50 us on an accelerator; 45 us in the configuration of
the UVMSmart simulator), and the bytes both ways. Everything is in pages: parameters and gradients, too.

With hints (`cudaMemPrefetchAsync`) the operands of the next operator come without faults while the current one runs.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from itertools import accumulate
from math import ceil

from lowtide.core.machine import Machine
from lowtide.core.plan import Plan, Problem, Swap
from lowtide.core.trace import Op
from lowtide.core.units import format_bytes, format_seconds
from lowtide.plan.compose import FITS, compose
from lowtide.plan.costs.sweep import link_of
from lowtide.plan.policy import About, Classified, Family, Runs
from lowtide.plan.views.evictions import oldest_first

# Memory is followed in at most about so many pieces: pages are gathered to larger ones for that, but counted as pages.
MOST_PIECES = 2048


class PageCache:
    """Fast memory in pages, of which the least recently used goes first."""

    def __init__(self, *, capacity_bytes: int, page_bytes: int) -> None:
        self._capacity = max(1, capacity_bytes // page_bytes)
        self._lru: OrderedDict[tuple[int, int], None] = OrderedDict()
        self._pinned: set[tuple[int, int]] = set()

    def touch(self, block: int, pages: int, *, pin: bool = False) -> tuple[int, int]:
        """Touch the first pages of a block one after the other; return how many came, and how many went for them.

        Pages that are pinned stay, as long as one page is left for everything else.
        """
        came = went = 0
        for page in range(pages):
            key = (block, page)
            if key in self._pinned:
                continue
            if key in self._lru:
                self._lru.move_to_end(key)
                continue
            came += 1
            if len(self._lru) + len(self._pinned) >= self._capacity:
                self._lru.popitem(last=False)
                went += 1
            if pin and len(self._pinned) + 1 < self._capacity:
                self._pinned.add(key)
            else:
                self._lru[key] = None
        return came, went

    def free(self, block: int, pages: int) -> None:
        """Forget a block: its pages are free, and nothing is copied."""
        for page in range(pages):
            self._lru.pop((block, page), None)
            self._pinned.discard((block, page))


@dataclass(frozen=True, slots=True, kw_only=True)
class Paging:
    """A step under a pager. `step_s` is compute, faults and transfers; with hints, what of them is not hidden."""

    step_s: float
    faults: int
    fault_s: float
    moved_in_bytes: int
    moved_out_bytes: int


def paging(
    problem: Problem,
    *,
    explicit: Collection[int] = (),
    pinned: Collection[int] = (),
    density: Mapping[int, float] | None = None,
    hints: bool = False,
) -> Paging:
    """Return what a step takes under a pager, in the steady state: the second of two.

    `explicit`: storages that are copied as a whole, without faults, before the operator that needs them. `pinned`:
    those whose pages stay. `density`: the share of a storage's pages that an operator touches, if it is not all.
    """
    return _Pager(problem, frozenset(explicit), frozenset(pinned), density or {}, hints=hints).run()


class _Pager:
    def __init__(
        self,
        problem: Problem,
        explicit: frozenset[int],
        pinned: frozenset[int],
        density: Mapping[int, float],
        *,
        hints: bool,
    ) -> None:
        self._trace = problem.trace
        self._machine: Machine = problem.machine
        self._link = link_of(problem)
        self._explicit = explicit
        self._pinned = pinned
        self._density = density
        self._hints = hints
        change = [0] * (len(self._trace.ops) + 1)
        for storage in self._trace.storages:
            change[max(storage.first_op, 0)] += storage.nbytes
            change[min(storage.last_op + 1, len(self._trace.ops))] -= storage.nbytes
        alive = list(accumulate(change))[:-1]
        peaks = [op.peak_bytes for op in self._trace.ops]
        # What is alive beside the recorded storages is never touched, and counted as if it stayed.
        beside_bytes = max(0, min((peak - held for peak, held in zip(peaks, alive, strict=True)), default=0))
        self._scratch = [max(0, peak - held - beside_bytes) for peak, held in zip(peaks, alive, strict=True)]
        capacity_bytes = max(1, problem.budget_bytes - beside_bytes)
        pages = self._trace.peak_bytes / self._machine.page_bytes
        self._piece_bytes = self._machine.page_bytes * max(1, ceil(pages / MOST_PIECES))
        self._cache = PageCache(capacity_bytes=capacity_bytes, page_bytes=self._piece_bytes)
        self._ending: dict[int, list[int]] = {}
        for index, storage in enumerate(self._trace.storages):
            if storage.first_op >= 0:
                self._ending.setdefault(min(storage.last_op, len(alive) - 1), []).append(index)
        self._made: set[int] = set()
        self._came_bytes = self._went_bytes = self._faults = 0

    def run(self) -> Paging:
        self._step()
        self._came_bytes = self._went_bytes = self._faults = 0
        step_s = self._step()
        return Paging(
            step_s=step_s,
            faults=self._faults,
            fault_s=self._faults * self._machine.page_fault_s,
            moved_in_bytes=self._came_bytes,
            moved_out_bytes=self._went_bytes,
        )

    def _step(self) -> float:
        self._made = {index for index, storage in enumerate(self._trace.storages) if storage.first_op < 0}
        clock_s = 0.0
        running_s = 0.0
        for index, op in enumerate(self._trace.ops):
            move_s = self._enter(index, op)
            # With hints the transfers for this operator have run beside the one before it.
            clock_s += max(0.0, move_s - running_s) if self._hints else move_s
            running_s = op.duration_s
            clock_s += op.duration_s
            for storage in self._ending.get(index, ()):
                self._cache.free(storage, self._pieces(self._trace.storages[storage].nbytes))
        return clock_s

    def _enter(self, index: int, op: Op) -> float:
        """Touch what an operator works on; return how long that takes."""
        move_s = 0.0
        for storage in dict.fromkeys((*op.reads, *op.writes)):
            move_s += self._touch(storage, fresh=storage not in self._made)
            self._made.add(storage)
        if self._scratch[index]:
            pieces = self._pieces(self._scratch[index])
            _, went = self._cache.touch(-1, pieces)
            self._cache.free(-1, pieces)
            move_s += self._out_s(went)
        return move_s

    def _touch(self, storage: int, *, fresh: bool) -> float:
        nbytes = self._trace.storages[storage].nbytes
        whole = fresh or storage in self._explicit
        share = 1.0 if whole else self._density.get(storage, 1.0)
        pieces = self._pieces(ceil(nbytes * share))
        came, went = self._cache.touch(storage, pieces, pin=storage in self._pinned)
        move_s = self._out_s(went)
        if came and not fresh:
            moved_bytes = min(came * self._piece_bytes, nbytes)
            self._came_bytes += moved_bytes
            if storage in self._explicit or self._hints:
                return move_s + self._link.read_s(moved_bytes)
            faults = ceil(moved_bytes / self._machine.page_bytes)
            self._faults += faults
            move_s += faults * self._machine.page_fault_s + moved_bytes / self._link.read_bytes_per_s
        return move_s

    def _out_s(self, pieces: int) -> float:
        self._went_bytes += pieces * self._piece_bytes
        return pieces * self._piece_bytes / self._link.write_bytes_per_s

    def _pieces(self, nbytes: int) -> int:
        return ceil(nbytes / self._piece_bytes)


class UnifiedMemory:
    """Decides nothing before the step: pages come by faults and go by age."""

    name = "unified_memory"
    summary = "unified memory: reactive, the least recently used makes room; faults as a page model"
    about = About(
        family=Family.BASELINE,
        classified=Classified(granularity="page", memory="device and host", moment="dynamic", objective="time"),
        runs=(Runs.SIMULATED, Runs.MODEL),
        paper="CUDA unified memory",
        reconstructed=(
            "executed and simulated with whole storages and no cost of faults; faults, pages and parameters that move "
            "are a model, whose figures are in the plan's notes"
        ),
    )

    def plan(self, problem: Problem) -> Plan:
        """Return a plan without decisions, and what the page model says of the step."""
        notes = ["reactive: victims are chosen when memory runs out"]
        if problem.trace.ops and problem.trace.peak_bytes > problem.budget_bytes:
            notes.append(_figures(paging(problem)))
        return Plan(policy=self.name, budget_bytes=problem.budget_bytes, notes=tuple(notes))


class UnifiedMemoryHints(UnifiedMemory):
    """Unified memory with a prefetch hint before every operator: what comes back is asked for one operator ahead."""

    name = "unified_memory_hints"
    summary = "unified memory with hints: the least recently used makes room, operands come one operator ahead"
    about = About(
        family=Family.BASELINE,
        classified=Classified(granularity="page", memory="device and host", moment="dynamic", objective="time"),
        runs=(Runs.REAL, Runs.SIMULATED, Runs.MODEL),
        paper="CUDA unified memory, cudaMemPrefetchAsync",
        reconstructed="whole storages move; the figures of pages in the plan's notes are a model",
    )

    def plan(self, problem: Problem) -> Plan:
        """Return the evictions by age, each fetched one operator ahead."""
        swaps = least_recently_used(problem)
        note = _figures(paging(problem, hints=True)) if swaps else FITS
        return compose(self.name, problem, swaps, notes=(note,))


def _figures(found: Paging) -> str:
    return (
        f"page model: {found.faults} faults cost {format_seconds(found.fault_s)}, {format_bytes(found.moved_in_bytes)} "
        f"come and {format_bytes(found.moved_out_bytes)} go, the step takes {format_seconds(found.step_s)}"
    )


def least_recently_used(problem: Problem) -> tuple[Swap, ...]:
    """Return the evictions by age, each from the operator that lacks memory on, fetched one operator ahead."""
    return tuple(
        Swap(gap=gap, fetch_op=max(gap.before_op - 1, gap.after_op + 1), tier=problem.tier)
        for gap in oldest_first(problem)
    )
