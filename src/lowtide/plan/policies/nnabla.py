"""nnabla's window: what is used within a window ahead stays or is fetched, the rest leaves (Sony, arXiv 2010.14109).

Symbols: the *head* is the first operator that is not in the window; it runs ahead of the one that executes.

The order of all accesses is known from the first step. Before each operator the head moves on: as long as the operator
under it fits, with everything that the window needs in memory, and as long as no more than `prefetch_bytes` are on
their way ahead of their use. What the head passes is fetched now, if it is away. After each operator, what it has used
leaves, if its next use is not in the window.
"""

from __future__ import annotations

from lowtide.core.plan import Plan, Problem, Swap
from lowtide.core.trace import Gap
from lowtide.errors import BadArgument
from lowtide.plan.compose import compose
from lowtide.plan.costs.curve import Curve
from lowtide.plan.costs.sweep import Sweep
from lowtide.plan.policy import ACTIVATIONS, About, Classified, Family, Order, Runs, activation_gaps


class Nnabla:
    """Keeps a window of the near future in memory. `prefetch_bytes`: how much may be ahead of its use (None: all)."""

    name = "nnabla"
    summary = "nnabla: keeps the operands of a window ahead, as far as memory goes, and moves the rest"
    about = About(
        kinds=ACTIVATIONS,
        family=Family.JOINT,
        classified=Classified(granularity="tensor", memory="device and host", moment="static", objective="time"),
        runs=(Runs.REAL, Runs.SIMULATED),
        paper="Sony, arXiv 2010.14109, 2020",
        reconstructed=(
            "prefetches have no limit of their own but memory; a read asked for once is not cancelled, and the markers "
            "that hold the head back are a look at the memory curve"
        ),
        victims=Order.FURTHEST,
    )

    def __init__(self, *, prefetch_bytes: int | None = None) -> None:
        if prefetch_bytes is not None and prefetch_bytes < 0:
            raise BadArgument(f"prefetch_bytes is {prefetch_bytes}: pass 0 or more, or None for no limit")
        self._prefetch_bytes = prefetch_bytes

    def plan(self, problem: Problem) -> Plan:
        """Return what the window leaves out, each fetched when the head passes its next use."""
        swaps = _Window(problem, self._prefetch_bytes).swaps()
        return compose(self.name, problem, swaps)


class _Window:
    """The walk of one window through a step."""

    def __init__(self, problem: Problem, prefetch_bytes: int | None) -> None:
        self._problem = problem
        self._facts = Sweep(problem)
        self._prefetch_bytes = prefetch_bytes
        self._curve = Curve(self._facts.peak_bytes)
        self._away: dict[int, list[Gap]] = {}
        self._fetch_op: dict[Gap, int] = {}
        self._ahead: dict[int, int] = {}
        self._head = 0

    def swaps(self) -> list[Swap]:
        """Walk through all operators and return what left."""
        opening: dict[int, list[Gap]] = {}
        for gap in activation_gaps(self._problem.trace):
            if self._facts.sizes[gap.storage]:
                opening.setdefault(gap.after_op, []).append(gap)
        count = len(self._facts.peak_bytes)
        self._move_head(0)
        for op in range(count):
            self._ahead.pop(op, None)
            for gap in opening.get(op, ()):
                if gap.before_op >= self._head and self._head < count:
                    self._leave(gap)
            self._move_head(op)
        return [
            Swap(gap=gap, fetch_op=min(max(fetch_op, gap.after_op + 1), gap.before_op), tier=self._problem.tier)
            for gap, fetch_op in self._fetch_op.items()
        ]

    def _leave(self, gap: Gap) -> None:
        self._curve.add(gap.after_op, gap.before_op, -self._facts.sizes[gap.storage])
        self._away.setdefault(gap.before_op, []).append(gap)
        self._fetch_op[gap] = gap.before_op

    def _move_head(self, op: int) -> None:
        count = len(self._facts.peak_bytes)
        # The operator that executes is always in the window: what it lacks is fetched while it waits.
        while self._head < count and (self._passes(op) or self._head <= op):
            self._head += 1

    def _passes(self, op: int) -> bool:
        """Tell whether the head may pass the operator under it, and fetch what that one uses if so."""
        head, budget_bytes = self._head, self._problem.budget_bytes
        if self._curve.earliest(head, head + 1, limit_bytes=budget_bytes) > head:
            return False
        coming = [gap for gap in self._away.get(head, ()) if self._facts.returns(gap)]
        nbytes = sum(self._facts.sizes[gap.storage] for gap in coming)
        if coming and head > op:
            limit_bytes = self._prefetch_bytes
            if limit_bytes is not None and sum(self._ahead.values()) + nbytes > limit_bytes:
                return False
            if self._curve.earliest(op, head, limit_bytes=budget_bytes - nbytes) > op:
                return False
            self._curve.add(op, head, nbytes)
            self._ahead[head] = nbytes
        for gap in coming:
            self._fetch_op[gap] = op
        return True
