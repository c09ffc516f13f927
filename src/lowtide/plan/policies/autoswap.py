"""AutoSwap: swap what crosses the peak, ranked by how well it pays (Zhang et al., arXiv 1903.06631).

Symbols: M, the limit; t_prev and t_next, the accesses on both sides of the peak; T_out and T_in, the transfers.

    DOA    = (t_next - t_prev) - T_out - T_in       how long the variable is really absent
    AOA    = DOA * bytes, or DOA / bytes if negative
    WDOA   = the integral of (load - M) over the absence, where the load passes M
    SWDOA  = WDOA of the load as it is after what was chosen so far, scored again after each choice
    vote   = the choice that most of the four agree on

Variables are taken until the load is within M. They leave one after the other in the order in which they are free, and
come back one after the other, laid out backwards from their uses. In the mode `no_overhead` only what is hidden
completely is moved, whatever M is; in the mode `stick_to_limit` M is met, whatever it costs.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from lowtide.core.plan import Plan, Problem, Swap
from lowtide.core.trace import Gap, Trace
from lowtide.core.units import format_bytes
from lowtide.errors import BadArgument
from lowtide.plan.auto.choose import Candidate, candidates
from lowtide.plan.compose import FITS, compose
from lowtide.plan.costs.sweep import Sweep
from lowtide.plan.policy import ACTIVATIONS, About, Classified, Family, Order, Runs, activation_gaps
from lowtide.plan.views.pools import FITS as POOL_FITS
from lowtide.plan.views.pools import addresses, step_blocks

SCORES = ("doa", "aoa", "wdoa", "swdoa")
MODES = ("stick_to_limit", "no_overhead")
# The paper's threshold, which is for models of gigabytes: a smaller step gets a smaller one.
LEAST_BYTES = 1 << 20
LEAST_SHARE = 1e-3


class AutoSwap:
    """Swaps the best variables across the peak until the load is within the budget.

    `score`: one of "doa", "aoa", "wdoa", "swdoa", "vote". `ready_ops`: how many operators after its last read, and
    after its last write, a variable is ready to leave. `fit`: "first" or "best", where SmartPool puts a block.
    """

    name = "autoswap"
    summary = "AutoSwap and SmartPool: swaps the tensors that weigh most on the peak, places blocks before the step"
    about = About(
        kinds=ACTIVATIONS,
        family=Family.SWAP_OUT,
        classified=Classified(granularity="tensor", memory="device and host", moment="static", objective="time"),
        runs=(Runs.REAL, Runs.SIMULATED),
        paper="Zhang et al., arXiv 1903.06631",
        reconstructed=(
            "the next highest operator follows when the peak is within the limit; variables below the paper's 1 MB are "
            "taken where larger ones are not enough; no Bayesian search over combined scores; SmartPool's layout of "
            "large blocks is followed by the simulator's memory, and not by a runtime, whose pages have no addresses"
        ),
        victims=Order.LARGEST_AREA,
    )

    def __init__(
        self,
        *,
        score: str = "swdoa",
        mode: str = "stick_to_limit",
        ready_ops: tuple[int, int] = (0, 0),
        fit: str = "first",
    ) -> None:
        if score not in (*SCORES, "vote"):
            raise BadArgument(f"unknown score {score!r}: choose one of {', '.join((*SCORES, 'vote'))}")
        if mode not in MODES:
            raise BadArgument(f"unknown mode {mode!r}: choose one of {', '.join(MODES)}")
        if fit not in POOL_FITS:
            raise BadArgument(f"unknown fit {fit!r}: choose one of {', '.join(POOL_FITS)}")
        self._fit = fit
        if min(ready_ops) < 0:
            raise BadArgument(f"ready_ops are {ready_ops}: they count operators, so pass 0 or more")
        self._score = score
        self._mode = mode
        self._ready_ops = ready_ops

    def plan(self, problem: Problem) -> Plan:
        """Return the swaps of the chosen variables."""
        if problem.trace.peak_bytes <= problem.budget_bytes:
            return self._laid_out(problem, compose(self.name, problem, notes=(FITS,)), {})
        facts = Sweep(problem)
        picks = Picking(problem, facts, score=self._score, ready_ops=self._ready_ops).run()
        trials = 0
        if self._mode == "no_overhead":
            hidden = hide(problem, facts, picks)
            swaps, trials = hidden.swaps, hidden.trials
            notes = [f"hides {len(swaps)} swaps, which leaves a peak of {format_bytes(hidden.peak_bytes)}"]
        else:
            swaps = schedule(problem, facts, picks)
            notes = [f"swaps {len(swaps)} variables by {self._score}"]
        plan = compose(self.name, problem, swaps, notes=notes, trials=trials)
        return self._laid_out(problem, plan, _held_until(facts, swaps))

    def _laid_out(self, problem: Problem, plan: Plan, held_until: Mapping[Gap, int]) -> Plan:
        """Return a plan with SmartPool's layout of the blocks that count."""
        least_bytes = _least_bytes(problem.trace)
        blocks = step_blocks(problem.trace, plan, least_bytes=least_bytes, held_until=held_until)
        return replace(plan, layout=addresses(blocks, fit=self._fit))


def _held_until(facts: Sweep, swaps: Sequence[Swap]) -> dict[Gap, int]:
    """Return the operator at whose end each write has landed, if they follow each other on one stream."""
    begin_s = facts.run(swaps).begin_s
    found, free_s = {}, 0.0
    for swap in sorted(swaps, key=lambda swap: swap.gap.after_op):
        free_s = max(free_s, begin_s[swap.gap.after_op]) + facts.link.write_s(facts.sizes[swap.gap.storage])
        found[swap.gap] = bisect_left(begin_s, free_s) - 1
    return found


def _least_bytes(trace: Trace) -> float:
    return min(LEAST_BYTES, LEAST_SHARE * trace.peak_bytes)


class Picking:
    """The choice of variables, one after the other, for the highest operator as the load is then."""

    def __init__(self, problem: Problem, facts: Sweep, *, score: str, ready_ops: tuple[int, int] = (0, 0)) -> None:
        self._limit_bytes = problem.budget_bytes
        self._facts = facts
        self._score = score
        found = _ready(problem.trace, facts, candidates(problem, facts, activation_gaps(problem.trace)), ready_ops)
        least_bytes = _least_bytes(problem.trace)
        self._large = [one for one in found if one.nbytes >= least_bytes]
        self._small = [one for one in found if one.nbytes < least_bytes]
        self._start_s = np.array(facts.start_s)
        self.load = np.array(facts.peak_bytes, dtype=np.int64)
        self._area = self._areas()

    def run(self, *, most: int | None = None) -> list[Candidate]:
        """Return the variables in the order of choice, at most as many as told."""
        picked: list[Candidate] = []
        groups = [_Left(group, self._facts) for group in (self._large, self._small)]
        while len(picked) != most and len(self.load):
            peak_op = int(self.load.argmax())
            if self.load[peak_op] <= self._limit_bytes:
                break
            # Small variables only where no large one is open; the next peak may be a large one's again.
            left = next((group for group in groups if group.open_at(peak_op).size), None)
            if left is None:
                break
            best = left.take(self._best(left, left.open_at(peak_op)))
            self.load[best.gap.after_op : best.gap.before_op] -= best.nbytes
            picked.append(best)
        return picked

    def _areas(self) -> npt.NDArray[np.float64]:
        """Return the integral of the load above the limit, from the beginning of the step to that of each operator."""
        above = np.maximum(self.load - self._limit_bytes, 0) * np.diff(self._start_s)
        return np.append(0.0, np.cumsum(above))

    def _best(self, left: _Left, open_now: npt.NDArray[np.int64]) -> int:
        if self._score != "vote":
            return self._favourite(left, open_now, self._score)
        votes = Counter(self._favourite(left, open_now, score) for score in reversed(SCORES))
        return votes.most_common(1)[0][0]

    def _favourite(self, left: _Left, open_now: npt.NDArray[np.int64], score: str) -> int:
        absence_s = left.back_s[open_now] - left.gone_s[open_now]
        if score == "aoa":
            value = np.where(absence_s >= 0, absence_s * left.nbytes[open_now], absence_s / left.nbytes[open_now])
        elif score == "doa":
            value = absence_s
        else:
            area = self._area if score == "wdoa" else self._areas()
            weight = np.interp(left.back_s[open_now], self._start_s, area) - np.interp(
                left.gone_s[open_now], self._start_s, area
            )
            value = np.where(absence_s >= 0, weight, absence_s)
        return int(open_now[value.argmax()])


class _Left:
    """Variables that are not chosen yet, as arrays: scores of all of them are taken again and again."""

    def __init__(self, found: Sequence[Candidate], facts: Sweep) -> None:
        self._found = list(found)
        self._after = np.array([one.gap.after_op for one in found], dtype=np.int64)
        self._before = np.array([one.gap.before_op for one in found], dtype=np.int64)
        self._free = np.ones(len(found), dtype=np.bool_)
        self.nbytes = np.array([one.nbytes for one in found], dtype=np.float64)
        self.gone_s = np.array([facts.start_s[one.gap.after_op] + one.write_s for one in found])
        self.back_s = np.array([facts.start_s[one.gap.before_op] - one.read_s for one in found])

    def open_at(self, op: int) -> npt.NDArray[np.int64]:
        """Return the variables that could be absent at an operator."""
        return np.flatnonzero(self._free & (self._after <= op) & (op < self._before))

    def take(self, position: int) -> Candidate:
        """Return a variable and forget it."""
        self._free[position] = False
        return self._found[position]


def _ready(trace: Trace, facts: Sweep, found: Sequence[Candidate], ready_ops: tuple[int, int]) -> list[Candidate]:
    """Return the candidates with their gaps beginning when they are ready, less those that never are."""
    if ready_ops == (0, 0):
        return list(found)
    wrote: dict[int, list[int]] = {one.gap.storage: [] for one in found}
    touched: dict[int, list[int]] = {one.gap.storage: [] for one in found}
    for index, op in enumerate(trace.ops):
        for storage in {*op.reads, *op.writes} & touched.keys():
            touched[storage].append(index)
            if storage in op.writes:
                wrote[storage].append(index)
    ready = []
    for one in found:
        before = touched[one.gap.storage][: bisect_left(touched[one.gap.storage], one.gap.after_op)]
        delay_ops = ready_ops[before[-1] in wrote[one.gap.storage]] if before else 0
        after_op = max(one.gap.after_op, (before[-1] + 1 if before else 0) + delay_ops)
        if after_op < one.gap.before_op:
            gap = Gap(storage=one.gap.storage, after_op=after_op, before_op=one.gap.before_op)
            ready.append(replace(one, gap=gap, span_s=facts.start_s[gap.before_op] - facts.start_s[after_op]))
    return ready


def schedule(problem: Problem, facts: Sweep, picks: Sequence[Candidate]) -> tuple[Swap, ...]:
    """Return the swaps: each read begins at the last moment that those behind it leave on one stream."""
    swaps = []
    free_s = facts.start_s[-1]
    for one in sorted(picks, key=lambda one: (one.gap.before_op, one.gap), reverse=True):
        fetch_op = one.gap.before_op
        if one.returns:
            free_s = min(free_s, facts.start_s[one.gap.before_op]) - one.read_s
            fetch_op = min(max(bisect_right(facts.start_s, free_s) - 1, one.gap.after_op + 1), one.gap.before_op)
        swaps.append(Swap(gap=one.gap, fetch_op=fetch_op, tier=problem.tier))
    return tuple(sorted(swaps, key=lambda swap: swap.gap))


@dataclass(frozen=True, slots=True, kw_only=True)
class Hidden:
    """Swaps that cost no time, the peak they leave, and how many steps were tried to find them."""

    swaps: tuple[Swap, ...]
    peak_bytes: int
    trials: int


def hide(problem: Problem, facts: Sweep, picks: Sequence[Candidate]) -> Hidden:
    """Return as many of the swaps as hide completely: those that do not are left out, the last chosen first."""
    left = list(picks)
    trials = 0
    while True:
        swaps = schedule(problem, facts, left)
        peak_bytes = _unhurried_peak_bytes(facts, swaps)
        outcome = Sweep(replace(problem, budget_bytes=peak_bytes)).run(swaps)
        trials += 1
        if outcome.prediction.stall_s <= 0 or not left:
            return Hidden(swaps=swaps, peak_bytes=peak_bytes, trials=trials)
        late = {swaps[k].gap for k, _ in outcome.late}
        hidden = [one for one in left if one.gap not in late]
        left = hidden if len(hidden) < len(left) else left[:-1]


def _unhurried_peak_bytes(facts: Sweep, swaps: Sequence[Swap]) -> int:
    """Return the peak if no operator waits: what leaves holds its memory until its copy has landed."""
    load = np.array(facts.peak_bytes, dtype=np.int64)
    free_s = 0.0
    for swap in sorted(swaps, key=lambda swap: swap.gap.after_op):
        nbytes = facts.sizes[swap.gap.storage]
        free_s = max(free_s, facts.start_s[swap.gap.after_op]) + facts.link.write_s(nbytes)
        landed_op = max(bisect_left(facts.start_s, free_s), swap.gap.after_op)
        if landed_op < swap.fetch_op:
            load[landed_op : swap.fetch_op] -= nbytes
    return int(load.max(initial=0))
