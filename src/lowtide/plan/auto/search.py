"""The search behind `auto`: attempts at one problem, judged by the sweep.

Symbols: *target*, the height the curve is brought under; *pressure*, bytes added to the curve where the last attempt
stalled, so that the next one makes room there; *price*, the seconds of recomputation that a second on the link costs.

An attempt chooses gaps by a rank (choose.py), decides which of them to discard (mix.py), lays out the reads of the
others (layout.py) and is judged (costs/sweep.py). Where operators waited for writes to land, or for a read that found
no room to begin early, pressure rises and the attempt is repeated.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import inf, log2

from lowtide.core.plan import Prediction, Problem, Recompute, Swap
from lowtide.core.trace import Gap
from lowtide.plan.auto.choose import (
    Candidate,
    Rank,
    candidates,
    choose,
    earliest_first,
    furthest_first,
    largest_first,
    longest_first,
    worth_trying,
)
from lowtide.plan.auto.cover import cheapest_cover
from lowtide.plan.auto.layout import Course, lay_out
from lowtide.plan.auto.mix import Discarding, Mix, narrowed, swaps_only
from lowtide.plan.costs.curve import Curve
from lowtide.plan.costs.minimum import least_traffic
from lowtide.plan.costs.sweep import Outcome, Sweep

# The share of the budget that plans leave free where that costs nothing.
HEADROOM = 0.02
# Times that differ by less than this share are the same to us: then fewer bytes moved is better.
NEGLIGIBLE = 1e-3
ROUNDS = 4
EVALUATIONS = 24
DISCARD_EVALUATIONS = 48
POLISH_EVALUATIONS = 24
# How many attempts are polished, and how early their reads are asked for: in units of the usual margin.
LEADERS = 3
MARGINS = (1.0, inf, 3.0, 0.0)
# Very long steps get fewer attempts, so that planning stays a matter of seconds.
EVALUATED_ITEMS = 400_000
LEAST_EVALUATIONS = 3
LEAST_EVALUATIONS_OF_TWO = 2  # steps: where pages move
# Where pages move, a plan that moves at most `NEAR_LEAST` of the least wins, even where it takes this share longer: the
# seconds are predicted, transfers beside operators take cores that the prediction does not charge, and writes wear a
# disk out. In steps that only read, plans differ most in traffic.
NEGLIGIBLE_FOR_TRAFFIC = 0.005
NEGLIGIBLE_FOR_READS = 0.03
NEAR_LEAST = 1.08
# The room that is kept free to read ahead into, in units of the largest storage that is read.
READ_AHEAD = (0.5, 1.0, 1.5, 2.0, 2.5, 3.0, 4.0, 6.0)
STREAM_EVALUATIONS = 96
STREAM_SIZES = 3
# What part of the link's work recomputation takes over, in turn.
SHARES = (1.0, 0.5, 0.25, 0.75, 0.1, 0.4, 0.6, 0.9)
SPLITS = 6


@dataclass(frozen=True, slots=True, kw_only=True)
class Attempt:
    """Decisions, and what they are predicted to take. `mix` is None for decisions that were not laid out here."""

    swaps: tuple[Swap, ...]
    recomputes: tuple[Recompute, ...]
    outcome: Outcome
    mix: Mix | None

    @property
    def prediction(self) -> Prediction:
        """What the attempt is predicted to take."""
        return self.outcome.prediction


class Search:
    """The attempts at one problem."""

    def __init__(self, problem: Problem, facts: Sweep) -> None:
        self.problem = problem
        self.facts = facts
        self.found = candidates(problem, facts)
        if facts.periodic:
            self.found = worth_trying(self.found, facts)
        self.comfort_bytes = int(problem.budget_bytes * (1 - HEADROOM))
        if facts.periodic:
            # Where state moves, headroom is paid for in traffic every step: it is a share of what has to move anyway.
            excess_bytes = max(0, max(facts.peak_bytes, default=0) - problem.budget_bytes)
            self.comfort_bytes = max(self.comfort_bytes, int(problem.budget_bytes - HEADROOM * excess_bytes))
        self.tried: list[Attempt] = []
        # Whether what a step only reads is enough to be away: as weights in inference.
        self.only_reads = facts.periodic and bool(self._sizes_that_suffice([*filter(self._is_clean, self.found)]))
        self.by_gap = {one.gap: one for one in self.found}
        self.of_storage: dict[int, list[Candidate]] = {}
        for one in self.found:
            self.of_storage.setdefault(one.gap.storage, []).append(one)
        self.discarding = Discarding(problem, facts, self.found) if problem.can_recompute else None
        self.items = len(facts.peak_bytes) + len(self.found) + 1
        if facts.periodic:
            self.items *= 2  # the sweep goes through two steps
        least = LEAST_EVALUATIONS_OF_TWO if facts.periodic else LEAST_EVALUATIONS
        self.most_evaluations = max(least, EVALUATED_ITEMS // self.items)
        self.evaluations_left = min(EVALUATIONS, self.most_evaluations)

    def swap(self) -> None:
        """Try swaps alone, by several ranks, until nothing is left to gain."""
        for rank in (longest_first, earliest_first, furthest_first, largest_first):
            for target_bytes in (self.comfort_bytes, self.problem.budget_bytes):
                self._attempt(rank, target_bytes=target_bytes)
                # Where state moves, room to spare is paid for in traffic every step: the budget itself is tried, too.
                spared = self.facts.periodic and target_bytes < self.problem.budget_bytes
                if self.settled() and not spared:
                    return

    def stream(self) -> None:
        """Try to keep a fixed part of what a step only reads, and to read the rest again in every step.

        Each storage is used once a step and then not for a whole step: whatever is not kept is read once, so that the
        traffic is what does not fit, and the room to read ahead into. What is read is small, as the largest of it
        decides how much room that takes, and spread evenly over the step, so that the link always has work.
        """
        if not self.only_reads:
            return
        clean = [one for one in self.found if self._is_clean(one)]
        self.evaluations_left = min(STREAM_EVALUATIONS, self.most_evaluations)
        for largest_bytes in self._sizes_that_suffice(clean):
            small = [one for one in clean if one.worthwhile and one.nbytes <= largest_bytes]
            in_order = sorted(small, key=lambda one: (one.gap.before_op % self.facts.count, one.gap))
            place = {one.gap: _reversed_bits(k) for k, one in enumerate(in_order)}

            def evenly(one: Candidate, place: dict[Gap, float] = place) -> tuple[float, ...]:
                if not one.returns:
                    return (0.0, 0.0, 0.0)
                return (1.0, 0.0, place[one.gap]) if one.gap in place else (2.0, one.nbytes, 0.0)

            def smallest(one: Candidate, place: dict[Gap, float] = place) -> tuple[float, ...]:
                if not one.returns:
                    return (0.0, 0.0, 0.0)
                return (1.0, one.nbytes, place[one.gap]) if one.gap in place else (2.0, one.nbytes, 0.0)

            for rank in (evenly, smallest):
                for share in READ_AHEAD:
                    if self.evaluations_left <= 0:
                        return
                    self._streamed(rank, target_bytes=self.problem.budget_bytes - int(share * largest_bytes))

    def _is_clean(self, one: Candidate) -> bool:
        """Tell whether a storage is never written in a step, and away from one use to that of the next step at most."""
        return not self.facts.can_write(one.gap.storage) and self.problem.trace.lives_on(one.gap.storage)

    def _sizes_that_suffice(self, clean: Sequence[Candidate]) -> list[int]:
        """Return sizes, smallest first: with what is not larger away, the step fits."""
        found = []
        for largest_bytes in sorted({one.nbytes for one in clean if one.returns and one.worthwhile}):
            cover = Curve([0] * self.facts.count)
            cover.add_all(
                (one.gap.after_op, one.gap.before_op, one.nbytes)
                for one in clean
                if not one.returns or one.nbytes <= largest_bytes
            )
            enough = zip(self.facts.peak_bytes, cover.values(), strict=True)
            if all(peak - away <= self.problem.budget_bytes for peak, away in enough):
                found.append(largest_bytes)
            if len(found) == STREAM_SIZES:
                break
        return found

    def _streamed(self, rank: Rank, *, target_bytes: int) -> None:
        """Choose for a target, lay out, and lay out again in the step as it was predicted."""
        need = [peak - target_bytes for peak in self.facts.peak_bytes]
        chosen = choose(self.found, need_bytes=need, rank=rank)
        course = None
        for _ in range(2):
            self.evaluations_left -= 1
            swaps = lay_out(self.problem, self.facts, chosen, comfort_bytes=self.problem.budget_bytes, course=course)
            outcome = self._judge(swaps, (), mix=swaps_only(chosen))
            course = Course(start_s=outcome.begin_s, peak_bytes=self.facts.peak_bytes)

    def cover(self) -> None:
        """Try the swaps that wait least for the link by a linear programme, where every byte is moved in every step."""
        if not self.facts.periodic:
            return
        for target_bytes in (self.problem.budget_bytes, self.comfort_bytes):
            need = [peak - target_bytes for peak in self.facts.peak_bytes]
            cover = cheapest_cover(self.found, self.facts, need)
            if cover is None:
                return
            chosen = choose(self.found, need_bytes=need, rank=cover.rank())
            swaps = tuple(
                Swap(gap=one.gap, fetch_op=self._nameable(one.gap, cover.fetch_op[one.gap]), tier=self.problem.tier)
                for one in chosen
            )
            outcome = self._judge(swaps, (), mix=swaps_only(chosen))
            for _ in range(ROUNDS):
                course = Course(start_s=outcome.begin_s, peak_bytes=self.facts.peak_bytes)
                comfort_bytes = self.problem.budget_bytes
                swaps = lay_out(self.problem, self.facts, chosen, comfort_bytes=comfort_bytes, course=course)
                before_s, outcome = outcome.prediction.step_s, self._judge(swaps, (), mix=swaps_only(chosen))
                if outcome.prediction.step_s > before_s * (1 - NEGLIGIBLE):
                    break

    def _nameable(self, gap: Gap, op: int) -> int:
        """Return an operator at which a gap's storage can be asked back: as wished, or the one that uses it."""
        return op if self.facts.can_name(gap.storage, op) else gap.before_op

    def discard(self) -> None:
        """Try recomputation in the place of the transfers that are dearest compared to it."""
        base, discarding = self.winner().mix, self.discarding
        if base is None or discarding is None:
            return
        self.evaluations_left = min(DISCARD_EVALUATIONS, self.most_evaluations)
        price = {one.gap: discarding.remake_s[one.gap] / self._link_s(one) for one in self.found}
        seen: set[tuple[frozenset[Gap], frozenset[Gap]]] = set()
        for share in SHARES:
            most = self._price_for(share, base.swapped, price)
            affordable = {gap for gap, seconds in price.items() if seconds <= most}
            for chosen in (
                base.swapped,
                self._cheapest(price, affordable, spread=True),
                self._cheapest(price, affordable, spread=False),
            ):
                discarded = frozenset(one.gap for one in chosen if one.gap in affordable)
                if (key := (frozenset(one.gap for one in chosen), discarded)) in seen:
                    continue
                seen.add(key)
                for once in (True, False):
                    self._mixed(discarding, chosen, discarded=set(discarded), once=once)
                    if self.settled() or self.evaluations_left <= 0:
                        return

    def _cheapest(self, price: dict[Gap, float], affordable: Collection[Gap], *, spread: bool) -> list[Candidate]:
        """Return gaps that bring the curve under the budget, the cheapest to discard first, then those that hide best.

        With `spread`, prices count by their order of magnitude only, and what is left in memory is spread evenly over
        the network: so no chain of operators that have to run again gets long.
        """
        place = {one.gap: _reversed_bits(k) for k, one in enumerate(self.found)}

        def cheapest_first(one: Candidate) -> tuple[float, ...]:
            if one.gap not in affordable:
                return (1.0, 0.0, 0.0, *longest_first(one))
            if spread:
                return (0.0, round(log2(max(price[one.gap], 1e-9))), place[one.gap], *longest_first(one))
            return (0.0, price[one.gap], 0.0, *longest_first(one))

        need = [peak - self.problem.budget_bytes for peak in self.facts.peak_bytes]
        return choose(self.found, need_bytes=need, rank=cheapest_first)

    def compete(self, swaps: Sequence[Swap], recomputes: Sequence[Recompute] = ()) -> None:
        """Let a plan of another policy take part, with its reads where they are, laid out again, and improved."""
        wholes = [self._whole(swap.gap) for swap in swaps] + [self._whole(one.gap) for one in recomputes]
        mix = None
        if None not in wholes and len(set(wholes)) == len(wholes):
            found = [one for one in wholes if one is not None]
            mix = Mix(
                swapped=tuple(narrowed(one, swap.gap, self.facts) for one, swap in zip(found, swaps, strict=False)),
                recomputes=tuple(recomputes),
                chosen=frozenset(one.gap for one in found),
                discarded=frozenset(one.gap for one in found[len(swaps) :]),
            )
        self._judge(tuple(swaps), tuple(recomputes), mix=mix)

    def _whole(self, gap: Gap) -> Candidate | None:
        """Return the candidate that a gap is a part of."""
        if (found := self.by_gap.get(gap)) is not None:
            return found
        return next(
            (
                one
                for one in self.of_storage.get(gap.storage, ())
                if one.gap.after_op <= gap.after_op and gap.before_op <= one.gap.before_op
            ),
            None,
        )

    def refill(
        self, attempt: Attempt, chosen: Collection[Gap], *, rank: Rank, without: Gap | None = None
    ) -> frozenset[Gap]:
        """Return `chosen` with as many other gaps, best rank first, as it takes to keep the budget.

        To do so without a gap, or, where none is named, with room to spare where the attempt waited for memory.
        """
        pressure = Curve([0] * len(self.facts.peak_bytes))
        if without is None:
            self._press(pressure, attempt.outcome, attempt.swaps)

        def chosen_first(one: Candidate) -> tuple[float, ...]:
            return (one.gap not in chosen, *rank(one))

        need = [
            peak + extra - self.problem.budget_bytes
            for peak, extra in zip(self.facts.peak_bytes, pressure.values(), strict=True)
        ]
        others = [one for one in self.found if one.gap != without]
        return frozenset(one.gap for one in choose(others, need_bytes=need, rank=chosen_first))

    def discardable(self) -> dict[Gap, float]:
        """Return the gaps whose storage can be made again, with the seconds that takes."""
        if self.discarding is None:
            return {}
        return {gap: seconds for gap, seconds in self.discarding.remake_s.items() if seconds < inf}

    def attempt(self, chosen: Collection[Gap], discarded: Collection[Gap], *, like: Attempt) -> Attempt:
        """Return what comes of another choice, with the reads laid out in the step that `like` was predicted to be."""
        found = [one for one in self.found if one.gap in chosen]
        if self.discarding is None or like.mix is None:
            mix = swaps_only(found)
        else:
            mix = self.discarding.mix(found, discarded=discarded, once=like.mix.once)
        swaps = lay_out(
            self.problem,
            self.facts,
            mix.swapped,
            comfort_bytes=self.problem.budget_bytes,
            course=Course(start_s=like.outcome.begin_s, peak_bytes=self._course(mix).peak_bytes),
        )
        self._judge(swaps, mix.recomputes, mix=mix)
        return self.tried[-1]

    def polish(self) -> None:
        """Lay the reads of the best attempts out again in the step as it was predicted, stalls included."""
        self.evaluations_left = min(POLISH_EVALUATIONS, self.most_evaluations // 2)
        for attempt in self.leaders():
            for margin in MARGINS:
                self._lay_out_again(attempt, margin=margin)
                if self.settled():
                    return

    def leaders(self) -> list[Attempt]:
        """Return the fastest attempts that fit, one for each set of gaps."""
        leaders: dict[tuple[frozenset[Gap], tuple[Recompute, ...]], Attempt] = {}
        for one in sorted(self.tried, key=lambda one: one.prediction.step_s):
            if one.mix is not None and one.prediction.peak_bytes <= self.problem.budget_bytes:
                leaders.setdefault((frozenset(swap.gap for swap in one.swaps), one.recomputes), one)
        return list(leaders.values())[:LEADERS]

    def _lay_out_again(self, best: Attempt, *, margin: float) -> None:
        """Repeat the layout on the course of the last one, as long as that makes the step faster."""
        mix = best.mix
        assert mix is not None
        peak_bytes = self._course(mix).peak_bytes
        for _ in range(ROUNDS):
            if self.evaluations_left <= 0:
                return
            self.evaluations_left -= 1
            swaps = lay_out(
                self.problem,
                self.facts,
                mix.swapped,
                comfort_bytes=self.problem.budget_bytes,
                margin=margin,
                course=Course(start_s=best.outcome.begin_s, peak_bytes=peak_bytes),
            )
            self._judge(swaps, mix.recomputes, mix=mix)
            if self.tried[-1].prediction.step_s > best.prediction.step_s * (1 - NEGLIGIBLE):
                return
            best = self.tried[-1]

    def winner(self) -> Attempt:
        """Return the attempt that moves least among the fastest."""
        fits = [one for one in self.tried if one.prediction.peak_bytes <= self.problem.budget_bytes] or self.tried
        fastest_s = min(self.watched_s(one) for one in fits)
        if frugal := self._frugal(fits, fastest_s):
            fits, fastest_s = frugal, min(self.watched_s(one) for one in frugal)
        close = [one for one in fits if self.watched_s(one) <= fastest_s * (1 + NEGLIGIBLE)]
        return min(close, key=lambda one: (self._moved_bytes(one.prediction), one.prediction.step_s))

    def _frugal(self, fits: Sequence[Attempt], fastest_s: float) -> list[Attempt]:
        """Return the attempts that move not much more than they have to, and hardly take longer."""
        swapping = [one for one in fits if not one.recomputes]
        if not self.facts.periodic or not swapping:
            return []
        budget_bytes = self.problem.budget_bytes
        if self.only_reads:
            share, least_bytes = (
                NEGLIGIBLE_FOR_READS,
                least_traffic(self.problem.trace, budget_bytes=budget_bytes).read_bytes,
            )
        else:
            # Covers move hardly more than any plan has to.
            share, least_bytes = NEGLIGIBLE_FOR_TRAFFIC, min(self._moved_bytes(one.prediction) for one in swapping)
        return [
            one
            for one in swapping
            if self._moved_bytes(one.prediction) <= NEAR_LEAST * least_bytes
            and self.watched_s(one) <= fastest_s * (1 + share)
        ]

    def _moved_bytes(self, prediction: Prediction) -> int:
        """Return the traffic that counts: what is read is not what was written where bytes may be clean."""
        read_bytes = prediction.moved_in_bytes if self.facts.periodic else 0
        return prediction.moved_out_bytes + read_bytes

    def watched_s(self, one: Attempt) -> float:
        """Return how long a step takes, with what codecs cost its operators, and watching them if they run again."""
        watch_s = self.problem.watch_s if one.recomputes else 0.0
        return one.prediction.step_s + watch_s + self.facts.options.drag_s(one.swaps)

    def settled(self) -> bool:
        """Tell whether some attempt leaves nothing to gain."""
        compute_s = self.facts.start_s[-1]
        return any(
            one.prediction.step_s <= compute_s * (1 + NEGLIGIBLE)
            and one.prediction.peak_bytes <= self.problem.budget_bytes
            for one in self.tried
        )

    def _link_s(self, one: Candidate) -> float:
        """Return how long a gap keeps the link busy, or the busier direction of it; never nothing."""
        link_s = max(one.write_s, one.read_s) if self.facts.link.duplex else one.write_s + one.read_s
        return max(link_s, 1e-12)

    def _price_for(self, share: float, swapped: Sequence[Candidate], price: dict[Gap, float]) -> float:
        """Return the highest price to pay if recomputation is to take over a share of the link's work."""
        offers = sorted((price[one.gap], self._link_s(one)) for one in swapped if price[one.gap] < inf)
        if not offers:
            return -1.0
        wanted_s = share * sum(self._link_s(one) for one in swapped)
        sums = list(accumulate(link_s for _, link_s in offers))
        return offers[min(bisect_right(sums, wanted_s), len(offers) - 1)][0]

    def _judge(self, swaps: tuple[Swap, ...], recomputes: tuple[Recompute, ...], *, mix: Mix | None) -> Outcome:
        swaps = self.facts.encoded(swaps)
        outcome = self.facts.run(swaps, recomputes)
        self.tried.append(Attempt(swaps=swaps, recomputes=recomputes, outcome=outcome, mix=mix))
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
            outcome = self._judge(swaps, (), mix=swaps_only(chosen))
            if self.settled() or outcome.prediction.step_s > last_s * (1 - NEGLIGIBLE):
                return
            last_s = outcome.prediction.step_s
            self._press(pressure, outcome, swaps)

    def _press(self, pressure: Curve, outcome: Outcome, swaps: tuple[Swap, ...]) -> None:
        """Raise the pressure where operators waited."""
        for op, lacking_bytes in outcome.short:
            pressure.add(op, op + 1, lacking_bytes)
        for k, waited_s in outcome.late:
            gap = swaps[k].gap
            trip = self.facts.trip(gap.storage)
            begin_s = self.facts.at_s(gap.before_op) - max(waited_s, trip.read_s + trip.decode_s)
            course = Course(start_s=self.facts.start_s, peak_bytes=self.facts.peak_bytes)
            begin = max(gap.after_op, course.op_at(begin_s))
            pressure.add(begin, gap.before_op, self.facts.sizes[gap.storage])

    def _mixed(self, discarding: Discarding, chosen: Sequence[Candidate], *, discarded: set[Gap], once: bool) -> None:
        """Discard some of the chosen gaps and judge; where making them again passes the budget, discard fewer."""
        for split in range(SPLITS):
            if self.evaluations_left <= 0 or not discarded:
                return
            self.evaluations_left -= 1
            mix = discarding.mix(chosen, discarded=discarded, once=once)
            course = self._course(mix)
            swaps = lay_out(self.problem, self.facts, mix.swapped, comfort_bytes=self.comfort_bytes, course=course)
            outcome = self._judge(swaps, mix.recomputes, mix=mix)
            if not outcome.over:
                return
            discarded = _split(discarded, mix.recomputes, over=set(outcome.over), cuts=2**split, sizes=self.facts.sizes)

    def _course(self, mix: Mix) -> Course:
        """Return the step with the recomputations in it, without stalls."""
        if not mix.recomputes:
            return Course(start_s=self.facts.start_s, peak_bytes=self.facts.peak_bytes)
        whole = [Swap(gap=one.gap, fetch_op=one.gap.before_op, tier=self.problem.tier) for one in mix.swapped]
        duration_s = list(self.facts.duration_s)
        peak = list(self.facts.peak_bytes)
        for rerun in self.facts.reruns(whole, mix.recomputes):
            duration_s[rerun.before_op] += rerun.duration_s
            peak[rerun.before_op] = max(peak[rerun.before_op], rerun.peak_bytes)
        change = [0] * (len(peak) + 1)
        for one in mix.recomputes:
            change[one.gap.after_op] -= self.facts.sizes[one.gap.storage]
            change[one.gap.before_op] += self.facts.sizes[one.gap.storage]
        return Course(
            start_s=[0.0, *accumulate(duration_s)],
            peak_bytes=[bytes_ + away for bytes_, away in zip(peak, accumulate(change), strict=False)],
        )


def _reversed_bits(number: int) -> float:
    """Return the van der Corput sequence: its first members, however many, lie evenly between 0 and 1."""
    value, part = 0.0, 0.5
    while number:
        value += part * (number & 1)
        number >>= 1
        part /= 2
    return value


def _split(
    discarded: set[Gap], recomputes: Sequence[Recompute], *, over: set[int], cuts: int, sizes: Sequence[int]
) -> set[Gap]:
    """Return `discarded` less a few storages of every group that passes the budget, spread evenly over its bytes.

    What is made again together is a segment of the network; it falls apart where a storage in it is there after all.
    """
    groups: dict[int, set[int]] = {}
    for one in recomputes:
        if one.gap.before_op in over:
            groups.setdefault(one.gap.before_op, set()).add(one.gap.storage)
    there: set[int] = set()
    for group in groups.values():
        sums = list(accumulate(sizes[storage] for storage in sorted(group)))
        for cut in range(1, cuts + 1):
            there.add(sorted(group)[min(bisect_right(sums, sums[-1] * cut // (cuts + 1)), len(group) - 1)])
    return {gap for gap in discarded if gap.storage not in there} if there else set()
