"""What a reactive policy sees of a simulated step: the residency machine's view, and what only a simulator knows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from lowtide.plan.policy import by_age
from lowtide.residency.view import MachineView
from lowtide.simulate.agenda import Record
from lowtide.simulate.remake import Remaker
from lowtide.simulate.state import State


class SimulatedView(MachineView):
    """A `View`, with costs in seconds for policies that drop and recompute (DTR).

    `protected` are storages that operators about to run again will read: they are not given up meanwhile.
    """

    def __init__(self, state: State, records: Mapping[int, Record], remaker: Remaker | None) -> None:
        super().__init__(state.machine)
        self._state = state
        self._records = records
        self._remaker = remaker
        self._next_need: dict[int, int] = {}
        self.protected: set[int] = set()
        self.clock_s = 0.0

    def needed_next(self, record: int, op: int) -> None:
        """Take down the operator before which a record will have to be back."""
        self._next_need[record] = op

    def evictable(self) -> Sequence[int]:
        """Return the records whose bytes could be given up now."""
        found = [record for record in self._machine.evictable() if record not in self.protected]
        if self._remaker is None:
            return found
        return [
            record
            for record in found
            if self._records[record].open and self._remaker.can_remake(record, self._next_need[record])
        ]

    def oldest(self, need_bytes: int) -> Sequence[int]:
        """Return the least recently used that cover `need_bytes`, or all there are."""
        everything = self._remaker is None and not self.protected
        return self._machine.oldest(need_bytes) if everything else by_age(self, need_bytes)


class DroppingView(SimulatedView):
    """The view of a policy whose victims are dropped: it also knows what making them again costs."""

    def __init__(self, state: State, records: Mapping[int, Record], remaker: Remaker) -> None:
        super().__init__(state, records, remaker)
        self._maker = remaker

    def recompute_s(self, record: int) -> float:
        """Return how long it would take to make `record` again, with everything dropped that hangs together with it."""
        return self._maker.neighbourhood_s(record, self._state.op)

    def staleness_s(self, record: int) -> float:
        """Return how long ago `record` was last read or written."""
        return self.clock_s - self._records[record].touched_s
