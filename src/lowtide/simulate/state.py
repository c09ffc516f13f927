"""Fast memory in a simulated step: what is absent, what is alive beside the running operator, and who is told."""

from __future__ import annotations

from collections.abc import Sequence

from lowtide.core.plan import Problem
from lowtide.residency import events as e
from lowtide.residency.machine import Residency
from lowtide.simulate.agenda import Record
from lowtide.simulate.equations import Equations
from lowtide.simulate.recording import Recording


class State:
    """The bytes of the step. `peak_bytes[i]` is what operator i would need if nothing were ever absent.

    While an operator waits for memory (`waiting`), what it needs is not alive yet: nothing is noted then.
    """

    def __init__(
        self,
        problem: Problem,
        *,
        peak_bytes: list[int],
        machine: Residency,
        recording: Recording,
        equations: Equations | None,
    ) -> None:
        self.budget_bytes = problem.budget_bytes
        self.peak_bytes = peak_bytes
        self.machine = machine
        self.recording = recording
        self.equations = equations
        self.op = 0
        self.away_bytes = 0
        self.waiting = False

    def live_bytes(self) -> int:
        """Return the bytes alive beside the running operator."""
        return self.peak_bytes[self.op] - self.away_bytes

    def note(self, at_s: float) -> None:
        """Take down what is alive from a moment on, and check it in a strict simulation."""
        if self.waiting:
            return
        self.recording.live(at_s, self.live_bytes())
        if self.equations is not None:
            self.machine.validate()
            self.equations.fits(self.op, self.peak_bytes[self.op], self.live_bytes())

    def gone(self, record: Record, at_s: float, *, dropped: bool = False) -> None:
        """Free a record's fast bytes: the tier has them, or (`dropped`) nobody has."""
        record.leaving = False
        record.away, record.dropped = not dropped, dropped
        self.away_bytes += record.nbytes
        self.recording.absent(at_s, record.storage, gone=True)
        if self.equations is not None:
            self.equations.out(record.storage)
        self.note(at_s)

    def claim(self, record: Record) -> None:
        """Lay claim to fast bytes for a record that comes back or is made again."""
        record.away = record.dropped = False
        self.away_bytes -= record.nbytes
        if self.equations is not None:
            self.equations.begins_to_come(record.storage)

    def arrived(self, record: Record) -> None:
        """Take in that a record is back, or was made again."""
        if self.equations is not None:
            self.equations.back(record.storage)

    def released(self, record: Record) -> None:
        """Forget a record that autograd let go of; what was away is not missed any more."""
        if record.away or record.dropped:
            record.away = record.dropped = False
            self.away_bytes -= record.nbytes
            if self.equations is not None:
                self.equations.released(record.storage)

    def tell(self, event: e.Event) -> Sequence[e.Command]:
        """Give the residency machine an event and return its commands."""
        return self.machine.on(event)
