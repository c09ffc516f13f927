"""Layrub: layers share a few blocks of memory (Jin et al., ACM TACO 15(3), 2018).

Between layers: data moves out when its last forward reader is done, and the block is only handed to the layer after the
next one once the copy is complete. It moves back while the layer before it in the backward pass computes, and not
earlier.

Inside a layer: a gradient takes the place of data that is dead by then. `aliases` finds these pairs, and
the plan's layout puts the gradient at the address of that data; nothing else uses it from then on. The simulator's
memory follows the layout. A runtime whose pages have no addresses does not: PyTorch frees such data, and the next
block gets its pages.
"""

from __future__ import annotations

from bisect import bisect_right, insort
from collections.abc import Sequence
from dataclasses import dataclass, replace

from lowtide.core.plan import Address, Plan, Problem, Swap
from lowtide.core.trace import Kind, Phase, Trace
from lowtide.core.units import format_bytes
from lowtide.errors import BadArgument
from lowtide.plan.costs.sweep import predict
from lowtide.plan.policies.vdnn import ends_of_layers, landing, that_fit
from lowtide.plan.policy import ACTIVATIONS, About, Classified, Family, Runs
from lowtide.plan.views.layers import crossing_gaps, layers_of, step_at
from lowtide.plan.views.pools import Block, addresses, step_blocks

# Smaller blocks than this share of the peak have no place of their own.
LEAST_SHARE = 1e-3
_STRATEGIES = ("hybrid", "inter", "intra")


@dataclass(frozen=True, slots=True, kw_only=True)
class Alias:
    """A gradient that lives in the memory of dead data."""

    gradient: int
    data: int


def aliases(trace: Trace) -> tuple[Alias, ...]:
    """Return which gradients can live in whose memory, so that no two tensors share a block at the same time.

    A gradient is a storage made by a backward operator; it takes the data that died last and is large enough.
    """
    gradients = [index for index, one in enumerate(trace.storages) if _in_phase(trace, one.first_op, Phase.BACKWARD)]
    data = [
        index
        for index, one in enumerate(trace.storages)
        if one.kind in (Kind.ACTIVATION, Kind.INPUT) and _in_phase(trace, one.first_op, Phase.FORWARD)
    ]
    # A block is free once its tenant is dead: (last operator of the tenant, block), ascending.
    waiting = sorted((trace.storages[index].last_op, index) for index in data)
    found = []
    for index in sorted(gradients, key=lambda index: (trace.storages[index].first_op, index)):
        gradient = trace.storages[index]
        for position in range(bisect_right(waiting, (gradient.first_op - 1, len(trace.storages))) - 1, -1, -1):
            _, block = waiting[position]
            if trace.storages[block].nbytes >= gradient.nbytes > 0:
                del waiting[position]
                insort(waiting, (gradient.last_op, block))
                found.append(Alias(gradient=index, data=block))
                break
    return tuple(found)


def in_places(trace: Trace, plan: Plan, reused: Sequence[Alias]) -> tuple[Address, ...]:
    """Return where blocks lie: gradients where the data was whose place they take, which is theirs until they die."""
    blocks = step_blocks(trace, plan, least_bytes=LEAST_SHARE * trace.peak_bytes)
    last = {block.of: block for block in blocks}  # of data that was away, the block it comes back to
    tenants: dict[int, list[Block]] = {}
    for one in reused:
        if one.data in last and one.gradient in last:
            tenants.setdefault(one.data, []).append(last[one.gradient])
    taken = {block for living in tenants.values() for block in living}
    shared = [
        replace(block, last_op=max(tenant.last_op for tenant in tenants[block.of]))
        if block.of in tenants and block is last[block.of]
        else block
        for block in blocks
        if block not in taken
    ]
    found = {(one.block, one.from_op): one for one in addresses(shared)}
    for data, living in tenants.items():
        place = found[data, last[data].first_op]
        for tenant in living:
            own = replace(place, block=tenant.of, from_op=tenant.first_op)
            found[own.block, own.from_op] = own
    return tuple(sorted(found.values()))


def _in_phase(trace: Trace, op: int, phase: Phase) -> bool:
    return 0 <= op < len(trace.ops) and trace.ops[op].phase is phase


class Layrub:
    """Moves data out between layers and lets gradients take the place of dead data.

    `strategy`: "inter" (only the first), "intra" (only the second) or "hybrid".
    """

    name = "layrub"
    summary = "Layrub: moves data out between layers, back one layer ahead"
    about = About(
        kinds=ACTIVATIONS,
        family=Family.SWAP_OUT,
        classified=Classified(granularity="layer", memory="device and host", moment="static", objective="memory"),
        runs=(Runs.REAL, Runs.SIMULATED),
        paper="Jin et al., ACM TACO 15(3), 2018",
        reconstructed=(
            "blocks are shared by two layers, so the copy out of one is awaited at the end of the next; reuse inside a "
            "layer is a layout, which the simulator's memory follows, and not a runtime, whose pages have no addresses"
        ),
    )

    def __init__(self, *, strategy: str = "hybrid") -> None:
        if strategy not in _STRATEGIES:
            raise BadArgument(f"unknown strategy {strategy!r}: choose one of {', '.join(_STRATEGIES)}")
        self._strategy = strategy
        # Without its swaps it moves nothing, at any budget.
        self.about = replace(type(self).about, adapts=strategy == "intra")

    def plan(self, problem: Problem) -> Plan:
        """Return the moves between layers, and where gradients lie inside them."""
        swaps = () if self._strategy == "intra" else self._moves(problem)
        notes: Sequence[str] = ()
        reused = aliases(problem.trace) if self._strategy != "inter" else ()
        if self._strategy != "inter":
            storages = problem.trace.storages
            nbytes = sum(storages[one.gradient].nbytes for one in reused)
            notes = (f"{len(reused)} gradients, {format_bytes(nbytes)}, live in the memory of dead data",)
        plan = Plan(
            policy=self.name,
            budget_bytes=problem.budget_bytes,
            swaps=swaps,
            prediction=predict(problem, swaps),
            notes=tuple(notes),
        )
        return plan if self._strategy == "inter" else replace(plan, layout=in_places(problem.trace, plan, reused))

    def _moves(self, problem: Problem) -> tuple[Swap, ...]:
        layers = layers_of(problem.trace)
        ends = ends_of_layers(layers)
        starts = sorted({layer.backward.start for layer in layers if layer.backward})
        swaps = []
        for gap in sorted(crossing_gaps(problem.trace).values()):
            step = step_at(starts, gap.before_op)
            fetch_op = max(starts[step - 1], gap.after_op + 1) if step > 0 else gap.before_op
            arrived_op = max(starts[step], fetch_op) if step >= 0 else gap.before_op
            swaps.append(
                Swap(
                    gap=gap,
                    fetch_op=fetch_op,
                    tier=problem.tier,
                    landed_op=landing(ends, gap),
                    arrived_op=arrived_op,
                )
            )
        return that_fit(problem, swaps)
