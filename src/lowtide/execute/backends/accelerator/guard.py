"""Watches a step's operators on a device: makes room before each, and runs one again that found none.

Note [Run again]: PyTorch's device allocators raise where memory runs out; nobody is asked first. But an operator is
called through the dispatcher, and a `TorchDispatchMode` stands right there, below autograd: it can catch the error,
let saved tensors leave, and call the same operator again. That is exact only if the failed call has changed nothing.
Results are new tensors, so it has not, but for these: an operator that writes to its arguments (run again only if
writing twice is the same), one that updates running statistics without saying so (they are put back), one that draws
random numbers (the generator is put back), and one of another library (never run again).

Note [Several devices]: each has a guard of its own, and all of them are on, one below the other. An operator that
copies between two devices passes both; memory may run out on either, and only that one's guard makes room and calls it
again. Autograd runs backward on a thread for each device, so operators of two threads may use one device at a time:
what such operators took there cannot be told apart, and is not remembered.

The mode costs some microseconds of the host's time for every operator, so it is on only where memory is tight.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable, Iterator
from functools import cache
from typing import Any, NamedTuple, Protocol

import torch

from lowtide.capture.recorder import is_operator
from lowtide.execute.backends.accelerator.log import Operand, OperatorLog
from lowtide.execute.backends.accelerator.memory import DeviceMemory, Span
from lowtide.execute.backends.oom_messages import asked_bytes, concerns
from lowtide.execute.recompute.modes import OwnMode, is_aside

_SAME_WHEN_REPEATED = frozenset({"aten::copy_", "aten::zero_", "aten::fill_", "aten::_copy_from"})
_KNOWN_AT_MOST = 1 << 16
_Span = tuple[torch.Event, torch.Event]


class Room(Protocol):
    """What the guard asks of the backend."""

    def make_room(self, need_bytes: int) -> bool:
        """Let records leave until `need_bytes` more fit; return whether they do."""
        ...

    def refusal(self, op: str, need_bytes: int) -> torch.OutOfMemoryError:
        """Return the error for an operator that cannot run, and remember it."""
        ...

    def look(self) -> None:
        """Note which records nobody else holds any more."""
        ...


class _Traits(NamedTuple):
    """What an operator's schema says. `written`: positions and names of the arguments that it changes.

    `statistics`: those that it changes without saying so, as BatchNorm does with its running mean.
    """

    name: str
    is_view: bool
    computes: bool
    is_retried: bool
    written: tuple[tuple[int, str], ...]
    statistics: tuple[tuple[int, str], ...]
    draws: bool

    @property
    def is_plain(self) -> bool:
        """Whether a call that failed has changed nothing, so that there is nothing to keep before it."""
        return self.is_retried and not (self.written or self.statistics or self.draws)


@cache
def _traits(func: Any) -> _Traits:
    schema = func._schema
    returns = [result.alias_info for result in schema.returns]
    places = [(position, argument.name) for position, argument in enumerate(schema.arguments)]
    aliases = [argument.alias_info for argument in schema.arguments]
    written = tuple(p for p, alias in zip(places, aliases, strict=True) if alias is not None and alias.is_write)
    return _Traits(
        name=schema.name,
        is_view=bool(returns) and all(alias is not None and not alias.is_write for alias in returns),
        computes=is_operator(schema.name),
        is_retried=schema.name.startswith("aten::") and (not written or schema.name in _SAME_WHEN_REPEATED),
        written=written,
        statistics=()
        if schema.name.endswith("_backward")  # it only reads them
        else tuple(place for place in places if place[1].startswith("running_")),
        draws=torch.Tag.nondeterministic_seeded in func.tags,
    )


class Guard(OwnMode):
    """The mode. `log` is the log of a step that is recorded; `foresees` tells whether a plan makes room in time."""

    supports_higher_order_operators = True

    def __init__(self, memory: DeviceMemory, room: Room) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's
        self.log: OperatorLog | None = None
        self.foresees = False
        self._memory = memory
        self._room = room
        self._module: Any = torch.get_device_module(memory.device)
        self._needs: dict[Hashable, int] = {}  # what an operator took beyond what was live, by its arguments
        self._spans: dict[Hashable, _Span | float] = {}  # how long it took on the device, of those that were logged
        self._is_entered = False
        self._is_active = False
        self._thread = threading.local()

    # ---- on and off ----

    def start(self) -> None:
        """Watch this thread's operators, and those of the backward passes that it starts."""
        self._is_active = True
        if not self._is_entered:
            self.enter_below()
            self._is_entered = True

    def stop(self) -> None:
        """Watch no more. Below a mode of the program's that is still on, it stays and lets everything pass."""
        self._is_active = False
        if self._is_entered and self.is_on_below_ours:
            self.leave()
            self._is_entered = False

    # ---- calls ----

    def mark_call(self, number: int) -> None:
        """Log the operator that this thread runs next as this one of the step's calls: see Note [Order of modes]."""
        self._thread.call = number

    def _take_call(self) -> int | None:
        number: int | None = getattr(self._thread, "call", None)
        self._thread.call = None
        return number

    def again(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Run an operator with room made for it, whether or not the mode is on. Nothing of it is logged."""
        traits = _traits(func)
        tensors = [thing for thing in _things((args, kwargs)) if isinstance(thing, torch.Tensor)]
        self._make_room(traits, func, args, kwargs, tensors)
        return self._run(traits, lambda: func(*args, **kwargs), args, kwargs, tensors)

    def duration_s(self, func: Any, args: Any, kwargs: Any) -> float | None:
        """Return how long an operator took on the device when it was last logged (None: it was not)."""
        key = _key(func, args, kwargs)
        span = self._spans.get(key)
        if isinstance(span, tuple):
            begin, end = span
            if not end.query():
                return None
            span = self._spans[key] = max(0.0, begin.elapsed_time(end) / 1e3)
        return span

    # ---- operators ----

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not self._is_active or is_aside() or not hasattr(func, "_schema"):
            return func(*args, **kwargs)
        if self.log is None:
            return self._guarded(func, args, kwargs)
        number = self._take_call()
        try:
            return self._guarded(func, args, kwargs, number)
        finally:
            self._take_call()  # of a mode below, which numbers this very operator: too late

    def _guarded(self, func: Any, args: Any, kwargs: Any, number: int | None = None) -> Any:
        traits = _traits(func)
        if self.log is None and (traits.is_view or (self.foresees and traits.is_plain)):
            try:
                return func(*args, **kwargs)
            except torch.OutOfMemoryError as error:
                if not concerns(error, self._memory.device):
                    raise
                # once more, with all that it takes
        tensors = [thing for thing in _things((args, kwargs)) if isinstance(thing, torch.Tensor)]
        if not self._is_ours(tensors, kwargs):
            return func(*args, **kwargs)
        if self.log is not None:
            return self._logged(self.log, traits, func, args, kwargs, tensors, number)
        # Where a plan makes room in time, only operators that cannot be run again are not left to that.
        if not self.foresees or traits.written:
            self._make_room(traits, func, args, kwargs, tensors)
        return self._run(traits, lambda: func(*args, **kwargs), args, kwargs, tensors)

    def _is_ours(self, tensors: list[torch.Tensor], kwargs: dict[str, Any]) -> bool:
        ours = self._memory.device
        if any(tensor.device == ours for tensor in tensors):
            return True
        device = kwargs.get("device")
        if device is None or device.type != ours.type:
            return False
        return (torch.accelerator.current_device_index() if device.index is None else device.index) == ours.index

    def _is_result_here(self, traits: _Traits, args: Any, kwargs: dict[str, Any]) -> bool:
        """Tell whether an operator's result is on our device: not that of a copy to another."""
        device = kwargs.get("device")
        if device is not None:
            return self._is_ours([], kwargs)
        changed = _given(traits.written, args, kwargs)
        return not changed or any(tensor.device == self._memory.device for tensor in changed)

    def _is_tracked(self, tensor: torch.Tensor) -> bool:
        is_plain = type(tensor) in (torch.Tensor, torch.nn.Parameter) and tensor.layout is torch.strided
        return is_plain and tensor.device == self._memory.device

    def _make_room(self, traits: _Traits, func: Any, args: Any, kwargs: Any, tensors: list[torch.Tensor]) -> None:
        """Make room for an operator: for what it took before, or as a guess for its operands once more."""
        need_bytes = self._needs.get(_key(func, args, kwargs))
        if need_bytes is None:
            if self._is_result_here(traits, args, kwargs):
                self._room.make_room(_bytes_of(tensors))
        elif need_bytes and not self._room.make_room(need_bytes):
            raise self._room.refusal(traits.name, need_bytes)

    def _logged(
        self,
        log: OperatorLog,
        traits: _Traits,
        func: Any,
        args: Any,
        kwargs: Any,
        tensors: list[torch.Tensor],
        number: int | None,
    ) -> Any:
        if not traits.is_view:
            self._make_room(traits, func, args, kwargs, tensors)
        self._room.look()
        reads = [_operand(tensor) for tensor in tensors if self._is_tracked(tensor)]
        begin, end = (torch.Event(device=self._memory.device, enable_timing=True) for _ in range(2))
        timed = (begin, end) if traits.computes else None
        stream = torch.accelerator.current_stream(self._memory.device)

        def call() -> Any:
            if timed is not None:
                begin.record(stream)
            return func(*args, **kwargs)

        with self._memory.span() as span:
            log.catch_up(span.before_bytes)
            result = call() if traits.is_view else self._run(traits, call, args, kwargs, tensors)
            if timed is not None:
                end.record(stream)
        if not traits.is_view:
            self._learn(_key(func, args, kwargs), span, timed)
        results = [thing for thing in _things(result) if isinstance(thing, torch.Tensor)]
        writes = [_operand(tensor) for tensor in results if self._is_tracked(tensor)]
        changed = _given(traits.written, args, kwargs)
        writes += [_operand(tensor, changed=True) for tensor in changed if self._is_tracked(tensor)]
        if any(tensor.device != self._memory.device for tensor in tensors):
            number = None  # it cannot run again: what it reads elsewhere is nobody's to keep here
        log.operator(
            traits.name,
            reads,
            writes,
            span=timed,
            live_bytes=span.live_bytes,
            peak_bytes=span.peak_bytes,
            call=number,
        )
        return result

    def _learn(self, key: Hashable, span: Span, timed: _Span | None) -> None:
        """Remember what an operator took, in bytes and in time."""
        if len(self._needs) >= _KNOWN_AT_MOST:  # shapes that never come again
            self._needs.clear()
            self._spans.clear()
        if span.is_alone:
            self._needs[key] = max(self._needs.get(key, 0), span.peak_bytes - span.before_bytes)
        if timed is not None:
            self._spans[key] = timed

    def _run(
        self, traits: _Traits, call: Callable[[], Any], args: Any, kwargs: Any, tensors: list[torch.Tensor]
    ) -> Any:
        """Call an operator; where the allocator refuses it, make room and call it again. See Note [Run again]."""
        undo = self._undo(traits, args, kwargs, tensors)
        tried_bytes = _bytes_of(tensors)
        while True:
            try:
                return call()
            except torch.OutOfMemoryError as error:
                if not concerns(error, self._memory.device):
                    raise  # of the other device that the operator copies from or to: see Note [Several devices]
                wanted_bytes = max(asked_bytes(error), 1)
                before_bytes = self._memory.allocated_bytes()
                refused = error.with_traceback(None)
            if undo is None:
                raise self._room.refusal(traits.name, wanted_bytes) from refused
            # More each time, until all that may leave has left.
            while tried_bytes <= 2 * self._memory.total_bytes:
                tried_bytes = max(2 * tried_bytes, wanted_bytes)
                self._room.make_room(tried_bytes)
                if self._memory.allocated_bytes() < before_bytes:
                    break
            else:
                raise self._room.refusal(traits.name, wanted_bytes) from refused
            undo()

    def _undo(self, traits: _Traits, args: Any, kwargs: Any, tensors: list[torch.Tensor]) -> Callable[[], None] | None:
        """Return what takes back a call that failed half-way; None if nothing can."""
        plain = all(type(tensor) in (torch.Tensor, torch.nn.Parameter) for tensor in tensors)
        if not plain or not traits.is_retried or (traits.draws and kwargs.get("generator") is not None):
            return None
        statistics = _given(traits.statistics, args, kwargs)
        copies = [(tensor, _copy_of(tensor)) for tensor in statistics if tensor.device == self._memory.device]
        state = self._module.get_rng_state(self._memory.device) if traits.draws else None

        def undo() -> None:
            if state is not None:
                self._module.set_rng_state(state, self._memory.device)
            for tensor, copy in copies:
                tensor.copy_(copy)

        return undo


def _copy_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return a copy, on the device: one on the host would wait in line behind all copies of records."""
    try:
        return tensor.clone()
    except torch.OutOfMemoryError:
        return tensor.to("cpu")


def _given(places: tuple[tuple[int, str], ...], args: Any, kwargs: Any) -> list[torch.Tensor]:
    """Return the tensors given for some arguments of a schema."""
    given = [args[position] for position, _ in places if position < len(args)]
    given += [kwargs[name] for _, name in places if name in kwargs]
    return [thing for thing in _things(given) if isinstance(thing, torch.Tensor)]


def _bytes_of(tensors: list[torch.Tensor]) -> int:
    return sum(tensor.nbytes for tensor in tensors if tensor.layout is torch.strided)


def _operand(tensor: torch.Tensor, *, changed: bool = False) -> Operand:
    """Return a tensor as the log needs it; `changed`: autograd counts that only when the call has returned."""
    version = 0 if tensor.is_inference() else tensor._version
    return Operand(tensor.untyped_storage(), version + changed)


def _things(value: Any) -> Iterator[Any]:
    if isinstance(value, dict):
        value = value.values()
    elif not isinstance(value, list | tuple):
        yield value
        return
    for item in value:
        yield from _things(item)


def _key(func: Any, args: Any, kwargs: Any) -> Hashable:
    """Return what an operator's need of memory depends on: shapes, and the numbers that decide over shapes."""

    def part(value: Any) -> Hashable:
        if isinstance(value, torch.Tensor):
            strides = value.stride() if value.layout is torch.strided else ()
            return value.dtype, value.device, tuple(value.shape), strides
        if isinstance(value, list | tuple):
            return tuple(part(item) for item in value)
        if isinstance(value, bool | int | str) or value is None:
            return value
        return type(value).__name__ if isinstance(value, float) else str(value)

    return func, part(args), tuple((name, part(value)) for name, value in sorted(kwargs.items()))
