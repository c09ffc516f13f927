"""TensorFlow's swapping pass and the attention of Meng et al. (NIPS ML Systems workshop 2017).

The pass rewrites a static graph, and treats one peak at a time. Symbols: *peak*, when the last tensor alive at the
highest point was allocated; *uses left*, the consumers of a tensor that complete after the peak.

    required = bytes at the peak - budget
    fitness  = (earliest use left - peak)^2 / (uses left)^2 + (allocation - peak)^2
    take tensors of more than 1 KiB that live for more than 1 ms, fittest first, until they cover what is required

An operator waits for each copy out. The copy back is triggered by an ancestor of the consumer: the latest that ends
early enough for a transfer at 16 GB/s before the consumer's other inputs are there. At most 25 passes; a tensor that
was rewritten is on the skip list of the next ones.

The paper's other half makes the intermediate results of additive attention again in the backward pass.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass, field

from lowtide.core.plan import Plan, Problem, Recompute, Swap
from lowtide.core.trace import Gap, Phase, Trace
from lowtide.errors import BadArgument
from lowtide.plan.compose import FITS, compose
from lowtide.plan.costs.curve import Curve
from lowtide.plan.costs.sweep import Sweep
from lowtide.plan.policy import ACTIVATIONS, About, Classified, Family, Runs, activation_gaps
from lowtide.plan.views.layers import crossing_gaps
from lowtide.plan.views.lineage import Lineage, alive_when

# The constants of the pass (tensorflow/core/grappler/optimizers/memory_optimizer.cc).
MOST_PASSES = 25
LEAST_BYTES = 1024
LEAST_LIFETIME_S = 1e-3
ASSUMED_BYTES_PER_S = 16e9
# Between a softmax over attention scores and the tanh of additive attention lie a product and a change of shape.
_ATTENTION_DEPTH = 3


class Meng:
    """Rewrites the step peak by peak.

    `passes`: how many peaks at most. `attention=False` leaves the recomputation of attention out.
    """

    name = "meng"
    summary = "TensorFlow's swapping pass: the fittest tensors of one peak after the other; recomputes attention"
    about = About(
        kinds=ACTIVATIONS,
        family=Family.JOINT,
        classified=Classified(granularity="tensor", memory="device and host", moment="static", objective="memory"),
        runs=(Runs.REAL, Runs.SIMULATED),
        paper="Meng et al., NIPS ML Systems workshop 2017; TensorFlow's memory optimizer",
        reconstructed=(
            "a copy begins when the storage can leave, after the consumer that waits for it in TensorFlow, so the "
            "operator after the next waits; attention is found by its operators: tanh, a product, softmax"
        ),
        recomputes=True,
    )

    def __init__(self, *, passes: int = MOST_PASSES, attention: bool = True) -> None:
        if passes < 1:
            raise BadArgument(f"{passes} passes change nothing: give 1 or more")
        self._passes = passes
        self._attention = attention

    def plan(self, problem: Problem) -> Plan:
        """Return the swaps of all passes, and the recomputation of attention where it fits."""
        if problem.trace.peak_bytes <= problem.budget_bytes:
            return compose(self.name, problem, notes=(FITS,))
        facts = Sweep(problem)
        notes = []
        recomputes: tuple[Recompute, ...] = ()
        attention = additive_attention(problem.trace) if self._attention else ()
        if attention and problem.can_recompute:
            recomputes = _again(problem.trace, attention)
        elif attention:
            notes.append("the executor cannot run operators again: attention is swapped like everything else")
        rewriting = Rewriting(problem, facts, recomputes)
        passes = rewriting.run(self._passes)
        if recomputes and facts.run(rewriting.swaps(), recomputes).over:
            notes.append("making attention again does not fit: only swaps")
            recomputes = ()
            rewriting = Rewriting(problem, facts, ())
            passes = rewriting.run(self._passes)
        notes.insert(0, f"{passes} passes swap {len(rewriting.swapped)} tensors; {len(recomputes)} are made again")
        return compose(self.name, problem, rewriting.swaps(), recomputes, notes=notes)


@dataclass(slots=True)
class Rewriting:
    """The graph as the passes have left it so far: what is swapped, and what is not to be touched again."""

    problem: Problem
    facts: Sweep
    recomputes: tuple[Recompute, ...] = ()
    swapped: dict[int, Swap] = field(default_factory=dict)
    skip: set[int] = field(default_factory=set)
    _curve: Curve = field(init=False)
    _touches: dict[int, list[int]] = field(init=False)
    _gaps: list[Gap] = field(init=False)

    def __post_init__(self) -> None:
        trace = self.problem.trace
        self._curve = Curve(self.facts.peak_bytes)
        for one in self.recomputes:
            self._curve.add(one.gap.after_op, one.gap.before_op, -trace.storages[one.gap.storage].nbytes)
            # What is read to make attention again has to be there then.
            self.skip.add(one.gap.storage)
            self.skip.update(storage for op in one.ops for storage in trace.ops[op].reads)
        self._gaps = [gap for gap in activation_gaps(trace) if gap.storage not in self.skip]
        self._touches = {gap.storage: [] for gap in self._gaps}
        for index, op in enumerate(trace.ops):
            for storage in {*op.reads, *op.writes}.intersection(self._touches):
                self._touches[storage].append(index)

    def swaps(self) -> tuple[Swap, ...]:
        """Return what is swapped so far."""
        return tuple(sorted(self.swapped.values(), key=lambda swap: swap.gap))

    def run(self, passes: int) -> int:
        """Run passes until none changes anything; return how many did."""
        return next((done for done in range(passes) if not self.one_pass()), passes)

    def peak(self) -> tuple[int, int]:
        """Return the operator with the most bytes as the graph is now, and those bytes."""
        values = self._curve.values()
        most = max(values, default=0)
        return (values.index(most) if values else 0), most

    def one_pass(self) -> bool:
        """Swap what the highest peak requires; tell whether anything changed."""
        peak_op, peak_bytes = self.peak()
        required = peak_bytes - self.problem.budget_bytes
        if required <= 0:
            return False
        live = [gap for gap in self._gaps if gap.after_op <= peak_op < gap.before_op and self._swappable(gap)]
        peak_s = self._peak_s(peak_op)
        taken = False
        for gap in sorted(live, key=lambda gap: (-self._fitness(gap, peak_op, peak_s), gap)):
            if required <= 0:
                break
            nbytes = self.facts.sizes[gap.storage]
            required -= nbytes
            self.swapped[gap.storage] = self._rewrite(gap)
            self.skip.add(gap.storage)
            self._curve.add(gap.after_op, gap.before_op, -nbytes)
            taken = True
        return taken

    def _swappable(self, gap: Gap) -> bool:
        storage = self.problem.trace.storages[gap.storage]
        start_s = self.facts.start_s
        lifetime_s = start_s[min(storage.last_op + 1, len(start_s) - 1)] - start_s[max(storage.first_op, 0)]
        return gap.storage not in self.skip and storage.nbytes > LEAST_BYTES and lifetime_s > LEAST_LIFETIME_S

    def _peak_s(self, peak_op: int) -> float:
        """Return when the last tensor that is alive at the peak was allocated."""
        alive = (one.first_op for one in self.problem.trace.storages if one.first_op <= peak_op <= one.last_op)
        return self.facts.start_s[max(0, max(alive, default=0))]

    def _fitness(self, gap: Gap, peak_op: int, peak_s: float) -> float:
        touches = self._touches[gap.storage]
        uses_left = max(1, len(touches) - bisect_left(touches, peak_op + 1))
        earliest_s = self.facts.start_s[min(gap.before_op + 1, len(self.facts.duration_s))]
        allocated_s = self.facts.start_s[max(0, self.problem.trace.storages[gap.storage].first_op)]
        return (earliest_s - peak_s) ** 2 / uses_left**2 + (allocated_s - peak_s) ** 2

    def _rewrite(self, gap: Gap) -> Swap:
        trigger = in_trigger(
            self.problem.trace, gap, swap_s=self.facts.sizes[gap.storage] / ASSUMED_BYTES_PER_S, facts=self.facts
        )
        fetch_op = gap.before_op if trigger is None else max(trigger, gap.after_op) + 1
        return Swap(gap=gap, fetch_op=min(fetch_op, gap.before_op), tier=self.problem.tier, landed_op=gap.after_op + 1)


def in_trigger(trace: Trace, gap: Gap, *, swap_s: float, facts: Sweep) -> int | None:
    """Return the operator whose end lets the copy back begin, or None if the consumer has no ancestor early enough.

    It is an ancestor of the consumer, so that waiting for it never waits for the consumer itself.
    """
    if gap.before_op >= len(trace.ops):
        return None
    needed = {*trace.ops[gap.before_op].reads} - {gap.storage}
    latest_s: float | None = None
    for index in range(gap.before_op - 1, gap.after_op - 1, -1):
        op = trace.ops[index]
        if needed.isdisjoint(op.writes):
            continue
        # The first one found makes the last of the consumer's other inputs.
        if latest_s is None:
            latest_s = facts.start_s[index + 1] - swap_s
        if facts.start_s[index + 1] <= latest_s:
            return index
        needed.update(op.reads)
    return None


def additive_attention(trace: Trace) -> tuple[int, ...]:
    """Return the storages of additive attention's intermediate results: the tanh that a softmax rests on."""
    maker: dict[int, int] = {}
    found: set[int] = set()
    for index, op in enumerate(trace.ops):
        if op.phase is Phase.FORWARD and "softmax" in op.name and "log" not in op.name:
            reached = set(op.reads)
            for _ in range(_ATTENTION_DEPTH):
                makers = {maker[storage] for storage in reached if storage in maker}
                tanhs = {one for one in makers if "tanh" in trace.ops[one].name}
                found.update(storage for one in tanhs for storage in trace.ops[one].writes)
                reached = {storage for one in makers - tanhs for storage in trace.ops[one].reads}
        for storage in op.writes:
            maker[storage] = index
    return tuple(sorted(found))


def _again(trace: Trace, storages: tuple[int, ...]) -> tuple[Recompute, ...]:
    """Return how to make those storages again that can be, each before its use, from what is in memory then."""
    lineage = Lineage(trace)
    crossing = crossing_gaps(trace)
    gone = {storage for storage in storages if storage in crossing}
    found = []
    for storage in sorted(gone):
        gap = crossing[storage]

        def available(operand: int, op: int = gap.before_op) -> bool:
            return operand not in gone and alive_when(trace, operand, op)

        ops = lineage.recipe([storage], available=available, before_op=gap.before_op)
        if ops is not None:
            found.append(Recompute(gap=gap, ops=ops))
    return tuple(found)
