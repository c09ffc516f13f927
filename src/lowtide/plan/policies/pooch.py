"""PoocH: every feature map is swapped, kept or recomputed, by predicted time (Ito et al., arXiv 1907.05013, 2019).

Symbols: L_O, the maps whose copy out an operator waited for; L_I, those whose copy back an operator waited for; r_i,
the time that making map i again would save.

The predictor plays a step on compute and both directions of the link; copies back begin as early as memory permits.

1. Swap or keep: all maps are swapped first. Which of L_O to keep is searched exhaustively, then which of L_I greedily,
   as long as everything fits and the step gets shorter.
2. Recompute: of the maps that are still waited for, the one with the largest r_i > 0 is made again instead; repeat.

A rule of ours begins step 1 elsewhere: with the latest maps kept that fit. Both searches run, from step 1 to step 2,
and the better result is taken; `Pooch(start=...)` runs one of them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate, combinations
from math import inf

from lowtide.core.plan import Plan, Problem, Recompute, Swap
from lowtide.core.trace import Gap
from lowtide.core.units import format_seconds
from lowtide.errors import BadArgument
from lowtide.plan.auto.choose import candidates
from lowtide.plan.auto.layout import Course, lay_out
from lowtide.plan.auto.mix import Discarding, Mix
from lowtide.plan.compose import FITS, compose
from lowtide.plan.costs.curve import Curve
from lowtide.plan.costs.sweep import Outcome, Sweep
from lowtide.plan.policy import ACTIVATIONS, About, Classified, Family, Order, Runs, activation_gaps

# Of L_O, the maps whose copies out take longest are searched exhaustively.
EXHAUSTIVE_MAPS = 5
# Predictions for each of the two steps; long traces get fewer.
EVALUATIONS = 96
EVALUATED_ITEMS = 150_000
LEAST_EVALUATIONS = 8
STARTS = ("published", "latest")


class Pooch:
    """Classifies what autograd saved into swapped, kept and recomputed.

    `start`: where the search begins: "published", with everything swapped; "latest", with the latest maps kept that
    fit; None: both run, and the better is taken.
    """

    name = "pooch"
    summary = "PoocH: searches which tensors to swap, keep and recompute, by predicted time"
    about = About(
        kinds=ACTIVATIONS,
        family=Family.JOINT,
        classified=Classified(granularity="tensor", memory="device and host", moment="static", objective="time"),
        runs=(Runs.REAL, Runs.SIMULATED),
        paper="Ito et al., PPoPP 2019 poster, arXiv 1907.05013",
        reconstructed=(
            f"the exhaustive part looks at {EXHAUSTIVE_MAPS} maps; the greedy parts try maps in the order of what "
            "could be gained at most and take each that helps; a second search begins with the latest maps kept that "
            "fit, and the better of the two is taken"
        ),
        recomputes=True,
        victims=Order.FURTHEST,
    )

    def __init__(self, *, start: str | None = None) -> None:
        if start not in (None, *STARTS):
            raise BadArgument(f"unknown start {start!r}: choose one of {', '.join(STARTS)}, or None for both")
        self._starts = STARTS if start is None else (start,)

    def plan(self, problem: Problem) -> Plan:
        """Return the classification with the shortest predicted step."""
        if problem.trace.peak_bytes <= problem.budget_bytes:
            return compose(self.name, problem, notes=(FITS,))
        search = _Search(problem)
        found = [search.swap_or_keep(start) for start in self._starts]
        notes = []
        if problem.can_recompute:
            found = [search.recompute(one) for one in found]
        else:
            notes.append("the executor cannot run operators again: maps are swapped or kept")
        best = min(found, key=lambda one: one.worth)
        kept = len(search.found) - len(best.swaps) - len(best.recomputes)
        notes.insert(
            0,
            f"swaps {len(best.swaps)} maps, keeps {kept}, recomputes {len(best.recomputes)}; "
            f"all swapped would take {format_seconds(search.all_swapped.outcome.prediction.step_s)}",
        )
        return compose(self.name, problem, best.swaps, best.recomputes, notes=notes, trials=search.trials)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Trial:
    kept: frozenset[Gap]
    discarded: frozenset[Gap]
    swaps: tuple[Swap, ...]
    recomputes: tuple[Recompute, ...]
    outcome: Outcome
    worth: tuple[float, ...]


class _Search:
    """The classifications of one problem that have been tried."""

    def __init__(self, problem: Problem) -> None:
        self._problem = problem
        self._facts = Sweep(problem)
        self.found = candidates(problem, self._facts, activation_gaps(problem.trace))
        self._of = {one.gap: one for one in self.found}
        items = len(self._facts.peak_bytes) + len(self.found) + 1
        self._evaluations = max(LEAST_EVALUATIONS, min(EVALUATIONS, EVALUATED_ITEMS // items))
        self._discarding: Discarding | None = None
        self.trials = 0
        self.all_swapped = self._try(frozenset(), frozenset())

    def swap_or_keep(self, start: str) -> _Trial:
        """Return the best of step 1, which begins as `start` says."""
        end = self.trials + self._evaluations
        best = self.all_swapped if start == "published" else self._try(self._latest_that_fit(), frozenset())
        not_hidden = self._waited_out(best) if start == "published" else set[Gap]()
        longest = sorted(not_hidden, key=lambda gap: (-self._of[gap].write_s, gap))[:EXHAUSTIVE_MAPS]
        for kept in (kept for count in range(1, len(longest) + 1) for kept in combinations(longest, count)):
            if self.trials < end and self._fits(kept):
                best = min(best, self._try(frozenset(kept), frozenset()), key=lambda one: one.worth)
        improved = True
        while improved and self.trials < end:
            improved = False
            for gap in self._waited_for(best):
                kept_too = best.kept | {gap}
                if self.trials < end and self._fits(kept_too):
                    trial = self._try(kept_too, frozenset())
                    if trial.worth < best.worth:
                        best, improved = trial, True
        return best

    def recompute(self, best: _Trial) -> _Trial:
        """Return the best of step 2, which starts from that of step 1."""
        if self._discarding is None:
            self._discarding = Discarding(self._problem, self._facts, self.found)
        discarding = self._discarding
        end = self.trials + self._evaluations
        improved = True
        while improved and self.trials < end:
            improved = False
            gains = {
                gap: self._of[gap].write_s + self._of[gap].read_s - discarding.remake_s[gap]
                for gap in self._waited_for(best)
                if discarding.remake_s[gap] < inf and gap not in best.discarded
            }
            for gap in sorted(gains, key=lambda gap: (-gains[gap], gap)):
                if self.trials < end:
                    trial = self._try(best.kept, best.discarded | {gap})
                    if trial.worth < best.worth:
                        best, improved = trial, True
        return best

    def _try(self, kept: frozenset[Gap], discarded: frozenset[Gap]) -> _Trial:
        self.trials += 1
        chosen = [one for one in self.found if one.gap not in kept]
        mix = Mix(swapped=tuple(chosen), recomputes=())
        if discarded and self._discarding is not None:
            mix = self._discarding.mix(chosen, discarded=discarded, once=False)
        swaps = lay_out(
            self._problem,
            self._facts,
            mix.swapped,
            comfort_bytes=self._problem.budget_bytes,
            margin=inf,
            course=self._course(mix) if mix.recomputes else None,
        )
        outcome = self._facts.run(swaps, mix.recomputes)
        prediction = outcome.prediction
        over_bytes = max(0, prediction.peak_bytes - self._problem.budget_bytes)
        return _Trial(
            kept=kept,
            discarded=discarded,
            swaps=swaps,
            recomputes=mix.recomputes,
            outcome=outcome,
            worth=(over_bytes, prediction.step_s, prediction.moved_out_bytes),
        )

    def _course(self, mix: Mix) -> Course:
        """Return the step that reads are placed in: with what is made again, and without what is discarded."""
        away = [Swap(gap=one.gap, fetch_op=one.gap.before_op, tier=self._problem.tier) for one in mix.swapped]
        duration_s, peak_bytes = list(self._facts.duration_s), list(self._facts.peak_bytes)
        for rerun in self._facts.reruns(away, mix.recomputes):
            duration_s[rerun.before_op] += rerun.duration_s
            peak_bytes[rerun.before_op] = max(peak_bytes[rerun.before_op], rerun.peak_bytes)
        curve = Curve(peak_bytes)
        for one in mix.recomputes:
            curve.add(one.gap.after_op, one.gap.before_op, -self._facts.sizes[one.gap.storage])
        return Course(start_s=[0.0, *accumulate(duration_s)], peak_bytes=curve.values())

    def _waited_out(self, trial: _Trial) -> set[Gap]:
        """Return L_O: what was still on its way out when an operator lacked memory."""
        begin_s = trial.outcome.begin_s
        free_s = 0.0
        landed_s: dict[Gap, float] = {}
        for swap in sorted(trial.swaps, key=lambda swap: swap.gap.after_op):
            free_s = max(free_s, begin_s[swap.gap.after_op]) + self._facts.link.write_s(
                self._facts.sizes[swap.gap.storage]
            )
            landed_s[swap.gap] = free_s
        short = [op for op, _ in trial.outcome.short]
        return {
            gap
            for gap, end_s in landed_s.items()
            if gap in self._of and any(gap.after_op <= op and end_s > begin_s[op] for op in short)
        }

    def _waited_for(self, trial: _Trial) -> list[Gap]:
        """Return L_I and L_O, those first that were waited for longest."""
        waits_s: dict[Gap, float] = {gap: self._of[gap].write_s for gap in self._waited_out(trial)}
        for k, waited_s in trial.outcome.late:
            gap = trial.swaps[k].gap
            if gap in self._of:
                waits_s[gap] = waits_s.get(gap, 0.0) + waited_s
        return sorted(waits_s, key=lambda gap: (-waits_s[gap], gap))

    def _fits(self, kept: Iterable[Gap]) -> bool:
        """Tell whether these maps can stay at all: a plan that passes the budget is not tried."""
        return self._stays_within(self._all_absent(), sorted(kept)) is not None

    def _latest_that_fit(self) -> frozenset[Gap]:
        """Return as many maps as can be kept, those first that were made last: their copies have least time to hide."""
        curve = self._all_absent()
        kept = set()
        for one in sorted(self.found, key=lambda one: (-one.gap.after_op, one.gap)):
            if self._stays_within(curve, [one.gap]) is not None:
                kept.add(one.gap)
        return frozenset(kept)

    def _all_absent(self) -> Curve:
        curve = Curve(self._facts.peak_bytes)
        for one in self.found:
            curve.add(one.gap.after_op, one.gap.before_op, -one.nbytes)
        return curve

    def _stays_within(self, curve: Curve, gaps: Sequence[Gap]) -> Curve | None:
        """Return the curve with the gaps kept, or None where the first that passes the budget is not added."""
        for gap in gaps:
            nbytes = self._of[gap].nbytes
            limit_bytes = self._problem.budget_bytes - nbytes
            if curve.earliest(gap.after_op, gap.before_op, limit_bytes=limit_bytes) > gap.after_op:
                return None
            curve.add(gap.after_op, gap.before_op, nbytes)
        return curve
