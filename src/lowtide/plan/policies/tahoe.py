"""Tahoe: a knapsack of data objects for every window of tasks (Wu, Ren and Li, SC 2018).

For object o in a window of tasks: benefit = the time its accesses take longer in slow memory; cost = what its copy
takes beyond the window before, which it overlaps; weight = benefit - cost. A 0/1 knapsack over fast memory chooses the
objects of each window, and a helper thread migrates them while the window before runs.
"""

from __future__ import annotations

from collections.abc import Sequence

from lowtide.core.plan import Plan, Problem
from lowtide.plan.compose import compose, nothing_to_place
from lowtide.plan.policy import About, Classified, Family, Runs
from lowtide.plan.views.slow_memory import Course, SlowMemory

# How many nodes a knapsack may look at before it takes the best it has.
MOST_NODES = 20_000


class Tahoe:
    """Chooses the objects of each window by a knapsack."""

    name = "tahoe"
    summary = "slow memory read in place: a knapsack fills fast memory for each window of the step"
    about = About(
        family=Family.PLACEMENT,
        classified=Classified(granularity="tensor", memory="fast and slow memory", moment="dynamic", objective="time"),
        runs=(Runs.EMULATED, Runs.SIMULATED),
        paper="Tahoe (Wu, Ren and Li, SC 2018)",
        reconstructed="a window is an equal part of the step's time; times come from the roofline, not from counters "
        "and a network; the knapsack is exact up to 20,000 nodes",
    )

    def __init__(self, *, windows: int = 16) -> None:
        self.windows = windows

    def plan(self, problem: Problem) -> Plan:
        """Return the migrations between the windows' choices."""
        if (nothing := nothing_to_place(self.name, problem)) is not None:
            return nothing
        memory = SlowMemory(problem)
        window = _windows(problem, self.windows)
        chosen = _chosen(memory, window)
        first_op = {number: op for op, number in reversed(list(enumerate(window)))}
        count, last = memory.count, window[-1]
        places = []
        for storage, life in memory.lives.items():
            touches = life.touches
            slow = tuple(storage not in chosen[window[op % count]] for op in touches)
            gone = tuple(
                not all(
                    storage in chosen[number % (last + 1)]
                    for number in range(
                        window[op % count] + (op // count) * (last + 1),
                        window[until % count] + (until // count) * (last + 1) + 1,
                    )
                )
                for op, until in zip(
                    touches,
                    (*touches[1:], touches[0] + count if life.forever else life.end_op - 1) if touches else (),
                    strict=True,
                )
            )
            if not touches:
                places.append(memory.for_life(storage))
            elif any(slow) or any(gone):
                ahead = {op % count: first_op[max(0, window[op % count] - 1)] + op // count * count for op in touches}
                places += memory.places(storage, Course(slow=slow, gone=gone), synchronous=False, ahead=ahead)
        return compose(self.name, problem, places=places, notes=(f"{last + 1} windows",))


def _windows(problem: Problem, count: int) -> list[int]:
    """Return the window of every operator: equal parts of the step's time."""
    step_s = max(problem.trace.duration_s, 1e-12)
    found = [min(count - 1, int(op.start_s / step_s * count)) for op in problem.trace.ops]
    numbers = {number: k for k, number in enumerate(sorted(set(found)))}
    return [numbers[number] for number in found]


def _chosen(memory: SlowMemory, window: Sequence[int]) -> list[set[int]]:
    """Return the objects in fast memory in each window."""
    base, chosen = memory.base_bytes(), list[set[int]]()
    for number in range(window[-1] + 1):
        ops = [op for op, own in enumerate(window) if own == number]
        begin, end = ops[0], ops[-1] + 1
        before_s = sum(op.duration_s for op, own in zip(memory.trace.ops, window, strict=True) if own == number - 1)
        room = memory.problem.budget_bytes - max(base[begin:end])
        objects, weights = [], []
        for storage, life in memory.lives.items():
            own = [op for op in life.touches if begin <= op % memory.count < end]
            if not own:
                continue
            benefit = sum(memory.extra_s(storage, op) for op in own)
            here = bool(chosen) and storage in chosen[-1]
            born = not life.forever and life.begin_op >= begin
            cost = 0.0 if here or born else max(0.0, memory.link.read_s(memory.nbytes(storage)) - before_s)
            objects.append(storage)
            weights.append(benefit - cost)
        picked = knapsack(weights, [memory.nbytes(storage) for storage in objects], room)
        chosen.append({objects[k] for k in picked})
    return chosen


def knapsack(values: Sequence[float], sizes: Sequence[int], capacity: int) -> set[int]:
    """Return the items with the largest value together that fit: branch and bound, best density first."""
    items = [k for k in range(len(values)) if values[k] > 0 and sizes[k] <= capacity]
    items.sort(key=lambda k: (-values[k] / max(1, sizes[k]), k))
    best_value, best = 0.0, frozenset[int]()
    nodes = 0
    stack: list[tuple[int, int, float, tuple[int, ...]]] = [(0, capacity, 0.0, ())]
    while stack:
        position, room, value, taken = stack.pop()
        nodes += 1
        if value > best_value:
            best_value, best = value, frozenset(taken)
        if nodes > MOST_NODES and best:
            break
        bound, left = value, room
        for k in items[position:]:
            if sizes[k] > left:
                bound += values[k] * left / sizes[k]
                break
            bound += values[k]
            left -= sizes[k]
        if position >= len(items) or bound <= best_value:
            continue
        k = items[position]
        stack.append((position + 1, room, value, taken))
        if sizes[k] <= room:
            stack.append((position + 1, room - sizes[k], value + values[k], (*taken, k)))
    return set(best)
