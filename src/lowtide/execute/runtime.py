"""The runtime: autograd's hooks above, the residency machine in the middle, a backend below.

Note [Locks]: `_lock` guards the machine and the matcher and is never held while anything waits: neither for a
transfer nor for room. The pressure callback takes it on whatever thread allocates; it may run inside our own calls to
the backend, on the same thread, which is why the lock is reentrant and why commands run only after the machine has
returned (R3).
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch.autograd.graph import saved_tensors_hooks

from lowtide.errors import SpillFull
from lowtide.execute import events as e
from lowtide.execute.backend import Backend
from lowtide.execute.hooks import KeptTensor, SavedTensor, is_parameter, unmanaged_reason
from lowtide.execute.residency import Residency
from lowtide.execute.steps import Matcher
from lowtide.plan.policy import Policy

Handle = KeptTensor | SavedTensor


class Runtime:
    """Keeps saved tensors inside the backend's budget, one step after the other."""

    def __init__(self, backend: Backend, policy: Policy, *, least_bytes: int, strict: bool = False) -> None:
        self.backend = backend
        self.matcher = Matcher()
        self.machine = Residency(policy.victims)
        self.unmanaged: Counter[str] = Counter()
        self.failure: BaseException | None = None
        self._least_bytes = least_bytes
        self._strict = strict
        self._lock = threading.RLock()
        self._key_of: dict[int, int] = {}
        self._next_key = 0

    # ---- steps ----

    def begin_step(self) -> None:
        """Start to number saves and uses from zero, and follow the plan that fits best so far."""
        with self._lock:
            self._settle()
            self.machine.begin_step()
            self._key_of.clear()
            self._next_key = 0
            self._follow(self.matcher.begin() is not None)
            self._expect()
        self.backend.prepare()

    def _follow(self, planned: bool) -> None:
        plan = self.matcher.followed
        if planned and plan is not None:
            self._run(self.machine.follow(swapped=plan.swapped, uses=plan.uses))
        else:
            self.machine.react()

    @contextmanager
    def hooks(self) -> Iterator[None]:
        """Manage what autograd saves inside this context, on this thread."""
        with saved_tensors_hooks(self.pack, self.unpack):
            yield

    # ---- autograd's side ----

    def pack(self, tensor: torch.Tensor) -> Handle:
        """Take a tensor that autograd saves."""
        reason = unmanaged_reason(tensor, self.backend.device)
        if reason is not None:
            self.unmanaged[reason] += 1
            return KeptTensor(tensor)
        if is_parameter(tensor):
            return KeptTensor(tensor)
        nbytes = self.backend.storage_bytes(tensor)
        if nbytes < 0:
            self.unmanaged["memory of another allocator"] += 1
        if nbytes < self._least_bytes:
            return KeptTensor(tensor)
        packed = self.backend.pack(tensor)
        # Made at once: it gives the pack back whatever happens from here on.
        handle = SavedTensor(
            self,
            pack=packed.pack,
            record=packed.record,
            version=packed.version,
            shape=tuple(tensor.shape),
            dtype=tensor.dtype,
        )
        with self._lock:
            self._settle()
            if packed.is_new or packed.record not in self._key_of:
                key = self._key_of[packed.record] = self._next_key
                self._next_key += 1
                if packed.is_new:
                    self.machine.on(e.Saved(packed.record, packed.nbytes, key))
            handle.key = self._key_of[packed.record]
            awaited = self._advance(hash((handle.key, packed.nbytes, handle.shape, handle.dtype)))
        self._await(awaited)
        self.backend.prepare()
        return handle

    def unpack(self, handle: Handle) -> torch.Tensor:
        """Give back a tensor that autograd saved."""
        if isinstance(handle, KeptTensor):
            return handle.get()
        backend, record = self.backend, handle.record
        handle.check_version(backend.version(handle.pack))
        backend.mark_unpack(handle.pack)
        with self._lock:
            self._settle()
            fetch = self._need(record)
        try:
            # A demanded read is queued before the prefetches of this event, which must not delay it.
            if fetch:
                self._fetch(record)
            with self._lock:
                awaited = self._advance(-1 - handle.key)
            self._await(awaited)
            tensor = backend.tensor(handle.pack, handle.dtype)
            while tensor is None:
                backend.wait(record)
                tensor = backend.tensor(handle.pack, handle.dtype)
                if tensor is None:  # it had left in the meantime
                    self._fetch(record)
            backend.prepare()
        finally:
            with self._lock:
                self._settle()
                self.machine.on(e.Used(record))
        return tensor

    def _fetch(self, record: int) -> None:
        try:
            self.backend.fetch(record)
        except BaseException:
            with self._lock:
                self.machine.on(e.ReadFailed(record))  # it is not on its way: nobody may wait for it
            raise

    def _need(self, record: int) -> bool:
        """Tell the machine that a record is needed; return whether it has to be fetched."""
        for command in self.machine.on(e.Needed(record)):
            if isinstance(command, e.Fetch):
                return True
            if isinstance(command, e.Keep) and not self.backend.keep(command.record):
                return True
        return False

    def _advance(self, signature: int) -> list[int]:
        """Count one event of the step, do what the plan wants at it; return the records whose transfer it awaits."""
        turn = self.matcher.advance(signature)
        self.machine.tick()
        if turn.changed:
            self._follow(True)
        self._expect()
        if turn.leave:
            self._run(self.machine.on(e.Leave(turn.leave)))
        self._run(self.machine.retry_deferred())
        if turn.due:
            self._run(self.machine.on(e.Due(turn.due)))
        return self.machine.moving(turn.awaited) if turn.awaited else []

    def _expect(self) -> None:
        """Tell the backend what the plan knows of the time until the next event."""
        plan, event = self.matcher.followed, len(self.matcher.signature) - 1
        self.backend.expect(plan.need_bytes(event) if plan is not None else None)
        for key in plan.stage.get(event, ()) if plan is not None else ():
            record = self.machine.record_of(key)
            if record is not None:
                self.backend.stage(record)

    def _await(self, records: list[int]) -> None:
        """Wait for transfers that a synchronous plan waits for. Without the lock: see Note [Locks]."""
        for record in records:
            self.backend.wait(record)

    # ---- the backend's side ----

    def on_pressure(self, need_bytes: int) -> int:
        """Make room where an allocation does not fit; return the bytes in flight, below zero after an error."""
        try:
            with self._lock:
                self._settle()
                self.backend.forget_freed()  # what others freed meanwhile is room too
                held = True
                while held:
                    held = not self._run(self.machine.on(e.Pressure(need_bytes)))
                self._settle()
                return self.machine.moving_bytes()
        except BaseException as error:  # noqa: BLE001  # C++ cannot take it; it is raised where the step ends
            self.failure = error
            return -1

    def take_failure(self) -> BaseException:
        """Return what went wrong while making room, once."""
        assert self.failure is not None
        failure, self.failure = self.failure, None
        return failure

    def _settle(self) -> None:
        """Tell the machine what happened in the background."""
        for event in self.backend.events():
            self._run(self.machine.on(event))
        if self._strict:
            self.machine.validate()

    def _run(self, commands: list[e.Command]) -> bool:
        """Carry out commands, none of which waits; return False if one could not be carried out."""
        done = True
        for command in commands:
            match command:
                case e.Write(record):
                    try:
                        written = self.backend.write(record, self.machine.nbytes(record))
                    except SpillFull:
                        done = False
                        self.machine.on(e.WriteFailed(record))
                        continue
                    if not written:
                        done = False
                        self._run(self.machine.on(e.Held(record)))
                case e.Drop(record):
                    if self.backend.drop(record):
                        self.machine.on(e.Dropped(record))
                    else:
                        done = False
                        self._run(self.machine.on(e.Held(record)))
                case e.Keep(record):
                    self.backend.keep(record)
                case e.Prefetch(record):
                    if not self.backend.prefetch(record):
                        self.machine.on(e.NoRoom(record))
                case e.Watch(record):
                    self.backend.watch(record)
                case e.Fetch(record):
                    raise AssertionError(f"record {record} is fetched only where autograd needs it")
        return done
