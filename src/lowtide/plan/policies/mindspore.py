"""MindSpore's memory offload, three generations: greedy choices by size and distance (MindSpore, 2019 to 2023).

Symbols: N, the number of operators; M, the budget; the *span* of a gap, the operators it covers; its *weight*,
(span - 1) times its bytes: what keeping it costs in memory over time.

- mem_reuse: swap what is larger than one threshold and idle for longer than another, which begins at N/3; lower both
  until enough bytes are gone. What is idle for 3 operators or fewer stays.
- offload: begin with the least memory of every operator, keep gaps in the order of rising weight while M holds, swap
  the rest.
- gsm: the same queue with three levels by first fit: device memory, host memory, disk. The host is the fastest tier
  there is, the disk the next; where there is one tier, it is both.

In all of them a tensor leaves after its earlier use and comes back one operator before the next.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

from lowtide.core.plan import Plan, Problem, Swap
from lowtide.core.trace import Gap, Trace
from lowtide.core.units import format_bytes
from lowtide.errors import BadArgument
from lowtide.plan.compose import FITS, compose
from lowtide.plan.costs.curve import Curve
from lowtide.plan.policy import ACTIVATIONS, About, Classified, Family, Order, Runs, activation_gaps

# MindSpore's own constants: the first distance is N over this factor, and none goes below the bound.
DISTANCE_FACTOR = 3
LEAST_DISTANCE_OPS = 3
# How many times thresholds are lowered on the way from the first to the last.
RETREATS = 32
_PAPER = "MindSpore, open source, 2019-2023"


def weight(trace: Trace, gap: Gap) -> int:
    """Return (span - 1) times the bytes of a gap."""
    return (gap.before_op - gap.after_op - 1) * trace.storages[gap.storage].nbytes


def by_weight(trace: Trace) -> list[Gap]:
    """Return the gaps with bytes in them, in the order of rising weight."""
    gaps = [gap for gap in activation_gaps(trace) if trace.storages[gap.storage].nbytes]
    return sorted(gaps, key=lambda gap: (weight(trace, gap), gap))


def with_all_absent(trace: Trace, gaps: Sequence[Gap]) -> Curve:
    """Return the bytes of every operator while all `gaps` are empty."""
    curve = Curve([op.peak_bytes for op in trace.ops])
    for gap in gaps:
        curve.add(gap.after_op, gap.before_op, -trace.storages[gap.storage].nbytes)
    return curve


def fits(curve: Curve, gap: Gap, nbytes: int, *, limit_bytes: int) -> bool:
    """Tell whether a gap's bytes can be added to a curve all through it."""
    return curve.earliest(gap.after_op, gap.before_op, limit_bytes=limit_bytes - nbytes) == gap.after_op


class _MindSpore(ABC):
    """What the generations share."""

    name: str

    def plan(self, problem: Problem) -> Plan:
        """Return swaps for what the generation does not keep."""
        if problem.trace.peak_bytes <= problem.budget_bytes:
            return compose(self.name, problem, notes=(FITS,))
        tier_of, notes = self._swapped(problem)
        swaps = [
            Swap(gap=gap, fetch_op=max(gap.before_op - 1, gap.after_op + 1), tier=tier) for gap, tier in tier_of.items()
        ]
        return compose(self.name, problem, swaps, notes=notes)

    @abstractmethod
    def _swapped(self, problem: Problem) -> tuple[dict[Gap, str], tuple[str, ...]]:
        """Return what leaves, each with its tier, and notes on how that was decided."""


class MindSporeMemReuse(_MindSpore):
    """Swaps what is large and idle for long, and lowers its standards until enough is gone."""

    name = "mindspore_mem_reuse"
    summary = "MindSpore, 1st generation: swaps by size and distance thresholds, lowered until it fits"
    about = About(
        kinds=ACTIVATIONS,
        family=Family.JOINT,
        classified=Classified(granularity="tensor", memory="device and host", moment="static", objective="time"),
        runs=(Runs.REAL, Runs.SIMULATED),
        paper=_PAPER,
        reconstructed=f"both thresholds fall together, in {RETREATS} equal parts of their way",
        victims=Order.LARGEST,
    )

    def _swapped(self, problem: Problem) -> tuple[dict[Gap, str], tuple[str, ...]]:
        trace = problem.trace
        gaps = [gap for gap in activation_gaps(trace) if trace.storages[gap.storage].nbytes]
        sizes = sorted({trace.storages[gap.storage].nbytes for gap in gaps}, reverse=True)
        first_ops = max(len(trace.ops) // DISTANCE_FACTOR, LEAST_DISTANCE_OPS)
        size_bytes, distance_ops, chosen = 0, first_ops, list[Gap]()
        for retreat in range(RETREATS + 1):
            size_bytes = sizes[(len(sizes) - 1) * retreat // RETREATS] if sizes else 0
            distance_ops = first_ops - (first_ops - LEAST_DISTANCE_OPS) * retreat // RETREATS
            chosen = [
                gap
                for gap in gaps
                if trace.storages[gap.storage].nbytes >= size_bytes and gap.before_op - gap.after_op > distance_ops
            ]
            if max(with_all_absent(trace, chosen).values(), default=0) <= problem.budget_bytes:
                break
        note = f"swaps from {format_bytes(size_bytes)} on, where idle for more than {distance_ops} operators"
        return dict.fromkeys(chosen, problem.tier), (note,)


class MindSporeOffload(_MindSpore):
    """Keeps the gaps that cost least memory over time as long as they fit, and swaps the rest."""

    name = "mindspore_offload"
    summary = "MindSpore, 2nd generation: keeps the lightest gaps while they fit, swaps the rest"
    about = About(
        kinds=ACTIVATIONS,
        family=Family.JOINT,
        classified=Classified(granularity="tensor", memory="device and host", moment="static", objective="time"),
        runs=(Runs.REAL, Runs.SIMULATED),
        paper=_PAPER,
        reconstructed="the first gap that does not fit ends the keeping; parameters stay, MindSpore moves them too",
        victims=Order.LARGEST,
    )

    def _swapped(self, problem: Problem) -> tuple[dict[Gap, str], tuple[str, ...]]:
        queue = by_weight(problem.trace)
        kept = 0
        curve = with_all_absent(problem.trace, queue)
        for gap in queue:
            nbytes = problem.trace.storages[gap.storage].nbytes
            if not fits(curve, gap, nbytes, limit_bytes=problem.budget_bytes):
                break
            curve.add(gap.after_op, gap.before_op, nbytes)
            kept += 1
        return dict.fromkeys(queue[kept:], problem.tier), (f"keeps {kept} of {len(queue)} gaps",)


@dataclass(frozen=True, slots=True, kw_only=True)
class Levels:
    """Where gaps are held: in device memory, in host memory or on disk."""

    device: tuple[Gap, ...]
    host: tuple[Gap, ...]
    disk: tuple[Gap, ...]


def levels(problem: Problem, *, host_bytes: int | None = None) -> Levels:
    """Return the level of every gap with bytes in it: the first with room all through it (None: host is endless)."""
    trace = problem.trace
    queue = by_weight(trace)
    on_device = with_all_absent(trace, queue)
    on_host = Curve([0] * len(trace.ops))
    device, host, disk = list[Gap](), list[Gap](), list[Gap]()
    for gap in queue:
        nbytes = trace.storages[gap.storage].nbytes
        if fits(on_device, gap, nbytes, limit_bytes=problem.budget_bytes):
            on_device.add(gap.after_op, gap.before_op, nbytes)
            device.append(gap)
        elif host_bytes is None or fits(on_host, gap, nbytes, limit_bytes=host_bytes):
            on_host.add(gap.after_op, gap.before_op, nbytes)
            host.append(gap)
        else:
            disk.append(gap)
    return Levels(device=tuple(device), host=tuple(host), disk=tuple(disk))


def host_and_disk(problem: Problem) -> tuple[str, str]:
    """Return the two fastest tiers that the executor has, by how fast they are read; one tier is both."""
    links = problem.machine.links
    known = [name for name in problem.tiers or (problem.tier,) if name in links]
    fastest = sorted(known, key=lambda name: (-links[name].read_bytes_per_s, name))
    return fastest[0], fastest[min(1, len(fastest) - 1)]


class MindSporeGsm(_MindSpore):
    """Fills device memory, then host memory, then disk, the lightest gaps first.

    `host_bytes`: what the host gives (None: as much as its tier holds).
    """

    name = "mindspore_gsm"
    summary = "MindSpore, 3rd generation: device, host and disk by first fit, the lightest gaps first"
    about = About(
        kinds=ACTIVATIONS,
        family=Family.JOINT,
        classified=Classified(granularity="tensor", memory="device and host", moment="static", objective="time"),
        runs=(Runs.REAL, Runs.SIMULATED),
        paper=_PAPER,
        reconstructed=(
            "host memory and disk are the two fastest tiers of the executor, and one if it has no more; parameters "
            "stay, where MindSpore offloads them on request"
        ),
        victims=Order.LARGEST,
    )

    def __init__(self, *, host_bytes: int | None = None) -> None:
        if host_bytes is not None and host_bytes < 0:
            raise BadArgument(f"host_bytes is {host_bytes}: pass 0 or more, or None for as much as is asked for")
        self._host_bytes = host_bytes

    def _swapped(self, problem: Problem) -> tuple[dict[Gap, str], tuple[str, ...]]:
        host, disk = host_and_disk(problem)
        host_bytes = self._host_bytes
        if host_bytes is None and host != disk:
            host_bytes = problem.machine.links[host].capacity_bytes
        found = levels(problem, host_bytes=host_bytes)
        sizes = problem.trace.storages
        held = {
            level: sum(sizes[gap.storage].nbytes for gap in gaps)
            for level, gaps in (("host", found.host), ("disk", found.disk))
        }
        note = (
            f"keeps {len(found.device)} gaps; moves {len(found.host)} to the host, {format_bytes(held['host'])}, "
            f"and {len(found.disk)} to disk, {format_bytes(held['disk'])}"
        )
        return {**dict.fromkeys(found.host, host), **dict.fromkeys(found.disk, disk)}, (note,)
