"""The survey's algorithms 1 to 4: what swapping systems have in common (Gao et al., Journal of Software 34(12), 2023).

Symbols: SO and SI, what is swapped out and in; an operator is *required* while it runs.

1. Swap out: while memory is lacking, the next victim (least recently used, or largest) that no required operator
   depends on joins SO. Tensors that no operator depends on any more leave at once.
2. Swap in: what a required operator finds in storage is fetched while it waits. Ahead of that, by dependency: what the
   next `forward_ops` operators read; or by access time: what is read within `forward_s`.
3. Both, dynamically: a tensor that would be needed again within `interval_s` of the end of its swap-out is not
   swappable, and one that a required operator found in storage, or still on its way, is not any more.
4. Both, statically: trial plans are run, and the fastest is kept. Of `count_profile` plans the most promising by
   prediction are run, one a step.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Collection, Hashable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, product
from typing import ClassVar

from lowtide.core.plan import Plan, Prediction, Problem, Swap
from lowtide.core.timeline import Lane, Timeline
from lowtide.core.trace import Gap, Trace
from lowtide.core.units import format_seconds
from lowtide.errors import BadArgument
from lowtide.plan.compose import FITS, compose
from lowtide.plan.costs.sweep import Sweep
from lowtide.plan.policies.vdnn import that_fit
from lowtide.plan.policy import ACTIVATIONS, About, Classified, Family, Order, Runs, activation_gaps
from lowtide.plan.views.evictions import evictions

VICTIMS = ("lru", "largest")
FORWARD_OPS = 4
# Look-aheads, in operators, and intervals, in round trips of the tensor, that algorithm 4 tries.
TRIED_FORWARD_OPS = (0, 1, FORWARD_OPS, 16, 64)
TRIED_ROUND_TRIPS = (0.0, 1.0)
# So many of the trial plans of algorithm 4 are run, the most promising first.
RUN_TRIALS = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What the survey leaves to the user.

    `victim`: "lru" or "largest". `forward_ops` or, if not None, `forward_s`: how far ahead reads are asked for.
    `interval_s`: how soon after the end of its swap-out a tensor may be needed again (None: `round_trips` times the
    time it takes to come back; 0: at any time).
    """

    victim: str = "lru"
    forward_ops: int = 0
    forward_s: float | None = None
    interval_s: float | None = None
    round_trips: float = 0.0

    def __post_init__(self) -> None:
        if self.victim not in VICTIMS:
            raise BadArgument(f"unknown victim {self.victim!r}: choose one of {', '.join(VICTIMS)}")
        for name in ("forward_ops", "forward_s", "interval_s", "round_trips"):
            value = getattr(self, name)
            if value is not None and value < 0:
                raise BadArgument(f"{name} is {value}: pass 0 or more")


def swap_outs(problem: Problem, facts: Sweep, settings: Settings, *, staying: Collection[int] = ()) -> tuple[Gap, ...]:
    """Return SO, by algorithms 1 and 3; the storages in `staying` are not swappable."""
    trace, sizes = problem.trace, facts.sizes
    gaps = [gap for gap in activation_gaps(trace) if gap.storage not in staying]

    def swappable(gap: Gap) -> bool:
        nbytes = sizes[gap.storage]
        interval_s = settings.interval_s
        if interval_s is None:
            interval_s = settings.round_trips * facts.link.read_s(nbytes)
        if interval_s <= 0:
            return True
        swapped_out_s = facts.start_s[gap.after_op] + facts.link.write_s(nbytes)
        return facts.start_s[gap.before_op] - swapped_out_s >= interval_s

    done_with = [gap for gap in gaps if sizes[gap.storage] and not facts.returns(gap) and swappable(gap)]
    change = [0] * (len(trace.ops) + 1)
    for gap in done_with:
        change[gap.after_op] -= sizes[gap.storage]
        change[gap.before_op] += sizes[gap.storage]
    need_bytes = [
        peak + away - problem.budget_bytes for peak, away in zip(facts.peak_bytes, accumulate(change), strict=False)
    ]

    def oldest(gap: Gap) -> float:
        return gap.after_op

    def largest(gap: Gap) -> float:
        return -sizes[gap.storage]

    gone = evictions(
        trace,
        [gap for gap in gaps if facts.returns(gap)],
        need_bytes=need_bytes,
        order=oldest if settings.victim == "lru" else largest,
        may_leave=swappable,
    )
    return tuple(sorted((*done_with, *gone)))


def swap_ins(problem: Problem, facts: Sweep, gaps: Sequence[Gap], settings: Settings) -> tuple[Swap, ...]:
    """Return the swaps of SO with the moments at which SI takes place, by algorithm 2."""
    swaps = []
    for gap in gaps:
        if settings.forward_s is not None:
            ahead_op = bisect_right(facts.start_s, facts.start_s[gap.before_op] - settings.forward_s)
        else:
            ahead_op = gap.before_op - settings.forward_ops
        fetch_op = min(max(ahead_op, gap.after_op + 1), gap.before_op)
        swaps.append(Swap(gap=gap, fetch_op=fetch_op, tier=problem.tier))
    return that_fit(problem, swaps)


class _Survey:
    """What the four algorithms share."""

    name: ClassVar[str]
    about: About

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        order = Order.LARGEST if settings.victim == "largest" else Order.OLDEST
        self.about = replace(type(self).about, victims=order)

    def plan(self, problem: Problem) -> Plan:
        """Return what leaves when memory runs out, and when it comes back."""
        return self._planned(problem, ())

    def _planned(self, problem: Problem, staying: Collection[int]) -> Plan:
        if problem.trace.peak_bytes <= problem.budget_bytes:
            return compose(self.name, problem, notes=(FITS,))
        facts = Sweep(problem)
        gaps = swap_outs(problem, facts, self._settings, staying=staying)
        notes = (f"not swappable any more: {len(staying)} storages",) if staying else ()
        return compose(self.name, problem, swap_ins(problem, facts, gaps, self._settings), notes=notes)


def _about(family: Family, reconstructed: str) -> About:
    return About(
        kinds=ACTIVATIONS,
        family=family,
        classified=Classified(granularity="tensor", memory="device and host", moment="dynamic", objective="time"),
        runs=(Runs.REAL, Runs.SIMULATED),
        paper="Gao et al., Journal of Software 34(12), 2023",
        reconstructed=reconstructed,
    )


class Survey1(_Survey):
    """Swaps out when memory runs out; everything comes back on demand."""

    name = "survey1"
    summary = "survey, algorithm 1: swaps out the least recently used when memory runs out"
    about = _about(
        Family.SWAP_OUT,
        "pseudo-code only; it does not say how tensors come back: on demand; nothing leaves while the step fits",
    )

    def __init__(self, *, victim: str = "lru") -> None:
        super().__init__(Settings(victim=victim))


class Survey2(_Survey):
    """Swaps out as algorithm 1 and in ahead of use: by dependency, or by access time if `forward_s` is given."""

    name = "survey2"
    summary = "survey, algorithm 2: fetches the operands of the next operators ahead of them"
    about = _about(
        Family.SWAP_IN,
        f"pseudo-code only; swaps out by algorithm 1; looks {FORWARD_OPS} operators ahead; a read that does not fit is "
        "put off",
    )

    def __init__(self, *, victim: str = "lru", forward_ops: int = FORWARD_OPS, forward_s: float | None = None) -> None:
        super().__init__(Settings(victim=victim, forward_ops=forward_ops, forward_s=forward_s))


class Survey3(_Survey):
    """Swaps out and in, and learns what is not worth it.

    `interval_s`: what would be needed again within that time of its swap-out stays (None: the time it takes to come
    back). Each kind of step has a memory of its own.
    """

    name = "survey3"
    summary = "survey, algorithm 3: keeps tensors that are needed again soon, or were missed in the last step"
    about = _about(
        Family.JOINT,
        "pseudo-code only; the interval is the time of the transfer back; what was missed or came late is kept from "
        "the next step of its kind on, unless the step would not fit then",
    )

    def __init__(
        self,
        *,
        victim: str = "lru",
        forward_ops: int = FORWARD_OPS,
        forward_s: float | None = None,
        interval_s: float | None = None,
    ) -> None:
        super().__init__(
            Settings(
                victim=victim, forward_ops=forward_ops, forward_s=forward_s, interval_s=interval_s, round_trips=1.0
            )
        )
        self._staying: dict[Hashable, frozenset[int]] = {}

    def plan(self, problem: Problem) -> Plan:
        """Return the plan for a step nothing is known of but its trace."""
        self._staying.pop(_kind(problem.trace), None)
        return super().plan(problem)

    def observe(self, problem: Problem, plan: Plan, timeline: Timeline) -> Plan:
        """Return the plan for the next step, in which what was found in storage or came late stays, if that fits."""
        missed = {
            span.storage
            for span in timeline.spans
            if span.storage is not None
            and (
                (span.lane is Lane.IN and span.cause == "demand")
                or (span.lane is Lane.STALL and span.cause == "arrival")
            )
        }
        before = self._staying.get(_kind(problem.trace), frozenset())
        staying = before | missed
        if staying == before:
            return plan
        revised = self._planned(problem, staying)
        if revised.prediction is None or revised.prediction.peak_bytes > problem.budget_bytes:
            return plan
        self._staying[_kind(problem.trace)] = staying
        return revised


def _kind(trace: Trace) -> Hashable:
    """Return what tells the steps of a program apart: their operators."""
    return tuple(op.name for op in trace.ops)


class Survey4(_Survey):
    """Tries plans with different settings and keeps the fastest. `count_profile`: how many it may try.

    The most promising by prediction comes first; the next few are run in the steps that follow (`observe`), and the one
    whose step was the shortest stays.
    """

    name = "survey4"
    summary = "survey, algorithm 4: runs trial plans and keeps the fastest"
    about = _about(
        Family.JOINT,
        f"pseudo-code only; trials vary the victim, the look-ahead and the interval; all are predicted, and the "
        f"{RUN_TRIALS} best run",
    )

    def __init__(self, *, count_profile: int = 20) -> None:
        super().__init__(Settings())
        if count_profile < 1:
            raise BadArgument(f"count_profile is {count_profile}: a plan takes 1 trial or more")
        self._count_profile = count_profile
        self._waiting: dict[Hashable, list[Plan]] = {}
        self._ran: dict[Hashable, list[tuple[float, Plan]]] = {}

    def settings(self) -> tuple[Settings, ...]:
        """Return what is tried, in order."""
        grid = product(TRIED_ROUND_TRIPS, TRIED_FORWARD_OPS, VICTIMS)
        tried = [
            Settings(victim=victim, forward_ops=forward_ops, round_trips=round_trips)
            for round_trips, forward_ops, victim in grid
        ]
        return tuple(tried[: self._count_profile])

    def plan(self, problem: Problem) -> Plan:
        """Return the fastest trial that fits, or the one that needs least memory."""
        if problem.trace.peak_bytes <= problem.budget_bytes:
            return compose(self.name, problem, notes=(FITS,))
        facts = Sweep(problem)
        trials: list[tuple[Prediction, Settings, tuple[Swap, ...]]] = []
        for settings in self.settings():
            swaps = swap_ins(problem, facts, swap_outs(problem, facts, settings), settings)
            trials.append((facts.run(swaps).prediction, settings, swaps))

        def worth(trial: tuple[Prediction, Settings, tuple[Swap, ...]]) -> tuple[float, ...]:
            prediction = trial[0]
            over_bytes = max(0, prediction.peak_bytes - problem.budget_bytes)
            return (over_bytes, prediction.step_s, prediction.moved_out_bytes)

        plans: dict[tuple[Swap, ...], Plan] = {}
        for prediction, one, swaps in sorted(trials, key=worth):
            note = (
                f"of {len(trials)} trials, {format_seconds(prediction.step_s)}: {one.victim} first, "
                f"{one.forward_ops} operators ahead, intervals from {one.round_trips:g} round trips on"
            )
            plans.setdefault(swaps, compose(self.name, problem, swaps, notes=(note,), trials=len(trials)))
        best, *others = plans.values()
        self._waiting[_kind(problem.trace)] = others[: RUN_TRIALS - 1]
        self._ran[_kind(problem.trace)] = []
        return best

    def observe(self, problem: Problem, plan: Plan, timeline: Timeline) -> Plan:
        """Return the next trial, or the fastest of those that ran."""
        kind = _kind(problem.trace)
        ran, waiting = self._ran.setdefault(kind, []), self._waiting.get(kind, [])
        if all(plan.swaps != one.swaps for _, one in ran):
            ran.append((timeline.step_s, plan))
        if waiting and timeline.stall_s > 0:
            return waiting.pop(0)
        return min(ran, key=lambda one: one[0])[1]
