"""AutoTM: an integer programme decides where every tensor is at every kernel (Hildebrand et al., ASPLOS 2020).

Symbols, for storage t with touches j = 1..k: L_j = 1 if it is in slow memory at touch j, G_j = 1 if it is in the gap
after it; T_o the time of operator o; W_v = 1 if version v of a storage is written to slow memory; R_j = 1 if it is read
for touch j.

    minimise    sum T_o + sum w W_v + sum r R_j               moves that are waited for
    subject to  T_o >= d_o,  T_o >= its roofline in L,  T_o >= the pairs of operands that it mixes
                G_j >= L_j,  G_j >= L_{j+1}                    a stay in slow memory takes the gaps around it
                W_v >= G_j - L_j - (earlier L of the version)  a version is written once; what is born there is not
                R_{j+1} >= G_j - L_{j+1}
                fast bytes at every operator <= limit

`static`: one L for each storage and no moves. `synchronous`: as above. `asynchronous`: moves may also be charged to one
of the operators within `BOUND` of the touch, T_o >= the seconds of the moves beside it, and occupy fast memory until
then.

After a solve the storages in fast memory are laid out by first fit; where the heap passes the budget, the limit is
lowered by up to 10% around the operators at which it does, and the programme is solved again (the defragmentation
loop).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from lowtide.core.plan import Place, Plan, Problem
from lowtide.plan.compose import compose, nothing_to_place
from lowtide.plan.costs.sweep import Sweep
from lowtide.plan.policy import About, Classified, Family, Runs
from lowtide.plan.programme import Programme, Solution
from lowtide.plan.views.pools import Block, colour
from lowtide.plan.views.slow_memory import Course, SlowMemory

BOUND = 15
RADIUS = 10
MOST_ROUNDS = 3
# How many operators beside which a move may go are offered to the solver: those that take longest.
OFFERED = 3
MIB = 1 << 20
# More operands than this are not looked at in pairs.
MOST_PAIRED = 6


class Mode(StrEnum):
    """Which storages may move, and whether operators wait for them."""

    STATIC = "static"
    SYNCHRONOUS = "synchronous"
    ASYNCHRONOUS = "asynchronous"


@dataclass(slots=True)
class _Stays:
    """The variables of one storage: in slow memory at each touch and in each gap, and moves beside operators."""

    slow: list[int]
    gone: list[int]
    beside_in: dict[int, list[tuple[int, int]]]
    beside_out: dict[int, list[tuple[int, int]]]


class AutoTm:
    """Solves the placement of every storage with HiGHS; the three modes of the paper are three policies."""

    mode = Mode.SYNCHRONOUS
    name = "autotm"
    summary = "slow memory read in place: an integer programme places and moves every storage, moves are waited for"
    about = About(
        family=Family.PLACEMENT,
        classified=Classified(granularity="tensor", memory="fast and slow memory", moment="static", objective="time"),
        runs=(Runs.EMULATED, Runs.SIMULATED),
        paper="AutoTM (Hildebrand et al., ASPLOS 2020)",
        reconstructed="kernel times by placement are a roofline unless measured; pairs of operands stand for all "
        "placements of a kernel; a move beside operators may choose among the 3 longest within 15 of its touch",
    )

    def __init__(self, *, seconds: float = 20.0, gap: float = 0.01, defragments: bool = True) -> None:
        self.seconds = seconds
        self.gap = gap
        self.defragments = defragments

    def plan(self, problem: Problem) -> Plan:
        """Return the placement with the least predicted time that the solver finds."""
        if (nothing := nothing_to_place(self.name, problem)) is not None:
            return nothing
        memory = SlowMemory(problem)
        limits = [problem.budget_bytes] * memory.count
        notes: list[str] = []
        rounds: list[list[Place]] = []
        left_s = self.seconds
        for _ in range(MOST_ROUNDS if self.defragments else 1):
            found = solve(memory, self.mode, limits, seconds=max(left_s, 1.0), gap=self.gap)
            if found is None:
                notes.append("the solver found no placement: everything that can be is in slow memory")
                rounds = rounds or [[memory.for_life(storage) for storage in memory.lives]]
                break
            places, solution = found
            notes.append(f"{self.mode}: {solution.told()}")
            rounds.append(places)
            left_s -= solution.seconds
            if not self.defragments or left_s <= 0 or not _lower(memory, places, limits):
                break
        return compose(self.name, problem, places=best_round(problem, rounds), notes=notes)


class AutoTmStatic(AutoTm):
    """AutoTM without moves."""

    mode = Mode.STATIC
    name = "autotm_static"
    summary = "slow memory read in place: an integer programme places every storage for its life"


class AutoTmAsynchronous(AutoTm):
    """AutoTM with moves beside operators."""

    mode = Mode.ASYNCHRONOUS
    name = "autotm_async"
    summary = "slow memory read in place: an integer programme places and moves every storage, also beside operators"


def best_round(problem: Problem, rounds: Sequence[list[Place]]) -> list[Place]:
    """Return the placement with the shortest step of those that keep the budget; of equals the last.

    Later rounds have less of the solver's time, and may end with a longer step than the first. Here memory is pages,
    which no heap can fragment, so the first is as good as they are.
    """
    facts = Sweep(problem)

    def worth(places: list[Place]) -> tuple[bool, float]:
        prediction = facts.run((), (), places).prediction
        return prediction.peak_bytes > problem.budget_bytes, prediction.step_s

    return min(reversed(rounds), key=worth)


def solve(
    memory: SlowMemory, mode: Mode, limits: Sequence[int], *, seconds: float, gap: float, relaxed: bool = False
) -> tuple[list[Place], Solution] | None:
    """Return the placement that the solver finds within limits at every operator, and what it says of it."""
    built = _Built(memory, mode, limits)
    solution = built.programme.solve(seconds=seconds, gap=gap, relaxed=relaxed)
    return None if solution is None else ([] if relaxed else built.places(solution.values), solution)


class _Built:
    """The programme of one problem."""

    def __init__(self, memory: SlowMemory, mode: Mode, limits: Sequence[int]) -> None:
        self.memory = memory
        self.mode = mode
        self.programme = Programme()
        short = [op.peak_bytes > limit for op, limit in zip(memory.trace.ops, limits, strict=True)]
        # Only what is there while memory is short has a reason to be anywhere else than in fast memory.
        self.stays: dict[int, _Stays] = {}
        self.beside: dict[int, list[tuple[int, float]]] = {}
        for storage in memory.lives:
            begin, end = memory.span(storage)
            if any(short[op % memory.count] for op in range(begin, end)):
                self.stays[storage] = self._variables(storage)
        self._times()
        self._capacities(limits)

    def _variables(self, storage: int) -> _Stays:
        programme, life = self.programme, self.memory.lives[storage]
        if self.mode is Mode.STATIC or not life.touches:
            where = programme.choice()
            known = max(1, len(life.touches))
            return _Stays([where] * known, [where] * known, {}, {})
        known = len(life.touches)
        slow = [programme.choice() for _ in range(known)]
        gone = [programme.choice() for _ in range(known)]
        stays = _Stays(slow, gone, {}, {})
        nbytes, link = self.memory.nbytes(storage), self.memory.link
        write_s, read_s = link.write_s(nbytes, waited=True), link.read_s(nbytes, waited=True)
        version_slow: dict[int, float] = {}
        written = programme.choice(cost=write_s)
        for j in range(known):
            last = j + 1 == known and not life.forever
            after = (j + 1) % known
            programme.at_least({gone[j]: 1.0, slow[j]: -1.0}, 0.0) if gone[j] != slow[j] else None
            if self.memory.writes(storage, life.touches[j]) and j:
                written, version_slow = programme.choice(cost=write_s), {}
            version_slow = {**version_slow, slow[j]: 1.0}
            out = self._beside(storage, j, outward=True)
            stays.beside_out[j] = out
            # Written, waited for or beside an operator, unless the version has been in slow memory before.
            programme.at_least({written: 1.0, **{k: 1.0 for k, _ in out}, **version_slow, gone[j]: -1.0}, 0.0)
            if last:
                continue
            if after != j:
                programme.at_least({gone[j]: 1.0, slow[after]: -1.0}, 0.0)
            back = self._beside(storage, after, outward=False)
            stays.beside_in[after] = back
            read = programme.variable(cost=read_s, upper=1.0)
            terms = {read: 1.0, **{k: 1.0 for k, _ in back}, gone[j]: -1.0}
            terms[slow[after]] = terms.get(slow[after], 0.0) + 1.0
            programme.at_least(terms, 0.0)
        return stays

    def _beside(self, storage: int, touch: int, *, outward: bool) -> list[tuple[int, int]]:
        """Return choices of operators beside which a storage may move after or before a touch."""
        if self.mode is not Mode.ASYNCHRONOUS:
            return []
        memory, life = self.memory, self.memory.lives[storage]
        known, at = len(life.touches), life.touches[touch]
        if at >= memory.count:
            return []  # the next step knows it by another name
        if outward:
            end = life.touches[touch + 1] if touch + 1 < known else at + memory.count if life.forever else life.end_op
            near = range(at + 1, min(at + 1 + BOUND, end))
        else:
            begin = life.touches[touch - 1] if touch else life.touches[-1] - memory.count if life.forever else at
            near = range(max(begin + 1, at - BOUND), at)
            if not life.forever:
                near = range(max(near.start, 0), near.stop)
        longest = sorted(near, key=lambda op: -memory.trace.ops[op % memory.count].duration_s)[:OFFERED]
        link, nbytes, found = memory.link, memory.nbytes(storage), []
        for op in longest:
            move = self.programme.choice()
            seconds = link.write_s(nbytes) if outward else link.read_s(nbytes)
            self.beside.setdefault(op % memory.count, []).append((move, seconds))
            found.append((move, op))
        return found

    def _times(self) -> None:
        """Let every operator take what its operands' places and the moves beside it make of it."""
        memory, programme = self.memory, self.programme
        where: dict[int, dict[int, int]] = {}
        for storage, stays in self.stays.items():
            for j, at in enumerate(memory.lives[storage].touches):
                where.setdefault(at % memory.count, {})[memory.name_at(storage, at)] = stays.slow[j]
        for index in range(memory.count):
            op, operands = memory.trace.ops[index], where.get(index, {})
            took = programme.variable(cost=1.0)
            programme.at_least({took: 1.0}, op.duration_s)
            sizes = {name: (memory.tier, memory.trace.storages[name].nbytes) for name in operands}
            alone = {name: memory.times.of(index, {name: sizes[name]}) for name in operands}
            slope = self._slope(index, sizes, alone)
            if operands:
                programme.at_least(
                    {took: 1.0, **{operands[name]: -seconds for name, seconds in slope[1].items() if seconds}}, slope[0]
                )
                for name, seconds in alone.items():
                    programme.at_least({took: 1.0, operands[name]: op.duration_s - seconds}, op.duration_s)
            if len(operands) <= MOST_PAIRED:
                names = sorted(operands)
                for k, first in enumerate(names):
                    for second in names[k + 1 :]:
                        both = memory.times.of(index, {first: sizes[first], second: sizes[second]}) - op.duration_s
                        programme.at_least(
                            {took: 1.0, operands[first]: -both, operands[second]: -both}, op.duration_s - both
                        )
            moves = self.beside.get(index, ())
            if moves:
                programme.at_least({took: 1.0, **{move: -seconds for move, seconds in moves}}, 0.0)

    def _slope(
        self, index: int, sizes: dict[int, tuple[str, int]], alone: dict[int, float]
    ) -> tuple[float, dict[int, float]]:
        """Return a line below the operator's time: what it takes at least, and more for each operand in slow memory.

        The roofline is the larger of the operator's own time and a line in the bytes that are in slow memory; two
        placements of each operand tell that line, all of them and all but one.
        """
        duration_s = self.memory.trace.ops[index].duration_s
        if not sizes:
            return duration_s, {}
        everything_s = self.memory.times.of(index, sizes)
        if len(sizes) == 1 or everything_s <= duration_s:
            return duration_s, {name: seconds - duration_s for name, seconds in alone.items()}
        steps = {
            name: max(
                0.0,
                everything_s
                - self.memory.times.of(index, {other: size for other, size in sizes.items() if other != name}),
            )
            for name in sizes
        }
        # No placement may be above the line: it goes through "everything" and below each operand alone.
        start_s = min([everything_s - sum(steps.values()), *(alone[name] - steps[name] for name in sizes)])
        return start_s, steps

    def _capacities(self, limits: Sequence[int]) -> None:
        """Let no operator have more in fast memory than its limit."""
        memory = self.memory
        rows: list[dict[int, float]] = [{} for _ in range(memory.count)]
        for storage, stays in self.stays.items():
            self._absences(storage, stays, rows)
        for row, op, limit in zip(rows, memory.trace.ops, limits, strict=True):
            # What lacks may be more than everything: then everything goes.
            lack = min(op.peak_bytes - limit, sum(factor for factor in row.values() if factor > 0))
            if lack > 0:
                self.programme.at_least({k: factor / MIB for k, factor in row.items()}, lack / MIB)

    def _absences(self, storage: int, stays: _Stays, rows: list[dict[int, float]]) -> None:
        """Add to each operator's row what a storage frees there if it is in slow memory."""
        memory, life, nbytes = self.memory, self.memory.lives[storage], float(self.memory.nbytes(storage))
        touches, count = life.touches, self.memory.count
        begin, end = memory.span(storage)
        before = range(begin, end) if not touches else range(begin, begin if life.forever else touches[0])
        for op in before:
            _add(rows[op % count], stays.slow[0], nbytes)
        untils = (*touches[1:], touches[0] + count if life.forever else end) if touches else ()
        for j, (op, until) in enumerate(zip(touches, untils, strict=True)):
            _add(rows[op % count], stays.slow[j], nbytes)
            for between in range(op + 1, until):
                row = rows[between % count]
                _add(row, stays.gone[j], nbytes)
                # Before it has moved beside an operator, and while it does, it is in fast memory.
                for move, at in stays.beside_out.get(j, ()):
                    if between <= at:
                        _add(row, move, -nbytes)
                for move, at in stays.beside_in.get((j + 1) % len(touches), ()):
                    if between >= (at + count if at < op else at):
                        _add(row, move, -nbytes)

    def places(self, values: Sequence[float]) -> list[Place]:
        """Return the decisions of a solution."""
        memory, found = self.memory, []
        for storage, stays in self.stays.items():
            life = memory.lives[storage]
            slow = tuple(values[k] > 0.5 for k in stays.slow)
            gone = tuple(values[k] > 0.5 for k in stays.gone)
            if not life.touches:
                found += [memory.for_life(storage)] if slow[0] else []
                continue
            if not any(slow) and not any(gone):
                continue
            own = memory.places(storage, Course(slow=slow, gone=gone))
            found += [self._moved_beside(storage, place, stays, values) for place in own]
        return found

    def _moved_beside(self, storage: int, place: Place, stays: _Stays, values: Sequence[float]) -> Place:
        """Return a place with its migrations beside the operators that the solution chose for them."""
        memory, life = self.memory, self.memory.lives[storage]
        from_op, landed_op, fetch_op = place.from_op, place.landed_op, place.fetch_op
        inside = [
            op
            for op in (*life.touches, *((op + memory.count for op in life.touches) if life.forever else ()))
            if place.from_op <= op < place.until_op
        ]
        for j, op in enumerate(life.touches):
            if (op + 1) % memory.count == place.from_op % memory.count:
                for move, at in stays.beside_out.get(j, ()):
                    moment = place.from_op + (at - op - 1)
                    first = min((*inside, place.until_op))
                    if values[move] > 0.5 and moment < min(first, memory.count):
                        from_op, landed_op = moment, None
            if op % memory.count == place.until_op % memory.count:
                for move, at in stays.beside_in.get(j, ()):
                    moment = place.until_op - (op - at)
                    named = life.forever or moment < memory.count
                    if values[move] > 0.5 and named and moment > max((*inside, from_op)):
                        fetch_op = moment
        return Place(
            storage=storage,
            tier=place.tier,
            from_op=from_op,
            until_op=place.until_op,
            fetch_op=fetch_op,
            landed_op=landed_op,
        )


def _add(row: dict[int, float], variable: int, factor: float) -> None:
    row[variable] = row.get(variable, 0.0) + factor


def _lower(memory: SlowMemory, places: Sequence[Place], limits: list[int]) -> bool:
    """Lower the limits around operators where the heap passes the budget; tell whether there are any."""
    budget = memory.problem.budget_bytes
    facts = Sweep(memory.problem)
    if facts.run((), (), places).prediction.peak_bytes > budget:
        return False  # no limit helps: operators need that much
    slow: dict[int, list[tuple[int, int]]] = {}
    for place in places:
        slow.setdefault(place.storage, []).append((place.from_op, place.until_op))
    spans: list[tuple[int, int, int]] = []
    for storage in memory.lives:
        begin, end = memory.span(storage)
        moment = begin
        for from_op, until_op in sorted(slow.get(storage, ())):
            if moment < from_op:
                spans.append((moment, min(from_op, end), memory.nbytes(storage)))
            moment = max(moment, until_op)
        if moment < end:
            spans.append((moment, end, memory.nbytes(storage)))
    base = memory.base_bytes()
    blocks = [Block(nbytes=nbytes, first_op=begin, last_op=end - 1) for begin, end, nbytes in spans]
    layout = colour(blocks)
    over = set()
    for (begin, end, nbytes), offset in zip(spans, layout.offsets, strict=True):
        for op in range(begin, end):
            if offset + nbytes + base[op % memory.count] > budget:
                over.add(op % memory.count)
    if not over:
        return False
    most = max(0, layout.footprint_bytes + max(base) - budget)
    step = min(budget // 10, max(most // 2, 1))
    for op in {min(max(near, 0), memory.count - 1) for o in over for near in range(o - RADIUS, o + RADIUS + 1)}:
        limits[op] = max(0, min(limits[op], budget) - step)
    return True
