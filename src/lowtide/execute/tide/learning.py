"""When a step is worth recording, and when a recorded one is worth a plan.

The first step of a training is planned at once, and so is the next kind of step: the first one makes the optimizer's
state, and is like no other. Each kind is recorded twice, because only then is the allocator warm, and do operators take
the time they will go on taking. Any further kind is planned once it repeats (R8).
Steps of a known kind that are of another size each time (a text that grows by a word with every call) never repeat:
after a while they are not recorded any more, and follow the plan that they have as far as it goes.
"""

from __future__ import annotations

from collections.abc import Hashable

_RECORDINGS = 2
# Kinds of step that are planned before they repeat.
_AT_ONCE = 2
# Steps to record after one that matched no plan.
_ALERT_STEPS = 8
# Recorded steps of new sizes, without one that repeats, after which they are not worth recording.
_MOST_SIZES = 24


class Learning:
    """Counts the kinds of step, each known by a signature."""

    def __init__(self) -> None:
        self._recorded: dict[Hashable, int] = {}
        self._seen: set[int] = set()
        self._alert = 1
        self._sizes = 0

    @property
    def records(self) -> bool:
        """Whether the next step is to be recorded."""
        return self._alert > 0

    def nothing_seen(self) -> None:
        """Take note of a step in which nothing could have moved."""
        self._alert = max(1 if not self._recorded else 0, self._alert - 1)

    def is_worth_planning(self, signature: Hashable, *, followed: bool) -> bool:
        """Tell whether a step that was recorded is to be planned; `followed`: it followed a plan to its end."""
        repeats = len(self._recorded) < _AT_ONCE or hash(signature) in self._seen
        return self._recorded.get(signature, 0) < _RECORDINGS and (repeats or followed)

    def planned(self, signature: Hashable) -> None:
        """Take note of a recorded step that was planned."""
        self._recorded[signature] = self._recorded.get(signature, 0) + 1
        self._sizes = 0

    def ended(self, signature: Hashable | None, *, followed: bool, resized: bool = False) -> None:
        """Take note of a step's end (None: it was not recorded, and followed no plan).

        `resized`: it had the operators of a plan, and tensors of other sizes.
        """
        self._alert = max(0, self._alert - 1)
        if resized:
            self._sizes += 1
            if self._sizes > _MOST_SIZES:
                self._alert = 0
                return
        times = 0
        if signature is not None:
            self._seen.add(hash(signature))
            times = self._recorded.get(signature, 0)
        if times == 0:
            self._alert = _ALERT_STEPS
        elif times < _RECORDINGS:
            self._alert = max(1, self._alert)
        elif followed:
            self._alert = 0
