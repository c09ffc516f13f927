"""AccUDNN: swap what hides behind compute, and tune the batch to the memory that frees (Guo et al., ICCD 2019).

Symbols: b, samples in a batch; c(b) = alpha + beta b, the seconds of an operator; m(b) = delta + gamma b, the bytes of
a storage.

*Memory optimiser*: a gap is swapped if both its transfers hide behind the compute it covers. Its copy out begins when
the forward pass is done with it, its copy back at the last moment that still hides. What the model finds exposed all
the same is kept from then on, if something else can go instead.

*Hyper-parameter tuner*: the step is recorded at five batch sizes and its lines are fitted. The batch with the most
samples a second is the best, of those that fit; the learning rate grows with it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from lowtide.core.machine import Machine
from lowtide.core.plan import Plan, Problem
from lowtide.core.trace import Gap, Trace
from lowtide.errors import BadArgument
from lowtide.plan.auto.choose import Candidate, candidates, choose
from lowtide.plan.auto.layout import lay_out
from lowtide.plan.compose import FITS, compose
from lowtide.plan.costs.sweep import Outcome, Sweep
from lowtide.plan.policy import ACTIVATIONS, About, Classified, Family, Order, Runs, activation_gaps

ROUNDS = 8
# An operator that takes less of the step than this is left out of the quality of a fit: clocks do not resolve it.
NOTABLE_SHARE = 0.01


class AccUdnn:
    """Swaps the gaps whose transfers hide, latest read first."""

    name = "accudnn"
    summary = "AccUDNN: swaps tensors whose transfers hide behind compute, read at the last moment; tunes the batch"
    about = About(
        kinds=ACTIVATIONS,
        family=Family.JOINT,
        classified=Classified(granularity="tensor", memory="device and host", moment="static", objective="time"),
        runs=(Runs.REAL, Runs.SIMULATED),
        paper="Guo et al., ICCD 2019",
        reconstructed=(
            f"gaps with the most slack go first; exposed ones are exchanged in up to {ROUNDS} rounds; where hidden "
            "ones are not enough, others go as well; the tuner is `tune`, a plan is for the batch of its trace"
        ),
        victims=Order.FURTHEST,
    )

    def plan(self, problem: Problem) -> Plan:
        """Return the fastest of a few rounds, in each of which what was exposed in the last is kept."""
        if problem.trace.peak_bytes <= problem.budget_bytes:
            return compose(self.name, problem, notes=(FITS,))
        facts = Sweep(problem)
        found = candidates(problem, facts, activation_gaps(problem.trace))
        need = [peak - problem.budget_bytes for peak in facts.peak_bytes]
        exposed: frozenset[Gap] = frozenset()
        tried = []
        for _ in range(ROUNDS):

            def hidden_first(one: Candidate, exposed: frozenset[Gap] = exposed) -> tuple[float, ...]:
                return (one.gap in exposed, one.slack_s < 0, not one.worthwhile, -one.slack_s)

            chosen = choose(found, need_bytes=need, rank=hidden_first)
            swaps = lay_out(problem, facts, chosen, comfort_bytes=problem.budget_bytes, margin=0.0)
            outcome = facts.run(swaps)
            tried.append((_worth(outcome, problem), swaps))
            late = {swaps[k].gap for k, _ in outcome.late} - exposed
            if not late:
                break
            exposed |= late
        best = min(tried, key=lambda trial: trial[0])[1]
        slack = {one.gap: one.slack_s for one in found}
        hidden = sum(slack[swap.gap] >= 0 for swap in best)
        return compose(
            self.name,
            problem,
            best,
            notes=(f"{hidden} of {len(best)} swaps are short enough to hide",),
            trials=len(tried),
        )


def _worth(outcome: Outcome, problem: Problem) -> tuple[float, ...]:
    prediction = outcome.prediction
    over_bytes = max(0, prediction.peak_bytes - problem.budget_bytes)
    return (over_bytes, prediction.step_s, prediction.moved_out_bytes)


@dataclass(frozen=True, slots=True, kw_only=True)
class Lines:
    """Straight lines through measurements at several batch sizes, one each for many quantities."""

    at_zero: npt.NDArray[np.float64]
    per_sample: npt.NDArray[np.float64]
    r2: npt.NDArray[np.float64]
    """How much of the variation each line explains: 1 is all of it."""

    def at(self, batch: int) -> npt.NDArray[np.float64]:
        """Return the quantities at a batch size; none is negative."""
        return np.maximum(self.at_zero + self.per_sample * batch, 0.0)


def fit_lines(batches: Iterable[int], measured: npt.ArrayLike) -> Lines:
    """Return the least-squares lines through `measured[k][j]`, quantity j at the k-th of `batches`."""
    x = np.array(list(batches), dtype=np.float64)
    y = np.asarray(measured, dtype=np.float64)
    if len(np.unique(x)) < 2:
        raise BadArgument(
            f"{len(np.unique(x))} batch sizes are too few to fit a line: record the step at 2 or more (AccUDNN: 5)"
        )
    dx = x - x.mean()
    per_sample = dx @ (y - y.mean(axis=0)) / (dx @ dx)
    at_zero = y.mean(axis=0) - per_sample * x.mean()
    left = ((y - at_zero - np.outer(x, per_sample)) ** 2).sum(axis=0)
    total = ((y - y.mean(axis=0)) ** 2).sum(axis=0)
    # A quantity that does not vary is explained; what rounding leaves of it is not variation.
    constant = total <= 1e-18 * np.maximum((y**2).sum(axis=0), 1e-300)
    r2 = np.where(constant, 1.0, 1.0 - left / np.where(constant, 1.0, total))
    return Lines(at_zero=at_zero, per_sample=per_sample, r2=r2)


class BatchModel:
    """A step whose trace is known at any batch size, from traces at a few."""

    def __init__(self, samples: Mapping[int, Trace]) -> None:
        """Fit the traces of one model by batch size; they have to have the same operators and storages."""
        if not samples:
            raise BadArgument("no batch size was recorded: AccUDNN records the step at 5")
        self.batches = tuple(sorted(samples))
        traces = [samples[batch] for batch in self.batches]
        # Of the largest batch: small storages are not recorded as saved, and it has the fewest of them.
        self._shape = traces[-1]
        names = [op.name for op in self._shape.ops]
        for batch, trace in zip(self.batches, traces, strict=True):
            if [op.name for op in trace.ops] != names or len(trace.storages) != len(self._shape.storages):
                raise BadArgument(
                    f"the step at batch {batch} has {len(trace.ops)} operators and {len(trace.storages)} storages, at "
                    f"{self.batches[-1]} {len(names)} and {len(self._shape.storages)}: record one model, same options"
                )
        self._time = fit_lines(self.batches, [[op.duration_s for op in trace.ops] for trace in traces])
        self._peak = fit_lines(self.batches, [[op.peak_bytes for op in trace.ops] for trace in traces])
        self._nbytes = fit_lines(self.batches, [[one.nbytes for one in trace.storages] for trace in traces])
        self._static = fit_lines(self.batches, [[trace.static_bytes] for trace in traces])

    @property
    def time_r2(self) -> float:
        """The worst fit of the time of an operator that takes a notable share of the step."""
        seconds = self._time.at(self.batches[-1])
        notable = seconds >= NOTABLE_SHARE * seconds.sum()
        return float(self._time.r2[notable].min()) if notable.any() else 1.0

    @property
    def memory_r2(self) -> float:
        """The worst fit of the bytes of a storage."""
        return float(self._nbytes.r2.min()) if len(self._nbytes.r2) else 1.0

    def trace(self, batch: int) -> Trace:
        """Return the trace that is expected at a batch size."""
        if batch < 1:
            raise BadArgument(f"a batch of {batch} has no sample: pass 1 or more")
        seconds, peaks = self._time.at(batch), self._peak.at(batch)
        starts = [0.0, *np.cumsum(seconds)]
        ops = tuple(
            replace(op, start_s=float(start), duration_s=float(duration), peak_bytes=round(peak))
            for op, start, duration, peak in zip(self._shape.ops, starts, seconds, peaks, strict=False)
        )
        storages = tuple(
            replace(one, nbytes=round(nbytes))
            for one, nbytes in zip(self._shape.storages, self._nbytes.at(batch), strict=True)
        )
        return replace(self._shape, ops=ops, storages=storages, static_bytes=round(self._static.at(batch)[0]))


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchChoice:
    """What a batch size is expected to take, and whether it fits."""

    batch: int
    step_s: float
    peak_bytes: int
    fits: bool

    @property
    def samples_per_s(self) -> float:
        """The throughput."""
        return self.batch / self.step_s if self.step_s else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Tuning:
    """The batch sizes looked at, and the best of them (None: none fits).

    `learning_rate_factor`: the learning rate grows with the batch, from that of the smallest batch recorded.
    """

    choices: tuple[BatchChoice, ...]
    best: BatchChoice | None
    learning_rate_factor: float


def tune(
    model: BatchModel, *, machine: Machine, budget_bytes: int, batches: Iterable[int], tier: str = "spill"
) -> Tuning:
    """Return the batch size with the most samples a second within the budget, swaps included."""
    choices = []
    for batch in sorted(set(batches)):
        problem = Problem(trace=model.trace(batch), machine=machine, budget_bytes=budget_bytes, tier=tier)
        prediction = AccUdnn().plan(problem).prediction
        assert prediction is not None
        choices.append(
            BatchChoice(
                batch=batch,
                step_s=prediction.step_s,
                peak_bytes=prediction.peak_bytes,
                fits=prediction.peak_bytes <= budget_bytes,
            )
        )
    best = max((one for one in choices if one.fits), key=lambda one: (one.samples_per_s, -one.batch), default=None)
    factor = best.batch / model.batches[0] if best is not None else 1.0
    return Tuning(choices=tuple(choices), best=best, learning_rate_factor=factor)
