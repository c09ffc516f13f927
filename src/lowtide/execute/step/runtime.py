"""The runtime: autograd's hooks above, the residency machine in the middle, a backend below."""

from __future__ import annotations

import time
from collections.abc import Collection, Iterator
from contextlib import contextmanager

import torch
from torch.autograd.graph import saved_tensors_hooks

from lowtide.autograd.kept import KeptTensor, is_parameter
from lowtide.execute.backends.protocol import Packed, StepMemory
from lowtide.execute.observe import touches
from lowtide.execute.observe.operators import can_watch
from lowtide.execute.recompute.remaker import Remaker
from lowtide.execute.recompute.rerun import OperandChanged
from lowtide.execute.step.matcher import Matcher
from lowtide.execute.step.saved import SavedTensor, UseWait, unmanaged_reason
from lowtide.execute.step.touching import Touching
from lowtide.plan.policy import Policy
from lowtide.residency import events as e
from lowtide.residency.machine import Residence

Handle = KeptTensor | SavedTensor

_IN_MEMORY = (Residence.RESIDENT, Residence.CLEAN)
# A use of bytes that were on their way waited for them if it took longer than this.
_LEAST_WAIT_S = 1e-4


class Runtime(Touching):
    """Keeps saved tensors inside the backend's budget, one step after the other."""

    backend: StepMemory

    def __init__(
        self, backend: StepMemory, policy: Policy, *, least_bytes: int, strict: bool = False, remakes: bool = True
    ) -> None:
        super().__init__(backend, policy, least_bytes=least_bytes, strict=strict)
        self.matcher = Matcher()
        self.waits: list[UseWait] = []
        self.first_save_s: float | None = None
        self._key_of: dict[int, int] = {}
        self._next_key = 0
        if remakes and backend.remakes is not None:
            self.remaker = Remaker(backend.remakes, self, least_bytes=least_bytes)
        self._remakes = False
        self._hooked = False
        self._closed = False

    # ---- steps ----

    def begin_step(self, *, recording: bool = False) -> None:
        """Start to number saves and uses from zero, and follow the plan that fits best so far.

        A step that is recorded runs nothing again, it swaps instead: its trace shows what the program does.
        """
        self._remakes = self.remaker is not None and not recording and can_watch()
        self.waits = []
        self.first_save_s = None
        self.refused_touch = None
        self.find_held()
        with self._lock:
            self._settle()
            self.machine.begin_step()
            self.machine.discards = self._remakes and self._policy.about.discards_victims
            self._key_of.clear()
            self._next_key = 0
            if self._watching:
                touches.begin_ticks(self.device)
            self._follow(self.matcher.begin() is not None)
            self._expect()
            if self.remaker is not None:
                self.remaker.begin(wanted=self._wanted_calls(), marks=recording)
                if self._hooked:  # a step of a script begins inside the hooks of the one before
                    self.remaker.watch()
        self.backend.prepare()

    def end_step(self) -> None:
        """Have back what was given up without a copy and is still saved: it does not outlive its step."""
        self.machine.discards = False  # else making one record would give up another
        if self.remaker is not None:
            self.remaker.end()

    def close(self, *, bring_back: bool) -> None:
        """Make what is still given up and saved, if it is to be had later; watch nothing from here on."""
        self.machine.discards = False
        if self.remaker is None:
            return
        self.remaker.close()
        try:
            if bring_back and self.backend.remakes is not None:
                self.backend.remakes.lift()
                self.remaker.end()
        finally:
            self._closed = True

    def abandon_step(self) -> None:
        """Forget the step; storages that it gave up without a copy are made again when they are used."""
        self.machine.discards = False
        if self.remaker is not None:
            self.remaker.forget_step()

    def figures(self) -> dict[str, object]:
        """Return what running operators again came to, and steps that left the plan, for `Tide.stats`."""
        ran, busy_s = (0, 0.0) if self.remaker is None else (self.remaker.ran, self.remaker.busy_s)
        return {"recomputed_ops": ran, "recompute_s": busy_s, "steps_off_plan": self.steps_off_plan}

    def _follow(self, planned: bool) -> None:
        plan = self.matcher.followed if planned else None
        self._follow_ticks(plan)
        if plan is None:
            self.machine.react()
        elif self._remakes:
            self._run(self.machine.follow(swapped=plan.swapped, uses=plan.uses, discarded=plan.discarded))
        else:
            self._run(self.machine.follow(swapped=plan.swapped | plan.discarded, uses=plan.uses))

    def _wanted_calls(self) -> Collection[int] | None:
        """Return the calls of this step that are to be remembered (None: all, since any may have to run again)."""
        if not self._remakes:
            return ()
        if self.machine.discards:
            return None
        return self.matcher.followed.calls if self.matcher.followed is not None else ()

    @contextmanager
    def hooks(self) -> Iterator[None]:
        """Manage what autograd saves inside this context, on this thread."""
        with saved_tensors_hooks(self.pack, self.unpack), self.hooked():
            yield

    @contextmanager
    def hooked(self) -> Iterator[None]:
        """Be ready for what hooks on this thread bring: `pack` and `unpack` are called by them."""
        self._hooked = True
        if self.remaker is not None:
            self.remaker.watch()
        try:
            yield
        finally:
            self._hooked = False
            if self.remaker is not None:
                self.remaker.unwatch()

    @property
    def moves_held(self) -> bool:
        """Whether a plan is known that moves what the program holds."""
        return any(plan.ticks is not None for plan in self.matcher.plans)

    # ---- autograd's side ----

    def pack(self, tensor: torch.Tensor) -> Handle:
        """Take a tensor that autograd saves."""
        self._raise_failure()
        if self.first_save_s is None:
            self.first_save_s = time.perf_counter()
        reason = unmanaged_reason(tensor, self.backend.device)
        if reason is not None:
            self.unmanaged[reason] += 1
            return KeptTensor(tensor)
        if is_parameter(tensor):
            return KeptTensor(tensor)
        if self.is_held(tensor):
            return KeptTensor(tensor)
        nbytes = self.backend.storage_bytes(tensor)
        if nbytes < 0:
            self.unmanaged["memory of another allocator"] += 1
        if nbytes < self._least_bytes:
            return KeptTensor(tensor)
        return self._save(tensor)

    def _save(self, tensor: torch.Tensor) -> SavedTensor:
        packed = self.backend.pack(tensor)
        handle = self._handle(packed, tensor)
        with self._lock:
            self._settle()
            if packed.is_new or packed.record not in self._key_of:
                key = self._key_of[packed.record] = self._next_key
                self._next_key += 1
                if packed.is_new:
                    self._run(self.machine.on(e.Saved(packed.record, packed.nbytes, key)))
                elif self.machine.is_unnamed(packed.record):
                    self._run(self.machine.on(e.Named(packed.record, key)))
            if self._remakes and self.remaker is not None:
                self.remaker.saved(packed.record, tensor)
            handle.key = self._key_of[packed.record]
            awaited = self._advance(hash((handle.key, packed.nbytes, handle.shape, handle.dtype)))
        self._await(awaited)
        self.backend.prepare()
        return handle

    def _handle(self, packed: Packed, tensor: torch.Tensor) -> SavedTensor:
        """Return what gives a pack back whatever happens from here on."""
        return SavedTensor(
            self,
            pack=packed.pack,
            record=packed.record,
            version=packed.version,
            shape=tuple(tensor.shape),
            dtype=tensor.dtype,
        )

    def unpack(self, handle: Handle) -> torch.Tensor:
        """Give back a tensor that autograd saved."""
        if isinstance(handle, KeptTensor):
            return handle.get()
        self._raise_failure()
        backend, record = self.backend, handle.record
        handle.check_version(backend.version(handle.pack))
        backend.mark_unpack(handle.pack)
        where = self.machine.where(record)
        commands = self._pin(record)
        try:
            start_s = time.perf_counter()
            # A demanded read is queued before the prefetches of this event, which must not delay it.
            self._bring_back(record, commands)
            with self._lock:
                event = len(self.matcher.signature)
                awaited = self._advance(-1 - handle.key)
            self._await(awaited)
            tensor = self._attached(record, lambda: backend.tensor(handle.pack, handle.dtype))
            if where in (Residence.AWAY, Residence.ARRIVING):
                wait = UseWait(handle.key, event, start_s, time.perf_counter(), demanded=where is Residence.AWAY)
                if wait.end_s - wait.start_s > _LEAST_WAIT_S:
                    self.waits.append(wait)
            if self.remaker is not None:
                self.remaker.handed_out(record, tensor)
            backend.prepare()
        finally:
            self._used(record)
        return tensor

    # ---- what is made again (see `Records`) ----

    def _remake(self, record: int) -> None:
        """Make a record again, and with it what the plan makes at the same time."""
        assert self.remaker is not None
        if self.remaker.is_lost(record):
            raise OperandChanged
        if self._closed:
            self.backend.fetch(record)  # which says that it went with the tier
        with self._lock:
            plan = self.matcher.followed
            key = self._key_of.get(record, -1)
            keys = plan.together.get(key, ()) if plan is not None else ()
            calls = plan.reruns.get(key, ()) if plan is not None else ()
            others = [other for key in keys if (other := self.machine.record_of(key)) is not None and other != record]
        try:
            self.remaker.remake([record, *others], planned=calls)
        except torch.OutOfMemoryError:
            if not others and not calls:
                raise
            # There is less room than the plan knew of (R8): the others are made when they are needed themselves, and
            # what is on a tier is read.
            self.remaker.remake([record])

    def hold(self, tensor: torch.Tensor) -> SavedTensor:
        """Make a tensor's storage a record, without a save of the step's."""
        packed = self.backend.pack(tensor)
        handle = self._handle(packed, tensor)
        with self._lock:
            self._settle()
            if packed.is_new:
                self.machine.on(e.Saved(packed.record, packed.nbytes, -packed.record))
        return handle

    @contextmanager
    def borrow(self, record: int, dtype: torch.dtype) -> Iterator[torch.Tensor]:
        """Return a record's storage as a flat tensor, in memory while the context lasts."""
        remakes = self.backend.remakes
        assert remakes is not None
        commands = self._pin(record)
        try:
            self._bring_back(record, commands)
            yield self._attached(record, lambda: remakes.flat(record, dtype))
        finally:
            self._used(record)

    def _advance(self, signature: int) -> list[int]:
        """Count one event of the step, do what the plan wants at it; return the records whose transfer it awaits."""
        turn = self.matcher.advance(signature)
        self.machine.tick()
        if turn.changed:
            self._follow(True)
            if self.remaker is not None:
                self.remaker.want(self._wanted_calls())
        self._expect()
        self._leave(turn.leave, turn.forget)
        self._leave_held()
        self._run(self.machine.retry_deferred())
        if turn.due:
            self._run(self.machine.on(e.Due(turn.due)))
        return self.machine.moving(turn.awaited) if turn.awaited else []

    def _leave(self, swapped: tuple[int, ...], discarded: tuple[int, ...]) -> None:
        if swapped:
            self._run(self.machine.on(e.Leave(swapped)))
        if discarded:
            self._run(self.machine.on(e.Leave(discarded, discard=self._remakes)))

    def _leave_early(self) -> None:
        """Send away what the plan does at the next event: it may have wanted that before the operator that runs now."""
        plan, event = self.matcher.followed, len(self.matcher.signature)
        if plan is not None:
            self._leave(self._present(plan.leave.get(event, ())), self._present(plan.forget.get(event, ())))

    def _present(self, keys: tuple[int, ...]) -> tuple[int, ...]:
        records = ((key, self.machine.record_of(key)) for key in keys)
        return tuple(key for key, record in records if record is not None and self.machine.where(record) in _IN_MEMORY)

    def _expect(self) -> None:
        """Tell the backend what the plan knows of the time until the next event."""
        plan, event = self.matcher.followed, len(self.matcher.signature) - 1
        self.backend.expect(plan.need_bytes(event) if plan is not None else None)
        for key in plan.stage.get(event, ()) if plan is not None else ():
            record = self.machine.record_of(key)
            if record is not None:
                self.backend.stage(record)
