"""Making storages again that were given up without a copy, by running the step's own calls once more.

`Remaker` is a dispatch mode: while it is on, it numbers the calls of the step, remembers those that a plan will want to
run again, and sees every write, so that nothing is made from operands that have changed (R1). What was given up does
not outlive its step: between steps, where nobody watches, nothing depends on a call.
"""

from __future__ import annotations

import sys
import threading
import time
import weakref
from collections.abc import Collection, Sequence
from typing import Any, Protocol

import torch
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode
from torch.utils._pytree import tree_flatten, tree_leaves

from lowtide.execute.hooks import is_parameter, unmanaged_reason
from lowtide.execute.recipes import (
    Call,
    Kept,
    Layout,
    Made,
    Operator,
    Product,
    Source,
    repeats,
    without_side_effects,
    writes_of,
)
from lowtide.execute.rerun import Records, rerun


def can_watch() -> bool:
    """Tell whether every call can be seen: not inside what `torch.compile` made, nor where it would not be let run."""
    counters = getattr(sys.modules.get("torch._dynamo.utils"), "counters", {})
    return hasattr(TorchDispatchMode, "ignore_compile_internals") and not counters.get("frames", {}).get("total", 0)


class Remakes(Protocol):
    """What a backend offers whose records can be given up and made again."""

    device: torch.device

    def serial(self, tensor: torch.Tensor) -> int:
        """Return a number for the memory behind a tensor, never used twice; below zero: not ours; 0: none."""
        ...

    def storage_bytes(self, tensor: torch.Tensor) -> int:
        """Return the bytes of the storage behind a tensor; -1 if others can reach that memory."""
        ...

    def discard(self, record: int) -> bool:
        """Give up a record's fast bytes without a copy; False if it cannot be moved now."""
        ...

    def adopt(self, record: int, tensor: torch.Tensor) -> bool:
        """Make a tensor's storage that of a record that was discarded; False if it does not fit."""
        ...

    def flat(self, record: int, dtype: torch.dtype) -> torch.Tensor | None:
        """Return all of a record's storage as one row, or None if it is not in fast memory."""
        ...

    def alias(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """Return the same memory with the same version, but without the graph (None: not possible)."""
        ...

    def mark_call(self, number: int) -> None:
        """Log which of the step's calls the operator is that runs."""
        ...


class Remaker(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch leaves modes untyped
    """Numbers and remembers calls, and runs them again: see the module's text."""

    def __init__(self, backend: Remakes, records: Records, *, least_bytes: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._backend = backend
        self._records = records
        self._least_bytes = least_bytes
        self._lock = threading.RLock()
        self._products: dict[int, Product] = {}
        self._recipes: dict[int, Product] = {}
        self._readers: dict[int, list[weakref.ref[Call]]] = {}
        self._number = 0
        self._wanted: Collection[int] = ()
        self._last = -1
        self._marks = False
        self._active = False
        self._on = False
        self.ran = 0
        self.busy_s = 0.0

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Leave compiled code alone: with any other mode on, PyTorch would run the code it was compiled from."""
        return True

    # ---- the step ----

    def begin(self, *, wanted: Collection[int], marks: bool) -> None:
        """Start to number calls from zero; remember the `wanted` ones, or mark all in the log."""
        self._number = 0
        watches = can_watch()
        self.want(wanted if watches else ())
        self._marks = marks and watches
        self._active = self.is_needed

    def want(self, wanted: Collection[int]) -> None:
        """Remember these calls of the step, as far as they are still to come."""
        self._wanted = wanted
        self._last = max(wanted, default=-1)

    @property
    def is_needed(self) -> bool:
        """Whether the step that begins has calls to number."""
        return self._marks or self._last >= 0

    def end(self) -> None:
        """Make what is still given up, and forget the step's calls."""
        self.remake([record for record in list(self._recipes) if self._records.is_dropped(record)])
        self.forget_step()

    def forget_step(self) -> None:
        """Forget the step's calls, except those that something given up is made from."""
        self.want(())
        self._marks = self._active = False
        self._products.clear()
        self._readers.clear()
        for record in [record for record in list(self._recipes) if not self._records.is_dropped(record)]:
            self._release(record)

    # ---- on and off ----

    def watch(self, *, nested: bool) -> None:
        """Be on if the step that begins has calls to number, else off; `nested`: the program's modes may be on."""
        if self.is_needed and not self._on:
            # A mode that the program leaves takes the topmost off: only a context of ours may stand above its own.
            if nested or torch._C._len_torch_dispatch_stack() == 0:
                self._on = True
                self.__enter__()  # type: ignore[no-untyped-call]
        elif not self.is_needed:
            self.unwatch()

    def unwatch(self) -> None:
        """Be off, unless the program has a mode on above."""
        if self._on and _get_current_dispatch_mode() is self:
            self._on = False
            self.__exit__(None, None, None)  # type: ignore[no-untyped-call]

    # ---- records ----

    def saved(self, record: int, tensor: torch.Tensor) -> None:
        """Take note that a tensor's storage is a record."""
        product = self._products.get(self._backend.serial(tensor))
        if product is not None:
            product.record = record
            self._recipes[record] = product

    def gone(self, record: int) -> None:
        """Take note that a record is no more."""
        self._release(record)

    def discard(self, record: int) -> bool | None:
        """Give a record up; False if it cannot be moved now, None if it could not be made again."""
        product = self._recipes.get(record)
        if product is None or not product.can_be_made():
            return None
        return self._backend.discard(record)

    def _release(self, record: int) -> None:
        product = self._recipes.pop(record, None)
        if product is not None and product.record == record:
            product.record = None

    # ---- watching ----

    def __torch_dispatch__(
        self, func: Operator, types: object, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:  # whatever the operator returns
        kwargs = kwargs or {}
        if not self._active:
            return func(*args, **kwargs)
        number = self._number
        self._number = number + 1
        if self._marks:
            self._backend.mark_call(number)
        written = writes_of(func)
        if written is None and number not in self._wanted:
            return func(*args, **kwargs)
        targets = [self._backend.serial(tensor) for tensor in written.written(args, kwargs)] if written else []
        for serial in targets:
            self._before_write(serial)
        call = self._remember(number, func, args, kwargs, targets) if number in self._wanted else None
        result = func(*args, **kwargs)
        self._after(call, targets, result, args, kwargs)
        if number == self._last:
            # What was not saved is known by now to whoever is made from it.
            self._products = {serial: one for serial, one in self._products.items() if one.record is not None}
        return result

    def _remember(
        self, number: int, func: Operator, args: tuple[Any, ...], kwargs: dict[str, Any], targets: Sequence[int]
    ) -> Call | None:
        """Return a call as it can be run again, or None if it cannot."""
        pure = without_side_effects(func, args) if repeats(func, args, kwargs) else None
        if pure is None or any(serial not in self._products for serial in targets):
            return None
        leaves, spec = tree_flatten((pure, kwargs))
        operands: list[object] = []
        read: list[int] = []
        for leaf in leaves:
            operand = self._operand(leaf, read) if isinstance(leaf, torch.Tensor) else leaf
            if operand is None and leaf is not None:
                return None
            operands.append(operand)
        call = Call(number, func, operands, spec, with_grad=torch.is_grad_enabled())
        reference = weakref.ref(call)
        for serial in read:
            self._readers.setdefault(serial, []).append(reference)
        return call

    def _operand(self, tensor: torch.Tensor, read: list[int]) -> Kept | Source | Made | None:
        if unmanaged_reason(tensor, self._backend.device) is not None:
            return None
        serial = self._backend.serial(tensor)
        product = self._products.get(serial)
        if product is not None and product.whole and product.dtype == tensor.dtype:
            return Made(product, Layout.of(tensor), product.changes)
        parameter = is_parameter(tensor)
        if serial < 0 and not parameter and not tensor.untyped_storage().resizable():
            return None  # memory of others, such as numpy's, changes without a call
        read.append(serial)
        if serial <= 0 or parameter or self._backend.storage_bytes(tensor) < self._least_bytes:
            alias = self._backend.alias(tensor)
            return None if alias is None else Kept(alias, alias._version)
        return Source(self._records.hold(tensor), Layout.of(tensor))

    def _after(
        self, call: Call | None, targets: Sequence[int], result: object, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        """Take note of what a call made and changed."""
        for serial in targets:
            product = self._products.get(serial)
            if product is not None and call is not None:
                product.calls.append(call)
            elif product is not None:
                product.whole = False
        if call is None:
            return
        before = {self._backend.serial(one) for one in tree_leaves((args, kwargs)) if isinstance(one, torch.Tensor)}
        for index, made in enumerate(tree_leaves(result)):
            if isinstance(made, torch.Tensor):
                serial = self._backend.serial(made)
                if serial > 0 and serial not in before:
                    self._products.setdefault(serial, Product([call], index, made.dtype))

    def _before_write(self, serial: int) -> None:
        """See to it that nothing will be made from memory that is about to change."""
        readers = [call for reference in self._readers.pop(serial, ()) if (call := reference()) is not None]
        if not readers:
            return
        numbers = {call.number for call in readers}
        self.remake(
            [
                record
                for record, product in list(self._recipes.items())
                if self._records.is_dropped(record) and any(call.number in numbers for call in product.history())
            ]
        )
        for call in readers:
            call.stale = True

    # ---- making ----

    def remake(self, records: Sequence[int]) -> None:
        """Run the calls again that make these records, as far as they are given up. May wait for room and reads."""
        with self._lock:
            wanted = {self._recipes[record]: record for record in records if self._records.is_dropped(record)}
            if not wanted:
                return
            begun = time.perf_counter()
            with rerun(wanted, self._records, self._backend.device) as made:
                for product, record in wanted.items():
                    if self._backend.adopt(record, made.pop(product)):
                        self._records.remade(record)
                    elif self._records.is_dropped(record):
                        raise AssertionError(f"record {record} was made again with another size")
            self.ran += made.calls
            self.busy_s += time.perf_counter() - begun
