"""What the program holds, kept inside the budget: brought back before every operator that touches it."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch

from lowtide.capture.builder import parameter_key
from lowtide.errors import BudgetTooSmall
from lowtide.execute.backends.oom_messages import AWAY
from lowtide.execute.backends.protocol import ShellMemory, StepMemory
from lowtide.execute.observe import touches
from lowtide.execute.observe.operators import is_aside
from lowtide.execute.observe.touches import Touch
from lowtide.execute.recompute.lending import Lending, Owned
from lowtide.execute.step.driver import Driver
from lowtide.execute.step.held import GRADIENT, PARAMETER, STATE, Owner, held_by
from lowtide.plan.policy import Policy
from lowtide.residency import events as e
from lowtide.residency.schedule import StepPlan, Ticks


class _Lent(NamedTuple):
    """A record that an operator uses; `is_there`: it has its block (else the operator raises)."""

    record: int
    writes: bool
    is_there: bool


class Touching(Driver):
    """Adds the tensors of models and optimizers to what the machine moves, where the backend can take their blocks."""

    backend: StepMemory

    def __init__(self, backend: StepMemory, policy: Policy, *, least_bytes: int, strict: bool) -> None:
        super().__init__(backend, policy, strict=strict)
        self.refused_touch: BaseException | None = None
        self.unmanaged: Counter[str] = Counter()
        self._least_bytes = least_bytes
        self._owners: list[weakref.ref[Owner]] = []
        self._watching = False
        self._ticks: Ticks | None = None
        self._parameters: dict[int, weakref.ref[torch.Tensor]] = {}  # by their keys
        self._unmade: list[int] = []  # gradients that are to leave once autograd has given them to their parameters
        self.steps_off_plan = 0
        self._lending = Lending(self._memory_lent)

    # ---- holders ----

    def know_holders(self, owners: Iterable[Owner]) -> None:
        """Let what these models and optimizers hold leave, now and later. They are not kept alive."""
        known = {id(owner()) for owner in self._owners}
        self._owners += [weakref.ref(owner) for owner in owners if id(owner) not in known]
        self.find_held()

    def find_held(self) -> bool:
        """Look for tensors that were not there before, as gradients are; return whether there were any."""
        shells = self.backend.shells
        if shells is None or not self._owners:
            return False
        shells.bury_shells()
        owners = [owner for reference in self._owners if (owner := reference()) is not None]
        return self.adopt(held for owner in owners for held in held_by(owner))

    def adopt(self, tensors: Iterable[tuple[torch.Tensor, str]]) -> bool:
        """Let tensors leave that the program holds, each with what it is; return whether there was a new one."""
        shells = self.backend.shells
        if shells is None or _may_be_sent():
            return False
        found = False
        for tensor, kind in tensors:
            adopted = shells.adopt_shell(tensor, kind=kind, least_bytes=self._least_bytes)
            if adopted is not None:
                found = True
                self._adopted(*adopted)
                if kind == PARAMETER:
                    self._parameters[-adopted[0]] = weakref.ref(tensor)
        return found

    def adopt_state(self, tensors: Iterable[torch.Tensor]) -> None:
        """Let optimizer state leave that was just made."""
        self.adopt((tensor, STATE) for tensor in tensors)

    def _adopted(self, record: int, nbytes: int) -> None:
        with self._lock:
            self._settle()
            self.machine.on(e.Saved(record, nbytes, -record))
            self._run(self.machine.on(e.Sole(record)))

    def watch_touches(self, wanted: bool) -> None:
        """Look at operators, so that what is held may leave; or no more, once everything is there (R8)."""
        shells = self.backend.shells
        if shells is None or not self._owners:
            return
        if wanted and not self._watching:
            self._watching = True
            shells.on_shortage = self.find_held
            touches.watch(self)
            self._lending.on()
        elif not wanted and shells.is_all_there():
            self.stop_touches()

    def stop_touches(self) -> None:
        """Put nothing back any more: everything is there, or is about to be."""
        if self._watching:
            self._watching = False
            touches.unwatch(self.device)
            self._lending.off()

    def held_keys(self) -> dict[int, int]:
        """Return the keys of what the program holds and may leave, by the numbers that the log has for it."""
        shells = self.backend.shells
        return {} if shells is None or not self._watching else shells.shells_in_log()

    # ---- ticks ----

    def _follow_ticks(self, plan: StepPlan | None) -> None:
        """Stop at the ticks of a plan, from here on."""
        ticks = None if plan is None else plan.ticks
        self.steps_off_plan += self._ticks is not None and ticks is None
        self._ticks = ticks if self._watching else None
        if self._watching:
            stops = () if ticks is None else ticks.stops()
            touches.follow_ticks(self.device, () if ticks is None else ticks.looks, stops)

    def ticked(self, number: int) -> None:
        """Send away what has been touched for now, and fetch what is touched before long, as the plan wants."""
        ticks = self._ticks
        if ticks is None:
            return
        try:
            with self._lock:
                self._settle()
                self._unmade += ticks.leave.get(number, ())
                self._leave_held()
                self._run(self.machine.retry_deferred())
                if due := ticks.due.get(number):
                    self._run(self.machine.on(e.Due(due)))
                awaited = self.machine.moving(ticks.awaited.get(number, ()))
            self._await(awaited)
        except BaseException as error:  # noqa: BLE001  # it is raised where the program runs Python next, or steps end
            self.failure = self.failure or error

    def _leave_held(self) -> None:
        """Send away what the plan wants gone; a gradient that its parameter does not have yet, a little later."""
        if not self._unmade:
            return
        wanted = [key for key in self._unmade if self._is_named(key)]
        self._unmade = [key for key in self._unmade if key not in wanted]
        if wanted:
            self._run(self.machine.on(e.Leave(tuple(wanted))))
            self._settle()  # nobody else holds it: it leaves now

    def _is_named(self, key: int) -> bool:
        """Tell whether the machine knows a key; that of a gradient is given to the one that its parameter has now."""
        parameter = parameter_key(key)
        if parameter is None:
            return True
        shells, owner = self.backend.shells, self._parameters.get(parameter)
        found = None if owner is None else owner()
        if shells is None or found is None or found.grad is None:
            return False
        self.adopt([(found.grad, GRADIENT)])
        record = shells.shell_of(found.grad.untyped_storage()._cdata)
        if record is None:
            return False
        if self.machine.record_of(key) != record:
            self._run(self.machine.on(e.Named(record, key)))
        return True

    def end_ticks(self) -> tuple[int, ...]:
        """Count no more ticks of this step; return what they looked like."""
        if not self._watching:
            return ()
        ended = touches.end_ticks(self.device)
        if self._ticks is not None and not ended.followed:
            self.steps_off_plan += 1
        self._ticks = None
        self._unmade.clear()
        return ended.looks

    # ---- touches ----

    @property
    def device(self) -> torch.device:
        """Where what is held lies."""
        return self.backend.device

    def touched(self, operator: str, told: Sequence[Touch]) -> list[_Lent] | None:
        """Have back what an operator is about to use. Raises nothing: the operator does, if something is missing."""
        shells = self.backend.shells
        assert shells is not None
        found = [(record, touch) for touch in told if (record := shells.shell_of(touch.storage)) is not None]
        if not found:
            return None
        # All are pinned before the first comes back, so that none leaves for another.
        wanted = [(record, touch, self._pin(record)) for record, touch in found]
        lent: list[_Lent] = []
        failure: BaseException | None = None
        while wanted and failure is None:
            record, touch, commands = wanted.pop(0)
            try:
                self._bring_back(record, commands)
                self._attached(record, partial(_lent, shells, record))
            except BaseException as error:  # noqa: BLE001  # see the docstring
                failure = _told_by(error, operator, more_bytes=self._not_fetched_bytes(wanted))
                touches.say(touch.storage, f"{AWAY}: {failure}")
            lent.append(_Lent(record, touch.writes, failure is None))
        lent += [_Lent(record, touch.writes, False) for record, touch, _ in wanted]
        if failure is not None:
            self.refused_touch = failure
            if not isinstance(failure, Exception):  # Ctrl-C: it is raised again where the program runs Python next
                self.left(lent)
                raise failure
        return lent

    def _not_fetched_bytes(self, wanted: Iterable[tuple[int, Touch, list[e.Command]]]) -> int:
        """Return the bytes of what was to come back, and tell the machine that it does not."""
        nbytes = 0
        with self._lock:
            for record, _, commands in wanted:
                if any(isinstance(command, e.Fetch) for command in commands):
                    nbytes += self.machine.nbytes(record)
                    self.machine.on(e.ReadFailed(record))
        return nbytes

    def left(self, lent: Any) -> None:
        """Take back what an operator has used."""
        shells = self.backend.shells
        assert shells is not None
        for record, writes, is_there in lent:
            wrote = is_there and shells.take_back(record, wrote=writes)
            self._used(record, wrote=wrote)

    def address_asked(self, storage: int) -> None:
        """Keep what is held and whose address is asked for on the device, for good. Raises what keeps it away."""
        shells = self.backend.shells
        record = None if shells is None or is_aside() else shells.shell_of(storage)
        if shells is None or record is None or not shells.may_leave(record):
            return
        commands = self._pin(record)
        try:
            self._bring_back(record, commands)
            self._attached(record, partial(_lent, shells, record))
            shells.keep_for_good(record)
            self.unmanaged["tensor whose address was asked for"] += 1
        finally:
            self._used(record)

    def _memory_lent(self, owned: Owned, _for_good: bool) -> None:
        """Keep what DLPack lends, or its owner gives another size."""
        is_plain = isinstance(owned, torch.UntypedStorage) or owned.layout is torch.strided
        if owned.device == self.device and is_plain:
            storage = owned if isinstance(owned, torch.UntypedStorage) else owned.untyped_storage()
            self.address_asked(storage._cdata)

    def is_held(self, tensor: torch.Tensor) -> bool:
        """Tell whether a tensor's storage is one that the program holds and that may leave."""
        shells = self.backend.shells
        return shells is not None and shells.shell_of(tensor.untyped_storage()._cdata) is not None


def _lent(shells: ShellMemory, record: int) -> bool | None:
    return shells.lend(record) or None


def _told_by(error: BaseException, operator: str, *, more_bytes: int) -> BaseException:
    """Return a refusal that names the operator that it was for, which needs `more_bytes` beside."""
    if not isinstance(error, BudgetTooSmall):
        return error
    return BudgetTooSmall(
        budget_bytes=error.budget_bytes,
        needed_bytes=error.needed_bytes + more_bytes,
        op=operator,
        detail=error.detail,
        device=error.device,
    )


def _may_be_sent() -> bool:
    """Tell whether collectives may use what the program holds after their operator has returned."""
    return torch.distributed.is_available() and torch.distributed.is_initialized()
