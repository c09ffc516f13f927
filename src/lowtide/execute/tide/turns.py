"""Where an iteration of a program with several optimizers begins and ends.

An iteration is one turn of each optimizer: the two steps of a GAN, or one optimizer for matrices and one for the rest.
Nobody says how many there are. The optimizers that step before one of them does so again are an iteration; once two
iterations in a row had the same ones in the same order, the next one is known to end with the last of them.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Turn:
    """An optimizer's step: whether it is the first of an iteration, and whether a step of the program ends with it."""

    begins: bool
    ends: bool


class Turns:
    """Follows the optimizers' steps. Until it knows the iterations, each step ends with the optimizer's own."""

    def __init__(self) -> None:
        self._before: tuple[int, ...] = ()
        self._stepped: tuple[int, ...] = ()
        self._last: int | None = None

    def take(self, optimizer: object) -> Turn:
        """Take note of an optimizer's step."""
        if id(optimizer) in self._stepped:
            self._end_iteration()
        begins = not self._stepped
        self._stepped += (id(optimizer),)
        ends = self._last in (None, id(optimizer))
        if ends and self._last is not None:
            self._end_iteration()
        return Turn(begins=begins, ends=ends)

    def _end_iteration(self) -> None:
        repeats = len(self._stepped) > 1 and self._stepped == self._before
        self._last = self._stepped[-1] if repeats else None
        self._before, self._stepped = self._stepped, ()
