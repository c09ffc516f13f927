"""Watches a step's operators on a device: names and logs them, and makes room for them.

Note [Who asks for room]: where the device's allocator can ask before it refuses (`set_pressure_callback` of its device
module), it does so in the middle of whichever operator lacks room, and records leave then; nothing is asked ahead, and
a step that is not recorded costs nothing. Where it cannot, room is made before each operator: as much as a call
with such operands took before, and for one that is seen for the first time all that may leave leaves. So what the
allocator refuses then could not have run.

Note [CUDA's callback]: CUDA's allocator asks too (`c10::FreeMemoryCallback`), but holds its lock meanwhile. To give
memory up takes the GIL, and a thread that has the GIL may wait for that lock. So it is not asked to.

Note [Several devices]: each has a guard of its own. Autograd runs backward on a thread for each device, so operators of
two threads may use one device at a time: what such operators took there cannot be told apart, and is not remembered.
"""

from __future__ import annotations

import threading
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple, Protocol

import torch

from lowtide.capture.schema import Argument, given, is_operator, tensors_in, unsaid_statistics, written_arguments
from lowtide.execute.backends.accelerator.log import Operand, OperatorLog
from lowtide.execute.backends.accelerator.memory import DeviceMemory, Span
from lowtide.execute.observe import operators, touches
from lowtide.execute.observe.operators import Operator

_KNOWN_AT_MOST = 1 << 16
_Times = tuple[torch.Event, torch.Event]


class Room(Protocol):
    """What the guard asks of the backend."""

    def make_room(self, need_bytes: int) -> bool:
        """Let records leave until `need_bytes` more fit; return whether they do."""
        ...

    def note_refusal(self, op: str, need_bytes: int) -> None:
        """Remember that there is no room for an operator: the allocator will refuse it."""
        ...

    def look(self) -> None:
        """Note which records are gone, and which no other code holds any more."""
        ...

    def failed(self, error: BaseException) -> None:
        """Keep an error until it can be raised."""
        ...


class _Traits(NamedTuple):
    """What an operator's schema says. `written`: the arguments that it changes."""

    name: str
    computes: bool
    written: tuple[Argument, ...]


@cache
def _traits(operator: Operator) -> _Traits:
    schema = operator._schema
    written = (*written_arguments(schema), *unsaid_statistics(schema))
    return _Traits(name=schema.name, computes=is_operator(schema.name), written=written)


@dataclass(slots=True, eq=False)
class _Running:
    """An operator that runs: what it takes is measured, and it is logged if there is a `log`."""

    traits: _Traits
    key: Hashable
    span: Span
    operand_bytes: int
    log: OperatorLog | None = None
    reads: tuple[Operand, ...] = ()
    changed: tuple[torch.Tensor, ...] = ()
    times: _Times | None = None
    stream: torch.Stream | None = None
    number: int | None = None
    tick: int = -1


class Guard:
    """The watcher. `log` is the log of a step that is recorded; `asks`: the allocator asks for room itself."""

    def __init__(self, memory: DeviceMemory, room: Room, *, asks: bool) -> None:
        operators.load()
        self.log: OperatorLog | None = None
        self.device = memory.device
        self._memory = memory
        self._room = room
        self._asks = asks
        self._needs: dict[Hashable, int] = {}  # what an operator took beyond what was live, by its arguments
        self._times: dict[Hashable, _Times | float] = {}  # how long it took on the device, of those that were logged
        self._thread = threading.local()

    # ---- on and off ----

    @property
    def wants_operands(self) -> bool:
        """Whether operators are logged, or need room ahead."""
        return self.log is not None or not self._asks

    def start(self) -> None:
        """Watch this thread's operators, and those of the backward passes that it starts."""
        operators.watch(self)

    def stop(self) -> None:
        """Watch no more."""
        operators.unwatch(self)

    @property
    def running(self) -> str:
        """The operator that this thread runs, or an empty string."""
        return getattr(self._thread, "again", None) or operators.running()

    # ---- calls ----

    def mark_call(self, number: int) -> None:
        """Log the operator that this thread begins now as this one of the step's calls."""
        self._thread.call = number

    def _take_call(self) -> int | None:
        number: int | None = getattr(self._thread, "call", None)
        self._thread.call = None
        return number

    def again(self, operator: Operator, args: Any, kwargs: Any) -> Any:
        """Run an operator with room made for it. Nothing of it is logged."""
        traits = _traits(operator)
        self._thread.again = traits.name
        try:
            if not self._asks:
                self._make_room(traits, _key(operator, args, kwargs), args, kwargs)
            return operator(*args, **kwargs)
        finally:
            self._thread.again = None

    def duration_s(self, operator: Operator, args: Any, kwargs: Any) -> float | None:
        """Return how long an operator took on the device when it was last logged (None: it was not)."""
        key = _key(operator, args, kwargs)
        times = self._times.get(key)
        if isinstance(times, tuple):
            begin, end = times
            if not end.query():
                return None
            times = self._times[key] = max(0.0, begin.elapsed_time(end) / 1e3)
        return times

    # ---- operators ----

    def began(self, operator: Operator, args: tuple[Any, ...], kwargs: dict[str, Any]) -> object:
        """Make room where nobody asks for it, and look at what is live before an operator runs."""
        number = self._take_call()
        tensors = list(tensors_in((args, kwargs)))
        if not self._is_ours(tensors, kwargs):
            return None
        traits, key = _traits(operator), _key(operator, args, kwargs)
        if not self._asks:
            self._make_room(traits, key, args, kwargs)
        if self.log is None:
            return None if key in self._needs else _Running(traits, key, self._memory.begin_span(), _bytes_of(tensors))
        self._room.look()
        if any(tensor.device != self.device for tensor in tensors):
            number = None  # it cannot run again: what it reads elsewhere is nobody's to keep here
        stream = torch.accelerator.current_stream(self.device)
        running = _Running(
            traits,
            key,
            self._memory.begin_span(),
            _bytes_of(tensors),
            log=self.log,
            reads=tuple(_operand(tensor) for tensor in tensors if self._is_tracked(tensor)),
            changed=tuple(tensor for tensor in given(traits.written, args, kwargs) if self._is_tracked(tensor)),
            stream=stream,
            number=number,
            tick=touches.tick(self.device, traits.name),
        )
        self.log.catch_up(running.span.base_bytes)
        self.log.begin(running.reads, [_operand(tensor) for tensor in running.changed])
        if traits.computes:
            begin, end = (torch.Event(device=self.device, enable_timing=True) for _ in range(2))
            running.times = (begin, end)
            begin.record(stream)
        return running

    def ended(self, token: _Running, results: tuple[Any, ...] | None) -> None:
        """Learn what an operator took, and log it."""
        if token.times is not None and results is not None:
            token.times[1].record(token.stream)
        peak_bytes = self._memory.end_span(token.span)
        if token.log is not None:
            token.log.rise(peak_bytes)
        if results is not None:
            self._learn(token)
            self._write(token, results)
        elif not self._asks:
            # It may have been refused, and nobody knows what it would have taken: as much as its operands, say.
            self._room.note_refusal(token.traits.name, token.operand_bytes)
        if token.log is not None:
            token.log.end()

    def _write(self, token: _Running, results: tuple[Any, ...]) -> None:
        """Log an operator that has ended."""
        if token.log is None:
            return
        writes = [_operand(tensor) for tensor in tensors_in(results) if self._is_tracked(tensor)]
        token.log.operator(
            token.traits.name,
            token.reads,
            writes + [_changed(tensor, token.reads) for tensor in token.changed],
            span=token.times,
            live_bytes=token.span.live_bytes,
            peak_bytes=token.span.peak_bytes,
            call=token.number,
            tick=token.tick,
        )

    def failed(self, error: Exception) -> None:
        """Keep an error until it can be raised."""
        self._room.failed(error)

    def _is_ours(self, tensors: list[torch.Tensor], kwargs: dict[str, Any]) -> bool:
        if any(tensor.device == self.device for tensor in tensors):
            return True
        device = kwargs.get("device")
        if device is None or device.type != self.device.type:
            return False
        return (torch.accelerator.current_device_index() if device.index is None else device.index) == self.device.index

    def _is_result_here(self, traits: _Traits, args: Any, kwargs: dict[str, Any]) -> bool:
        """Tell whether an operator's result is on our device: not that of a copy to another."""
        if kwargs.get("device") is not None:
            return self._is_ours([], kwargs)
        changed = given(traits.written, args, kwargs)
        return not changed or any(tensor.device == self.device for tensor in changed)

    def _is_tracked(self, tensor: torch.Tensor) -> bool:
        is_plain = type(tensor) in (torch.Tensor, torch.nn.Parameter) and tensor.layout is torch.strided
        return is_plain and tensor.device == self.device

    def _make_room(self, traits: _Traits, key: Hashable, args: Any, kwargs: Any) -> None:
        """Make room for an operator: see Note [Who asks for room]."""
        need_bytes = self._needs.get(key)
        if need_bytes is None:
            if self._is_result_here(traits, args, kwargs):
                self._room.make_room(2 * self._memory.total_bytes)
        elif need_bytes and not self._room.make_room(need_bytes):
            self._room.note_refusal(traits.name, need_bytes)

    def _learn(self, ran: _Running) -> None:
        """Remember what an operator took, in bytes and in time."""
        if len(self._needs) >= _KNOWN_AT_MOST:  # shapes that never come again
            self._needs.clear()
            self._times.clear()
        if ran.span.is_alone:
            self._needs[ran.key] = max(self._needs.get(ran.key, 0), ran.span.rise_bytes)
        if ran.times is not None:
            self._times[ran.key] = ran.times


def _bytes_of(tensors: list[torch.Tensor]) -> int:
    return sum(tensor.nbytes for tensor in tensors if tensor.layout is torch.strided)


def _operand(tensor: torch.Tensor) -> Operand:
    """Return a tensor as the log needs it."""
    return Operand(tensor.untyped_storage(), 0 if tensor.is_inference() else tensor._version)


def _changed(tensor: torch.Tensor, reads: Sequence[Operand]) -> Operand:
    """Return a tensor that an operator has changed, which not all count: not those on lists, nor a normalisation."""
    after = _operand(tensor)
    before = max((each.version for each in reads if each.storage._cdata == after.storage._cdata), default=-1)
    return after._replace(version=max(after.version, before + 1))


def _key(operator: Operator, args: Any, kwargs: Any) -> Hashable:
    """Return what an operator's need of memory depends on: shapes, and the numbers that decide over shapes."""

    def part(value: Any) -> Hashable:
        if isinstance(value, torch.Tensor):
            strides = value.stride() if value.layout is torch.strided else ()
            return value.dtype, value.device, tuple(value.shape), strides
        if isinstance(value, list | tuple):
            return tuple(part(item) for item in value)
        if isinstance(value, bool | int | str) or value is None:
            return value
        if isinstance(value, torch.UntypedStorage):
            return value.device, value.nbytes()
        # Not the text of what may have contents: a storage's is made of its bytes, one by one.
        return str(value) if isinstance(value, torch.device | torch.dtype) else type(value).__name__

    return operator, part(args), tuple((name, part(value)) for name, value in sorted(kwargs.items()))
