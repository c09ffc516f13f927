"""Storages that the program holds, on an accelerator: their blocks leave and return, the storages stay.

Note [Lending]: what the program holds may be touched at any time, so a block with a copy below the device is ours, and
the program has a *shell* (see `execute/observe/touches.py`). For an operator that touches it the block is put back, and
the operator's stream is ordered after the copies that use it; when the operator has ended without writing it, the block
is taken out again, so that the next one is told of as well. What an operator has written has no copy any more: its
block stays with the program, and operators on it are not told of, until it leaves again.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from lowtide.errors import BudgetTooSmall, SpillError
from lowtide.execute.backends.accelerator.log import OperatorLog
from lowtide.execute.backends.accelerator.records import End, Record, flat
from lowtide.execute.backends.accelerator.traffic import Traffic
from lowtide.execute.backends.oom_messages import AWAY
from lowtide.execute.observe import touches
from lowtide.execute.observe.operators import aside
from lowtide.execute.step.held import KINDS
from lowtide.execute.step.saved import unmanaged_reason
from lowtide.residency.machine import Residence

_WeakRef: Any = StorageWeakRef  # untyped in torch
_is_copy_on_write: Any = getattr(torch._C, "_is_cow_tensor", lambda _tensor: False)

_UNANNOUNCED = f"{AWAY}, and the code that touches it is not a PyTorch operator: see docs/limits.md"


class Shell(Record):
    """A storage that the program holds, named by `owner`, its number in torch. `storage` has its block if we do.

    `kind`: what it is, for messages. `lent`: for how many operators the block was put back. `stays`: it never leaves
    (again), because the program knows its address.
    """

    is_saved = False

    def __init__(self, number: int, storage: torch.UntypedStorage, ends: deque[End], *, kind: str) -> None:
        super().__init__(number, storage, ends)
        self.owner = storage._cdata
        self.kind, self.what = kind, f"of {kind}"
        self.lent = 0
        self.stays = False
        self._weak = _WeakRef(storage)
        self._device = storage.device
        self.storage = None

    @property
    def is_gone(self) -> bool:
        """Whether no code holds the storage any more."""
        return bool(self._weak.expired())

    def held(self) -> torch.UntypedStorage:
        """Return the program's storage."""
        storage: torch.UntypedStorage = torch.UntypedStorage._new_with_weak_ptr(self._weak.cdata)
        return storage

    def is_alone(self) -> bool:
        if self.lent or self.stays or self.is_gone or not touches.is_watching(self._device):
            return False
        return self.storage is not None or not touches.is_used(self.owner)

    def take(self) -> bool:
        if self.storage is not None:
            return True
        block = torch.empty(0, dtype=torch.uint8, device=self._device).untyped_storage()
        if self.is_gone or not touches.take_block(self.owner, block, why=_UNANNOUNCED):
            return False
        if block.nbytes() != self.nbytes:  # resized by its owner: it is another one
            touches.put_block(self.owner, block, lend=False)
            self.stays = True
            return False
        self.storage, self.cdata = block, block._cdata
        return True

    def put(self, *, lend: bool) -> None:
        """Give the block back to the program."""
        assert self.storage is not None, f"the block of record {self.number} is not ours to give"
        touches.put_block(self.owner, self.storage, lend=lend)
        self.storage = None


class Shells(Traffic):
    """Adds what the program holds to the records: see `ShellMemory`."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.on_shortage: Callable[[], bool] = lambda: False
        self._shells: dict[int, Shell] = {}
        self._taken: OperatorLog | None = None  # the log taken last: it still knows the storages by number

    @property
    def shells(self) -> Shells | None:
        return self if touches.can_take_blocks() else None

    def shell_of(self, storage: int) -> int | None:
        found = self._shells.get(storage)
        return None if found is None else found.number

    def adopt_shell(self, tensor: torch.Tensor, *, kind: str, least_bytes: int) -> tuple[int, int] | None:
        if unmanaged_reason(tensor, self.device) is not None or tensor.grad_fn is not None:
            return None
        storage = tensor.untyped_storage()
        if storage._cdata in self._shells or storage._cdata in self._by_storage:
            return None
        if storage.nbytes() < least_bytes or not storage.resizable() or _is_copy_on_write(tensor):
            return None
        with self._lock:
            shell = Shell(next(self._numbers), storage, self._ends, kind=kind)
            self._shells[shell.owner] = shell
            self._records[shell.number] = shell
        return shell.number, shell.nbytes

    def shells_in_log(self) -> dict[int, int]:
        with self._lock:
            shells = [shell for shell in self._shells.values() if not (shell.is_gone or shell.stays)]
        log = self._guard.log or self._taken
        return {} if log is None else {log.serial_of(shell.held()): -shell.number for shell in shells}

    def bury_shells(self) -> None:
        """Forget the storages that no code holds any more, and our copies of them."""
        with self._lock:
            for shell in [shell for shell in self._shells.values() if shell.is_gone]:
                del self._shells[shell.owner]

    def is_all_there(self) -> bool:
        with self._lock:
            return all(shell.state is Residence.RESIDENT for shell in self._shells.values())

    def away_bytes(self) -> int:
        """Return the bytes of what the program holds and the device does not have."""
        return sum(shell.nbytes for shell in self._shells.values() if shell.state is Residence.AWAY)

    # ---- lending ----

    def lend(self, record: int) -> bool:
        with aside(), self._lock:
            shell = self._shell(record)
            if shell.storage is None and shell.state is Residence.AWAY:
                return False
            block = flat(shell.storage if shell.storage is not None else shell.held())
            self._copies.before_use(shell, block)
            self._copies.before_write(shell)
            if shell.storage is not None:
                shell.put(lend=True)
            shell.lent += 1
            return True

    def take_back(self, record: int, *, wrote: bool) -> bool:
        with aside(), self._lock:
            shell = self._shell(record)
            shell.lent -= 1
            if not shell.lent and touches.end_lending(shell.owner):
                wrote = True
            has_copy = shell.state in (Residence.CLEAN, Residence.LEAVING) and not shell.handed_out
            # An operator that began in between, on another thread, may write what nobody watches any more.
            if has_copy and not wrote and not shell.lent and not shell.take():
                wrote = True
            if wrote:
                self._changed(shell)
            return wrote

    def _changed(self, shell: Shell) -> None:
        """Count a shell as never copied; its block is the program's, for any stream."""
        if shell.state is Residence.CLEAN:
            self._forget_copy(shell)
        elif shell.state is Residence.LEAVING:
            shell.handed_out = True
        if shell.home is not None and not shell.is_gone:
            self._copies.share(flat(shell.held()))

    def may_leave(self, record: int) -> bool:
        return not self._shell(record).stays

    def keep_for_good(self, record: int) -> None:
        with self._lock:
            self._shell(record).stays = True
        self.take_back(record, wrote=True)

    def _shell(self, record: int) -> Shell:
        found = self._records[record]
        assert isinstance(found, Shell), f"record {record} was saved by autograd"
        return found

    # ---- the end ----

    def _give_back_all(self) -> None:
        """Give the program all that it holds; raises what the first that cannot be had did, after all others."""
        failure: BaseException | None = None
        for shell in sorted(self._shells.values(), key=lambda shell: KINDS.index(shell.kind)):
            try:
                self._give_back(shell)
            except (SpillError, BudgetTooSmall) as error:
                touches.say(shell.owner, f"{AWAY}: when its tide was closed, it could not be brought back ({error})")
                failure = failure or error
        self._shells.clear()
        if failure is not None:
            raise failure

    def _give_back(self, shell: Shell) -> None:
        while not shell.is_gone and shell.state is Residence.AWAY:
            self.fetch(shell.number)
            self.wait(shell.number)
        if not shell.is_gone:
            self.lend(shell.number)
            self.keep_for_good(shell.number)

    def fetch(self, record: int) -> None:
        """Start to bring a record back, waiting for room."""
        raise NotImplementedError
