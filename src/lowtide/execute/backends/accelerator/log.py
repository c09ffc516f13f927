"""The log of a step on an accelerator, in the form of the native one: operators, operands, memory, saves and uses.

Host clocks say nothing of a device that runs behind, so every operator is timed by a pair of events on its own
stream. Their differences, laid end to end, are the log's clock: waits for transfers and idle time between operators
are not in it.

Memory is counted by the device's allocator. What it says is told apart by asking which known storages have died since;
what nothing accounts for (an operator's scratch, rounding) becomes a block of its own, so that the log's curve is the
allocator's.

Autograd's threads for other devices use this one too, where a training copies between them: every entry is made under
a lock, which is never held while anything waits.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from functools import wraps
from typing import Any, Concatenate, NamedTuple, ParamSpec, TypeVar

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from lowtide.capture.builder import Scope
from lowtide.core.log import Event as Logged
from lowtide.core.log import Log, LogEntry

_WeakRef: Any = StorageWeakRef  # untyped in torch
_BACKWARD, _UPDATE = "backward", "Optimizer.step"
# What PyTorch's device allocators round to; what they add beyond that is counted as nobody's.
_ROUND_BYTES = 512

P = ParamSpec("P")
T = TypeVar("T")


class Operand(NamedTuple):
    """A tensor that an operator reads or writes, as the log needs it."""

    storage: torch.UntypedStorage
    version: int


class _Known(NamedTuple):
    weak: Any
    serial: int
    nbytes: int


_open_logs: set[OperatorLog] = set()


def _begin_update(optimizer: torch.optim.Optimizer, _args: object, _kwargs: object) -> None:
    for log in _open_logs:
        log.updating = True
        log.note_gradients(parameter for group in optimizer.param_groups for parameter in group["params"])


def _end_update(_optimizer: torch.optim.Optimizer, _args: object, _kwargs: object) -> None:
    for log in _open_logs:
        log.updating = False


# Registered once and for all: where a script is run a log begins and ends inside another such hook, and PyTorch does
# not let hooks come and go while it calls them.
register_optimizer_step_pre_hook(_begin_update)
register_optimizer_step_post_hook(_end_update)


def _locked(method: Callable[Concatenate[OperatorLog, P], T]) -> Callable[Concatenate[OperatorLog, P], T]:
    """Let one thread at a time into a method."""

    @wraps(method)
    def alone(log: OperatorLog, /, *args: P.args, **kwargs: P.kwargs) -> T:
        with log._lock:
            return method(log, *args, **kwargs)

    return alone


class OperatorLog:
    """One step's log. `level_bytes` is what is live where the log begins."""

    def __init__(self, level_bytes: int, *, most_entries: int = 4_000_000) -> None:
        self._lock = threading.RLock()
        self._level_bytes = level_bytes
        self._most_entries = most_entries
        self._entries: list[LogEntry] = []
        self._names: dict[str, int] = {_BACKWARD: 0, _UPDATE: 1}
        self._known: dict[int, _Known] = {}
        self._spans: list[tuple[torch.Event, torch.Event]] = []
        self._serials = 0
        self.updating = False
        self._thread = threading.local()
        self._needs: list[int] = [0]
        self._gradients: dict[int, int] = {}
        self._segment_bytes = level_bytes  # what was live when the segment began, and what was moved since
        _open_logs.add(self)

    # ---- entries ----

    @_locked
    def add(self, kind: Logged, a: int = 0, b: int = 0, c: int = 0) -> None:
        """Append an entry; the clock is read off the operators when the log is taken."""
        if len(self._entries) < self._most_entries:
            self._entries.append(LogEntry(kind, 0, len(self._spans), a, b, c))

    @_locked
    def add_module(self, name: str) -> None:
        """Note that a module's operators follow."""
        self.add(Logged.MODULE, self._number(name))

    @_locked
    def serial_of(self, storage: torch.UntypedStorage) -> int:
        """Return the number of a storage, which existed before the step if it was not seen yet."""
        known = self._known.get(storage._cdata)
        if known is None or known.weak.expired():
            known = self._know(storage)
        return known.serial

    def _know(self, storage: torch.UntypedStorage) -> _Known:
        self._serials += 1
        known = self._known[storage._cdata] = _Known(_WeakRef(storage), self._serials, _rounded(storage))
        return known

    def _number(self, name: str) -> int:
        return self._names.setdefault(name, len(self._names))

    @_locked
    def note_gradients(self, parameters: Iterable[torch.Tensor]) -> None:
        """Note which storages are the gradients of which parameters: by the end of the step they may be gone."""
        for parameter in parameters:
            gradient = parameter.grad
            if gradient is not None and gradient.layout is torch.strided and gradient.device == parameter.device:
                known = self._known.get(gradient.untyped_storage()._cdata)
                if known is not None and not known.weak.expired():
                    self._gradients[known.serial] = self.serial_of(parameter.untyped_storage())

    @_locked
    def pack(self, record: int, tensor: torch.Tensor) -> None:
        """Note that autograd saves a tensor; the result of an operator after that operator, though it still runs."""
        storage = tensor.untyped_storage()
        known = self._known.get(storage._cdata)
        changes: list[Operand] | None = getattr(self._thread, "changes", None)
        is_result = changes is not None and (
            known is None
            or known.weak.expired()
            or any(each.storage._cdata == storage._cdata and each.version != tensor._version for each in changes)
        )
        if is_result:
            self._thread.packs.append((record, storage))
        else:
            self.add(Logged.PACK, record, self.serial_of(storage), storage.nbytes())

    # ---- operators ----

    @_locked
    def begin(self, reads: Sequence[Operand], changes: Sequence[Operand]) -> None:
        """Note that this thread begins an operator; it is logged when it ends."""
        for operand in reads:
            self.serial_of(operand.storage)
        self._thread.changes, self._thread.packs = list(changes), []

    @_locked
    def end(self) -> None:
        """Note what autograd saved of this thread's operator, which has ended."""
        packs, self._thread.changes, self._thread.packs = self._thread.packs, None, []
        for record, storage in packs:
            self.add(Logged.PACK, record, self.serial_of(storage), storage.nbytes())

    @property
    def is_inside(self) -> bool:
        """Whether this thread runs an operator that will be logged."""
        return getattr(self._thread, "changes", None) is not None

    @_locked
    def operator(
        self,
        name: str,
        reads: Sequence[Operand],
        writes: Sequence[Operand],
        *,
        span: tuple[torch.Event, torch.Event] | None,
        live_bytes: int,
        peak_bytes: int,
        call: int | None = None,
        tick: int = -1,
    ) -> None:
        """Log a call that has ended; `live_bytes` and `peak_bytes` as the allocator counts, `span` if it computes.

        `call`: its number among the step's calls, if they are numbered; `tick`: the tick that it is, or the next one.
        """
        scope = Scope.BACKWARD if torch._C._current_graph_task_id() != -1 else Scope.USER if self.updating else None
        outer = self._number(_BACKWARD if scope is Scope.BACKWARD else _UPDATE)
        number = self._number(name)
        if span is not None:
            if scope is not None:
                self.add(Logged.OP_BEGIN, outer, scope)
            self.add(Logged.OP_BEGIN, number, Scope.FUNCTION)
            if call is not None:
                self.add(Logged.CALL, call)
            if tick >= 0:
                self.add(Logged.TICK, tick)
            self._spans.append(span)
        for operand in reads:  # also those of a view: its result is not a new storage
            serial = self.serial_of(operand.storage)
            if span is not None:
                self.add(Logged.READ, serial, operand.version, _rounded(operand.storage))
        self._allocated(writes, live_bytes=live_bytes, peak_bytes=peak_bytes)
        if span is not None:
            for operand in writes:
                self.add(Logged.WRITE, self.serial_of(operand.storage), operand.version, _rounded(operand.storage))
            self.add(Logged.OP_END, number, Scope.FUNCTION)
            if scope is not None:
                self.add(Logged.OP_END, outer, scope)

    def _allocated(self, results: Sequence[Operand], *, live_bytes: int, peak_bytes: int) -> None:
        for result in results:
            known = self._known.get(result.storage._cdata)
            # Whatever existed before has been seen as an operand: a result that was not is new.
            if result.storage.nbytes() and (known is None or known.weak.expired()):
                known = self._know(result.storage)
                self.add(Logged.ALLOC, known.serial, known.nbytes)
                self._level_bytes += known.nbytes
        if live_bytes > self._level_bytes:  # kept, but no result: rounding, or a library's workspace
            self._anonymous(live_bytes - self._level_bytes, stays=True)
        if peak_bytes > self._level_bytes:
            self._anonymous(peak_bytes - self._level_bytes, stays=False)
        self.catch_up(live_bytes)

    def _anonymous(self, nbytes: int, *, stays: bool) -> None:
        self._serials += 1
        self.add(Logged.ALLOC, self._serials, nbytes)
        if stays:
            self._level_bytes += nbytes
        else:
            self.add(Logged.FREE, self._serials, nbytes)

    @_locked
    def catch_up(self, live_bytes: int) -> None:
        """Note what has died, so that the log says `live_bytes` too; the youngest are asked first."""
        if live_bytes > self._level_bytes:
            self._anonymous(live_bytes - self._level_bytes, stays=True)
        if live_bytes == self._level_bytes:
            return
        for cdata in reversed(self._known.copy()):
            known = self._known[cdata]
            if known.weak.expired():
                del self._known[cdata]
                self.add(Logged.FREE, known.serial, known.nbytes)
                self._level_bytes -= known.nbytes
                if self._level_bytes <= live_bytes:
                    break
        if live_bytes < self._level_bytes:
            self._serials += 1
            self.add(Logged.FREE, self._serials, self._level_bytes - live_bytes)
            self._level_bytes = live_bytes
        elif live_bytes > self._level_bytes:
            self._anonymous(live_bytes - self._level_bytes, stays=True)

    # ---- what the backend does itself ----

    @_locked
    def moved(self, change_bytes: int) -> None:
        """Leave bytes out of the curve that we gave up or took: an unmanaged step would not have."""
        self._level_bytes += change_bytes
        self._segment_bytes += change_bytes

    @_locked
    def fetched(self, record: int, storage: torch.UntypedStorage) -> None:
        """Note that a record's bytes have a new block."""
        self.add(Logged.FETCH_ALLOC, self._know(storage).serial, _rounded(storage), record)

    @_locked
    def evicted(self, storage: torch.UntypedStorage) -> None:
        """Note that a record's block is given up: its end is not the end of its bytes."""
        known = self._known.pop(storage._cdata, None)
        self.add(Logged.EVICT_FREE, known.serial if known else 0, _rounded(storage))

    @_locked
    def rise(self, peak_bytes: int) -> None:
        """Note how much was live at most since this was told last."""
        self._needs[-1] = max(self._needs[-1], peak_bytes - self._segment_bytes)

    @_locked
    def segment(self, live_bytes: int) -> None:
        """Note a save or a use: from here on another segment's need is looked for."""
        self._needs.append(0)
        self._segment_bytes = live_bytes

    # ---- the end ----

    def close(self) -> None:
        """Stop watching the optimizers."""
        _open_logs.discard(self)

    def take(self) -> Log | None:
        """Return the log (None: the step was too long). Waits for the device."""
        self.close()
        if len(self._entries) >= self._most_entries:
            return None
        starts_ns, now_ns = [], 0
        for begin, end in self._spans:
            end.synchronize()
            starts_ns.append(now_ns)
            now_ns += max(0, round(begin.elapsed_time(end) * 1e6))
        starts_ns.append(now_ns)
        entries = [entry._replace(at_ns=starts_ns[entry.at_ns]) for entry in self._entries]
        return Log(
            entries=entries, names=list(self._names), end_ns=now_ns, needs=tuple(self._needs), gradients=self._gradients
        )


def _rounded(storage: torch.UntypedStorage) -> int:
    return -(-storage.nbytes() // _ROUND_BYTES) * _ROUND_BYTES
