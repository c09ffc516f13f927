"""The default: swaps the gaps whose transfers hide best, places every read, and leaves alone what fits.

Symbols: *target*, the height the curve is brought under; *pressure*, bytes added to the curve where the last attempt
stalled, so that the next one makes room there.

An attempt chooses gaps by a rank (choose.py), lays out their reads (layout.py) and is judged by the sweep (sweep.py).
Where operators waited for writes to land, or for a read that found no room to begin early, pressure rises and the
attempt is repeated. Ranks and targets are tried in turn until nothing is left to gain. If stalls remain, the classic
policies compete as well. Among the plans within `NEGLIGIBLE` of the fastest, the one that moves least wins.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator
from math import inf, isinf, log2

from lowtide.core.plan import Plan, Prediction, Problem, Swap
from lowtide.core.units import format_bytes, format_seconds
from lowtide.plan.choose import Candidate, Rank, candidates, choose, furthest_first, largest_first, longest_first
from lowtide.plan.curve import Curve
from lowtide.plan.layout import lay_out
from lowtide.plan.policies.belady import furthest_next_use
from lowtide.plan.policies.swap_all import one_use_ahead
from lowtide.plan.policy import View, until_covered
from lowtide.plan.sweep import Outcome, Sweep

# The share of the budget that plans leave free where that costs nothing.
HEADROOM = 0.02
# Times that differ by less than this share are the same to us: then fewer bytes moved is better.
NEGLIGIBLE = 1e-3
ROUNDS = 4
EVALUATIONS = 16
# Very long steps get fewer attempts, so that planning stays a matter of seconds.
EVALUATED_ITEMS = 750_000


class Auto:
    """Chooses gaps by predicted stall and places each prefetch against the memory curve."""

    name = "auto"
    summary = "swaps the gaps whose transfers hide best and leaves alone what fits (the default)"

    def plan(self, problem: Problem) -> Plan:
        """Return the fastest plan found, or the best effort if the budget is below the trace's floor."""
        facts = Sweep(problem)
        if problem.trace.peak_bytes <= problem.budget_bytes:
            return self._plan(problem, (), facts.run(()).prediction, note="everything fits: nothing is moved")
        floor_bytes = problem.trace.floor_bytes()
        if problem.budget_bytes < floor_bytes:
            swaps = tuple(Swap(gap=gap, fetch_op=gap.before_op, tier=problem.tier) for gap in problem.trace.gaps())
            note = (
                f"best effort: the budget of {format_bytes(problem.budget_bytes)} is below the floor of "
                f"{format_bytes(floor_bytes)}, so every gap is swapped and fetched on demand"
            )
            return self._plan(problem, swaps, facts.run(swaps).prediction, note=note)
        search = _Search(problem, facts)
        swaps, prediction = search.best()
        note = (
            f"swaps {len(swaps)} of {len(search.found)} gaps, {format_bytes(prediction.moved_out_bytes)}; "
            f"predicted stall {format_seconds(prediction.stall_s)}"
        )
        return self._plan(problem, swaps, prediction, note=note)

    def _plan(self, problem: Problem, swaps: tuple[Swap, ...], prediction: Prediction, *, note: str) -> Plan:
        return Plan(
            policy=self.name, budget_bytes=problem.budget_bytes, swaps=swaps, prediction=prediction, notes=(note,)
        )

    def victims(self, view: View, need_bytes: int) -> Iterator[int]:
        """Yield the furthest next use first, among similar ones those that cost no write, and then the oldest."""
        records = view.evictable()
        now = max((view.last_access(record) for record in records), default=0)

        def order(record: int) -> tuple[float, bool, float, int]:
            use = view.next_use(record)
            # Next uses are similar if they are as far away, to a factor of the square root of two.
            band = inf if isinf(use) else round(2 * log2(max(1.0, use - now)))
            return (-band, not view.clean(record), -use, view.last_access(record))

        return until_covered(sorted(records, key=order), view, need_bytes)


class _Search:
    """The attempts at one problem."""

    def __init__(self, problem: Problem, facts: Sweep) -> None:
        self.problem = problem
        self.facts = facts
        self.found = candidates(problem, facts)
        self.comfort_bytes = int(problem.budget_bytes * (1 - HEADROOM))
        self.tried: list[tuple[tuple[Swap, ...], Prediction]] = []
        items = len(facts.peak_bytes) + len(self.found) + 1
        self.evaluations_left = min(EVALUATIONS, max(ROUNDS, EVALUATED_ITEMS // items))

    def best(self) -> tuple[tuple[Swap, ...], Prediction]:
        """Return the plan that wins, and what it is predicted to take."""
        for rank in (longest_first, furthest_first, largest_first):
            for target_bytes in (self.comfort_bytes, self.problem.budget_bytes):
                self._attempt(rank, target_bytes=target_bytes)
                if self._settled():
                    return self._winner()
        for swaps in (
            tuple(
                Swap(gap=gap, fetch_op=fetch_op, tier=self.problem.tier)
                for gap, fetch_op in one_use_ahead(self.problem.trace)
            ),
            furthest_next_use(self.problem),
        ):
            self._judge(swaps)
        return self._winner()

    def _winner(self) -> tuple[tuple[Swap, ...], Prediction]:
        fastest_s = min(prediction.step_s for _, prediction in self.tried)
        close = [one for one in self.tried if one[1].step_s <= fastest_s * (1 + NEGLIGIBLE)]
        return min(close, key=lambda one: (one[1].moved_out_bytes, one[1].step_s))

    def _settled(self) -> bool:
        """Tell whether some attempt leaves nothing to gain."""
        return any(prediction.stall_s <= NEGLIGIBLE * prediction.step_s for _, prediction in self.tried)

    def _judge(self, swaps: tuple[Swap, ...]) -> Outcome:
        outcome = self.facts.run(swaps)
        self.tried.append((swaps, outcome.prediction))
        return outcome

    def _attempt(self, rank: Rank, *, target_bytes: int) -> None:
        """Choose, lay out and judge, with pressure rising where it stalls, as long as that changes anything."""
        pressure = Curve([0] * len(self.facts.peak_bytes))
        last: list[Candidate] | None = None
        last_s = inf
        for _ in range(ROUNDS):
            if self.evaluations_left <= 0:
                return
            need = [
                peak + extra - target_bytes
                for peak, extra in zip(self.facts.peak_bytes, pressure.values(), strict=True)
            ]
            chosen = choose(self.found, need_bytes=need, rank=rank)
            if chosen == last:
                return
            last = chosen
            self.evaluations_left -= 1
            swaps = lay_out(self.problem, self.facts, chosen, comfort_bytes=self.comfort_bytes)
            outcome = self._judge(swaps)
            if self._settled() or outcome.prediction.step_s > last_s * (1 - NEGLIGIBLE):
                return
            last_s = outcome.prediction.step_s
            self._press(pressure, outcome, swaps)

    def _press(self, pressure: Curve, outcome: Outcome, swaps: tuple[Swap, ...]) -> None:
        """Raise the pressure where operators waited."""
        for op, lacking_bytes in outcome.short:
            pressure.add(op, op + 1, lacking_bytes)
        for k, waited_s in outcome.late:
            gap = swaps[k].gap
            read_s = self.facts.link.read_s(self.facts.sizes[gap.storage])
            begin_s = self.facts.start_s[gap.before_op] - max(waited_s, read_s)
            begin = max(gap.after_op, bisect_right(self.facts.start_s, begin_s) - 1)
            pressure.add(begin, gap.before_op, self.facts.sizes[gap.storage])
