"""HALO: what is hot for its size and lifetime gets the fast memory (Han et al., IEEE Transactions on Computers 2020).

Filling fast memory over time is a temporal knapsack. Tensors are taken by value(t) = benefit(t) / (size lifetime), the
time that fast memory saves them, each where it fits for all of its life; the others live in slow memory. Those that are
still worth it migrate in when space appears for the rest of their life.
"""

from __future__ import annotations

from lowtide.core.plan import Plan, Problem
from lowtide.plan.compose import compose, nothing_to_place
from lowtide.plan.policies.first_touch import FirstTouch
from lowtide.plan.policy import About, Classified, Family, Runs
from lowtide.plan.views.slow_memory import SlowMemory


class Halo:
    """A bin-packing heuristic of the temporal knapsack, with migration into space that appears."""

    name = "halo"
    summary = (
        "slow memory read in place: storages that gain most per byte and lifetime are in fast memory, or move in later"
    )
    about = About(
        family=Family.PLACEMENT,
        classified=Classified(granularity="tensor", memory="fast and slow memory", moment="dynamic", objective="time"),
        runs=(Runs.EMULATED, Runs.SIMULATED),
        paper="HALO (Han et al., IEEE TC 2020)",
        reconstructed="the benefit is a roofline's; the order of packing; migrations are waited for and have to pay "
        "for themselves; it is first touch where that is predicted to be faster",
    )

    def plan(self, problem: Problem) -> Plan:
        """Return the packing."""
        if (nothing := nothing_to_place(self.name, problem)) is not None:
            return nothing
        memory = SlowMemory(problem)

        def value(storage: int) -> float:
            area = memory.nbytes(storage) * max(1, memory.lifetime(storage))
            return memory.total_extra_s(storage) / area

        order = sorted(memory.lives, key=lambda storage: (-value(storage), storage))
        slow = memory.fill(order)
        curve = memory.fast_bytes(slow)
        places = []
        for storage in (storage for storage in order if storage in slow):
            course = memory.move_in_later(curve, storage)
            places += [memory.for_life(storage)] if course is None else memory.places(storage, course)
        packed = compose(self.name, problem, places=places)
        plain = compose(self.name, problem, places=FirstTouch().plan(problem).places)
        assert packed.prediction is not None
        assert plain.prediction is not None
        return min(packed, plain, key=lambda plan: plan.prediction.step_s if plan.prediction is not None else 0.0)
