"""Infiniswap: swap to the memory of other machines, in slabs, with a disk behind (Gu et al., NSDI 2017).

The kernel decides what moves: when memory runs out, the oldest goes, and the operator waits until a server
has confirmed it; what is missed is read on demand. What makes the system is where it goes, and that is its tier
(`lowtide.tiers.Slabs`): slabs on servers chosen by the power of two choices, a disk that holds a copy of everything,
and servers that give slabs up when their own memory is short. `spill=["redis://a", "redis://b", "/disk"]` is one.
"""

from __future__ import annotations

from lowtide.core.plan import Plan, Problem, Swap
from lowtide.plan.compose import FITS, compose
from lowtide.plan.policy import About, Classified, Family, Runs
from lowtide.plan.views.evictions import oldest_first


class Infiniswap:
    """Out by age when memory runs out, awaited; back on demand."""

    name = "infiniswap"
    summary = "kernel swap to other machines' memory: out by age, awaited, back on demand; its slabs are a tier"
    about = About(
        family=Family.SWAP_OUT,
        classified=Classified(granularity="tensor", memory="host and remote", moment="dynamic", objective="time"),
        runs=(Runs.EMULATED, Runs.SIMULATED),
        paper="Infiniswap (Gu et al., NSDI 2017)",
        reconstructed="storages instead of pages; slabs of 64 MiB instead of 1 GiB, mapped at their first write; TCP "
        "instead of one-sided RDMA; a slab that a server gives up is drawn by this process, not by a daemon there; "
        "what would be away past the end of a step is left to the runtime",
    )

    def plan(self, problem: Problem) -> Plan:
        """Return the evictions, each awaited by the operator after, and read when it is missed."""
        swaps = [
            Swap(gap=gap, fetch_op=gap.before_op, landed_op=gap.after_op + 1, tier=problem.tier)
            for gap in oldest_first(problem, ahead_ops=0)
        ]
        return compose(self.name, problem, swaps, notes=() if swaps else (FITS,))
