"""moDNN: swap when memory runs short, fetch as late as possible, postpone what does not fit (Chen et al., DATE 2018).

Symbols: *target*, the memory a trial plan lives in; b, the number of pieces a batch is cut into.

A trial walks through the operators with the memory curve beside it. Where an operator does not fit, the least recently
used storage leaves, from the moment it became free, so that its copy overlaps with what came since; if that copy cannot
be over by now and the operator has an algorithm with a smaller workspace, it takes that one instead. Reads are then
laid out at the last moment the link leaves them, and postponed where they would not fit. Trials run over targets up to
the budget, and over the ways to cut the batch; the fastest wins.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

from lowtide.core.plan import Plan, Prediction, Problem, Swap
from lowtide.core.trace import Gap, Kind, Phase, Trace
from lowtide.core.units import format_bytes, format_seconds
from lowtide.errors import BadArgument
from lowtide.plan.auto.choose import candidates
from lowtide.plan.auto.layout import lay_out
from lowtide.plan.costs.sweep import Sweep
from lowtide.plan.policy import ACTIVATIONS, About, Classified, Family, Runs, activation_gaps
from lowtide.plan.views.algorithms import Table, fastest, with_algorithms

# Targets are this share of the way from the floor to the peak apart. They do not depend on the budget: a larger budget
# has the trials of a smaller one and more, so that it is never slower. Very long steps get fewer of them.
TARGETS = 16
TRIED_OPS = 250_000
_PER_SAMPLE = (Kind.INPUT, Kind.ACTIVATION, Kind.SCRATCH, Kind.OTHER)


@dataclass(frozen=True, slots=True, kw_only=True)
class SubBatch:
    """A batch cut into `pieces`: what the step is predicted to take, whether it fits, and the trials this took."""

    pieces: int
    step_s: float
    peak_bytes: int
    fits: bool
    trials: int


@dataclass(frozen=True, slots=True, kw_only=True)
class _Trial:
    swaps: tuple[Swap, ...]
    prediction: Prediction
    label: str


def sub_batched(problem: Problem, pieces: int) -> Problem:
    """Return the problem of one of `pieces` equal parts of the batch, of which gradients are accumulated.

    What is made for samples shrinks, and so do the times of the forward and backward pass; parameters, gradients and
    the update stay. An operator's time is taken to be proportional to its samples.
    """
    if pieces < 1:
        raise BadArgument(f"a batch cannot be cut into {pieces} pieces: pass 1 or more")
    trace = problem.trace
    storages = tuple(
        replace(one, nbytes=-(-one.nbytes // pieces)) if one.kind in _PER_SAMPLE and one.first_op >= 0 else one
        for one in trace.storages
    )
    saved = [old.nbytes - new.nbytes for old, new in zip(trace.storages, storages, strict=True)]
    change = [0] * (len(trace.ops) + 2)
    held = [0] * (len(trace.ops) + 2)
    for one, nbytes in zip(trace.storages, saved, strict=True):
        if one.first_op >= 0:
            for curve, amount in ((change, nbytes), (held, one.nbytes)):
                curve[one.first_op] += amount
                curve[min(one.last_op, len(trace.ops)) + 1] -= amount
    ops, start_s = [], 0.0
    for op, less_bytes, alive_bytes in zip(trace.ops, accumulate(change), accumulate(held), strict=False):
        # Beside its storages and what was there before, an operator holds scratch: that is made for samples as well.
        scratch_bytes = max(0, op.peak_bytes - trace.static_bytes - alive_bytes)
        duration_s = op.duration_s if op.phase is Phase.UPDATE else op.duration_s / pieces
        peak_bytes = op.peak_bytes - less_bytes - (scratch_bytes - scratch_bytes // pieces)
        ops.append(replace(op, start_s=start_s, duration_s=duration_s, peak_bytes=peak_bytes))
        start_s += duration_s
    return replace(problem, trace=replace(trace, ops=tuple(ops), storages=storages))


class Modnn:
    """Swaps on demand and fetches just in time, by trial.

    `algorithms` states the ways to run operators; `sub_batches` are the numbers of pieces to consider cutting the batch
    into. A plan is for the batch as it was recorded: that a cut would be faster, or is needed, is in its notes.
    """

    name = "modnn"
    summary = "moDNN: evicts the least recently used early enough to overlap, fetches at the last moment"
    about = About(
        kinds=ACTIVATIONS,
        family=Family.JOINT,
        classified=Classified(granularity="layer", memory="device and host", moment="static", objective="time"),
        runs=(Runs.REAL, Runs.SIMULATED),
        paper="Chen et al., DATE 2018; IEEE TPDS 2019",
        reconstructed=(
            "the search: trials over targets of memory, each judged by prediction; cutting the batch is simulated and "
            "reported, with times proportional to samples; convolution algorithms only from a stated table"
        ),
    )

    def __init__(self, *, algorithms: Table | None = None, sub_batches: Sequence[int] = (1,)) -> None:
        self._algorithms = dict(algorithms or {})
        self._sub_batches = tuple(sub_batches)

    def plan(self, problem: Problem) -> Plan:
        """Return the fastest trial of the whole batch, with a note on the pieces that would do better."""
        best, trials = self._best(problem)
        notes = [best.label]
        if best.prediction.peak_bytes > problem.budget_bytes:
            notes.append(
                f"best effort: {format_bytes(best.prediction.peak_bytes)} are needed, "
                f"more than the budget of {format_bytes(problem.budget_bytes)}"
            )
        if self._sub_batches != (1,):
            cuts = self.sub_batch_choices(problem)
            trials += sum(cut.trials for cut in cuts if cut.pieces > 1)
            fitting = [cut for cut in cuts if cut.fits]
            if fitting:
                cut = min(fitting, key=lambda cut: (cut.step_s, cut.pieces))
                notes.append(f"fastest cut of the batch: {cut.pieces} pieces, {format_seconds(cut.step_s)} a step")
            else:
                notes.append(f"no cut of the batch fits: {', '.join(str(cut.pieces) for cut in cuts)} pieces tried")
        return Plan(
            policy=self.name,
            budget_bytes=problem.budget_bytes,
            swaps=best.swaps,
            prediction=best.prediction,
            notes=tuple(notes),
            trials=trials,
        )

    def sub_batch_choices(self, problem: Problem) -> tuple[SubBatch, ...]:
        """Return what a step takes with the batch cut into each of the numbers of pieces."""
        found = []
        for pieces in self._sub_batches:
            part = sub_batched(problem, pieces)
            best, trials = self._best(part)
            update_s = sum(op.duration_s for op in part.trace.ops if op.phase is Phase.UPDATE)
            found.append(
                SubBatch(
                    pieces=pieces,
                    step_s=pieces * (best.prediction.step_s - update_s) + update_s,
                    peak_bytes=best.prediction.peak_bytes,
                    fits=best.prediction.peak_bytes <= problem.budget_bytes,
                    trials=trials,
                )
            )
        return tuple(found)

    def _best(self, problem: Problem) -> tuple[_Trial, int]:
        """Return the trial that fits and is fastest, or the one that needs least memory, and how many were made."""
        trials = list(self._trials(problem))
        fitting = [trial for trial in trials if trial.prediction.peak_bytes <= problem.budget_bytes]
        if fitting:
            return min(fitting, key=lambda one: (one.prediction.step_s, one.prediction.moved_out_bytes)), len(trials)
        return min(trials, key=lambda one: (one.prediction.peak_bytes, one.prediction.step_s)), len(trials)

    def _trials(self, problem: Problem) -> Iterator[_Trial]:
        table = self._algorithms
        trace = with_algorithms(problem.trace, table, fastest(table)) if table else problem.trace
        if trace.peak_bytes <= problem.budget_bytes:
            yield self._trial(problem, trace, trace.peak_bytes)
            return
        floor_bytes = trace.floor_bytes()
        span_bytes = trace.peak_bytes - floor_bytes
        count = max(2, min(TARGETS, TRIED_OPS // max(1, len(trace.ops))))
        for k in reversed(range(count)):
            target_bytes = floor_bytes + k * span_bytes // count
            if k == 0 or target_bytes <= problem.budget_bytes:
                trial = self._trial(problem, trace, target_bytes)
                yield trial
                if trial.prediction.peak_bytes <= problem.budget_bytes and trial.prediction.stall_s == 0:
                    return  # nothing is faster, and a smaller target moves more

    def _trial(self, problem: Problem, trace: Trace, target_bytes: int) -> _Trial:
        """Return the plan that lives within `target_bytes`, and what it takes within the budget."""
        gaps, downgraded = evictions(problem, trace, self._algorithms, target_bytes=target_bytes)
        label = f"lives in {format_bytes(target_bytes)}"
        if downgraded:
            trace = with_algorithms(problem.trace, self._algorithms, {**fastest(self._algorithms), **downgraded})
            label += f"; smaller workspaces at operators {', '.join(map(str, sorted(downgraded)))}"
        narrow = replace(problem, trace=trace, budget_bytes=target_bytes)
        facts = Sweep(narrow)
        chosen = [one for one in candidates(narrow, facts, activation_gaps(narrow.trace)) if one.gap in gaps]
        late = lay_out(narrow, facts, chosen, comfort_bytes=target_bytes, margin=0.0)
        judge = Sweep(replace(narrow, budget_bytes=problem.budget_bytes))
        return _Trial(swaps=late, prediction=judge.run(late).prediction, label=label)


def evictions(problem: Problem, trace: Trace, table: Table, *, target_bytes: int) -> tuple[set[Gap], dict[int, int]]:
    """Return the gaps that leave, least recently used first, and the algorithms taken where no copy is over in time.

    `trace` is the problem's with the fastest algorithms.
    """
    facts = Sweep(replace(problem, trace=trace))
    opening: dict[int, list[Gap]] = {}
    for gap in activation_gaps(trace):
        if facts.sizes[gap.storage]:
            opening.setdefault(gap.after_op, []).append(gap)
    choice = fastest(table)
    waiting: list[Gap] = []
    back_bytes = [0] * (len(trace.ops) + 1)
    leaving: set[Gap] = set()
    downgraded: dict[int, int] = {}
    away_bytes, head, copied_s = 0, 0, 0.0
    for index, op in enumerate(trace.ops):
        away_bytes -= back_bytes[index]
        waiting.extend(opening.get(index, ()))
        lacking_bytes = op.peak_bytes - away_bytes - target_bytes
        while lacking_bytes > 0 and head < len(waiting):
            gap = waiting[head]
            if gap.before_op <= index:
                head += 1
                continue
            nbytes = facts.sizes[gap.storage]
            over_s = max(copied_s, facts.start_s[gap.after_op]) + facts.link.write_s(nbytes)
            if over_s > facts.start_s[index] and index in table and index not in downgraded:
                k = _smaller_workspace(table, index, choice[index], lacking_bytes)
                if k != choice[index]:
                    downgraded[index] = k
                    freed = table[index][choice[index]].workspace_bytes - table[index][k].workspace_bytes
                    lacking_bytes -= freed
                    continue
            head += 1
            copied_s = over_s
            leaving.add(gap)
            away_bytes += nbytes
            lacking_bytes -= nbytes
            back_bytes[gap.before_op] += nbytes
    return leaving, downgraded


def _smaller_workspace(table: Table, op: int, current: int, lacking_bytes: int) -> int:
    """Return the fastest algorithm that frees what is lacking, or the leanest if none does."""
    row = table[op]
    enough = [k for k, one in enumerate(row) if one.workspace_bytes <= row[current].workspace_bytes - lacking_bytes]
    if enough:
        return min(enough, key=lambda k: row[k].duration_s)
    return min(range(len(row)), key=lambda k: (row[k].workspace_bytes, row[k].duration_s))
