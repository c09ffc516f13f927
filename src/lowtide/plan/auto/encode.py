"""Chooses the codec of each gap that may be swapped: by what a round trip takes, each part after the other.

n bytes take 2 n / B as they are. Through a codec that encodes at Ce, decodes at Cd and saves the share s, they take
2 (1 - s) n / B + n / Ce + n / Cd: less where 2 s / B > 1 / Ce + 1 / Cd. Whether that helps the step is for the search
to find out: transfers may be hidden as it is, and all codecs share one engine.

A codec that rounds, within the problem's error, is for what only backward reads again: forward never sees it, as in
Gist's delayed precision reduction. What operators that run again read stays as it was: they would make something else.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from lowtide.core.plan import IDENTITY, CodecCost, Problem, Recompute, Swap
from lowtide.core.trace import Gap, Kind, Phase, Trace
from lowtide.plan.costs.options import Option, Options


class ChosenCodecs:
    """The fastest codec for each storage of a problem: of all that it admits, and of those that keep every bit."""

    def __init__(self, problem: Problem, options: Options) -> None:
        exact = [one for one in problem.codecs if not one.error_bound]
        rounding = [one for one in problem.codecs if 0 < one.error_bound <= problem.max_error]
        self._rounding = frozenset(one.name for one in rounding)
        self._round_from = _only_backward_from(problem.trace) if rounding else {}
        self._exact: dict[int, str] = {}
        self._any: dict[int, str] = {}
        if problem.tier in problem.addressable():
            return
        for storage in {gap.storage for gap in problem.trace.gaps()}:
            self._exact[storage] = _fastest(problem, options, storage, exact)
            admitted = [*exact, *rounding] if storage in self._round_from else exact
            self._any[storage] = _fastest(problem, options, storage, admitted)

    def any(self) -> bool:
        """Tell whether some storage is faster through a codec."""
        return any(name != IDENTITY.name for name in self._any.values())

    def of_storage(self, storage: int) -> str:
        """Return the codec of a storage, as it goes when backward alone reads it again."""
        return self._any.get(storage, IDENTITY.name)

    def of_gap(self, gap: Gap) -> str:
        """Return the codec of a gap: one that rounds only if all that follows is backward."""
        name = self.of_storage(gap.storage)
        if name in self._rounding and gap.before_op < self._round_from[gap.storage]:
            return self._exact[gap.storage]
        return name

    def without_rounded_recipes(
        self, swaps: Sequence[Swap], recomputes: Sequence[Recompute], trace: Trace
    ) -> tuple[Swap, ...]:
        """Return swaps that keep every bit of what operators that run again read."""
        read = {storage for one in recomputes for op in one.ops for storage in trace.ops[op].reads}
        return tuple(
            replace(swap, codec=self._exact[swap.gap.storage])
            if swap.codec in self._rounding and swap.gap.storage in read
            else swap
            for swap in swaps
        )


def _fastest(problem: Problem, options: Options, storage: int, codecs: Sequence[CodecCost]) -> str:
    nbytes = problem.trace.storages[storage].nbytes
    names = (IDENTITY.name, *(one.name for one in codecs if one is not IDENTITY))
    rows = [options.swap(nbytes, tier=problem.tier, codec=name, storage=storage) for name in names]
    return min(rows, key=_round_trip_s).codec  # of equals the first: as it is


def _only_backward_from(trace: Trace) -> dict[int, int]:
    """Return the operator from which on only backward reads each activation: a use, if there is one."""
    found = {}
    for storage, (block, touched) in enumerate(zip(trace.storages, trace.touches(), strict=True)):
        if block.kind is not Kind.ACTIVATION or trace.lives_on(storage):
            continue
        others = [op for op in touched if trace.ops[op].phase is not Phase.BACKWARD]
        first = next((op for op in touched if op > max(others, default=-1)), None)
        if first is not None:
            found[storage] = first
    return found


def _round_trip_s(row: Option) -> float:
    return row.encode_s + row.write_s + row.read_s + row.decode_s
