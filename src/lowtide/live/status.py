"""Each step in a terminal's last row."""

from __future__ import annotations

import time
from collections.abc import Callable

from lowtide.core.step_record import StepRecord
from lowtide.live.epochs import EpochClock
from lowtide.live.line import status_line
from lowtide.live.terminal import LastRow

# Faster updates cannot be read.
_PAUSE_S = 0.1


class LiveLine:
    """Shows each step in a terminal's last row, at most some times a second.

    `may_show` is asked once, at the first step: whether this process has the terminal.
    """

    def __init__(
        self,
        row: LastRow,
        *,
        may_show: Callable[[], bool] = lambda: True,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._row, self._may_show, self._clock = row, may_show, clock
        self._epoch = EpochClock()
        self._shows: bool | None = None
        self._next_s = 0.0

    def __call__(self, record: StepRecord) -> None:
        """Show a step."""
        if self._shows is None:
            self._shows = self._may_show()
        if not self._shows:
            return
        now_s = self._clock()
        left_s = self._epoch.left_s(now_s)
        if now_s >= self._next_s:
            self._next_s = now_s + _PAUSE_S
            self._row.show(status_line(record, columns=self._row.columns, left_s=left_s))

    def close(self) -> None:
        """Give the row back."""
        self._row.close()
