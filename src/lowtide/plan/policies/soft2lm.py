"""Soft2LM: advice of the application and a bounded rate of migration (Giardino et al., NAS 2016).

The application advises the class of each region; the operating system fills fast memory by it, and migrates pages to
fast memory only while the time lost to slow memory passes a threshold, and never more than so many pages a second.
"""

from __future__ import annotations

from lowtide.core.plan import Plan, Problem
from lowtide.core.trace import Kind
from lowtide.plan.compose import compose, nothing_to_place
from lowtide.plan.policy import About, Classified, Family, Runs
from lowtide.plan.views.slow_memory import SlowMemory

# What a training script would advise: state that every step reads and writes is hot, early activations are cold.
_ADVICE = {
    Kind.PARAM: 0,
    Kind.BUFFER: 0,
    Kind.GRAD: 1,
    Kind.SCRATCH: 1,
    Kind.OTHER: 2,
    Kind.INPUT: 2,
    Kind.ACTIVATION: 2,
    Kind.OPTIMIZER: 0,
}


class Soft2Lm:
    """Fills fast memory by advice, then migrates at a bounded rate."""

    name = "soft2lm"
    summary = "slow memory read in place: filled by advice on kinds of storages, few pages a second move to fast memory"
    about = About(
        family=Family.PLACEMENT,
        classified=Classified(granularity="page", memory="fast and slow memory", moment="dynamic", objective="time"),
        runs=(Runs.EMULATED, Runs.SIMULATED),
        paper="Soft2LM (Giardino et al., NAS 2016)",
        reconstructed="the advice for training; the threshold is a share of the step; the rate is that of the paper, "
        "1000 pages a second",
    )

    def __init__(self, *, pages_per_s: float = 1000.0, threshold: float = 0.02, advice: bool = True) -> None:
        self.pages_per_s = pages_per_s
        self.threshold = threshold
        self.advice = advice

    def plan(self, problem: Problem) -> Plan:
        """Return the placement by advice, and the migrations that the rate allows."""
        if (nothing := nothing_to_place(self.name, problem)) is not None:
            return nothing
        memory = SlowMemory(problem)

        def rank(storage: int) -> tuple[int, int, int]:
            begin, _ = memory.span(storage)
            return (_ADVICE[memory.kind(storage)], -begin, storage) if self.advice else (0, begin, storage)

        slow = memory.fill(sorted(memory.lives, key=rank))
        curve = memory.fast_bytes(slow)
        step_s = problem.trace.duration_s
        lost_s = sum(memory.total_extra_s(storage) for storage in slow)
        tokens = int(self.pages_per_s * step_s) * memory.link.page_bytes
        places, moved = [], 0
        for storage in sorted(slow, key=lambda storage: (-memory.total_extra_s(storage), storage)):
            nbytes = -(-memory.nbytes(storage) // memory.link.page_bytes) * memory.link.page_bytes
            pressed = lost_s > self.threshold * step_s
            course = memory.move_in_later(curve, storage) if pressed and moved + nbytes <= tokens else None
            if course is None:
                places.append(memory.for_life(storage))
                continue
            moved += nbytes
            later = [
                op for op, slow_then in zip(memory.lives[storage].touches, course.slow, strict=True) if not slow_then
            ]
            lost_s -= sum(memory.extra_s(storage, op) for op in later)
            places += memory.places(storage, course)
        return compose(self.name, problem, places=places)
