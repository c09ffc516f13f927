"""TierTrain: tensors leave and return by queues that know the step repeats (Intel, ISMM 2025; from its abstract).

CPU training with DRAM as the fast tier. No accesses are watched: what a step touches and when is known from the step
before. A queue of leaving tensors is served in the order of their last use, a queue of returning ones in the order of
their next. A tensor leaves if both transfers hide in its idle time; if that does not free enough, others follow by how
little they cost, as long as the step stays within a bound on its slowdown, and after that regardless.
"""

from __future__ import annotations

from lowtide.core.plan import Place, Plan, Problem
from lowtide.plan.compose import compose, nothing_to_place
from lowtide.plan.costs.curve import Curve
from lowtide.plan.policy import About, Classified, Family, Runs
from lowtide.plan.views.slow_memory import Course, SlowMemory


class TierTrain:
    """Queues out by last use and in by next use, within a bound on the slowdown."""

    name = "tiertrain"
    summary = "slow memory below DRAM: idle storages leave and return by queues, the rest is in place; a reconstruction"
    about = About(
        family=Family.PLACEMENT,
        classified=Classified(granularity="tensor", memory="fast and slow memory", moment="static", objective="memory"),
        runs=(Runs.EMULATED, Runs.SIMULATED),
        paper="TierTrain (Intel, ISMM 2025)",
        reconstructed="all but the abstract: which tensors leave, how early they return (twice their transfer), and "
        "that what cannot leave in time is used in slow memory",
    )

    def __init__(self, *, slowdown: float = 0.16) -> None:
        self.slowdown = slowdown

    def plan(self, problem: Problem) -> Plan:
        """Return the two queues' migrations, and what stays in slow memory."""
        if (nothing := nothing_to_place(self.name, problem)) is not None:
            return nothing
        memory = SlowMemory(problem)
        curve = Curve([op.peak_bytes for op in problem.trace.ops])
        gone = {storage: [False] * len(life.touches) for storage, life in memory.lives.items()}
        ahead: dict[int, dict[int, int]] = {}
        idle = sorted(_idle(memory), reverse=True)
        for slack_s, storage, j, begin, end in idle:
            if slack_s < 0 or max(curve.values()) <= problem.budget_bytes:
                break
            nbytes = memory.nbytes(storage)
            back_op = _back_op(memory, end, 2 * memory.link.read_s(nbytes))
            if back_op <= begin + 1:
                continue
            gone[storage][j] = True
            ahead.setdefault(storage, {})[end % memory.count] = back_op
            curve.add(begin, back_op, -nbytes)
        slow = self._stay(memory, curve, gone)
        places: list[Place] = [memory.for_life(storage) for storage in sorted(slow)]
        for storage, own in gone.items():
            if storage not in slow and any(own):
                course = Course(slow=(False,) * len(own), gone=tuple(own))
                places += memory.places(storage, course, synchronous=False, ahead=ahead.get(storage, {}))
        return compose(self.name, problem, places=places)

    def _stay(self, memory: SlowMemory, curve: Curve, gone: dict[int, list[bool]]) -> set[int]:
        """Return the storages that are used in slow memory, the cheapest per byte first, until the rest fits."""
        budget, bound_s = memory.problem.budget_bytes, self.slowdown * memory.problem.trace.duration_s
        order = sorted(
            memory.lives, key=lambda storage: (memory.total_extra_s(storage) / memory.nbytes(storage), storage)
        )
        slow: set[int] = set()
        cost_s = 0.0
        for within in (True, False):
            for storage in order:
                extra_s = memory.total_extra_s(storage)
                if storage in slow or (within and cost_s + extra_s > bound_s) or (within and any(gone[storage])):
                    continue
                begin, end = memory.span(storage)
                if curve.earliest(begin, end, limit_bytes=budget) == begin:
                    continue  # memory is not short while it is there
                slow.add(storage)
                cost_s += extra_s
                memory.add(curve, storage, sign=-1)
        return slow


def _idle(memory: SlowMemory) -> list[tuple[float, int, int, int, int]]:
    """Return every idle span of a storage: what is left of it after both transfers, whose it is, after which touch."""
    starts_s = [op.start_s for op in memory.trace.ops]
    step_s, count = memory.trace.duration_s, memory.count
    found = []
    for storage, life in memory.lives.items():
        nbytes = memory.nbytes(storage)
        transfers_s = memory.link.write_s(nbytes) + memory.link.read_s(nbytes)
        touches = life.touches
        ends = (*touches[1:], touches[0] + count) if touches and life.forever else touches[1:]
        for j, (op, until) in enumerate(zip(touches, ends, strict=False)):
            if op + 1 < until and op + 1 < count:
                idle_s = starts_s[until % count] + step_s * (until // count) - starts_s[(op + 1) % count]
                found.append((idle_s - 2 * transfers_s, storage, j, op + 1, until))
    return found


def _back_op(memory: SlowMemory, touch: int, before_s: float) -> int:
    """Return the operator that begins so many seconds before a touch."""
    op, left_s = touch, before_s
    while left_s > 0 and op > touch - memory.count:
        op -= 1
        left_s -= memory.trace.ops[op % memory.count].duration_s
    return op
