"""TFLMS: swap the long edges of the graph, with thresholds tuned on a model of memory (Le et al., ISMM 2019).

Symbols: the *level* of an operator is its place in the topological order; an edge leads from the operator that makes a
tensor to one that uses it.

    swapout_threshold   edges over more levels are cut: the tensor leaves and comes back
    swapin_groupby      uses of a tensor that are at most so many levels apart share one way back
    swapin_ahead        the way back begins when the operator so many levels before the use has ended;
                        negative: one after the other, when the use before it has run, the first one three levels ahead
    sync_mode           0: no waiting, 1: for tensors that leave, 2: for those that return, 3: for both

Tuning: the least waiting with which threshold 1 fits into 0.9 of the memory beside variables; then, by bisection, the
largest threshold that fits, the largest distance ahead and the largest group. What leaves holds its memory for a level
longer unless it is waited for.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

from lowtide.core.plan import Plan, Problem, Swap
from lowtide.core.trace import Gap, Trace
from lowtide.plan.compose import FITS, compose
from lowtide.plan.policy import ACTIVATIONS, About, Classified, Family, Order, Runs, activation_gaps

MEMORY_SHARE = 0.9
FIRST_AHEAD = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Knobs:
    """The thresholds of TFLMS."""

    swapout_threshold: int = 1
    swapin_ahead: int = 1
    swapin_groupby: int = 0
    sync_mode: int = 0

    @property
    def waits_out(self) -> bool:
        """Whether the next operator waits for what leaves."""
        return self.sync_mode in (1, 3)

    @property
    def waits_in(self) -> bool:
        """Whether nothing comes back before it is waited for."""
        return self.sync_mode in (2, 3)


class Tflms:
    """Cuts edges by thresholds; tunes them to the budget unless they are given."""

    name = "tflms"
    summary = "TFLMS: swaps tensors whose uses are far apart, thresholds tuned on a model of memory"
    about = About(
        kinds=ACTIVATIONS,
        family=Family.JOINT,
        classified=Classified(granularity="tensor", memory="device and host", moment="static", objective="time"),
        runs=(Runs.REAL, Runs.SIMULATED),
        paper="Le et al., ISMM 2019",
        reconstructed=(
            "operators run one after another, so a level is an operator's place in the step; all memory is tried where "
            "0.9 of it is too little; synchronous reads are those on demand; tensor ranks are not recorded"
        ),
        victims=Order.FIRST_THAT_SUFFICES,
    )

    def __init__(self, *, knobs: Knobs | None = None) -> None:
        self._knobs = knobs
        self.about = replace(type(self).about, adapts=knobs is None)

    def plan(self, problem: Problem) -> Plan:
        """Return the swaps of the given or tuned thresholds."""
        if self._knobs is not None:
            return self._plan(problem, self._knobs, trials=0)
        if problem.trace.peak_bytes <= problem.budget_bytes:
            return compose(self.name, problem, notes=(FITS,))
        tuning = Tuning(problem)
        return self._plan(problem, tuning.run(), trials=tuning.trials)

    def _plan(self, problem: Problem, knobs: Knobs, *, trials: int) -> Plan:
        swaps = cut(problem.trace, knobs, tier=problem.tier)
        ahead = f"{knobs.swapin_ahead} ahead, groups of {knobs.swapin_groupby} levels"
        note = f"threshold {knobs.swapout_threshold}, {ahead}, sync mode {knobs.sync_mode}"
        return compose(self.name, problem, swaps, notes=(note,), trials=trials)


def cut(trace: Trace, knobs: Knobs, *, tier: str = "spill", edges: Sequence[Gap] | None = None) -> tuple[Swap, ...]:
    """Return the swaps that the thresholds make of a step; `edges` are the trace's gaps, if they are known already."""
    gaps = []
    seen: set[int] = set()
    for gap in activation_gaps(trace) if edges is None else edges:
        far = gap.before_op - trace.storages[gap.storage].first_op > knobs.swapout_threshold
        apart = gap.storage not in seen or gap.before_op - gap.after_op + 1 > knobs.swapin_groupby
        if far and apart:
            gaps.append(gap)
        seen.add(gap.storage)
    fetched = _fetches(gaps, knobs)
    return tuple(
        Swap(gap=gap, fetch_op=fetched[gap], tier=tier, landed_op=gap.after_op + 1 if knobs.waits_out else None)
        for gap in gaps
    )


def _fetches(gaps: list[Gap], knobs: Knobs) -> dict[Gap, int]:
    """Return the operator at which each way back begins."""
    found: dict[Gap, int] = {}
    before: int | None = None
    last: int | None = None
    for gap in sorted(gaps, key=lambda gap: (gap.before_op, gap)):
        if knobs.waits_in:
            ahead = 1
        elif knobs.swapin_ahead >= 0:
            ahead = knobs.swapin_ahead
        else:
            if last != gap.before_op:
                before, last = last, gap.before_op
            ahead = FIRST_AHEAD if before is None else gap.before_op - before
        found[gap] = min(max(gap.before_op - ahead + 1, gap.after_op + 1), gap.before_op)
    return found


def modelled_peak_bytes(trace: Trace, knobs: Knobs, *, edges: Sequence[Gap] | None = None) -> int:
    """Return the highest point of the tuner's model of memory, which knows no time."""
    change = [0] * (len(trace.ops) + 1)
    delay_ops = 0 if knobs.waits_out else 1
    for swap in cut(trace, knobs, edges=edges):
        leaves_op = swap.gap.after_op + delay_ops
        if leaves_op < swap.fetch_op:
            change[leaves_op] -= trace.storages[swap.gap.storage].nbytes
            change[swap.fetch_op] += trace.storages[swap.gap.storage].nbytes
    away = accumulate(change)
    return max((op.peak_bytes + absent for op, absent in zip(trace.ops, away, strict=False)), default=0)


class Tuning:
    """The search for the thresholds that move least and still fit; `trials` counts the runs of the model."""

    def __init__(self, problem: Problem) -> None:
        self._trace = problem.trace
        self._edges = activation_gaps(problem.trace)
        self.trials = 0
        variables = min(problem.trace.static_bytes, problem.budget_bytes)
        self._limits = (variables + int(MEMORY_SHARE * (problem.budget_bytes - variables)), problem.budget_bytes)
        self.limit_bytes = self._limits[0]

    def passes(self, knobs: Knobs) -> bool:
        """Tell whether the model of memory stays within the limit."""
        self.trials += 1
        return modelled_peak_bytes(self._trace, knobs, edges=self._edges) <= self.limit_bytes

    def run(self) -> Knobs:
        """Return the thresholds, or those that move most if none fit."""
        for limit_bytes in self._limits:
            self.limit_bytes = limit_bytes
            for sync_mode in range(4):
                knobs = Knobs(sync_mode=sync_mode)
                if self.passes(knobs):
                    return self._widen(knobs)
        return Knobs(sync_mode=3)

    def _widen(self, knobs: Knobs) -> Knobs:
        most = max(1, len(self._trace.ops))
        knobs = self._largest(knobs, most, lambda value: replace(knobs, swapout_threshold=value))
        if not knobs.waits_in:
            tuned = knobs
            knobs = self._largest(tuned, most, lambda value: replace(tuned, swapin_ahead=value))
        tuned = knobs
        grouped = replace(tuned, swapin_groupby=most)
        if self.passes(grouped):
            return grouped
        return self._largest(tuned, most - 1, lambda value: replace(tuned, swapin_groupby=value))

    def _largest(self, passing: Knobs, most: int, turn: Callable[[int], Knobs]) -> Knobs:
        """Return the knobs with the largest value up to `most` that pass, by bisection from those that do."""
        low, high = 0, most
        while low < high:
            middle = (low + high + 1) // 2
            knobs = turn(middle)
            if self.passes(knobs):
                low, passing = middle, knobs
            else:
                high = middle - 1
        return passing
