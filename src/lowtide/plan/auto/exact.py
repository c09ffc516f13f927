"""The joint problem as an integer programme, for small steps: what `auto`, a heuristic, is held against.

Symbols: operators i with times d[i], each beginning at t[i]; gaps g from operator a[g] to b[g], of m[g] bytes.

    s[g, c] in {0, 1}    g is swapped through codec c; its write begins at w[g] and takes W[g], its read at r[g], R[g]
    z[g]    in {0, 1}    g is discarded and made again; v[i, p], operator p runs again before operator i
    x[g, i] in {0, 1}    g is absent while operator i runs

    minimise    the end of the last operator
    subject to  t[i] >= t[i - 1] + d[i - 1] + (what runs again before i)
                if swapped, w[g] >= (end of operator a[g] - 1) + encoding,  r[g] >= w[g] + W[g],
                            t[b[g]] >= r[g] + R[g] + decoding
                of two transfers of one way of the link, or of the link, one is over before the other begins
                x[g, i] <= (what of g is chosen), and if swapped  w[g] + W[g] <= t[i],  r[g] >= t[i] + d[i]
                v[i, p] >= x[g, i - 1] - x[g, i] - (g is swapped)    for the maker p of g: it is back at i, so p ran
                v[i, q] >= v[i, p] + x[k, i] - 1    for the maker q of each k that p reads; v[i, p] if k is gone
                sum of m[g] x[g, i] >= peak of i - budget
                with v[i, p], what i begins with less what is absent, what p reads and makes besides <= budget

It leaves out what a clock adds: that a link serves requests in order, that codecs share one engine, all that a chain of
operators that run again holds at once, and waiting at another rate. So no plan with one decision a gap is
faster than its optimum, and one that comes near is nearly the best there is.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations

from lowtide.core.plan import Problem
from lowtide.core.trace import Gap
from lowtide.errors import BadArgument
from lowtide.plan.costs.options import Option
from lowtide.plan.costs.rerun import Reruns
from lowtide.plan.costs.sweep import Sweep
from lowtide.plan.programme import Programme
from lowtide.plan.views.lineage import Lineage, alive_when

MOST_GAPS = 16
SOLVE_S = 30.0
GAP = 0.001


@dataclass(frozen=True, slots=True, kw_only=True)
class Optimum:
    """What no plan is faster than, and the best that was found: how it treats gaps, and which solver says so."""

    least_step_s: float
    found_step_s: float
    swapped: int
    encoded: int
    discarded: int
    solver: str
    gap: float
    seconds: float

    def told(self) -> str:
        """Return it in words, with the solver's name, gap and time."""
        return (
            f"no plan takes less than {self.least_step_s:.6g} s: {self.swapped} swapped, {self.encoded} of them "
            f"encoded, {self.discarded} made again ({self.solver}, gap {self.gap:.2%}, {self.seconds:.2f} s)"
        )


def solve(problem: Problem, *, seconds: float = SOLVE_S, most_gaps: int = MOST_GAPS) -> Optimum | None:
    """Return the optimum of a small problem (None: nothing fits, or nothing was found in time)."""
    return _Joint(problem, most_gaps=most_gaps).solve(seconds)


@dataclass(frozen=True, slots=True)
class _Chosen:
    """The variables of one gap."""

    gap: Gap
    nbytes: int
    rows: tuple[Option, ...]
    swaps: tuple[int, ...]
    discard: int | None
    write_at: int
    read_at: int
    returns: bool


class _Joint:
    def __init__(self, problem: Problem, *, most_gaps: int) -> None:
        if problem.trace.repeats:
            raise BadArgument("steps whose state moves follow each other, which the programme has no terms for")
        self.problem, self.trace = problem, problem.trace
        self.facts = Sweep(problem)
        self.programme = Programme()
        self.lineage = Lineage(self.trace)
        gaps = [gap for gap in self.trace.gaps() if self.trace.storages[gap.storage].nbytes]
        if len(gaps) > most_gaps:
            raise BadArgument(f"{len(gaps)} gaps are too many for the programme, which takes {most_gaps}")
        self.count = count = len(self.trace.ops)
        # Times in hundredths of the step: a solver's tolerances are absolute.
        self.unit_s = self.trace.duration_s / 100 or 1.0
        self.duration = [op.duration_s / self.unit_s for op in self.trace.ops]
        # Everything one after the other: nothing begins later.
        admitted = [one for one in problem.codecs if one.error_bound <= problem.max_error]
        rows = {gap: self._rows(gap, [one.name for one in admitted]) for gap in gaps}
        moving_s = sum(
            max(row.encode_s + row.write_s + row.read_s + row.decode_s for row in each) for each in rows.values()
        )
        self.far = (2 * self.trace.duration_s + moving_s) / self.unit_s
        self.begin = [
            self.programme.variable(upper=self.far, cost=1.0 if i == count else 0.0) for i in range(count + 1)
        ]
        self.chosen = [self._choices(gap, rows[gap]) for gap in gaps]
        self.by_storage: dict[int, list[_Chosen]] = {}
        for one in self.chosen:
            self.by_storage.setdefault(one.gap.storage, []).append(one)
        self.absent = {
            (one.gap, i): self.programme.choice()
            for one in self.chosen
            for i in range(one.gap.after_op, min(one.gap.before_op, count))
        }
        self.again: dict[tuple[int, int], int] = {}

    def _rows(self, gap: Gap, codecs: Sequence[str]) -> tuple[Option, ...]:
        nbytes, options = self.trace.storages[gap.storage].nbytes, self.facts.options
        return tuple(options.swap(nbytes, tier=self.problem.tier, codec=name, storage=gap.storage) for name in codecs)

    def _choices(self, gap: Gap, rows: tuple[Option, ...]) -> _Chosen:
        programme, returns = self.programme, self.facts.returns(gap)
        makers = self.lineage.makers(gap.storage, before_op=gap.before_op)
        may_discard = self.problem.can_recompute and self.facts.may_discard(gap) and (makers is not None or not returns)
        one = _Chosen(
            gap=gap,
            nbytes=self.trace.storages[gap.storage].nbytes,
            rows=rows,
            swaps=tuple(programme.choice() for _ in rows),
            discard=programme.choice() if may_discard else None,
            write_at=programme.variable(upper=self.far),
            read_at=programme.variable(upper=self.far),
            returns=returns,
        )
        programme.at_least(dict.fromkeys(self._taken(one), -1.0), -1.0)
        return one

    @staticmethod
    def _taken(one: _Chosen) -> tuple[int, ...]:
        return one.swaps if one.discard is None else (*one.swaps, one.discard)

    def solve(self, seconds: float) -> Optimum | None:
        self._transfers()
        self._orders()
        self._memory()
        self._reruns()
        self._room_to_run_again()
        self._clock()
        solution = self.programme.solve(seconds=seconds, gap=GAP)
        if solution is None:
            return None
        values = solution.values
        swapped = [(one, k) for one in self.chosen for k, s in enumerate(one.swaps) if values[s] > 0.5]
        return Optimum(
            least_step_s=max(solution.bound * self.unit_s, self.trace.duration_s),
            found_step_s=solution.objective * self.unit_s,
            swapped=len(swapped),
            encoded=sum(one.rows[k].codec != "identity" for one, k in swapped),
            discarded=sum(one.discard is not None and values[one.discard] > 0.5 for one in self.chosen),
            solver=solution.solver,
            gap=solution.gap,
            seconds=solution.seconds,
        )

    def _terms(self, one: _Chosen, name: str, factor: float = 1.0) -> dict[int, float]:
        """Return a figure of the row that is chosen, as terms."""
        return {s: factor * getattr(row, name) / self.unit_s for s, row in zip(one.swaps, one.rows, strict=True)}

    def _if_swapped(self, one: _Chosen, terms: dict[int, float], least: float) -> None:
        """Demand something of a gap that is swapped."""
        combined = dict(terms)
        for s in one.swaps:
            combined[s] = combined.get(s, 0.0) - self.far
        self.programme.at_least(combined, least - self.far)

    def _transfers(self) -> None:
        for one in self.chosen:
            first, end = one.gap.after_op - 1, self.begin[min(one.gap.before_op, self.count)]
            # Asked for when the operator before is over; the operator itself may wait for it.
            over, least = ({self.begin[first]: -1.0}, self.duration[first]) if first >= 0 else ({}, 0.0)
            self._if_swapped(one, {one.write_at: 1.0, **over, **self._terms(one, "encode_s", -1.0)}, least)
            self._if_swapped(one, {one.read_at: 1.0, one.write_at: -1.0, **self._terms(one, "write_s", -1.0)}, 0.0)
            if one.returns:
                back = {
                    s: -(row.read_s + row.decode_s) / self.unit_s for s, row in zip(one.swaps, one.rows, strict=True)
                }
                self._if_swapped(one, {end: 1.0, one.read_at: -1.0, **back}, 0.0)

    def _orders(self) -> None:
        """Demand that transfers of one way do not overlap, nor any where the link has one for both."""
        moves = [(one, one.write_at, "write_s") for one in self.chosen]
        moves += [(one, one.read_at, "read_s") for one in self.chosen if one.returns]
        for (one, first, name), (other, second, other_name) in combinations(moves, 2):
            if one is other or (self.facts.link.duplex and name != other_name):
                continue
            order = self.programme.choice()  # 1: the first is over before the other begins
            self._apart(one, other, first, second, name, {order: -self.far}, -self.far)
            self._apart(other, one, second, first, other_name, {order: self.far}, 0.0)

    def _apart(
        self, one: _Chosen, other: _Chosen, first: int, second: int, name: str, turn: dict[int, float], least: float
    ) -> None:
        """Demand that the second transfer begins when the first is over, if both are made and it is their turn."""
        terms = {second: 1.0, first: -1.0, **turn}
        for s, seconds in self._terms(one, name, -1.0).items():
            terms[s] = seconds - self.far
        for s in other.swaps:
            terms[s] = -self.far
        self.programme.at_least(terms, least - 2 * self.far)

    def _memory(self) -> None:
        for one in self.chosen:
            for i in range(one.gap.after_op, min(one.gap.before_op, self.count)):
                absent = self.absent[one.gap, i]
                self.programme.at_least({**dict.fromkeys(self._taken(one), 1.0), absent: -1.0}, 0.0)
                free = {absent: -self.far} | ({} if one.discard is None else {one.discard: self.far})
                landed = {self.begin[i]: 1.0, one.write_at: -1.0, **self._terms(one, "write_s", -1.0), **free}
                self.programme.at_least(landed, -self.far)
                if one.returns:
                    later = {one.read_at: 1.0, self.begin[i]: -1.0, **free}
                    self.programme.at_least(later, self.duration[i] - self.far)
        for i, op in enumerate(self.trace.ops):
            lacking = op.peak_bytes - self.problem.budget_bytes
            if lacking > 0:
                terms = {
                    self.absent[one.gap, i]: one.nbytes / lacking for one in self.chosen if (one.gap, i) in self.absent
                }
                self.programme.at_least(terms, 1.0)

    def _reruns(self) -> None:
        """Demand that whatever comes back without having been swapped is made."""
        for one in self.chosen:
            if one.discard is None or not one.returns:
                continue
            for i in range(one.gap.after_op + 1, one.gap.before_op + 1):
                gone = {self.absent[one.gap, i - 1]: -1.0, **dict.fromkeys(one.swaps, 1.0)}
                if i < one.gap.before_op:
                    gone[self.absent[one.gap, i]] = 1.0
                for maker in self.lineage.makers(one.gap.storage, before_op=one.gap.before_op) or ():
                    self.programme.at_least({self._runs(i, maker): 1.0, **gone}, 0.0)

    def _runs(self, before_op: int, op: int) -> int:
        """Return the variable that says that an operator runs again before another, with what that brings about."""
        known = self.again.get((before_op, op))
        if known is not None:
            return known
        found = self.again[before_op, op] = self.programme.variable(upper=1.0)  # whole, as what it follows from is
        for storage in self.trace.ops[op].reads:
            makers = self.lineage.makers(storage, before_op=op) if self.trace.storages[storage].first_op >= 0 else ()
            if alive_when(self.trace, storage, before_op):
                away = [
                    self.absent[other.gap, before_op]
                    for other in self.by_storage.get(storage, ())
                    if (other.gap, before_op) in self.absent
                ]
                if not away:
                    continue
            else:
                away = []
            if makers is None:
                # It cannot be made again: the operator cannot run where it is absent.
                self.programme.at_least({found: -1.0, **dict.fromkeys(away, -1.0)}, -1.0 if away else 0.0)
                continue
            for maker in makers:
                needed = self._runs(before_op, maker)
                self.programme.at_least({needed: 1.0, found: -1.0, **dict.fromkeys(away, -1.0)}, -1.0 if away else 0.0)
        return found

    def _room_to_run_again(self) -> None:
        """Demand that each operator that runs again fits beside what the one that it runs for begins with."""
        facts = Reruns(self.trace)
        most = float(sum(block.nbytes for block in self.trace.storages))
        back: dict[tuple[Gap, int], int] = {}
        for i, p in self.again:
            if i >= self.count:
                continue
            terms: dict[int, float] = {self.again[i, p]: -most}
            for one in self.chosen:
                if one.gap.storage in self.trace.ops[p].reads:
                    continue  # it is there, or made by then
                if (one.gap, i) in self.absent:
                    terms[self.absent[one.gap, i]] = float(one.nbytes)
                if (one.gap, i - 1) in self.absent and self.trace.storages[one.gap.storage].first_op >= p:
                    # It comes back at i, and is made later: operators run again in their order.
                    terms[self._comes_back(one, i, back)] = float(one.nbytes)
            held = facts.begin_bytes(i) + facts.alone_bytes(p)
            scale = 1 / max(most, 1.0)
            scaled = {variable: factor * scale for variable, factor in terms.items()}
            self.programme.at_least(scaled, (held - self.problem.budget_bytes - most) * scale)

    def _comes_back(self, one: _Chosen, i: int, known: dict[tuple[Gap, int], int]) -> int:
        """Return a variable that may be 1 where a gap's storage is absent before operator i and not with it."""
        if (one.gap, i) not in known:
            found = known[one.gap, i] = self.programme.variable(upper=1.0)
            self.programme.at_least({self.absent[one.gap, i - 1]: 1.0, found: -1.0}, 0.0)
            if (one.gap, i) in self.absent:
                self.programme.at_least({self.absent[one.gap, i]: -1.0, found: -1.0}, -1.0)
        return known[one.gap, i]

    def _clock(self) -> None:
        rerun: dict[int, dict[int, float]] = {}
        for (before_op, op), variable in self.again.items():
            rerun.setdefault(before_op, {})[variable] = -self.duration[op]
        for i in range(self.count + 1):
            more = rerun.get(i, {})
            if i == 0:
                self.programme.at_least({self.begin[0]: 1.0, **more}, 0.0)
            else:
                terms = {self.begin[i]: 1.0, self.begin[i - 1]: -1.0, **more}
                self.programme.at_least(terms, self.duration[i - 1])
