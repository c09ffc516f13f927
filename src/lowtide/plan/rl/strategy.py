"""DeepTM's mechanisms, with knobs: heat of storages, blocks of pages, and migrations beside operators.

A reconstruction: of DeepTM (Zhou et al., IEEE TPDS 2024) only the abstract is known. The choices made here:

- *heat* of a storage: the weighted sum of four characteristics, each from 0 to 1 by rank: access (the seconds that slow
  memory costs it, per byte), size (small is hot), lifetime (short is hot) and reuse distance (near is hot);
- *aggregation*: storages below `BLOCK_BYTES` with the same life and touches, and heat of the same quarter, are one
  block of pages: one decision, one run of pages;
- *contiguous migration*: whatever moves at the same operators moves as one run, with one latency;
- *performance model*: what an operator takes with operands in slow memory (plan/costs/operator_times.py) against what a
  migration takes; a storage leaves a gap if that is `horizon` times as long as its two transfers, is asked back `lead`
  times its transfer before its touch, and does neither if slow memory costs less than `gain` times the transfer;
- fast memory is filled by heat, touch by touch: where a block does not fit it is touched in slow memory;
- *earned heat*: what a storage has cost a step, in slow memory or by being late, makes it hotter in the next ("squeaky
  wheel" optimisation, Joslin and Clements, JAIR 10, 1999), so that those come first which the four characteristics
  have misjudged.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from itertools import accumulate
from math import exp

from lowtide.core.plan import Place
from lowtide.plan.costs.curve import Curve
from lowtide.plan.costs.sweep import Outcome, Sweep
from lowtide.plan.views.slow_memory import Course, SlowMemory

CHARACTERISTICS = ("access", "size", "lifetime", "reuse")
BLOCK_BYTES = 2 << 20
HEAT_QUARTERS = 4
# How fast weights follow what a step has shown, and how much heat the dearest storage of a step earns.
RATE = 0.5
EARNED = 0.1


@dataclass(frozen=True, slots=True, kw_only=True)
class Knobs:
    """What an agent sets: the weights of the four characteristics, and how willing storages are to migrate."""

    weights: tuple[float, float, float, float] = (0.4, 0.1, 0.4, 0.1)
    horizon: float = 2.0
    lead: float = 2.0
    gain: float = 0.75

    def turned(self, action: Sequence[float]) -> Knobs:
        """Return the knobs that an action of seven numbers from -1 to 1 makes of these."""
        access, size, lifetime, reuse = (
            weight * exp(float(turn)) for weight, turn in zip(self.weights, action, strict=False)
        )
        total = access + size + lifetime + reuse
        return Knobs(
            weights=(access / total, size / total, lifetime / total, reuse / total),
            horizon=min(max(self.horizon * 2.0 ** float(action[4]), 0.25), 16.0),
            lead=min(max(self.lead * 2.0 ** float(action[5]), 0.25), 16.0),
            gain=min(max(self.gain + 0.5 * float(action[6]), 0.0), 2.0),
        )


class Blame(Enum):
    """What earned heat is in proportion to: seconds, or seconds for each byte and operator of fast memory taken."""

    SECONDS = "seconds"
    DENSITY = "density"


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """Storages that are placed and moved together; the first stands for all of them."""

    storages: tuple[int, ...]
    nbytes: int


class Strategy:
    """One problem, ready to be placed with any knobs. `aggregates` and `contiguous` switch a mechanism off."""

    def __init__(self, memory: SlowMemory, *, aggregates: bool = True, contiguous: bool = True) -> None:
        self.memory = memory
        self.aggregates = aggregates
        self.contiguous = contiguous
        self.characteristics = _characteristics(memory)
        self._starts_s = [0.0, *accumulate(op.duration_s for op in memory.trace.ops)]

    def heat(self, storage: int, weights: Sequence[float]) -> float:
        """Return how hot a storage is."""
        own = self.characteristics[storage]
        return sum(weight * value for weight, value in zip(weights, own, strict=True)) / max(sum(weights), 1e-12)

    def blocks(self, weights: Sequence[float], earned: Mapping[int, float] | None = None) -> list[Block]:
        """Return the blocks, the hottest first; `earned` is heat beside that of the characteristics."""
        memory, more = self.memory, earned or {}
        heats = {storage: self.heat(storage, weights) + more.get(storage, 0.0) for storage in memory.lives}
        alike: dict[object, list[int]] = {}
        for storage, life in memory.lives.items():
            small = self.aggregates and memory.nbytes(storage) < BLOCK_BYTES
            quarter = int(HEAT_QUARTERS * min(heats[storage], 0.999))
            key = (life.begin_op, life.end_op, life.touches, quarter) if small else storage
            alike.setdefault(key, []).append(storage)
        blocks = [Block(storages=tuple(members), nbytes=sum(map(memory.nbytes, members))) for members in alike.values()]
        return sorted(blocks, key=lambda block: (-max(heats[s] for s in block.storages), block.storages))

    def places(self, knobs: Knobs, earned: Mapping[int, float] | None = None) -> list[Place]:
        """Return the decisions for a step."""
        memory = self.memory
        curve = Curve(memory.base_bytes())
        found: list[Place] = []
        for number, block in enumerate(self.blocks(knobs.weights, earned)):
            course, ahead = self._course(block, curve, knobs)
            if course is None:
                continue
            run = number if len(block.storages) > 1 else None
            for storage in block.storages:
                if not memory.lives[storage].touches:
                    found.append(memory.for_life(storage))
                    continue
                found += [replace(p, run=run) for p in memory.places(storage, course, synchronous=False, ahead=ahead)]
        return _in_contiguous_runs(found) if self.contiguous else found

    def adapted(self, knobs: Knobs, places: Sequence[Place]) -> Knobs:
        """Return the knobs with weights that follow a step: characteristics of what was slow and dear gain weight."""
        costs = self._costs_s(places)
        total = sum(costs.values())
        if total <= 0 or not self.characteristics:
            return knobs
        means = [sum(own[k] for own in self.characteristics.values()) / len(self.characteristics) for k in range(4)]
        dear = [sum(self.characteristics[s][k] * cost for s, cost in costs.items()) / total for k in range(4)]
        weights = [
            weight * exp(RATE * (high - mean)) for weight, high, mean in zip(knobs.weights, dear, means, strict=True)
        ]
        scale = sum(weights)
        access, size, lifetime, reuse = (weight / scale for weight in weights)
        return replace(knobs, weights=(access, size, lifetime, reuse))

    def lessons(self, facts: Sweep, knobs: Knobs, *, count: int) -> Iterator[tuple[list[Place], Outcome]]:
        """Yield the decisions for so many steps in which storages earn heat, for each way of blaming, and their steps.

        The first of each series has no earned heat; a series ends early where no storage costs anything.
        """
        for blame in Blame:
            earned: dict[int, float] = {}
            for _ in range(count):
                places = self.places(knobs, earned)
                outcome = facts.run((), (), places)
                yield places, outcome
                earned = self.earned(earned, places, outcome, blame)
                if not any(earned.values()):
                    return

    def earned(
        self, before: Mapping[int, float], places: Sequence[Place], seen: Outcome, blame: Blame
    ) -> dict[int, float]:
        """Return the heat that storages have earned once a step has shown what each of them costs."""
        costs = self._costs_s(places)
        for position, late_s in seen.late:
            storage = places[position].storage
            costs[storage] = costs.get(storage, 0.0) + late_s
        if blame is Blame.DENSITY:
            costs = {
                storage: cost_s / (self.memory.nbytes(storage) * max(1, self.memory.lifetime(storage)))
                for storage, cost_s in costs.items()
            }
        most = max(costs.values(), default=0.0)
        found = dict(before)
        for storage, cost in costs.items() if most > 0 else ():
            found[storage] = found.get(storage, 0.0) + EARNED * cost / most
        return found

    def _costs_s(self, places: Sequence[Place]) -> dict[int, float]:
        """Return what each storage makes operators take longer that touch it in place, each operand taken alone."""
        memory, costs = self.memory, dict[int, float]()
        for place in places:
            touched = [op for op in memory.lives[place.storage].touches if place.from_op <= op < place.until_op]
            costs[place.storage] = costs.get(place.storage, 0.0) + sum(
                memory.extra_s(place.storage, op) for op in touched
            )
        return costs

    def _course(self, block: Block, curve: Curve, knobs: Knobs) -> tuple[Course | None, Mapping[int, int]]:
        """Return where a block is (None: in fast memory all its life), and where it is asked back for each touch."""
        memory, first = self.memory, block.storages[0]
        life, budget = memory.lives[first], memory.problem.budget_bytes
        if memory.fits(curve, first, block.nbytes):
            curve.add(*memory.span(first), block.nbytes)
            return None, {}
        touches = life.touches
        if not touches:
            return Course(slow=(), gone=()), {}
        write_s, read_s = memory.link.write_s(block.nbytes), memory.link.read_s(block.nbytes)
        untils = (*touches[1:], touches[0] + memory.count if life.forever else life.end_op)
        costs = [sum(memory.extra_s(storage, op) for storage in block.storages) for op in touches]
        far = [
            op + 1 < until and self._between_s(op + 1, until) >= knobs.horizon * (write_s + read_s)
            for op, until in zip(touches, untils, strict=True)
        ]
        if not life.forever:
            far[-1] = True
        slow: list[bool] = []
        ahead = {}
        for j, (op, until) in enumerate(zip(touches, untils, strict=True)):
            born = j == 0 and not life.forever
            comes = not born and (far[j - 1] or slow[-1:] == [True])
            begin = life.begin_op if born else self._before(op, knobs.lead * read_s) if comes else op
            begin = max(begin, touches[j - 1] + 1 if j else 0, 0)
            ahead[op % memory.count] = begin
            stretch = self._stretch_s(costs, far, j)
            pays = stretch > knobs.gain * (read_s if comes else write_s if born and far[0] else 0.0)
            end = max(op + 1 if far[j] else until, begin + 1)
            room = curve.earliest(begin, end, limit_bytes=budget - block.nbytes) == begin
            slow.append(not (pays and room) and (comes or born or not room or slow[-1:] == [True]))
            if not slow[-1]:
                curve.add(begin, end, block.nbytes)
        gone = [
            not now and leaves and (life.forever or j + 1 < len(touches))
            for j, (now, leaves) in enumerate(zip(slow, far, strict=True))
        ]
        return Course(slow=tuple(slow), gone=tuple(gone)), ahead

    def _stretch_s(self, costs: Sequence[float], far: Sequence[bool], j: int) -> float:
        """Return what slow memory costs from a touch on until the storage may leave again."""
        total = 0.0
        for cost, leaves in zip(costs[j:], far[j:], strict=True):
            total += cost
            if leaves:
                break
        return total

    def _between_s(self, begin: int, end: int) -> float:
        return self._at_s(end) - self._at_s(begin)

    def _at_s(self, op: int) -> float:
        step, index = divmod(op, self.memory.count)
        return step * self._starts_s[-1] + self._starts_s[index]

    def _before(self, op: int, seconds: float) -> int:
        """Return the last operator that begins so many seconds before another, in this step or the one before."""
        moment = self._at_s(op) - seconds
        step_s, count = self._starts_s[-1], self.memory.count
        back = 0
        while moment < 0 and back < 1:
            moment += step_s
            back += 1
        return min(op, bisect_right(self._starts_s, max(moment, 0.0)) - 1 - back * count)


def _characteristics(memory: SlowMemory) -> dict[int, tuple[float, float, float, float]]:
    """Return the four characteristics of every storage, each from 0 (cold) to 1 (hot) by its rank."""
    raw: dict[int, tuple[float, float, float, float]] = {}
    for storage, life in memory.lives.items():
        touches = life.touches
        spread = (touches[-1] - touches[0]) / (len(touches) - 1) if len(touches) > 1 else memory.lifetime(storage)
        raw[storage] = (
            memory.total_extra_s(storage) / memory.nbytes(storage),
            -float(memory.nbytes(storage)),
            -float(memory.lifetime(storage)),
            -float(spread),
        )
    found: dict[int, list[float]] = {storage: [] for storage in raw}
    for k in range(4):
        values = sorted({own[k] for own in raw.values()})
        rank = {value: (position + 1) / len(values) for position, value in enumerate(values)}
        for storage, own in raw.items():
            found[storage].append(rank[own[k]])
    return {storage: (own[0], own[1], own[2], own[3]) for storage, own in found.items()}


def _in_contiguous_runs(places: Sequence[Place]) -> list[Place]:
    """Return the places with those that move at the same operators in one run of pages."""
    runs: dict[tuple[object, ...], int] = {}
    for place in places:
        runs.setdefault((place.tier, place.from_op, place.until_op, place.asked_op, place.landed_op), len(runs))
    return [
        replace(place, run=runs[place.tier, place.from_op, place.until_op, place.asked_op, place.landed_op])
        for place in places
    ]
