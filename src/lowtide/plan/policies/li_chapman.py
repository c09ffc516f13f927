"""Li & Chapman: choose explicit copies or implicit paging for every object, and keep what would thrash (SC 2019).

A compiler works out three things about each object in each kernel. Symbols: *density*, the share of its pages that the
kernel touches; *reuse distance*, the bytes touched between two uses of it; *locality*, that a use is followed by
another one, which a gap of the trace stands for.

1. A dense object is copied explicitly, as a whole, one operator ahead: no faults. A sparse one is paged: it comes when
   it is touched, and only what is touched moves.
2. What is used again within memory's reach stays. What is not is kept in part rather than moved to and fro: where more
   is scanned than memory holds, the least recently used is always the one that is needed next.
3. Residency is given by density over reuse distance: the furthest objects leave first, of equally far ones always the
   same, so that a part of a scan stays.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import accumulate
from math import ceil

from lowtide.core.machine import Link, Machine
from lowtide.core.plan import Plan, Problem, Swap
from lowtide.core.trace import Gap, Kind, Trace
from lowtide.core.units import format_seconds
from lowtide.plan.auto.choose import Candidate, candidates, choose
from lowtide.plan.compose import FITS, compose
from lowtide.plan.costs.sweep import Sweep
from lowtide.plan.policies.unified_memory import paging
from lowtide.plan.policies.vdnn import that_fit
from lowtide.plan.policy import ACTIVATIONS, About, Classified, Family, Order, Runs, activation_gaps
from lowtide.plan.views.layers import LayerKind, kind_of


class Mode(StrEnum):
    """How an object comes to fast memory."""

    EXPLICIT = "explicit"
    """Copied as a whole before the operator: pays for all its bytes."""
    IMPLICIT = "implicit"
    """By faults, page by page: pays for a fault on each page that is touched."""


def mode_of(nbytes: int, density: float, *, link: Link, machine: Machine) -> Mode:
    """Return the cheaper way for an object."""
    touched = ceil(nbytes * density / machine.page_bytes)
    implicit_s = touched * (machine.page_fault_s + machine.page_bytes / link.read_bytes_per_s)
    return Mode.EXPLICIT if link.read_s(nbytes) <= implicit_s else Mode.IMPLICIT


def densities(trace: Trace) -> dict[int, float]:
    """Return the density of the objects that are touched in part only: the tables of embeddings.

    An embedding touches as many bytes of its table as it makes, at most; everything else is touched as a whole.
    """
    found: dict[int, float] = {}
    for op in trace.ops:
        if kind_of(op) is LayerKind.EMBEDDING:
            made = sum(trace.storages[storage].nbytes for storage in op.writes)
            for storage in op.reads:
                table = trace.storages[storage]
                if table.kind is Kind.PARAM and table.nbytes > made:
                    found[storage] = max(found.get(storage, 0.0), made / table.nbytes)
    return found


def keep(distances: Mapping[int, float], sizes: Mapping[int, int], *, capacity_bytes: int) -> tuple[int, ...]:
    """Return the objects to keep in memory: by density over reuse distance, as many as fit.

    `distances` are reuse distances over density. The last one may fit in part: its first pages stay.
    """
    kept = []
    for storage in sorted(distances, key=lambda storage: (distances[storage], storage)):
        if capacity_bytes <= 0:
            break
        kept.append(storage)
        capacity_bytes -= sizes[storage]
    return tuple(kept)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Touched:
    """The bytes touched up to the beginning of each operator."""

    until: Sequence[int]

    def between(self, after_op: int, before_op: int) -> int:
        return self.until[before_op] - self.until[after_op]


class LiChapman:
    """Moves the objects of the largest reuse distance, each in the cheaper way.

    `density` states the share of a storage that is touched, where it is known better than from the trace.
    """

    name = "li_chapman"
    summary = "Li & Chapman: explicit copies for dense objects, paging for sparse ones, furthest reuse leaves first"
    about = About(
        kinds=ACTIVATIONS,
        family=Family.SWAP_IN,
        classified=Classified(granularity="page", memory="device and host", moment="static", objective="time"),
        runs=(Runs.REAL, Runs.SIMULATED, Runs.MODEL),
        paper="Li & Chapman, SC 2019",
        reconstructed=(
            "thresholds: a copy is explicit where it is cheaper, reuse is near if memory holds all touched until then; "
            "the compiler's analysis is the recorded step; an explicit copy begins one operator ahead, a paged object "
            "comes on demand and as a whole: pages are a model"
        ),
        victims=Order.FURTHEST_NEWEST,
    )

    def __init__(self, *, density: Mapping[int, float] | None = None) -> None:
        self._density = dict(density or {})

    def plan(self, problem: Problem) -> Plan:
        """Return the swaps of the objects that leave, each copied back before the operator that needs it."""
        if problem.trace.peak_bytes <= problem.budget_bytes:
            return compose(self.name, problem, notes=(FITS,))
        facts = Sweep(problem)
        density = {**densities(problem.trace), **self._density}
        touched = _Touched(until=[0, *accumulate(_touched_bytes(problem.trace, density))])

        def furthest_first(one: Candidate) -> tuple[float, ...]:
            distance = touched.between(one.gap.after_op, one.gap.before_op)
            near = distance <= problem.budget_bytes
            return (near, -distance / max(density.get(one.gap.storage, 1.0), 1e-9), one.gap.storage)

        need = [peak - problem.budget_bytes for peak in facts.peak_bytes]
        chosen = choose(
            candidates(problem, facts, activation_gaps(problem.trace)), need_bytes=need, rank=furthest_first
        )
        modes = self._modes(problem, density)
        swaps = that_fit(
            problem, [_swap(one.gap, modes.get(one.gap.storage, Mode.EXPLICIT), problem.tier) for one in chosen]
        )
        copied = sum(modes.get(swap.gap.storage) is not Mode.IMPLICIT for swap in swaps)
        model = paging(
            problem,
            explicit=[storage for storage, mode in modes.items() if mode is Mode.EXPLICIT],
            density=density,
        )
        sparse = sum(mode is Mode.IMPLICIT for mode in modes.values())
        faults = f"{model.faults} faults cost {format_seconds(model.fault_s)}"
        notes = [
            f"{copied} of {len(swaps)} gaps end by an explicit copy, the others on demand; {sparse} are better paged",
            f"page model: {faults}, the step takes {format_seconds(model.step_s)}",
        ]
        return compose(self.name, problem, swaps, notes=notes)

    def _modes(self, problem: Problem, density: Mapping[int, float]) -> dict[int, Mode]:
        link = problem.machine.links[problem.tier]
        return {
            index: mode_of(storage.nbytes, density.get(index, 1.0), link=link, machine=problem.machine)
            for index, storage in enumerate(problem.trace.storages)
            if storage.nbytes
        }


def _swap(gap: Gap, mode: Mode, tier: str) -> Swap:
    ahead = 1 if mode is Mode.EXPLICIT else 0
    return Swap(gap=gap, fetch_op=max(gap.before_op - ahead, min(gap.after_op + 1, gap.before_op)), tier=tier)


def _touched_bytes(trace: Trace, density: Mapping[int, float]) -> Iterator[int]:
    for op in trace.ops:
        storages = {*op.reads, *op.writes}
        yield sum(int(trace.storages[one].nbytes * density.get(one, 1.0)) for one in storages)
