"""Two-level memory (2LM): fast memory is a hardware cache of slow memory ("Memory Mode" of Optane machines).

All data is in slow memory. What an operator touches and the cache does not have is read into it, and what was touched
least recently makes room; if it changed it is written back. The program waits for both. Nothing knows what comes next.
"""

from __future__ import annotations

from lowtide.core.plan import Plan, Problem
from lowtide.plan.compose import compose, nothing_to_place
from lowtide.plan.policy import About, Classified, Family, Runs
from lowtide.plan.views.slow_memory import Course, SlowMemory


class TwoLevel:
    """The least recently used storage leaves the cache when an operand needs its place."""

    name = "two_level"
    summary = "slow memory under a hardware cache (2LM): the least recently used is written back, misses are waited for"
    about = About(
        family=Family.PLACEMENT,
        classified=Classified(granularity="page", memory="fast and slow memory", moment="dynamic", objective="time"),
        runs=(Runs.EMULATED, Runs.SIMULATED),
        paper="Intel Optane Memory Mode, as AutoTM compares with it",
        reconstructed="whole storages instead of lines of 64 bytes, least recently used instead of direct mapping; "
        "what an operator makes is not read first; operands beyond the cache's size are touched in place",
    )

    def plan(self, problem: Problem) -> Plan:
        """Return the misses and evictions of a cache, as migrations that are waited for."""
        if (nothing := nothing_to_place(self.name, problem)) is not None:
            return nothing
        memory = SlowMemory(problem)
        courses = _cached(memory)
        places = [place for storage, course in courses.items() for place in memory.places(storage, course)]
        return compose(self.name, problem, places=places)


def _cached(memory: SlowMemory) -> dict[int, Course]:
    """Run three steps through a cache that evicts the least recently used; return where everything is in the second."""
    cache = _Cache(memory)
    # The first step fills the cache; what the second leaves in it is evicted in the third.
    cache.step()
    cache.gone = {storage: [False] * len(life.touches) for storage, life in memory.lives.items()}
    cache.step()
    cache.step()
    # Storages that no operator touches are never cached.
    return {
        storage: Course(slow=tuple(cache.slow[storage]), gone=tuple(cache.gone[storage]))
        for storage, life in memory.lives.items()
        if not life.touches or any(cache.slow[storage]) or any(cache.gone[storage])
    }


class _Cache:
    """A cache of whole storages. `held` are those in it, the least recently used first, each with its last touch."""

    def __init__(self, memory: SlowMemory) -> None:
        self._memory = memory
        self._base = memory.base_bytes()
        self._at: list[dict[int, int]] = [{} for _ in range(memory.count)]
        self._ends: list[list[int]] = [[] for _ in range(memory.count)]
        for storage, life in memory.lives.items():
            for k, op in enumerate(life.touches):
                self._at[op % memory.count][storage] = k
            if not life.forever:
                self._ends[(life.end_op - 1) % memory.count].append(storage)
        self.slow = {storage: [False] * len(life.touches) for storage, life in memory.lives.items()}
        self.gone = {storage: [False] * len(life.touches) for storage, life in memory.lives.items()}
        self.held: dict[int, int] = {}

    def step(self) -> None:
        """Touch what every operator of a step touches."""
        for index, touched in enumerate(self._at):
            room = self._memory.problem.budget_bytes - self._base[index]
            self._touch(touched, room)
            held_bytes = sum(map(self._memory.nbytes, self.held))
            for victim in [storage for storage in self.held if storage not in touched]:
                if held_bytes <= room:
                    break
                self.gone[victim][self.held.pop(victim)] = True
                held_bytes -= self._memory.nbytes(victim)
            for storage in self._ends[index]:
                self.held.pop(storage, None)

    def _touch(self, touched: dict[int, int], room: int) -> None:
        """Bring an operator's operands in as far as there is room for them; the rest is touched in place."""
        taken = 0
        for storage in sorted(touched, key=lambda storage: (storage not in self.held, storage)):
            k, nbytes = touched[storage], self._memory.nbytes(storage)
            self.held.pop(storage, None)
            self.slow[storage][k] = taken + nbytes > room
            if not self.slow[storage][k]:
                self.held[storage] = k
                taken += nbytes
