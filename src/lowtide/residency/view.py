"""What a policy sees when it chooses victims: the residency machine, and where known what making them again costs."""

from __future__ import annotations

from collections.abc import Sequence

from lowtide.plan.policy import Costs
from lowtide.residency.machine import Residency


class MachineView:
    """A `View` of a residency machine, for those that know more than it does."""

    def __init__(self, machine: Residency) -> None:
        self._machine = machine

    def evictable(self) -> Sequence[int]:
        """Return the records whose bytes could be given up now."""
        return self._machine.evictable()

    def oldest(self, need_bytes: int) -> Sequence[int]:
        """Return the least recently used that cover `need_bytes`, or all there are."""
        return self._machine.oldest(need_bytes)

    def nbytes(self, record: int) -> int:
        """Return the bytes that giving up `record` frees."""
        return self._machine.nbytes(record)

    def clean(self, record: int) -> bool:
        """Tell whether the tier already holds a valid copy."""
        return self._machine.clean(record)

    def last_access(self, record: int) -> int:
        """Return the event at which `record` was last touched."""
        return self._machine.last_access(record)

    def next_use(self, record: int) -> float:
        """Return the event of the next use (`math.inf`: not known)."""
        return self._machine.next_use(record)


class DroppingView(MachineView):
    """The view of a policy whose victims are dropped. A record that cannot be made again costs infinitely much."""

    def __init__(self, machine: Residency, costs: Costs) -> None:
        super().__init__(machine)
        self._costs = costs

    def recompute_s(self, record: int) -> float:
        """Return how long it takes to make `record` again, with its evicted neighbourhood."""
        return self._costs.recompute_s(record)

    def staleness_s(self, record: int) -> float:
        """Return how long ago `record` was last touched."""
        return self._costs.staleness_s(record)
