"""Turns chosen gaps into swaps and recomputations that fit together.

A discarded storage is made again from what is in memory when it is needed. Where an operand is absent then:

- if there is room to hold it from then on until its own use, its gap ends there: a swapped one comes back, a discarded
  one is made again at the same time, or is swapped after all if what it is made from cannot be had. So a network that
  is discarded falls into segments, as long as memory allows, with a swapped storage at the beginning of each;
- otherwise it is made again on the way and let go, and once more for its own use, unless the caller wants each
  discarded storage made no more than once: then what needed it is swapped after all.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace
from math import inf

from lowtide.core.plan import Problem, Recompute
from lowtide.core.trace import Gap, Trace
from lowtide.plan.auto.choose import Candidate
from lowtide.plan.costs.curve import Curve
from lowtide.plan.costs.sweep import Sweep
from lowtide.plan.views.lineage import Lineage, alive_when

# What a recipe makes besides is kept if it is needed within so many operators.
NEAR_OPS = 16
MOST_OPS = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class Mix:
    """Gaps to swap, whose reads are still to be placed, and recomputations; and the choice they come from."""

    swapped: tuple[Candidate, ...]
    recomputes: tuple[Recompute, ...]
    chosen: frozenset[Gap] = frozenset()
    discarded: frozenset[Gap] = frozenset()
    once: bool = True


def narrowed(one: Candidate, gap: Gap, facts: Sweep) -> Candidate:
    """Return a candidate for a part of its gap."""
    if gap == one.gap:
        return one
    trip = facts.trip(gap.storage)
    return replace(
        one,
        gap=gap,
        span_s=facts.at_s(gap.before_op) - facts.at_s(gap.after_op),
        read_s=trip.read_s + trip.decode_s if facts.returns(gap) else 0.0,
        returns=facts.returns(gap),
    )


def swaps_only(chosen: Sequence[Candidate]) -> Mix:
    """Return the mix in which nothing is discarded."""
    return Mix(swapped=tuple(chosen), recomputes=(), chosen=frozenset(one.gap for one in chosen))


@dataclass(slots=True)
class _Recipe:
    """What is run before one operator.

    `made`: discarded storages that are made along with the one wanted. `cuts`: the gaps that were cut short, with their
    spans before. `turned`: discarded ones that are swapped after all.
    """

    before_op: int
    ops: set[int] = field(default_factory=set)
    made: list[_Decision] = field(default_factory=list)
    cuts: list[tuple[_Decision, int, int, int]] = field(default_factory=list)
    turned: list[_Decision] = field(default_factory=list)

    def copy(self) -> _Recipe:
        return _Recipe(self.before_op, set(self.ops), list(self.made), list(self.cuts), list(self.turned))


@dataclass(slots=True, eq=False)
class _Decision:
    """A chosen gap on its way to a swap or a recomputation; its span shrinks where others need the storage."""

    candidate: Candidate
    after_op: int
    before_op: int
    discard: bool
    settled: bool = False

    def gap(self) -> Gap:
        return Gap(storage=self.candidate.gap.storage, after_op=self.after_op, before_op=self.before_op)


class Discarding:
    """The facts of one problem that recomputation depends on."""

    def __init__(self, problem: Problem, facts: Sweep, found: Sequence[Candidate]) -> None:
        self._trace = problem.trace
        self._facts = facts
        self._lineage = Lineage(problem.trace)
        self.remake_s = self._alone_s(found)

    def _alone_s(self, found: Sequence[Candidate]) -> dict[Gap, float]:
        """Return how long each storage takes to make again with everything else in memory (infinity: it cannot be).

        What the same operators make is made at once: they share the time, by their bytes.
        """
        together: dict[tuple[int, ...], int] = {}
        recipes: dict[Gap, tuple[int, ...] | None] = {}
        for one in found:
            ops = recipes[one.gap] = self._whole_recipe(one)
            if ops:
                together[ops] = together.get(ops, 0) + one.nbytes
        alone_s: dict[Gap, float] = {}
        for one in found:
            ops = recipes[one.gap]
            if ops is None:
                alone_s[one.gap] = inf
            else:
                whole_s = sum((self._facts.duration_s[index] for index in ops), start=0.0)
                alone_s[one.gap] = whole_s * one.nbytes / together.get(ops, one.nbytes)
        return alone_s

    def _whole_recipe(self, one: Candidate) -> tuple[int, ...] | None:
        """Return the operators that make a storage again with everything else in memory."""
        if not self._facts.may_discard(one.gap):
            return None
        if not one.returns:
            return ()
        op = one.gap.before_op
        return self._lineage.recipe(
            [one.gap.storage], available=lambda storage: alive_when(self._trace, storage, op), before_op=op
        )

    def mix(self, chosen: Sequence[Candidate], *, discarded: Collection[Gap], once: bool) -> Mix:
        """Return the chosen gaps as swaps and, for those in `discarded`, recomputations; `once`: none made twice."""
        swapped, recomputes = _Mixing(self._trace, self._facts, self._lineage, chosen, discarded, once=once).mix()
        return Mix(
            swapped=swapped,
            recomputes=recomputes,
            chosen=frozenset(one.gap for one in chosen),
            discarded=frozenset(discarded),
            once=once,
        )


class _Mixing:
    """One set of decisions on its way to a mix."""

    def __init__(
        self,
        trace: Trace,
        facts: Sweep,
        lineage: Lineage,
        chosen: Sequence[Candidate],
        discarded: Collection[Gap],
        *,
        once: bool,
    ) -> None:
        self.once = once
        self.trace = trace
        self.facts = facts
        self.lineage = lineage
        self.decisions = [
            _Decision(
                one, one.gap.after_op, one.gap.before_op, discard=one.gap in discarded and facts.may_discard(one.gap)
            )
            for one in chosen
        ]
        self.of: dict[int, list[_Decision]] = {}
        # What is held with everything chosen absent; it rises where a gap is cut short.
        self.curve = Curve(facts.peak_bytes)
        self.curve.add_all((one.after_op, one.before_op, -one.candidate.nbytes) for one in self.decisions)
        for one in self.decisions:
            self.of.setdefault(one.candidate.gap.storage, []).append(one)
        self.recipe = _Recipe(before_op=0)

    def mix(self) -> tuple[tuple[Candidate, ...], tuple[Recompute, ...]]:
        """Settle every discarded gap, in the order of use."""
        recomputes: list[Recompute] = []
        for one in sorted((one for one in self.decisions if one.discard), key=lambda one: (one.before_op, one.gap())):
            if one.discard and not one.settled and one.after_op < one.before_op:
                recomputes += self._settle(one)
        swapped = [
            narrowed(one.candidate, one.gap(), self.facts)
            for one in self.decisions
            if not one.discard and one.after_op < one.before_op
        ]
        return tuple(swapped), tuple(recomputes)

    def _settle(self, one: _Decision) -> list[Recompute]:
        """Return the recomputations before the operator that needs a storage, or none if it has to be swapped."""
        one.settled = True
        if not one.candidate.returns:
            return [Recompute(gap=one.gap(), ops=())]
        self.recipe = _Recipe(before_op=one.before_op)
        if not self._make(one.candidate.gap.storage, until=one.before_op):
            self._undo(_Recipe(before_op=one.before_op))
            one.discard = False
            return []
        wanted = [one, *self.recipe.made, *self._besides(one)]
        ops = tuple(sorted(self.recipe.ops))
        for other in wanted[1:]:
            other.settled = True
        return [Recompute(gap=other.gap(), ops=ops) for other in wanted]

    def _besides(self, one: _Decision) -> list[_Decision]:
        """Return what else the recipe makes that is discarded, needed soon after, and can be held until then."""
        found = []
        for index in self.recipe.ops:
            for storage in self.trace.ops[index].writes:
                other = self._absent(storage)
                if other is None or not other.discard or other.settled or other is one or self._begins(other):
                    continue
                makers = self.lineage.makers(storage, before_op=self.recipe.before_op)
                whole = makers is not None and self.recipe.ops.issuperset(makers)
                if whole and other.before_op <= self.recipe.before_op + NEAR_OPS and self._hold(other):
                    found.append(other)
        return found

    def _absent(self, storage: int) -> _Decision | None:
        """Return the decision that keeps a storage away when the recipe runs."""
        return next((one for one in self.of.get(storage, ()) if self._moment(one) is not None), None)

    def _moment(self, one: _Decision) -> int | None:
        """Return the operator that the recipe runs for as a gap counts it, where it lies in it (None: it does not)."""
        for op in (self.recipe.before_op, self.recipe.before_op + self.facts.count):
            if one.after_op <= op < one.before_op:
                return op
        return None

    def _begins(self, one: _Decision) -> bool:
        """Tell whether a gap begins with the operator that the recipe runs for: the storage is still there."""
        return one.after_op == self._moment(one)

    def _make(self, storage: int, *, until: int) -> bool:
        """Add to the recipe what makes a storage what it was before operator `until`; tell whether that is possible."""
        makers = self.lineage.makers(storage, before_op=until)
        if makers is None:
            return False
        for maker in makers:
            if maker in self.recipe.ops:
                continue
            self.recipe.ops.add(maker)
            if len(self.recipe.ops) > MOST_OPS:
                return False
            for operand in self.trace.ops[maker].reads:
                if operand != storage and not self._have(operand, reader=maker):
                    return False
        return True

    def _have(self, storage: int, *, reader: int) -> bool:
        """See to it that an operand is there when `reader` runs again; tell whether that is possible."""
        op = self.recipe.before_op
        if not alive_when(self.trace, storage, op):
            return self._make(storage, until=reader)
        absent = self._absent(storage)
        if absent is None:
            return not self.lineage.written_between(storage, reader, op)
        if self.lineage.written_between(storage, reader, op):
            return False
        mark = self.recipe.copy()
        begins = self._begins(absent)
        if self._hold(absent):
            if begins or not absent.discard:
                return True  # not gone yet, or back by then
            held = self.recipe.copy()
            self.recipe.made.append(absent)
            if self._make(storage, until=op):
                return True
            # There is room for it, but not for what it is made from: it begins a segment.
            self._undo(held)
            self.recipe.turned.append(absent)
            absent.discard = False
            return True
        self._undo(mark)
        return not self.once and self._make(storage, until=reader)

    def _hold(self, one: _Decision) -> bool:
        """Cut a gap short so that its storage is there when the recipe runs, if there is room for it from then on."""
        op, nbytes = self._moment(one), one.candidate.nbytes
        assert op is not None
        if one.after_op == op and not self.facts.can_name(one.candidate.gap.storage, op + 1):
            return False
        end = one.before_op if one.after_op < op else op + 1
        if self.curve.earliest(op, end, limit_bytes=self.facts.budget_bytes - nbytes) > op:
            return False
        self.curve.add(op, end, nbytes)
        self.recipe.cuts.append((one, one.after_op, one.before_op, op))
        if one.after_op < op:
            one.before_op = op
        else:
            one.after_op = op + 1
        return True

    def _undo(self, mark: _Recipe) -> None:
        """Take back what was added to the recipe since `mark`."""
        for one, after_op, before_op, op in reversed(self.recipe.cuts[len(mark.cuts) :]):
            end = before_op if after_op < op else op + 1
            self.curve.add(op, end, -one.candidate.nbytes)
            one.after_op, one.before_op = after_op, before_op
        for one in self.recipe.turned[len(mark.turned) :]:
            one.discard = True
        self.recipe = mark
