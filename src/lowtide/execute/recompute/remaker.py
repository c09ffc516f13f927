"""Making storages again that were given up without a copy, by running the step's own calls once more.

`Remaker` is told of operators: it numbers the calls of the step, remembers those that a plan will want to run again,
and sees the writes of its thread, so that nothing is made from operands that have changed (R1). What was given up does
not outlive its step: between steps, which are not watched, nothing depends on a call.

Note [Unseen writes]: what changes memory, and how it is noticed. Operators of this thread, and of those on which
autograd runs backward on a device: they are told, through views, `.data`, `out=` and lists; those of other libraries,
collectives among them, may write whatever they are given; a normalisation in training writes its running statistics
and does not say so. Operators of other threads: by versions, where the tensor has one. numpy and others with the same
memory: not at all, so nothing is made from memory that they have, except parameters; before they get it, what is given
up and made from it is made. The same before a storage is given up or resized by its owner, as FSDP does with
parameters. What remains is in docs/limits.md.

Note [Lost]: what it is made from may still change, where making it first has failed; a caller that asks for it then is
told so. The end of a step or of the tide does not ask: often nobody will. When backward raises on a device, autograd's
thread tells the program before it lets go of the graph, for which it needs the GIL: for a moment nobody but that thread
holds what was saved. So what is lost stays given up, and the others are made.
"""

from __future__ import annotations

import itertools
import math
import sys
import threading
import time
import weakref
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils._pytree import tree_flatten, tree_leaves

from lowtide.autograd.kept import is_parameter
from lowtide.execute.observe import operators
from lowtide.execute.observe.operators import Operator, can_watch, is_aside
from lowtide.execute.recompute.lending import Lending, LentForGood, Owned, as_tensor
from lowtide.execute.recompute.neighbourhoods import Neighbourhoods
from lowtide.execute.recompute.numerics import numerics
from lowtide.execute.recompute.recipes import (
    Call,
    Kept,
    Layout,
    Made,
    Product,
    Source,
    Writes,
    repeats,
    without_statistics,
    writes_of,
)
from lowtide.execute.recompute.remakes import Remakes
from lowtide.execute.recompute.rerun import OperandChanged, Records, rerun
from lowtide.execute.step.saved import unmanaged_reason


@dataclass(slots=True, eq=False)
class _Running:
    """A call that runs. `targets` and `moved`: the memory that it changes, and that it changes without saying so."""

    number: int
    operator: Operator
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    targets: Sequence[int] = ()
    moved: Sequence[int] = ()
    call: Call | None = None
    begun_s: float = 0.0
    saved: list[tuple[int, torch.Tensor]] = field(default_factory=list)  # results, with their records


class Remaker:
    """Numbers and remembers calls, and runs them again: see the module's text."""

    def __init__(self, backend: Remakes, records: Records, *, least_bytes: int) -> None:
        operators.load()
        self._backend = backend
        self._records = records
        self._least_bytes = least_bytes
        self._lock = threading.RLock()
        self._thread = threading.local()
        self._products: dict[int, Product] = {}
        self._recipes: dict[int, Product] = {}
        self._lost: set[int] = set()
        self._left: set[int] = set()  # of a step that is over: their operands are no longer watched
        self._readers: dict[int, list[weakref.ref[Call]]] = {}
        self._numbers = itertools.count()  # on a device, autograd's threads call too
        self._wanted: Collection[int] | None = ()
        self._last = -1
        self._marks = False
        self._active = False
        self._forward = False
        self._on = False
        self._lent = LentForGood()
        self._lending = Lending(self._before_lending)
        self._lending.on()  # also between steps: what is lent then may be written at any time
        self._neighbourhoods = self._no_neighbours()
        self.ran = 0
        self._host_s = 0.0

    # ---- the step ----

    def begin(self, *, wanted: Collection[int] | None, marks: bool) -> None:
        """Start to number calls from zero; remember the `wanted` ones (see `want`), or mark all in the log."""
        self._numbers = itertools.count()
        watches = can_watch()
        self.want(wanted if watches else ())
        self._marks = marks and watches
        self._active = self.is_needed

    def want(self, wanted: Collection[int] | None) -> None:
        """Remember these calls of the step, as far as they are still to come (None: all of forward)."""
        self._wanted = wanted
        self._last = sys.maxsize if wanted is None else max(wanted, default=-1)

    @property
    def is_needed(self) -> bool:
        """Whether the step that begins has calls to number."""
        return self._marks or self._last >= 0

    def end(self) -> None:
        """Make what is still given up, and forget the step's calls; see Note [Lost]."""
        for record in list(self._recipes):
            try:
                self.remake([record])
            except OperandChanged:
                self._lost.add(record)
        self.forget_step()

    def is_lost(self, record: int) -> bool:
        """Tell whether a record could not be made when its step or the tide ended."""
        return record in self._lost

    def forget_step(self) -> None:
        """Forget the step's calls, except those that something given up is made from."""
        self.want(())
        self._marks = self._active = False
        self._products.clear()
        self._readers.clear()
        self._neighbourhoods = self._no_neighbours()  # another thread may still look at the old ones
        for record in [record for record in list(self._recipes) if not self._records.is_discarded(record)]:
            self._release(record)
        self._left = set(self._recipes)

    # ---- on and off ----

    @property
    def device(self) -> torch.device:
        """Where the operators are that it is told of."""
        return self._backend.device

    @property
    def wants_operands(self) -> bool:
        """Whether it is told of operators: always."""
        return True

    def watch(self) -> None:
        """Be told if the step that begins has calls to number, else be told no more."""
        if self.is_needed and not self._on:
            self._on = True
            operators.watch(self, first=True)  # the log hears a call's number from here
        elif not self.is_needed:
            self.unwatch()

    def unwatch(self) -> None:
        """Be told no more."""
        if self._on:
            self._on = False
            operators.unwatch(self)

    def close(self) -> None:
        """Be told of nothing any more."""
        self.unwatch()
        self._lending.off()

    # ---- records ----

    def saved(self, record: int, tensor: torch.Tensor) -> None:
        """Take note that a tensor's storage is a record."""
        serial = self._backend.serial(tensor)
        product = self._products.get(serial)
        running: _Running | None = getattr(self._thread, "running", None)
        if running is not None and (product is None or serial in running.targets):
            running.saved.append((record, tensor))  # a result of the call that runs: known when it has ended
        elif product is not None:
            product.see(tensor, is_shared=self._is_shared(tensor, serial))
            product.record = record
            self._recipes[record] = product

    def handed_out(self, record: int, tensor: torch.Tensor) -> None:
        """Take note that autograd has a record's tensor, which may be in other memory than it was: see `_follow`."""
        product = self._recipes.get(record)
        if product is not None:
            product.touched_s = time.perf_counter()
            self._follow(product, self._backend.serial(tensor))

    def gone(self, record: int) -> None:
        """Note that a record is gone."""
        self._release(record)

    def discard(self, record: int) -> bool | None:
        """Give a record up; False if it cannot be moved now, None if it could not be made again."""
        product = self._recipes.get(record)
        if product is None or record in self._left or not product.can_be_made():
            return None
        discarded = self._backend.discard(record)
        if discarded:
            self._neighbourhoods.discarded(record)
        return discarded

    # ---- what a policy may ask ----

    def recompute_s(self, record: int) -> float:
        """Return how long it takes to make a record again, with everything discarded that hangs together with it."""
        product = self._recipes.get(record)
        if product is None or not product.whole or record in self._left:
            return math.inf
        neighbourhoods = self._neighbourhoods
        neighbourhoods.learn([record])
        return neighbourhoods.cost_s(record)

    def staleness_s(self, record: int) -> float:
        """Return how long ago a record was last read or made."""
        product = self._recipes.get(record)
        return 0.0 if product is None else time.perf_counter() - product.touched_s

    def _no_neighbours(self) -> Neighbourhoods:
        def own(record: int) -> tuple[float, Sequence[int]]:
            product = self._recipes.get(record)  # None: it went meanwhile, on another thread
            return (math.inf, ()) if product is None else product.own()

        return Neighbourhoods(own)

    def _release(self, record: int) -> None:
        product = self._recipes.pop(record, None)
        self._left.discard(record)
        self._lost.discard(record)
        if product is not None and product.record == record:
            product.record = None
            self._forget(product)

    def _follow(self, product: Product, serial: int) -> None:
        """Know a product by the memory it is in now, so that changes are noticed there."""
        self._forget(product)
        product.serial = serial
        self._products[serial] = product

    def _forget(self, product: Product) -> None:
        if self._products.get(product.serial) is product:
            del self._products[product.serial]

    # ---- watching ----

    def began(self, operator: Operator, args: tuple[Any, ...], kwargs: dict[str, Any]) -> object:
        """Give a call its number, see to what it is about to change, and remember it if it is wanted."""
        if not self._active:
            return None
        number = next(self._numbers)
        if self._marks:
            self._backend.mark_call(number)
        writes = writes_of(operator)
        wanted = self._is_wanted(number)
        if writes is None and not wanted:
            return None
        running = _Running(number, operator, args, kwargs)
        if writes is not None:
            running.targets = [self._backend.serial(tensor) for tensor in writes.written(args, kwargs)]
            running.moved = [self._backend.serial(tensor) for tensor in writes.moved_along(args)]
            for serial in (*running.targets, *running.moved):
                self._before_write(serial)
        if wanted:
            running.call = self._remember(number, operator, args, kwargs, writes, running.targets)
        running.begun_s = time.perf_counter()
        self._thread.running = running
        return running

    def ended(self, token: _Running, results: tuple[Any, ...] | None) -> None:
        """Take note of what a call changed and made."""
        self._thread.running = None
        if results is None:
            self._changed(None, [*token.targets, *token.moved])  # half of it may have been done
            return
        call = token.call
        self._changed(call, token.targets)
        self._changed(None, token.moved)
        if call is not None:
            call.duration_s, clock = time.perf_counter() - token.begun_s, self._backend.clock
            if self._wanted is None and clock is not None:  # otherwise it is not used
                call.duration_s = clock.took_s(token.operator, token.args, token.kwargs) or call.duration_s
            self._made(call, results, token.args, token.kwargs)
        for record, tensor in token.saved:
            self.saved(record, tensor)
        if token.number == self._last:
            self._forget_unsaved(but=call)

    def failed(self, error: Exception) -> None:
        """Have an error raised where it can be."""
        self._records.failed(error)

    def _is_wanted(self, number: int) -> bool:
        """Tell whether a call is to be remembered."""
        if self._wanted is not None:
            return number in self._wanted
        if torch._C._current_graph_task_id() != -1:  # in backward: forward, or a part of it, is over
            if self._forward:
                self._forward = False
                self._forget_unsaved()
            return False
        self._forward = True
        return torch.is_grad_enabled()  # else autograd saves nothing of what it makes

    def _forget_unsaved(self, *, but: Call | None = None) -> None:
        """Let go of products that were not saved: recipes that need them hold them by now.

        What the running call has made (`but`) can only be saved by those that follow it.
        """
        self._products = {
            serial: one
            for serial, one in list(self._products.items())
            if one.record is not None or any(call is but for call in one.calls)
        }

    def _remember(
        self,
        number: int,
        func: Operator,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        writes: Writes | None,
        targets: Sequence[int],
    ) -> Call | None:
        """Return a call as it can be run again, or None if it cannot."""
        if not repeats(func, args, kwargs):
            return None
        leaves, spec = tree_flatten((without_statistics(writes, args), kwargs))
        operands: list[object] = []
        read: list[int] = []
        for leaf in leaves:
            operand = self._operand(leaf, read, targets) if isinstance(leaf, torch.Tensor) else leaf
            if operand is NotImplemented or (operand is None and leaf is not None):
                return None
            operands.append(operand)
        call = Call(number, func, operands, spec, numerics())
        reference = weakref.ref(call)
        for serial in read:
            self._readers.setdefault(serial, []).append(reference)
        return call

    def _operand(self, tensor: torch.Tensor, read: list[int], targets: Sequence[int]) -> Kept | Source | Made | None:
        """Return how a tensor is to be had later, or None if that is not certain; see Note [Unseen writes]."""
        if unmanaged_reason(tensor, self._backend.device) is not None or tensor.is_inference():
            return None
        serial = self._backend.serial(tensor)
        product = self._products.get(serial)
        if product is not None:
            product.see(tensor, is_shared=self._is_shared(tensor, serial))
            product.touched_s = time.perf_counter()
            if product.whole and product.dtype == tensor.dtype:
                return Made.of(product, Layout.of(tensor), own=serial in targets)
        if serial in targets:
            return None  # it may change only what it has made itself
        parameter = is_parameter(tensor)
        if not parameter and self._is_shared(tensor, serial):
            return None
        read.append(serial)
        if serial <= 0 or parameter or self._backend.storage_bytes(tensor) < self._least_bytes:
            alias = self._backend.alias(tensor)
            return None if alias is None else Kept.of(alias, may_be_shared=parameter)
        return Source(self._records.hold(tensor), Layout.of(tensor))

    def _is_shared(self, tensor: torch.Tensor, serial: int) -> bool:
        """Tell whether others than tensors may write the memory behind a tensor."""
        return serial in self._lent or self._backend.is_shared(tensor)

    def _changed(self, call: Call | None, targets: Sequence[int]) -> None:
        """Take note of what a call changed."""
        for serial in targets:
            product = self._products.get(serial)
            if product is None:
                continue
            if call is not None:
                product.calls.append(call)
            else:
                product.whole = False
            product.version = None  # autograd counts the change when the call has returned

    def _made(self, call: Call, result: object, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Take note of what a call made."""
        before = {self._backend.serial(one) for one in tree_leaves((args, kwargs)) if isinstance(one, torch.Tensor)}
        for index, made in enumerate(tree_leaves(result)):
            if isinstance(made, torch.Tensor) and not made.is_inference():
                serial = self._backend.serial(made)
                if serial > 0 and serial not in before:
                    product = Product([call], index, made.dtype, serial, made._version)
                    self._products.setdefault(serial, product)

    def _before_write(self, serial: int) -> None:
        """See to it that nothing will be made from memory that is about to change."""
        readers = [call for reference in self._readers.pop(serial, ()) if (call := reference()) is not None]
        if not readers:
            return
        for call in readers:
            call.stale = True  # first of all: nothing more may be given up that depends on it
        numbers = {call.number for call in readers}
        try:
            self._remake_each(
                [
                    record
                    for record, product in list(self._recipes.items())
                    if any(call.number in numbers for call in product.history())
                ]
            )
        except BaseException:
            for call in readers:
                call.spoilt = True  # the program cannot be kept from writing: a value that was not made by now is lost
            raise

    def _before_lending(self, owned: Owned, for_good: bool) -> None:
        """Make sure that nothing is made from memory that code may write without a call."""
        if is_aside() or owned.device != self._backend.device or not (self._active or for_good):
            return
        tensor = as_tensor(owned)
        if tensor is None:
            return
        serial = self._backend.serial(tensor)
        if for_good and serial:
            self._lent.add(serial, tensor.untyped_storage())
        if self._active:
            self._before_write(serial)
            self._changed(None, [serial])

    # ---- making ----

    @property
    def busy_s(self) -> float:
        """How long everything took that ran again so far."""
        clock = self._backend.clock
        return self._host_s if clock is None else clock.ran_s()

    def _remake_each(self, records: Sequence[int]) -> None:
        """Make records one after the other, in the order they were saved: each may be swapped as soon as it is made."""
        for record in records:
            self.remake([record])

    def remake(self, records: Sequence[int], *, planned: Collection[int] = ()) -> None:
        """Run the calls again that make these records, as far as they are given up. May wait for room and reads."""
        with self._lock:
            discarded = [record for record in records if self._records.is_discarded(record)]
            wanted = {self._recipes[record]: record for record in discarded}
            if not wanted:
                return
            begun = time.perf_counter()
            with rerun(wanted, self._records, self._backend, planned=planned) as made:
                for product, record in wanted.items():
                    tensor = made.pop(product)
                    if self._backend.adopt(record, tensor):
                        self._follow(product, self._backend.serial(tensor))
                        del tensor
                        self._neighbourhoods.remade(record)
                        self._records.remade(record)
                        if record in self._left:
                            self._release(record)
                    elif self._records.is_discarded(record):
                        raise AssertionError(f"record {record} was made again with another size, or on another device")
            self.ran += made.calls
            self._host_s += time.perf_counter() - begun
