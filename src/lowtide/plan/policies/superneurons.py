"""SuperNeurons: free early, recompute what is cheap, and cache the rest in fast memory (Wang et al., PPoPP 2018).

Symbols: a *checkpoint* is an output that costs much to make (convolutions, fully connected layers, joins,
concatenations, data, softmax); a *segment* is what lies between two of them; l_i, the bytes that the backward pass of
layer i needs; l_peak, the largest of them.

1. Liveness: tensors that no operator reads any more are freed. A trace is recorded like that.
2. Recomputation: what activations, pools and normalisations make is discarded, and made again from the checkpoint
   before it. A segment that fits into l_peak is made once, as a whole, and kept (speed-centric); of a longer one each
   member is made when it is needed (memory-centric). So the peak stays at l_peak.
3. Cache: when memory still runs out, the least recently used tensor is copied out, while the operator waits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush

from lowtide.core.plan import Plan, Problem, Recompute, Swap
from lowtide.core.trace import Gap, Kind, Phase, Trace
from lowtide.core.units import format_bytes
from lowtide.plan.costs.curve import Curve
from lowtide.plan.costs.rerun import Reruns
from lowtide.plan.costs.sweep import predict
from lowtide.plan.policy import ACTIVATIONS, About, Classified, Family, Runs, activation_gaps
from lowtide.plan.views.layers import LayerKind, crossing_gaps, kind_of
from lowtide.plan.views.lineage import Lineage

_CHEAP = (LayerKind.ACTIVATION, LayerKind.NORM, LayerKind.POOL)
_STATE = (Kind.PARAM, Kind.BUFFER, Kind.GRAD, Kind.OPTIMIZER)


class SuperNeurons:
    """Recomputes cheap layers segment by segment and evicts the least recently used of the rest.

    `recompute=False` leaves the second of its three means out.
    """

    name = "superneurons"
    summary = "SuperNeurons: recomputes cheap layers, evicts the least recently used checkpoint on demand"
    about = About(
        kinds=ACTIVATIONS,
        family=Family.JOINT,
        classified=Classified(granularity="layer", memory="device and host", moment="dynamic", objective="memory"),
        runs=(Runs.REAL, Runs.SIMULATED),
        paper="Wang et al., PPoPP 2018",
        reconstructed=(
            "nothing is discarded while the step fits; a plan that does not fit gives up speed-centric segments first, "
            "then recomputation; workspaces are part of the recorded operators"
        ),
        recomputes=True,
    )

    def __init__(self, *, recompute: bool = True) -> None:
        self._recompute = recompute

    def plan(self, problem: Problem) -> Plan:
        """Return the first that fits: cost-aware recomputation, the leanest recomputation, swapping alone."""
        if problem.trace.peak_bytes <= problem.budget_bytes:
            return self._plan(problem, (), (), note="everything fits: nothing is moved")
        if self._recompute and problem.can_recompute:
            l_peak_bytes = largest_need_bytes(problem.trace)
            why = "nothing is cheap to make again: only swaps"
            for keep_bytes, style in ((l_peak_bytes, "cost-aware"), (-1, "memory-centric")):
                discarded = discards(problem.trace, keep_bytes=keep_bytes)
                if not discarded:
                    break
                swaps = kick_outs(problem, discarded)
                plan = self._plan(problem, swaps, discarded, note=f"{style} recomputation of {len(discarded)} storages")
                if plan.prediction is not None and plan.prediction.peak_bytes <= problem.budget_bytes:
                    return plan
                why = "recomputation does not fit: only swaps"
        elif self._recompute:
            why = "the executor cannot run operators again: only swaps"
        else:
            why = "recomputation is switched off: only swaps"
        return self._plan(problem, kick_outs(problem, ()), (), note=why)

    def _plan(self, problem: Problem, swaps: tuple[Swap, ...], discarded: tuple[Recompute, ...], *, note: str) -> Plan:
        prediction = predict(problem, swaps, discarded)
        notes = [note]
        if prediction.peak_bytes > problem.budget_bytes:
            notes.append(
                f"best effort: {format_bytes(prediction.peak_bytes)} are needed, "
                f"more than the budget of {format_bytes(problem.budget_bytes)}"
            )
        return Plan(
            policy=self.name,
            budget_bytes=problem.budget_bytes,
            swaps=swaps,
            recomputes=discarded,
            prediction=prediction,
            notes=tuple(notes),
        )


def largest_need_bytes(trace: Trace) -> int:
    """Return l_peak: the most bytes of activations and gradients that one backward operator works on."""

    def need_bytes(operands: set[int]) -> int:
        return sum(trace.storages[one].nbytes for one in operands if trace.storages[one].kind not in _STATE)

    backward = (op for op in trace.ops if op.phase is Phase.BACKWARD)
    return max((need_bytes({*op.reads, *op.writes}) for op in backward), default=0)


@dataclass(slots=True)
class _Segment:
    """What the cheap operators between two checkpoints made and autograd saved."""

    gaps: list[Gap] = field(default_factory=list)
    nbytes: int = 0


def discards(trace: Trace, *, keep_bytes: int) -> tuple[Recompute, ...]:
    """Return the recomputations; segments of at most `keep_bytes` are made at once and kept."""
    lineage = Lineage(trace)
    available = _Availability(trace)
    found: list[Recompute] = []
    for segment in _segments(trace, lineage):
        if segment.nbytes <= keep_bytes:
            at_once = min(gap.before_op for gap in segment.gaps)
            # A member that is still in use then could not have been discarded before: it gets its own recomputation.
            gaps = [
                Gap(storage=gap.storage, after_op=gap.after_op, before_op=at_once) if gap.after_op < at_once else gap
                for gap in segment.gaps
            ]
        else:
            gaps = segment.gaps
        found.extend(_recipes(trace, lineage, gaps, available))
    return tuple(sorted(found, key=lambda one: one.gap))


def _segments(trace: Trace, lineage: Lineage) -> list[_Segment]:
    crossing = crossing_gaps(trace)
    made_by: dict[int, list[int]] = {}
    for storage in crossing:
        producer = lineage.producer(storage)
        if producer is not None and trace.storages[storage].nbytes:
            made_by.setdefault(producer, []).append(storage)
    segments = [_Segment()]
    for index, op in enumerate(trace.ops):
        if op.phase is Phase.FORWARD:
            if kind_of(op) not in _CHEAP:
                segments.append(_Segment())
                continue
            for storage in made_by.get(index, ()):
                segments[-1].gaps.append(crossing[storage])
                segments[-1].nbytes += trace.storages[storage].nbytes
    return [segment for segment in segments if segment.gaps]


class _Availability:
    """Tells what is in memory, and unchanged, when operators run again."""

    def __init__(self, trace: Trace) -> None:
        self._storages = trace.storages
        self._changed_op: dict[int, int] = {}
        written: set[int] = set()
        for index, op in enumerate(trace.ops):
            for storage in op.writes:
                if storage in written:
                    self._changed_op.setdefault(storage, index)
                written.add(storage)

    def before(self, op: int, absent: dict[int, Gap]) -> Callable[[int], bool]:
        """Return the test for operators that run again before `op` while the gaps of `absent` are empty."""

        def available(storage: int) -> bool:
            one = self._storages[storage]
            if not one.first_op < op <= one.last_op or self._changed_op.get(storage, op) < op:
                return False
            gap = absent.get(storage)
            return gap is None or not gap.after_op <= op <= gap.before_op

        return available


def _recipes(trace: Trace, lineage: Lineage, gaps: Sequence[Gap], available: _Availability) -> list[Recompute]:
    """Return how the storages of a segment are made again, less those that would need a checkpoint's operator."""
    absent = {gap.storage: gap for gap in gaps}
    while True:
        found = []
        for gap in absent.values():
            ops: tuple[int, ...] | None = ()
            if gap.before_op < len(trace.ops):
                ops = lineage.recipe([gap.storage], available=available.before(gap.before_op, absent))
            if ops is None or any(kind_of(trace.ops[op]) not in _CHEAP for op in ops):
                break
            found.append(Recompute(gap=gap, ops=ops))
        else:
            return found
        # What stays is in memory for the others, so they are looked at once more.
        del absent[gap.storage]


def kick_outs(problem: Problem, discarded: Sequence[Recompute]) -> tuple[Swap, ...]:
    """Return the evictions of the cache: the least recently used checkpoint first, the rest if those are not enough."""
    trace = problem.trace
    need = _need_curve(trace, discarded)
    cheap = {storage for op in trace.ops if kind_of(op) in _CHEAP for storage in op.writes}
    opening: dict[int, list[Gap]] = {}
    for gap in _cacheable(trace, discarded):
        opening.setdefault(gap.after_op, []).append(gap)
    waiting: list[tuple[bool, int, Gap]] = []
    back_bytes = [0] * (len(trace.ops) + 1)
    away_bytes = 0
    swaps = []
    for index, need_bytes in enumerate(need):
        away_bytes -= back_bytes[index]
        for gap in opening.get(index, ()):
            heappush(waiting, (gap.storage in cheap, gap.after_op, gap))
        while waiting and need_bytes - away_bytes > problem.budget_bytes:
            _, _, gap = heappop(waiting)
            if gap.before_op > index:
                nbytes = trace.storages[gap.storage].nbytes
                away_bytes += nbytes
                back_bytes[gap.before_op] += nbytes
                evicted = Gap(storage=gap.storage, after_op=index, before_op=gap.before_op)
                swaps.append(Swap(gap=evicted, fetch_op=gap.before_op, tier=problem.tier))
    return tuple(sorted(swaps, key=lambda swap: swap.gap))


def _need_curve(trace: Trace, discarded: Sequence[Recompute]) -> list[int]:
    """Return the bytes of every operator, with the recomputation before it, while what is discarded is absent."""
    peaks = [op.peak_bytes for op in trace.ops]
    curve = Curve(peaks)
    for one in discarded:
        curve.add(one.gap.after_op, one.gap.before_op, -trace.storages[one.gap.storage].nbytes)
    need = curve.values()
    for rerun in Reruns(trace).of((), discarded, due_op=()) if discarded else ():
        absent_bytes = peaks[rerun.before_op] - need[rerun.before_op]
        need[rerun.before_op] = max(need[rerun.before_op], rerun.peak_bytes - absent_bytes)
    return need


def _cacheable(trace: Trace, discarded: Sequence[Recompute]) -> Iterator[Gap]:
    """Yield the gaps left to the cache, each ending where its storage is first read to make something again."""
    gone = {(one.gap.storage, one.gap.after_op) for one in discarded}
    read_at: dict[int, set[int]] = {}
    for one in discarded:
        for op in one.ops:
            for storage in trace.ops[op].reads:
                read_at.setdefault(storage, set()).add(one.gap.before_op)
    for gap in activation_gaps(trace):
        if (gap.storage, gap.after_op) in gone or not trace.storages[gap.storage].nbytes:
            continue
        after_op, before_op = gap.after_op, gap.before_op
        for op in sorted(read_at.get(gap.storage, ())):
            if op == after_op:
                after_op += 1
            elif after_op < op < before_op:
                before_op = op
        if after_op < before_op:
            yield Gap(storage=gap.storage, after_op=after_op, before_op=before_op)
