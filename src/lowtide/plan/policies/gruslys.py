"""Memory-efficient backpropagation through time: a dynamic programme over slots (Gruslys et al., NIPS 2016).

Symbols: *t* time steps, *m* slots for hidden states, costs in forward steps. With one slot everything is run again from
the beginning; otherwise a state is stored after *y* steps, the t - y after it are done with one slot fewer, and the y
before it with all of them:

    C(t, 1) = t (t + 1) / 2
    C(t, m) = 2 t - 1 if m >= t
    C(t, m) = min over y of y + C(t - y, m - 1) + C(y, m)

On a trace, a time step is what lies between two articulation points, and its hidden state is the point it ends with:
the cells of an unrolled RNN, the layers of a chain. What a step has inside is made again right before its own backward.
"""

from __future__ import annotations

from functools import cache

from lowtide.core.plan import Plan, Problem
from lowtide.plan.compose import compose, fastest_that_fits, nothing_to_discard
from lowtide.plan.policy import ACTIVATIONS, About, Classified, Family, Runs
from lowtide.plan.views.values import Values

# The table has as many rows as there are time steps: longer chains are taken several steps at a time.
MOST_STEPS = 192


@cache
def cost(t: int, m: int) -> int:
    """Return the forward steps that backpropagation through `t` time steps takes with `m` slots."""
    return _best(t, m)[0]


@cache
def split(t: int, m: int) -> int:
    """Return after how many steps the first state is stored (0: there is no slot for another)."""
    return _best(t, m)[1]


def _best(t: int, m: int) -> tuple[int, int]:
    if t <= 0:
        return 0, 0
    if m <= 1:
        return t * (t + 1) // 2, 0
    if m >= t:
        return 2 * t - 1, 1 if t > 1 else 0
    return min((y + cost(t - y, m - 1) + cost(y, m), y) for y in range(1, t))


def spine(begin: int, end: int, m: int) -> list[int]:
    """Return the states that are stored on the way through the steps `begin <= k < end`, with `m` slots for them.

    State `k` is the one before step `k`; that before `begin` is there already.
    """
    found = []
    while m > 1 and end - begin > 1:
        begin += split(end - begin, m)
        m -= 1
        found.append(begin)
    return found


def sweeps(t: int, m: int) -> dict[int, int]:
    """Return, for each state that is stored, the step whose backward is next when it is: t for the forward pass.

    A state that is in no sweep is made on the way to others, and never stored.
    """
    stored: dict[int, int] = {}

    def back(begin: int, end: int, slots: int, reached: int) -> None:
        points = [begin, *spine(begin, end, slots)]
        for point in points[1:]:
            stored[point] = reached
        # Later stretches are done first; each gives its slot back to those before it.
        stop = end
        for depth, point in reversed(list(enumerate(points))):
            if stop - point > 1 and slots - depth > 1 and stop != end:
                back(point, stop, slots - depth, stop)
            stop = point

    back(0, t, m, t)
    return stored


class Gruslys:
    """Stores hidden states by the dynamic programme, with as many slots as fit."""

    name = "gruslys"
    summary = "Gruslys: hidden states in as many slots as fit, by dynamic programming"
    about = About(
        kinds=ACTIVATIONS,
        family=Family.RECOMPUTE,
        classified=Classified(granularity="layer", memory="one memory", moment="static", objective="time"),
        runs=(Runs.REAL, Runs.SIMULATED),
        paper="Gruslys et al., NIPS 2016",
        reconstructed=(
            "hidden states only (HSM); time steps are what lies between articulation points, all taken to cost the "
            "same; the number of slots is the one whose plan fits and is fastest"
        ),
        recomputes=True,
    )

    def plan(self, problem: Problem) -> Plan:
        """Return the fastest of the plans that fit, by their slots."""
        if (idle := nothing_to_discard(self.name, problem)) is not None:
            return idle
        values = Values(problem)
        points = values.cuts()
        points = points[:: -(-len(points) // MOST_STEPS) or 1]
        steps = len(points) + 1
        tried = []
        low, high = 1, max(steps, 1)
        while low <= high:
            slots = (low + high) // 2
            plan = self.with_slots(problem, values, points, slots)
            tried.append(plan)
            assert plan.prediction is not None
            if plan.prediction.peak_bytes <= problem.budget_bytes:
                low = slots + 1
            else:
                high = slots - 1
        return fastest_that_fits(self.name, problem, tried)

    def with_slots(self, problem: Problem, values: Values, points: tuple[int, ...], slots: int) -> Plan:
        """Return the plan that stores hidden states in so many slots, the one before the first step among them."""
        steps = len(points) + 1
        stored = sweeps(steps, slots)
        bounds = [-1, *points, len(values.all) - 1]
        inside = [range(bounds[k] + 1, bounds[k + 1] + 1) for k in range(steps)]
        # The backward of a step begins with the first use of anything that it has made.
        begins = [min(values.at_once(members).values(), default=None) for members in inside]
        moments: dict[int, int | None] = {}
        for step, members in enumerate(inside):
            for k in members:
                state = step + 1 if k in points else None
                if not values.all[k].waiting or (state in stored and stored[state] == steps):
                    continue  # nothing waits, or it is stored in the forward pass
                moments[k] = begins[stored[state] - 1] if state in stored else begins[step]
        return compose(
            self.name,
            problem,
            (),
            values.discards(moments),
            notes=(f"{slots} slots for {steps} steps, {cost(steps, slots)} forward steps in theory",),
        )
