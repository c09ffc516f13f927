"""Fast memory in a simulated step: absent storages, bytes alive beside the running operator, and notifications."""

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

    `op` is the running operator, counted on from step to step; `index` is its number in its own step.

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
        self._count = max(1, len(problem.trace.ops))
        self.away_bytes = 0
        self.tier_bytes: dict[str, int] = {}
        self._now_s = 0.0
        self.waiting = False

    @property
    def index(self) -> int:
        """The running operator's number in its own step."""
        return self.op % self._count

    def live_bytes(self) -> int:
        """Return the bytes alive beside the running operator."""
        return self.peak_bytes[self.op] - self.away_bytes

    def note(self, at_s: float) -> None:
        """Take down what is alive from a moment on, and check it in a strict simulation."""
        self._now_s = max(self._now_s, at_s)
        if self.waiting:
            return
        self.recording.live(at_s, self.live_bytes())
        if self.equations is not None:
            self.machine.validate()
            self.equations.fits(self.index, self.peak_bytes[self.op], self.live_bytes())

    def gone(self, record: Record, at_s: float, *, discarded: bool = False) -> None:
        """Free a record's fast bytes: the tier has them or, if `discarded`, they are gone."""
        record.leaving = False
        record.away, record.discarded = not discarded, discarded
        self.away_bytes += record.nbytes
        self._now_s = max(self._now_s, at_s)
        if not discarded:
            self._in_tier(record, record.nbytes)
        self.recording.absent(at_s, record.storage, gone=True)
        if self.equations is not None:
            self.equations.out(record.storage)
        self.note(at_s)

    def claim(self, record: Record) -> None:
        """Lay claim to fast bytes for a record that comes back or is made again."""
        if record.away:
            self._in_tier(record, -record.nbytes)
        record.away = record.discarded = False
        self.away_bytes -= record.nbytes
        if self.equations is not None:
            self.equations.begins_to_come(record.storage)

    def arrived(self, record: Record) -> None:
        """Take in that a record is back, or was made again."""
        if self.equations is not None:
            self.equations.back(record.storage)

    def released(self, record: Record) -> None:
        """Forget a record that autograd let go of; what was away is not missed any more."""
        if record.away:
            self._in_tier(record, -record.nbytes)
        if record.away or record.discarded:
            record.away = record.discarded = False
            self.away_bytes -= record.nbytes
            if self.equations is not None:
                self.equations.released(record.storage)

    def _in_tier(self, record: Record, change_bytes: int) -> None:
        """Count what a tier holds of records that are away."""
        self.tier_bytes[record.tier] = self.tier_bytes.get(record.tier, 0) + change_bytes
        self.recording.in_tier(self._now_s, record.tier, self.tier_bytes[record.tier])

    def tell(self, event: e.Event) -> Sequence[e.Command]:
        """Give the residency machine an event and return its commands."""
        return self.machine.on(event)
