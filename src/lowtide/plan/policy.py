"""What a policy is: a planner before the step, and a judge of victims during it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Literal, Protocol, runtime_checkable

from lowtide.core.order import Order as Order
from lowtide.core.plan import Plan, Problem
from lowtide.core.timeline import Timeline
from lowtide.core.trace import Gap, Kind, Reach, Trace


class Runs(StrEnum):
    """How a policy runs here, honestly."""

    REAL = "real"
    """`lowtide.fit(policy=...)` executes it."""
    EMULATED = "emulated"
    """Data really moves, but the hardware effect that sets the system apart is imitated."""
    SIMULATED = "simulated"
    """Its plans run in the simulator only."""
    MODEL = "model"
    """Only its decisions are modelled."""


class Family(StrEnum):
    """What a policy decides about."""

    BASELINE = "baseline"
    SWAP_OUT = "swap-out"
    SWAP_IN = "swap-in"
    JOINT = "joint"
    RECOMPUTE = "recompute"
    PLACEMENT = "placement"


Granularity = Literal["tensor", "layer", "page"]
MemoryKind = Literal["device and host", "device and drive", "fast and slow memory", "host and remote", "one memory"]
Moment = Literal["static", "dynamic"]
Objective = Literal["time", "memory"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Classified:
    """Where a system stands in the survey's own tables (Gao et al., Journal of Software 34(12), 2023).

    `granularity`: what it decides about. `memory`: between which kinds it moves things; "fast and slow memory" is read
    in place, "one memory" is that of systems that only recompute. `moment`: "static" where all is decided before the
    step, "dynamic" where steps or faults change it. `objective`: the least time in a memory, or the least memory.
    """

    granularity: Granularity
    memory: MemoryKind
    moment: Moment
    objective: Objective


ACTIVATIONS = frozenset({Kind.ACTIVATION})
"""What systems know that move what forward leaves for backward, and nothing else."""


def activation_gaps(trace: Trace) -> tuple[Gap, ...]:
    """Return the gaps of activations, which begin and end within the step.

    Where the executor moves what autograd saved, those are the gaps of that.
    """
    if trace.reach is not Reach.TOUCHED:
        saved = trace.saved()
        return tuple(gap for gap in trace.gaps() if gap.storage in saved)
    return tuple(gap for gap in trace.gaps(kinds=ACTIVATIONS) if gap.before_op <= len(trace.ops))


@dataclass(frozen=True, slots=True, kw_only=True)
class About:
    """What a policy says of itself: where it comes from, and what it asks of those that execute and judge it.

    `reconstructed`: what its paper leaves open and was filled in here. `adapts`: it leaves alone what fits (False: it
    moves the same bytes under every budget). `recomputes`: its plans run operators again, unless that is forbidden.
    `discards_victims`: what it gives up when memory runs out is not written but made again. `victims`: in which order,
    unless it `ChoosesVictims` itself.
    `kinds` are the storages it decides about (None: all that can move). `classified`: its place in the survey's tables.
    """

    family: Family
    runs: tuple[Runs, ...]
    paper: str = ""
    reconstructed: str = ""
    adapts: bool = True
    recomputes: bool = False
    discards_victims: bool = False
    victims: Order = Order.OLDEST
    kinds: frozenset[Kind] | None = None
    classified: Classified | None = None


class View(Protocol):
    """What an online decision sees.

    A *record* is a storage the runtime manages; *events* are numbered as they happen.
    """

    def evictable(self) -> Sequence[int]:
        """Return the records whose bytes could be given up now."""
        ...

    def oldest(self, need_bytes: int) -> Sequence[int]:
        """Return the least recently used that cover `need_bytes`, or all there are; among equals the clean first.

        The same as sorting `evictable` by `last_access`, but its time does not grow with what is not returned.
        """
        ...

    def nbytes(self, record: int) -> int:
        """Return the bytes that giving up `record` frees."""
        ...

    def clean(self, record: int) -> bool:
        """Tell whether the tier already holds a valid copy, so that giving `record` up costs no write."""
        ...

    def last_access(self, record: int) -> int:
        """Return the event at which `record` was last touched."""
        ...

    def next_use(self, record: int) -> float:
        """Return the event of the next use, from the trace of the matching step (`math.inf`: not known)."""
        ...


@runtime_checkable
class Costs(Protocol):
    """What a view also knows if the executor can run operators again."""

    def recompute_s(self, record: int) -> float:
        """Return how long it takes to make a record again, with its evicted neighbourhood."""
        ...

    def staleness_s(self, record: int) -> float:
        """Return how long ago a record was last touched."""
        ...


@runtime_checkable
class Policy(Protocol):
    """Decides what a step moves, and in which order to give up the rest when memory still runs out."""

    @property
    def name(self) -> str:
        """The name users select the policy by."""
        ...

    @property
    def summary(self) -> str:
        """One line for listings."""
        ...

    @property
    def about(self) -> About:
        """What the policy says of itself."""
        ...

    def plan(self, problem: Problem) -> Plan:
        """Return the decisions for a step; never raises because the budget is small."""
        ...


@runtime_checkable
class ChoosesVictims(Protocol):
    """A policy with an order of its own, which no `Order` is."""

    def victims(self, view: View, need_bytes: int) -> Iterator[int]:
        """Yield records to give up, best first, until `need_bytes` are covered or nothing is left."""
        ...


@runtime_checkable
class Observes(Protocol):
    """A policy that sees each step of a plan of its own, and may change the plan for the next."""

    def observe(self, problem: Problem, plan: Plan, timeline: Timeline) -> Plan:
        """Return the plan for the next step, the same one if nothing is to change."""
        ...


def revised(policy: Policy, problem: Problem, plan: Plan, timeline: Timeline) -> Plan:
    """Return the plan for the step after `timeline`: another one only where the policy observes and wants that."""
    return policy.observe(problem, plan, timeline) if isinstance(policy, Observes) else plan


def until_covered(records: Iterable[int], view: View, need_bytes: int) -> Iterator[int]:
    """Yield from `records`, in their order, until their bytes cover `need_bytes`."""
    for record in records:
        if need_bytes <= 0:
            return
        yield record
        need_bytes -= view.nbytes(record)


def by_age(view: View, need_bytes: int) -> list[int]:
    """Return what `View.oldest` has to, by sorting: for views that leave out some of what could be given up."""
    order = sorted(view.evictable(), key=lambda record: (view.last_access(record), not view.clean(record), record))
    return list(until_covered(order, view, need_bytes))
