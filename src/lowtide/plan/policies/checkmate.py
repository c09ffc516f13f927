"""Checkmate: which values to keep and which to make again, by an integer programme (Jain et al., MLSys 2020).

Stages advance with the backward pass: stage s begins where a value is first needed that no earlier stage needed.
Symbols: R[s, i], value i is made again in stage s; S[s, i], it is in memory when stage s begins; c and m, its time and
bytes; U[s], the values that stage s needs; B, the budget.

    minimise    sum of c[i] R[s, i]
    subject to  R[s, j] <= R[s, i] + S[s, i]    for every i that j is made from
                S[s + 1, i] <= S[s, i] + R[s, i]
                R[s, i] + S[s, i] >= 1    for i in U[s]
                what every operator holds, less what is absent, and every stage with all it makes <= B

The approximation solves it without whole numbers at 0.9 of what B leaves above the floor, and rounds S at several
thresholds; R follows from S. POET (poet.py) and OffMate (offmate.py) are the same with a tier below: P[i], value i is
written out after its last use in forward; I[s, i], it is read in stage s. Both stand where R does in the rows above.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from itertools import pairwise
from math import inf

from lowtide.core.plan import Plan, Problem, Recompute, Swap
from lowtide.core.trace import Gap
from lowtide.errors import BadArgument
from lowtide.plan.compose import compose, fastest_that_fits, nothing_to_discard
from lowtide.plan.costs.options import link_to
from lowtide.plan.policy import ACTIVATIONS, About, Classified, Family, Runs
from lowtide.plan.programme import Programme, Solution
from lowtide.plan.views.values import Values

SOLVE_S = 5.0
GAP = 0.005
# Longer networks are taken several values at a time.
MOST_BLOCKS = 20
# How often the budget of the programme is lowered by what its plan passes ours.
REPAIRS = 5
THRESHOLDS = (0.1, 0.3, 0.5, 0.7, 0.9)
RELAXED_SHARE = 0.9


class Paging(Enum):
    """Whether values may also leave to a tier, and whether the step waits for their transfers."""

    NONE = "none"
    WAITED = "waited"
    OVERLAPPED = "overlapped"


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """One or more values in a row that are decided about together."""

    values: tuple[int, ...]
    nbytes: int
    cost_s: float
    sources: tuple[int, ...]
    stage: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """The S of a solution, by stage and block; which blocks are written out; and what the solver says of itself."""

    kept: tuple[tuple[float, ...], ...]
    paged: tuple[float, ...]
    solution: Solution


class Stages:
    """The blocks of one problem, the stages of its backward pass, and the programme over both."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.values = Values(problem)
        waiting = self.values.waiting()
        per_block = -(-len(waiting) // MOST_BLOCKS) or 1
        self.moments = sorted({min(self._uses(waiting[k : k + per_block])) for k in range(0, len(waiting), per_block)})
        self.blocks = self._blocks([waiting[k : k + per_block] for k in range(0, len(waiting), per_block)])

    def _uses(self, values: Sequence[int]) -> list[int]:
        return [op for k in values if (op := self.values.all[k].before_op) is not None]

    def _blocks(self, groups: Sequence[Sequence[int]]) -> tuple[Block, ...]:
        every = self.values.all
        found: list[Block] = []
        number: dict[int, int] = {}
        begin = 0
        for group in groups:
            members = range(begin, group[-1] + 1)
            number |= dict.fromkeys(members, len(found))
            found.append(
                Block(
                    values=tuple(members),
                    nbytes=sum(every[k].nbytes for k in members),
                    cost_s=sum(every[k].cost_s for k in members),
                    sources=tuple({number[one] for k in members for one in every[k].sources} - {len(found)}),
                    stage=self.moments.index(min(self._uses(group))),
                )
            )
            begin = group[-1] + 1
        return tuple(found)

    def solve(self, budget_bytes: float, *, paging: Paging, relaxed: bool = False) -> Answer | None:
        """Return what to keep (None: nothing keeps the budget, or nothing was found in time)."""
        programme = Programme()
        stages, blocks = range(len(self.moments)), range(len(self.blocks))
        # Where operators cannot run again, whatever the programme wants made is paged.
        again = 1.0 if self.problem.can_recompute else 0.0
        make = [
            [programme.variable(cost=block.cost_s, upper=again, integer=True) for block in self.blocks] for _ in stages
        ]
        keep = [[programme.choice() for _ in blocks] for _ in stages]
        link = link_to(self.problem.machine, self.problem.tier)
        waited = paging is Paging.WAITED
        paged = [
            programme.choice(cost=link.write_s(block.nbytes) if waited else 0.0) if paging is not Paging.NONE else None
            for block in self.blocks
        ]
        read = [
            [
                programme.choice(cost=link.read_s(block.nbytes) if waited else 0.0) if paged[i] is not None else None
                for i, block in enumerate(self.blocks)
            ]
            for _ in stages
        ]

        def there(stage: int, i: int, factor: float = 1.0) -> dict[int, float]:
            """Return the terms that say whether a block is in memory once a stage has made and read what it does."""
            fetched = read[stage][i]
            return {make[stage][i]: factor, keep[stage][i]: factor} | ({} if fetched is None else {fetched: factor})

        for s in stages:
            for i, block in enumerate(self.blocks):
                for source in block.sources:
                    programme.at_least({**there(s, source), make[s][i]: -1.0}, 0.0)
                if s + 1 < len(stages):
                    programme.at_least({**there(s, i), keep[s + 1][i]: -1.0}, 0.0)
                if block.stage == s:
                    programme.at_least(there(s, i), 1.0)
                fetched, out = read[s][i], paged[i]
                if fetched is not None and out is not None:
                    programme.at_least({out: 1.0, fetched: -1.0}, 0.0)
            self._hold(programme, s, there, budget_bytes)
        self._hold_forward(programme, keep[0] if len(stages) else [], budget_bytes)
        if paging is Paging.OVERLAPPED:
            self._overlap(programme, paged, read)
        solution = programme.solve(seconds=SOLVE_S, gap=GAP, relaxed=relaxed)
        if solution is None:
            return None
        return Answer(
            kept=tuple(tuple(solution.values[keep[s][i]] for i in blocks) for s in stages),
            paged=tuple(0.0 if out is None else solution.values[out] for out in paged),
            solution=solution,
        )

    def _hold(
        self, programme: Programme, s: int, there: Callable[[int, int, float], dict[int, float]], budget_bytes: float
    ) -> None:
        """Demand that a stage with all that it makes, and the operators until the next, are within the budget."""
        begin = self.moments[s]
        end = self.moments[s + 1] if s + 1 < len(self.moments) else len(self.problem.trace.ops)
        waits = [i for i, block in enumerate(self.blocks) if block.stage >= s]
        most_bytes = max(op.peak_bytes for op in self.problem.trace.ops[begin:end])
        fixed_bytes = most_bytes - sum(self.blocks[i].nbytes for i in waits)
        terms: dict[int, float] = {}
        for i in waits:
            terms |= there(s, i, -float(self.blocks[i].nbytes))
        programme.at_least(terms, fixed_bytes - budget_bytes)

    def _hold_forward(self, programme: Programme, keep: Sequence[int], budget_bytes: float) -> None:
        """Demand that every operator before the first stage is within the budget, with what is kept until then."""
        first = self.moments[0] if self.moments else 0
        leaves = [self.values.leaves_op(block.values) for block in self.blocks]
        bounds = sorted({0, first, *(op for op in leaves if op < first)})
        for begin, end in pairwise(bounds):
            most_bytes = max(op.peak_bytes for op in self.problem.trace.ops[begin:end])
            gone = [i for i, op in enumerate(leaves) if op <= begin]
            fixed_bytes = most_bytes - sum(self.blocks[i].nbytes for i in gone)
            if most_bytes > budget_bytes:
                terms = {keep[i]: -float(self.blocks[i].nbytes) for i in gone}
                programme.at_least(terms, fixed_bytes - budget_bytes)

    def _overlap(self, programme: Programme, paged: Sequence[int | None], read: Sequence[Sequence[int | None]]) -> None:
        """Charge only the transfers that take longer than the compute they run beside."""
        trace, link = self.problem.trace, link_to(self.problem.machine, self.problem.tier)
        first = self.moments[0] if self.moments else 0
        forward_s = sum(op.duration_s for op in trace.ops[:first])
        backward_s = sum(op.duration_s for op in trace.ops[first:])
        for busy, hidden_s in (
            ({out: link.write_s(b.nbytes) for out, b in zip(paged, self.blocks, strict=True)}, forward_s),
            ({one: link.read_s(b.nbytes) for row in read for one, b in zip(row, self.blocks, strict=True)}, backward_s),
        ):
            stall = programme.variable(cost=1.0, upper=inf)
            terms = {one: -seconds for one, seconds in busy.items() if one is not None}
            programme.at_least({**terms, stall: 1.0}, -hidden_s)

    def decisions(self, answer: Answer, *, threshold: float = 0.5) -> tuple[list[Swap], tuple[Recompute, ...]]:
        """Return what S means: a block is back in the stage since which it stays until it is needed."""
        moments: dict[int, int | None] = {}
        swaps: list[Swap] = []
        for i, block in enumerate(self.blocks):
            back = block.stage
            while back >= 0 and answer.kept[back][i] >= threshold:
                back -= 1
            if back < 0:
                continue  # kept from forward on
            for k in block.values:
                if not self.values.all[k].waiting:
                    continue
                if answer.paged[i] >= threshold:
                    swaps += self._swaps(k, back)
                else:
                    moments[k] = self.moments[back]
        away = {swap.gap.storage: swap.gap for swap in swaps}
        return swaps, self.values.discards(moments, away=away)

    def _swaps(self, k: int, back: int) -> list[Swap]:
        """Return the swaps of a value that is asked for a stage before the one that has it back."""
        found = []
        for gap in self.values.gaps_of(k):
            end = min(gap.before_op, max(self.moments[back], gap.after_op + 1))
            asked = max(gap.after_op + 1, self.moments[back - 1] if back else end)
            part = Gap(storage=gap.storage, after_op=gap.after_op, before_op=end)
            found.append(Swap(gap=part, fetch_op=min(asked, end), tier=self.problem.tier))
        return found


def _told(solution: Solution) -> str:
    """Return the solver and the gap in words; the time is the limit, so that equal problems give equal plans."""
    return f"{solution.solver}: objective {solution.objective:.6g} s, gap {solution.gap:.2%}, within {SOLVE_S:g} s"


def solved(name: str, problem: Problem, *, paging: Paging) -> Plan:
    """Return the plan of the programme, solved again with a lower budget while what follows from it passes ours."""
    stages = Stages(problem)
    budget_bytes, tried = (
        float(problem.budget_bytes),
        [compose(name, problem, notes=("the programme has no solution",))],
    )
    for _ in range(REPAIRS if stages.blocks else 0):
        answer = stages.solve(budget_bytes, paging=paging)
        if answer is None:
            break
        swaps, discards = stages.decisions(answer)
        note = f"{len(stages.blocks)} blocks, {len(stages.moments)} stages; {_told(answer.solution)}"
        plan = compose(name, problem, swaps, discards, notes=(note,))
        tried.append(plan)
        assert plan.prediction is not None
        over_bytes = plan.prediction.peak_bytes - problem.budget_bytes
        if over_bytes <= 0:
            break
        budget_bytes -= over_bytes
    return fastest_that_fits(name, problem, tried)


class Checkmate:
    """Solves the integer programme."""

    name = "checkmate"
    summary = "Checkmate: the least recomputation within the budget, by an integer programme"
    about = About(
        kinds=ACTIVATIONS,
        family=Family.RECOMPUTE,
        classified=Classified(granularity="tensor", memory="one memory", moment="static", objective="time"),
        runs=(Runs.REAL, Runs.SIMULATED),
        paper="Jain et al., MLSys 2020",
        reconstructed=(
            f"stages begin where backward first needs a value; beyond {MOST_BLOCKS} values several are one; all that a "
            "stage makes is held until its end; where a plan passes the budget, the programme's is lowered"
        ),
        recomputes=True,
    )

    def plan(self, problem: Problem) -> Plan:
        """Return the optimum of the programme, if its plan fits."""
        idle = nothing_to_discard(self.name, problem)
        return solved(self.name, problem, paging=Paging.NONE) if idle is None else idle


class CheckmateLp:
    """Solves it without whole numbers, and rounds: S counts as 1 from one of the `thresholds` on."""

    name = "checkmate_lp"
    summary = "Checkmate: the linear relaxation of its programme, rounded"
    about = About(
        kinds=ACTIVATIONS,
        family=Family.RECOMPUTE,
        classified=Classified(granularity="tensor", memory="one memory", moment="static", objective="time"),
        runs=(Runs.REAL, Runs.SIMULATED),
        paper="Jain et al., MLSys 2020",
        reconstructed="as checkmate; of the thresholds and of 0.9 and less of the budget the fastest plan that fits",
        recomputes=True,
    )

    def __init__(self, *, thresholds: Sequence[float] = THRESHOLDS) -> None:
        if not thresholds or not all(0 < threshold <= 1 for threshold in thresholds):
            raise BadArgument(f"thresholds are {tuple(thresholds)}: pass one or more above 0 and up to 1")
        self._thresholds = tuple(thresholds)

    def plan(self, problem: Problem) -> Plan:
        """Return the fastest rounding that fits."""
        if (idle := nothing_to_discard(self.name, problem)) is not None:
            return idle
        stages = Stages(problem)
        tried = [compose(self.name, problem, notes=("the programme has no solution",))]
        for share in (RELAXED_SHARE, 0.8, 0.65) if stages.blocks else ():
            floor_bytes = problem.trace.floor_bytes()
            limit_bytes = floor_bytes + share * (problem.budget_bytes - floor_bytes)
            answer = stages.solve(limit_bytes, paging=Paging.NONE, relaxed=True)
            for threshold in self._thresholds if answer is not None else ():
                assert answer is not None
                _, discards = stages.decisions(answer, threshold=threshold)
                note = f"S rounded at {threshold}; {_told(answer.solution)}"
                tried.append(compose(self.name, problem, (), discards, notes=(note,)))
        return fastest_that_fits(self.name, problem, tried)
