"""Plans of a step, written by hand."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from lowtide.residency.range_schedule import ActionKind
from tests.memory.engine import Engine

LEAVE, FETCH, DISCARD, REMAKE, PLACE, LANDED, RETURN = map(int, ActionKind)


class Step:
    """A plan over tensors from before the step and births within it, with actions at its operators."""

    def __init__(self, engine: Engine, names: Sequence[str]) -> None:
        self.engine = engine
        self.names = [engine.native.name_id(name) for name in names]
        self.storages: list[tuple[int, int, int, int, int, int, int]] = []
        self.uses: list[tuple[int, ...]] = []
        self.actions: list[tuple[int, int, int, int, int, int]] = []
        self.remade: list[tuple[int, ...]] = []

    def known(self, tensor: torch.Tensor, *uses: int, tier: int = 0, again: bool = True) -> int:
        """Add a storage from before."""
        return self._add((self.engine.memory.serial_of(tensor), -1, -1), tensor.nbytes, uses, tier, again)

    def born(
        self,
        after: int,
        number: int,
        nbytes: int,
        *uses: int,
        tier: int = 0,
        slow: int | None = None,
        again: bool = False,
    ) -> int:
        """Add the `number`-th large block made since operator `after` began; `slow`: in which slow memory."""
        return self._add((-1, after, number), nbytes, uses, tier, again, slow)

    def _add(
        self,
        key: tuple[int, int, int],
        nbytes: int,
        uses: Sequence[int],
        tier: int,
        again: bool,
        slow: int | None = None,
    ) -> int:
        first = self.engine.memory.first_tier
        birth = -1 if slow is None else first + slow
        self.storages.append((*key, nbytes, first + tier, int(again), birth))
        self.uses.append(tuple(uses))
        return len(self.storages) - 1

    def at(self, op: int, kind: int, storage: int, tier: int = 0, codec: str = "identity") -> Step:
        """Add an action."""
        memory = self.engine.memory
        self.actions.append((op, kind, storage, memory.first_tier + tier, -1, memory.coders[codec]))
        return self

    def discarded(self, storage: int, *, after: int, before: int | None, ops: Sequence[int]) -> Step:
        """Discard a storage when `after` begins, and make it again by `ops` when `before` does (None: never)."""
        tier = self.engine.memory.first_tier
        self.actions.append((after, DISCARD, storage, tier, len(self.remade), 0))
        self.remade.append(tuple(ops))
        if before is not None:
            self.actions.append((before, REMAKE, storage, tier, -1, 0))
        return self

    def compile(self) -> int:
        """Give it to the engine."""
        return self.engine.native.plan_add(
            names=self.names, storages=self.storages, uses=self.uses, actions=self.actions, remade=self.remade
        )
