"""Sentinel: migration by intervals of layers, with the shape of tensors in mind (Ren et al., HPCA 2021).

One profiled step tells every tensor's lifetime in layers and its accesses; then:

- tensors that live no longer than a layer are allocated in a region of fast memory of their own, RS bytes, which is
  recycled and never migrates;
- tensors of like lifetime and access count share pages, and pages migrate whole (co-allocation);
- the step is cut into migration intervals (MI) of the same number of layers. When one begins, what the next needs is
  fetched; what the next does not need leaves after its last use. An interval is possible if what it needs fits,
  Tensors(MI) <= S - RS, and its migration takes no longer than it does, Tensors(MI) / B <= T(MI);
- the lengths that are possible are tried, one step each. What has not arrived when it is needed is waited for, or used
  in slow memory, whichever a trial finds faster.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from lowtide.core.plan import Place, Plan, Problem
from lowtide.plan.compose import compose, nothing_to_place
from lowtide.plan.costs.curve import Curve
from lowtide.plan.costs.sweep import Sweep
from lowtide.plan.policy import About, Classified, Family, Runs
from lowtide.plan.views.slow_memory import Course, SlowMemory, layer_of, layer_starts

# Lengths that are tried at most, spread over those that are possible.
MOST_TRIALS = 8
# A tensor smaller than this shares pages with others like it.
SHARES_PAGES_BELOW = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Interval:
    """A length of migration intervals, in layers, with what the model says of it."""

    layers: int
    fits: bool
    in_time: bool


class Sentinel:
    """Short-lived tensors stay in fast memory; long-lived ones migrate an interval ahead."""

    name = "sentinel"
    summary = "slow memory read in place: long-lived storages migrate by intervals of layers, short-lived never do"
    about = About(
        family=Family.PLACEMENT,
        classified=Classified(granularity="page", memory="fast and slow memory", moment="dynamic", objective="time"),
        runs=(Runs.EMULATED, Runs.SIMULATED),
        paper="Sentinel (Ren et al., HPCA 2021, arXiv 1909.05182)",
        reconstructed="a layer is a stretch of operators of one module; groups are formed by equal first and last "
        "layer and access count; what does not fit stays in slow memory, least accessed per byte first",
    )

    def __init__(self, *, layers: int | None = None, trials: int = MOST_TRIALS) -> None:
        self.layers = layers
        self.trials = trials

    def plan(self, problem: Problem) -> Plan:
        """Return the migrations of the interval length that a trial finds fastest."""
        if (nothing := nothing_to_place(self.name, problem)) is not None:
            return nothing
        profile = Profile(problem)
        lengths = [self.layers] if self.layers is not None else _tried(profile.intervals(), self.trials)
        facts = Sweep(problem)
        best: tuple[tuple[bool, float], list[Place], int, bool] | None = None
        trials = 0
        for length in lengths:
            for waits in (False, True):
                places = profile.places(length, waits=waits)
                seen = facts.run((), (), places).prediction
                rank = (seen.peak_bytes > problem.budget_bytes, seen.step_s)
                trials += 1
                if best is None or rank < best[0]:
                    best = (rank, places, length, waits)
        assert best is not None
        _, places, length, waits = best
        late = "waited for" if waits else "used in slow memory"
        note = f"migration interval of {length} layers of {profile.layer_count}; what is late is {late}"
        region = f"{len(profile.short_lived)} short-lived storages never migrate"
        return compose(self.name, problem, places=places, notes=(note, region), trials=trials)


def _lengths(layers: int) -> list[int]:
    """Return the lengths of intervals that are looked at: all short ones, and every longer one by a quarter."""
    found = [1]
    while found[-1] < layers:
        found.append(min(layers, max(found[-1] + 1, found[-1] * 5 // 4)))
    return found


def _tried(intervals: Sequence[Interval], most: int) -> list[int]:
    """Return the lengths to try: those that are possible, or all if none is, spread if they are many."""
    possible = [one.layers for one in intervals if one.fits and one.in_time] or [one.layers for one in intervals]
    step = max(1, len(possible) // most)
    return possible[::step][:most]


class Profile:
    """What the profiled step tells: layers, short-lived storages, and groups of like ones that share pages."""

    def __init__(self, problem: Problem) -> None:
        self.memory = SlowMemory(problem)
        self.problem = problem
        self.starts = layer_starts(problem)
        self.layer_count = len(self.starts)
        self.layer = layer_of(self.starts, self.memory.count)
        self.short_lived = frozenset(storage for storage in self.memory.lives if self._is_short_lived(storage))
        self.groups = self._groups()

    def _is_short_lived(self, storage: int) -> bool:
        life = self.memory.lives[storage]
        if life.forever or life.end_op > self.memory.count:
            return False
        return self.layer[life.end_op - 1] - self.layer[life.begin_op] <= 1

    def _groups(self) -> Mapping[int, int]:
        """Return the run that each small storage shares pages with."""
        alike: dict[tuple[int, ...], list[int]] = {}
        for storage, life in self.memory.lives.items():
            if storage in self.short_lived or self.memory.nbytes(storage) >= SHARES_PAGES_BELOW:
                continue
            layers = sorted({self.layer[op % self.memory.count] for op in life.touches})
            alike.setdefault((life.forever, len(life.touches), *layers[:1], *layers[-1:]), []).append(storage)
        runs = {}
        for number, members in enumerate(alike.values()):
            runs.update(dict.fromkeys(members, number))
        return runs

    def intervals(self) -> list[Interval]:
        """Return lengths of intervals with whether its tensors fit, and are moved in time."""
        memory, ops = self.memory, self.problem.trace.ops
        bandwidth = min(memory.link.read_bytes_per_s, memory.link.write_bytes_per_s)
        reserved = Curve(memory.base_bytes())
        for storage in self.short_lived:
            memory.add(reserved, storage)
        kept = reserved.values()
        needs = [{s for s in (*op.reads, *op.writes) if s in memory.lives and s not in self.short_lived} for op in ops]
        found = []
        for length in _lengths(self.layer_count):
            fits = in_time = True
            for first in range(0, self.layer_count, length):
                begin = self.starts[first]
                end = self.starts[first + length] if first + length < self.layer_count else memory.count
                touched = set().union(*needs[begin:end])
                needed = sum(map(memory.nbytes, touched))
                room = self.problem.budget_bytes - max(kept[begin:end], default=0)
                fits &= needed <= room
                in_time &= needed / bandwidth <= sum(op.duration_s for op in ops[begin:end])
            found.append(Interval(layers=length, fits=fits, in_time=in_time))
        return found

    def places(self, length: int, *, waits: bool) -> list[Place]:
        """Return the migrations of intervals of a length; `waits`: what is late is waited for, not used as it is."""
        memory = self.memory
        interval = [layer // length for layer in self.layer]
        first_op = {number: op for op, number in reversed(list(enumerate(interval)))}
        curve = Curve(memory.base_bytes())
        found: list[Place] = []
        for storage in sorted(self.short_lived, key=lambda storage: (-memory.total_extra_s(storage), storage)):
            if memory.fits(curve, storage):
                memory.add(curve, storage)
            else:  # the region is full
                found.append(memory.for_life(storage))
        wanted = [storage for storage in memory.lives if storage not in self.short_lived]
        wanted.sort(key=lambda storage: (-memory.total_extra_s(storage) / memory.nbytes(storage), storage))
        for storage in wanted:
            touches = memory.lives[storage].touches
            fetches = {op % memory.count: self._fetch_op(op, interval, first_op) for op in touches}
            course = self._course(storage, curve, interval, fetches, waits=waits)
            if not touches or any(course.slow) or any(course.gone):
                found += memory.places(storage, course, synchronous=False, ahead=fetches)
        return _in_runs(found, self.groups)

    def _fetch_op(self, op: int, interval: Sequence[int], first_op: Mapping[int, int]) -> int:
        """Return where what a touch needs is fetched: when the interval before its own begins."""
        step, index = divmod(op, self.memory.count)
        number = interval[index]
        return step * self.memory.count + (first_op[number - 1] if number else first_op[interval[-1]] - len(interval))

    def _course(
        self, storage: int, curve: Curve, interval: Sequence[int], fetches: Mapping[int, int], *, waits: bool
    ) -> Course:
        """Return where a storage is: in fast memory in the intervals that touch it and where that leaves room."""
        memory, life = self.memory, self.memory.lives[storage]
        nbytes, budget, count = memory.nbytes(storage), self.problem.budget_bytes, memory.count
        touches = life.touches
        if not touches or memory.fits(curve, storage):
            if touches:
                memory.add(curve, storage)
            return (
                Course(slow=(False,) * len(touches), gone=(False,) * len(touches))
                if touches
                else Course(slow=(), gone=())
            )
        untils = [*touches[1:], touches[0] + count if life.forever else life.end_op]
        intervals = interval[-1] + 1
        far = [
            interval[until % count] + intervals * (until // count)
            > interval[op % count] + intervals * (op // count) + 1
            for op, until in zip(touches, untils, strict=True)
        ]
        if not life.forever:
            far[-1] = True  # it may leave after its last use
        slow: list[bool] = []
        gone: list[bool] = []
        for j, (op, until) in enumerate(zip(touches, untils, strict=True)):
            born = j == 0 and not life.forever
            begin = life.begin_op if born else max(op - self._lead(op, interval), 0)
            end = max(op + 1 if far[j] else until, begin + 1)
            room = curve.earliest(begin, end, limit_bytes=budget - nbytes) == begin
            comes = not born and (far[j - 1] or slow[-1:] == [True])
            late = comes and memory.link.read_s(nbytes) > self._between_s(fetches[op % count], op)
            slow.append(not room or (late and not waits))
            gone.append(not slow[-1] and far[j] and (life.forever or j + 1 < len(touches)))
            if not slow[-1]:
                curve.add(begin, end, nbytes)
        return Course(slow=tuple(slow), gone=tuple(gone))

    def _between_s(self, begin: int, end: int) -> float:
        return sum(self.memory.trace.ops[op % self.memory.count].duration_s for op in range(begin, end))

    def _lead(self, op: int, interval: Sequence[int]) -> int:
        """Return how many operators before a touch its storage is asked for: from the interval before on."""
        index = op % self.memory.count
        back = index
        while back > 0 and interval[back - 1] >= interval[index] - 1:
            back -= 1
        return index - back


def _in_runs(places: Sequence[Place], groups: Mapping[int, int]) -> list[Place]:
    """Return the places with those of one group that move at the same operators in one run of pages."""
    alike: dict[tuple[object, ...], list[int]] = {}
    for k, place in enumerate(places):
        if place.storage in groups:
            key = (groups[place.storage], place.from_op, place.until_op, place.asked_op, place.landed_op)
            alike.setdefault(key, []).append(k)
    runs = {k: number for number, members in enumerate(alike.values()) if len(members) > 1 for k in members}
    return [replace(place, run=runs[k]) if k in runs else place for k, place in enumerate(places)]
