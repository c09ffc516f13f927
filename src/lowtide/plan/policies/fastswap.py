"""Fastswap: swap to far memory, with reads that are waited for on a way of their own (Amaro et al., EuroSys 2020).

The kernel's swap without its waits. Pages go by age; a core of their own reclaims them ahead of need, so that an
allocation does not wait for a write. A page that is missed is read at once, and those that left beside it are read
ahead behind it, on another queue, so that neither they nor writes hold the missed one up. Reading ahead takes no memory
that is short.

    slot      the place of an eviction among all, in the order in which they left
    cluster   slots that are read ahead together: aligned, as the kernel's are

The queues are the runtime's: its movers serve reads that are waited for first, and to a server on a connection of their
own.
"""

from __future__ import annotations

from collections.abc import Sequence

from lowtide.core.plan import Plan, Problem, Swap
from lowtide.core.trace import Gap
from lowtide.errors import BadArgument
from lowtide.plan.compose import FITS, compose
from lowtide.plan.costs.curve import Curve
from lowtide.plan.policy import About, Classified, Family, Runs
from lowtide.plan.views.evictions import oldest_first

CLUSTER = 8


class Fastswap:
    """Out by age, an operator ahead of need; back on demand, with the neighbours of what was missed behind it."""

    name = "fastswap"
    summary = "kernel swap to far memory: out by age ahead of need, back on demand, neighbours read ahead"
    about = About(
        family=Family.SWAP_IN,
        classified=Classified(granularity="tensor", memory="host and remote", moment="dynamic", objective="time"),
        runs=(Runs.EMULATED, Runs.SIMULATED),
        paper="Fastswap (Amaro et al., EuroSys 2020)",
        reconstructed="storages instead of pages of 4 KiB, so a cluster is 8 storages; reclaim is one operator ahead; "
        "TCP to a server instead of RDMA, so latency is not the paper's; the cluster scheduler is left out; what would "
        "be away past the end of a step is left to the runtime",
    )

    def __init__(self, *, cluster: int = CLUSTER) -> None:
        if cluster < 1:
            raise BadArgument(f"a cluster of {cluster} slots reads nothing: give one or more")
        self.cluster = cluster

    def plan(self, problem: Problem) -> Plan:
        """Return the evictions, and when each comes back."""
        evicted = sorted(oldest_first(problem, ahead_ops=1), key=lambda gap: (gap.after_op, gap.storage))
        if not evicted:
            return compose(self.name, problem, notes=(FITS,))
        swaps = self._read_ahead(problem, evicted)
        ahead = sum(swap.fetch_op < swap.gap.before_op for swap in swaps)
        note = f"{len(swaps) - ahead} reads on demand, {ahead} ahead with a neighbour"
        return compose(self.name, problem, swaps, notes=(note,))

    def _read_ahead(self, problem: Problem, slots: Sequence[Gap]) -> list[Swap]:
        trace = problem.trace
        curve = Curve([op.peak_bytes for op in trace.ops])
        for gap in slots:
            curve.add(gap.after_op, gap.before_op, -trace.storages[gap.storage].nbytes)
        swaps = []
        for first in range(0, len(slots), self.cluster):
            neighbours = slots[first : first + self.cluster]
            for gap in neighbours:
                nbytes = trace.storages[gap.storage].nbytes
                # The neighbour whose miss reads this one too: the first that comes while this one is away.
                missed = min(other.before_op for other in neighbours if gap.after_op < other.before_op)
                fits = curve.earliest(missed, gap.before_op, limit_bytes=problem.budget_bytes - nbytes) == missed
                fetch_op = missed if fits else gap.before_op
                curve.add(fetch_op, gap.before_op, nbytes)
                swaps.append(Swap(gap=gap, fetch_op=fetch_op, tier=problem.tier))
        return swaps
