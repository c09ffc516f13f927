"""Runs calls again: which ones it takes to make some products, in order, with no more memory than they need."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Protocol

import torch
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_unflatten

from lowtide.execute.observe.operators import unseen
from lowtide.execute.recompute.numerics import running_under
from lowtide.execute.recompute.recipes import Call, Kept, Layout, Made, Product, Source
from lowtide.execute.recompute.remakes import Remakes
from lowtide.execute.step.saved import SavedTensor


class OperandChanged(RuntimeError):
    """A saved tensor was given up, and what it is made from has changed since: it cannot be had again."""

    def __init__(self) -> None:
        super().__init__(
            "lowtide: a tensor that a saved one is computed from was changed in place on another thread or after its "
            "step had raised, or was lent to numpy, so backward cannot have the saved one again: use a policy that "
            "does not recompute, such as 'belady'"
        )


class Records(Protocol):
    """The runtime's side: records in memory, and the machine's view of them."""

    def hold(self, tensor: torch.Tensor) -> SavedTensor:
        """Make a tensor's storage a record, without a save of the step's."""
        ...

    def borrow(self, record: int, dtype: torch.dtype) -> AbstractContextManager[torch.Tensor]:
        """Return a record's storage as a flat tensor, in memory while the context lasts."""
        ...

    def is_discarded(self, record: int) -> bool | None:
        """Tell whether a record was given up (None: there is no such record)."""
        ...

    def is_away(self, record: int) -> bool:
        """Tell whether a record is on a tier only, and not on its way back."""
        ...

    def remade(self, record: int) -> None:
        """Take note that a record is in memory again."""
        ...

    def failed(self, error: Exception) -> None:
        """Keep an error of a call that could not be watched, until it can be raised."""
        ...


class Rerun:
    """The calls that make some products, down to operands in memory or on a tier, and what they made so far.

    What is on a tier is read, unless the calls that make it are `planned`.
    """

    def __init__(
        self, wanted: Collection[Product], records: Records, remakes: Remakes, planned: Collection[int] = ()
    ) -> None:
        self._wanted = wanted
        self._planned = planned
        self._records = records
        self._remakes = remakes
        self._borrowed: dict[int, ExitStack] = {}
        self._bases: dict[tuple[int, torch.dtype], torch.Tensor] = {}
        self._at_hand: dict[Product, int] = {}
        self._made: dict[Product, torch.Tensor] = {}
        self._outputs: dict[Call, list[Product]] = {}
        self._ordered = self._gather()
        self._last = {operand.product: call for call in self._ordered for operand in call.made()}
        self._last_reader = {record: call for call in self._ordered for record in self._read_by(call)}

    @property
    def calls(self) -> int:
        """How many calls it takes."""
        return len(self._ordered)

    def pop(self, product: Product) -> torch.Tensor:
        """Return what was made for a product, and let go of it."""
        return self._made.pop(product)

    def close(self) -> None:
        """Let go of everything."""
        self._made.clear()
        self._give_back(list(self._borrowed))

    def _give_back(self, records: Sequence[int]) -> None:
        for key in [key for key in self._bases if key[0] in records]:
            del self._bases[key]
        for record in records:
            self._borrowed.pop(record).close()

    def _read_by(self, call: Call) -> Iterator[int]:
        """Yield the records that a call reads."""
        for leaf in call.leaves:
            match leaf:
                case Source(handle):
                    yield handle.record
                case Made() if leaf.product in self._at_hand and leaf.changes == leaf.product.changes:
                    yield self._at_hand[leaf.product]

    def _gather(self) -> list[Call]:
        calls: dict[int, Call] = {}
        products: dict[Product, None] = {}
        waiting = [(product, product.changes) for product in self._wanted]
        while waiting:
            product, changes = waiting.pop()
            products[product] = None
            for call in product.calls[: changes + 1]:
                if call.number in calls:
                    continue
                calls[call.number] = call
                for operand in call.made():
                    if self._is_at_hand(operand):
                        assert operand.product.record is not None
                        self._at_hand[operand.product] = operand.product.record
                    else:
                        waiting.append((operand.product, operand.changes))
        for product in products:
            self._outputs.setdefault(product.calls[0], []).append(product)
        return [calls[number] for number in sorted(calls)]

    def _is_at_hand(self, operand: Made) -> bool:
        """Tell whether an operand need not be made: its storage is saved, and is what the call read."""
        product = operand.product
        if product in self._wanted or product.record is None or not product.whole:
            return False
        if operand.changes != product.changes or self._records.is_discarded(product.record) is not False:
            return False
        return not (self._is_planned(product) and self._records.is_away(product.record))

    def _is_planned(self, product: Product) -> bool:
        return all(call.number in self._planned for call in product.calls) and product.can_be_made()

    def run(self) -> None:
        """Run the calls; what they make besides is let go after its last use."""
        for call in self._ordered:
            if call.spoilt:
                raise OperandChanged
            args, kwargs = tree_unflatten([self._value(leaf) for leaf in call.leaves], call.spec)
            with running_under(call.numerics):
                results = tree_leaves(self._remakes.run(call.operator, args, kwargs))
            for product in self._outputs.get(call, ()):
                self._made[product] = results[product.output]
            del args, kwargs, results
            self._give_back([record for record in self._borrowed if self._last_reader[record] is call])
            for product in [one for one in self._made if one not in self._wanted and self._last.get(one) is call]:
                del self._made[product]

    def _value(self, leaf: object) -> object:
        match leaf:
            case Kept() | Source() if leaf.is_changed():
                raise OperandChanged
            case Kept(tensor):
                return tensor
            case Source(handle, layout):
                return self._on_record(handle.record, layout)
            case Made():
                product = leaf.product
                if product in self._at_hand and leaf.changes == product.changes:
                    return self._on_record(self._at_hand[product], leaf.layout)
                return leaf.layout.over(self._made[product])
            case _:
                return leaf

    def _on_record(self, record: int, layout: Layout) -> torch.Tensor:
        if (record, layout.dtype) not in self._bases:
            borrowed = self._records.borrow(record, layout.dtype)
            stack = self._borrowed.setdefault(record, ExitStack())
            self._bases[record, layout.dtype] = stack.enter_context(borrowed)
        return layout.over(self._bases[record, layout.dtype])


@contextmanager
def rerun(
    wanted: Collection[Product], records: Records, remakes: Remakes, *, planned: Collection[int] = ()
) -> Iterator[Rerun]:
    """Run the calls that make the wanted products; what they made is there while the context lasts.

    They run as they were dispatched: below autograd, autocast and whatever modes the program has on.
    """
    running = Rerun(wanted, records, remakes, planned)
    below = torch._C._AutoDispatchBelowAutograd
    plain = torch.autocast(remakes.device.type, enabled=False)
    with torch.no_grad(), plain, _disable_current_modes(), below(), unseen():
        try:
            running.run()
            yield running
        finally:
            running.close()
