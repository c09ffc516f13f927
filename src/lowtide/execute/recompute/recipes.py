"""What a step did, call by call, kept so that a storage given up without a copy can be made again.

A *call* is one operator with its arguments, as it was dispatched below autograd. A *product* is a storage that a call
allocated; later calls may have changed it in place. An operand is remembered by where it is to be had later: kept as it
is, from a record of the runtime, or made by an earlier call.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
from torch.utils._pytree import TreeSpec

from lowtide.capture.schema import arguments_of, draws_random, tensors_in, unsaid_statistics, written_arguments
from lowtide.execute.observe.operators import Operator
from lowtide.execute.recompute.numerics import Numerics
from lowtide.execute.step.saved import SavedTensor


@dataclass(frozen=True, slots=True)
class Layout:
    """Which part of a storage a tensor is."""

    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int
    dtype: torch.dtype

    @staticmethod
    def of(tensor: torch.Tensor) -> Layout:
        """Return a tensor's layout."""
        return Layout(tuple(tensor.shape), tensor.stride(), int(tensor.storage_offset()), tensor.dtype)

    def over(self, base: torch.Tensor) -> torch.Tensor:
        """Return the tensor of this layout on the storage of `base`, which has the same dtype."""
        return base.as_strided(self.sizes, self.strides, self.offset)


@dataclass(frozen=True, slots=True)
class Kept:
    """An operand that stays where it is: a parameter, something small, or memory that never moves.

    `tensor` is the same memory without a graph, of which `version` was current and whose storage had `nbytes`.
    """

    tensor: torch.Tensor
    version: int
    nbytes: int
    may_be_shared: bool = False

    @staticmethod
    def of(tensor: torch.Tensor, *, may_be_shared: bool) -> Kept:
        """Return a tensor without a graph as it is now."""
        return Kept(tensor, tensor._version, tensor.untyped_storage().nbytes(), may_be_shared)

    def is_changed(self) -> bool:
        """Tell whether the memory was changed since, or may have been: lent to numpy, or given up by FSDP."""
        storage = self.tensor.untyped_storage()
        shared = not self.may_be_shared and not storage.resizable()
        return shared or self.tensor._version != self.version or storage.nbytes() != self.nbytes


@dataclass(frozen=True, slots=True)
class Source:
    """An operand that is a record, which may be away meanwhile; `handle` keeps it from being let go."""

    handle: SavedTensor
    layout: Layout

    def is_changed(self) -> bool:
        """Tell whether the memory was changed since, or may have been: it was lent to numpy, for one."""
        return self.handle.is_changed()


@dataclass(frozen=True, slots=True)
class Made:
    """An operand that a call of the same step made, as it was after so many `changes`.

    A call that changes it in place is one of its own, and only refers to it weakly: nothing is kept by a circle.
    """

    reference: Callable[[], Product | None]
    layout: Layout
    changes: int

    @staticmethod
    def of(product: Product, layout: Layout, *, own: bool = False) -> Made:
        """Return a product as it is now; `own`: for a call that changes it."""
        return Made(weakref.ref(product) if own else lambda: product, layout, product.changes)

    @property
    def product(self) -> Product:
        """The product; the caller keeps it alive."""
        product = self.reference()
        assert product is not None, "a call outlived what it changed"
        return product


@dataclass(slots=True, eq=False, weakref_slot=True)
class Call:
    """An operator with its arguments flattened: operands for tensors, the values themselves for the rest.

    `numerics`: the settings it ran under. `duration_s`: how long it took. `stale`: an operand was changed since, or is
    about to be, so it would make something else then. `spoilt`: it was, and not all was made before that needs this.
    """

    number: int
    operator: Operator
    leaves: list[object]
    spec: TreeSpec
    numerics: Numerics
    duration_s: float = 0.0
    stale: bool = False
    spoilt: bool = False

    def made(self) -> Iterator[Made]:
        """Yield the operands that other calls made."""
        for leaf in self.leaves:
            if isinstance(leaf, Made):
                yield leaf

    def is_stale(self) -> bool:
        """Tell whether it would make something else now."""
        return self.stale or any(isinstance(leaf, (Kept, Source)) and leaf.is_changed() for leaf in self.leaves)


@dataclass(slots=True, eq=False, weakref_slot=True)
class Product:
    """A storage by the calls that made it what it is: the first allocated it, as its output number `output`.

    `serial`: the memory it is in. `version`: the tensor's when it was last seen (None: it was changed by a call since).
    `whole`: no other code changed it. `record`: its number in the runtime, while it has one. `touched_s`: when it
    was last made or read.
    """

    calls: list[Call]
    output: int
    dtype: torch.dtype
    serial: int
    version: int | None
    whole: bool = True
    record: int | None = None
    touched_s: float = field(default_factory=time.perf_counter)

    @property
    def changes(self) -> int:
        """How often it was changed in place so far."""
        return len(self.calls) - 1

    def see(self, tensor: torch.Tensor, *, is_shared: bool) -> None:
        """Look at a tensor on it: another version than expected, or numpy, means that other code may change it."""
        if is_shared or (self.version is not None and tensor._version != self.version):
            self.whole = False
        self.version = tensor._version

    def history(self, *, through: Callable[[Product], bool] = lambda _: True) -> Iterator[Call]:
        """Yield every call that has a part in it, whether or not its operands are in memory.

        `through`: whether to go on to the calls of a product that it is made from.
        """
        seen: set[int] = set()
        waiting = list(self.calls)
        while waiting:
            call = waiting.pop()
            if call.number in seen:
                continue
            seen.add(call.number)
            yield call
            for operand in call.made():
                if through(operand.product):
                    waiting += operand.product.calls[: operand.changes + 1]

    def own(self) -> tuple[float, list[int]]:
        """Return how long the calls took that make it from records, and which records those are."""
        calls = list(self.history(through=lambda product: product.record is None or product is self))
        sources = {operand.product.record: None for call in calls for operand in call.made()}
        return (
            sum(call.duration_s for call in calls),
            [record for record in sources if record is not None and record != self.record],
        )

    def can_be_made(self) -> bool:
        """Tell whether running its calls again gives the same bytes."""
        return self.whole and not any(call.is_stale() for call in self.history())


@dataclass(frozen=True, slots=True)
class Writes:
    """Which arguments an operator writes, by position and by name.

    `statistics`: positions that it writes besides, and does not say so, if the argument at `training` is true; what it
    makes does not depend on them then. `anything`: nothing is known, so every tensor may be written.
    """

    positions: tuple[int, ...] = ()
    names: tuple[str, ...] = ()
    statistics: tuple[int, ...] = ()
    training: int = -1
    anything: bool = False

    def written(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[torch.Tensor]:
        """Return the tensors among the arguments that a call writes and says so."""
        if self.anything:
            return list(tensors_in((args, kwargs)))
        values = [args[position] for position in self.positions if position < len(args)]
        return list(tensors_in([values, [kwargs[name] for name in self.names if name in kwargs]]))

    def moved_along(self, args: tuple[Any, ...]) -> list[torch.Tensor]:
        """Return the running statistics that a call writes besides."""
        if not self.statistics or not args[self.training]:
            return []
        return list(tensors_in([args[position] for position in self.statistics]))


@cache
def writes_of(operator: object) -> Writes | None:
    """Return which arguments an operator writes (None: none)."""
    if not isinstance(operator, Operator) or operator.namespace not in ("aten", "prims", "prim"):
        return Writes(anything=True)  # collectives, for one, write what they do not say they write
    written, unsaid = written_arguments(operator._schema), unsaid_statistics(operator._schema)
    if unsaid:
        training = _position(operator, "training")
        if training is not None and not written:
            return Writes(statistics=tuple(place.position for place in unsaid), training=training)
        written += unsaid  # as in the parts of a normalisation over several devices
    if not written:
        return None
    return Writes(
        positions=tuple(place.position for place in written if not place.kwarg_only),
        names=tuple(place.name for place in written),
    )


@cache
def _position(operator: Operator, name: str) -> int | None:
    return next((place.position for place in arguments_of(operator._schema) if place.name == name), None)


def repeats(operator: object, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Tell whether a call gives the same bytes when it runs again: it draws no random numbers and is PyTorch's own."""
    if not isinstance(operator, Operator) or operator.namespace != "aten":
        return False  # it may keep a state that no schema tells of
    if not draws_random(operator):
        return True
    # Attention kernels draw only where dropout is on.
    at = _position(operator, "dropout_p")
    if at is None:
        return False
    return bool((args[at] if at < len(args) else kwargs.get("dropout_p", 0.0)) == 0.0)


def without_statistics(writes: Writes | None, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return a call's arguments without the running statistics that it would move along once more."""
    if writes is None or not writes.statistics or not args[writes.training]:
        return args
    return tuple(None if position in writes.statistics else value for position, value in enumerate(args))
