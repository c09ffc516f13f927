"""Updates that are put off: an optimizer's step is noted, and each parameter is updated when it is next used.

With a state larger than memory, the step of an optimizer reads and writes all of it with little compute to hide that.
Put off, the same traffic hides in the next forward pass. The work is native: see Note [Put off] in
`memory/native/updates.h`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from lowtide.core.trace import RANGE_BYTES
from lowtide.memory.ranges import RangeMemory


class PutOff:
    """Puts off updates under a budget; `least_bytes`: smaller tensors are updated at once."""

    least_bytes = RANGE_BYTES

    def __init__(self, memory: RangeMemory, *, budget_bytes: int) -> None:
        self._memory = memory
        self._budget_bytes = budget_bytes
        self._before = memory.native.update_counters().put_off
        self.paused = False  # an update that is rehearsed has to need what it needs

    def pays(self) -> bool:
        """Tell whether state has to leave: when an optimizer steps, it is most of what there is."""
        return not self.paused and self._memory.held_bytes() > self._budget_bytes // 2

    @property
    def operators(self) -> int:
        """How many operators have been put off."""
        return self._memory.native.update_counters().put_off - self._before

    @contextmanager
    def calls(self) -> Iterator[None]:
        """Put off what this thread does to large tensors meanwhile, element by element."""
        native = self._memory.native
        native.put_off(1)
        try:
            yield
        finally:
            native.put_off(0)
