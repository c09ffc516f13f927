"""Bandwidth-aware placement: pages in the ratio of the memories' bandwidths (Yu, Park and Baek, ICS 2017).

A fraction f = B_fast / (B_fast + B_slow) of the pages is in fast memory, so that both are busy for as long.
`interleave` puts that fraction of every storage there, `random` whole storages with that probability, `local` fills
fast memory first and only the rest goes to slow memory. Fast memory that is too small for f takes what it holds.
"""

from __future__ import annotations

from random import Random

from lowtide.core.plan import Plan, Problem
from lowtide.errors import BadArgument
from lowtide.plan.compose import NOTHING_SLOW, compose
from lowtide.plan.policies.first_touch import FirstTouch
from lowtide.plan.policy import About, Classified, Family, Runs
from lowtide.plan.views.slow_memory import SlowMemory

MODES = ("interleave", "random", "local")


class BandwidthAware:
    """Spreads pages over both memories."""

    name = "bandwidth_aware"
    summary = "slow memory read in place: every storage has pages in both memories, in the ratio of their bandwidths"
    about = About(
        family=Family.PLACEMENT,
        classified=Classified(granularity="page", memory="fast and slow memory", moment="static", objective="time"),
        runs=(Runs.SIMULATED,),
        paper="Yu, Park and Baek, ICS 2017",
        reconstructed="the slow memory's bandwidth is the mean of its reads and writes; its migration towards the "
        "ratio is left out, since a step's pages are in it from the start",
        adapts=False,
    )

    def __init__(self, *, mode: str = "interleave") -> None:
        if mode not in MODES:
            raise BadArgument(f"unknown mode {mode!r}: choose one of {', '.join(MODES)}")
        self.mode = mode

    def plan(self, problem: Problem) -> Plan:
        """Return the pages in slow memory."""
        if not problem.addressable():
            return compose(self.name, problem, notes=(NOTHING_SLOW,))
        memory = SlowMemory(problem)
        fast = fast_fraction(problem)
        if self.mode == "local" or (fast == 1 and problem.trace.peak_bytes <= problem.budget_bytes):
            return compose(self.name, problem, places=FirstTouch().plan(problem).places)
        base = memory.base_bytes()
        held = [
            max(0, op.peak_bytes - own) / max(1, problem.budget_bytes - own)
            for op, own in zip(problem.trace.ops, base, strict=True)
        ]
        fast = min(fast, 1 / max(1.0, *held, 1.0))
        if self.mode == "random":
            draw = Random(0)
            order = sorted(memory.lives, key=lambda storage: (draw.random() > fast, storage))
            return compose(self.name, problem, places=[memory.for_life(one) for one in memory.fill(order)])
        page = memory.link.page_bytes
        places = []
        for storage in memory.lives:
            whole = memory.nbytes(storage)
            away = min(whole, -(-int(whole * (1 - fast) + 1) // page) * page)
            places.append(memory.for_life(storage, away if away < whole else None))
        note = f"{fast:.1%} of every storage in fast memory; the ratio of bandwidths is {fast_fraction(problem):.1%}"
        return compose(self.name, problem, places=places, notes=(note,))


def fast_fraction(problem: Problem) -> float:
    """Return the fraction of pages in fast memory with which both memories are busy for as long.

    On shared channels, every byte in slow memory takes longer: the best fraction is all.
    """
    access = problem.machine.links[problem.addressable()[0]].access
    fast = problem.machine.memory_bytes_per_s
    assert access is not None
    if fast is None or not access.own_channel:
        return 1.0
    slow = (access.read_bytes_per_s + access.write_bytes_per_s) / 2
    return fast / (fast + slow)
