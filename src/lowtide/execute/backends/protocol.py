"""The boundary between the runtime and the memory it manages.

Everything that knows a device lives behind `Backend`: accounting of fast memory, starting and waiting for transfers,
ordering against compute, the clock. The residency machine, the plan language and the policies are the same above it.
Each user takes the part it needs: the driver `Transfers`, the runtime `StepMemory`, the recorder `Observation`; only a
tide, which opens it, holds all of it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from lowtide.capture.recorder import Observation, Serials
from lowtide.estimate.traffic import Traffic
from lowtide.residency.events import Event

if TYPE_CHECKING:
    import torch

    from lowtide.execute.recompute.remakes import Clock, Remakes


class Packed(NamedTuple):
    """A saved tensor as the backend knows it. `version` is the tensor's when it was saved."""

    pack: int
    record: int
    is_new: bool
    nbytes: int
    version: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """Fast memory and traffic at one instant. `traffic` is None where transfers are not timed.

    `away_bytes` are those of what the program holds that are not in fast memory.
    """

    live_bytes: int
    peak_bytes: int
    reserved_bytes: int
    peak_reserved_bytes: int
    stall_s: float
    written_bytes: int
    read_bytes: int
    fresh_bytes: int = 0
    away_bytes: int = 0
    traffic: Traffic | None = None


class Budget(Protocol):
    """Fast memory with a budget: what a tide opens, asks and closes."""

    @property
    def exact_budget(self) -> bool:
        """Whether the budget is enforced at every allocation (False: accounted for, and only advisory)."""
        ...

    def open(self, *, budget_bytes: int, on_pressure: Callable[[int], int]) -> None:
        """Enforce a budget; call `on_pressure(need_bytes)` when an allocation lacks room.

        It answers how many bytes are in flight, below zero to give up.
        """
        ...

    def refresh_static(self) -> None:
        """Bring the accounting of memory from other allocators up to date."""
        ...

    def usage(self) -> Usage:
        """Return the numbers now."""
        ...

    def figures(self) -> dict[str, object]:
        """Return what else there is to tell, for `Tide.stats`."""
        ...

    @property
    def refusals(self) -> int:
        """How many allocations were refused so far."""
        ...

    def too_small(self) -> BaseException:
        """Return the error for the allocation that was refused last: `BudgetTooSmall`, or what interrupted its wait."""
        ...

    def close(self, *, bring_back: bool = True) -> None:
        """Lift the budget and remove the spill; `bring_back` what is still saved, or let it go with the tier."""
        ...


class SavedTensors(Serials, Protocol):
    """Tensors that autograd saved, by packs that lead to records."""

    device: torch.device
    """Where fast memory is: tensors of other devices are not managed."""

    def storage_bytes(self, tensor: torch.Tensor) -> int:
        """Return the bytes of the storage behind a tensor; -1 if others can reach that memory: it cannot move."""
        ...

    def pack(self, tensor: torch.Tensor) -> Packed:
        """Note a saved tensor."""
        ...

    def version(self, pack: int) -> int:
        """Return the saved tensor's version now."""
        ...

    def tensor(self, pack: int, dtype: torch.dtype) -> torch.Tensor | None:
        """Return the saved tensor, or None if its record is not in fast memory."""
        ...

    def close_pack(self, pack: int) -> None:
        """Forget a saved tensor. May be called on any thread, at any time."""
        ...

    def mark_unpack(self, pack: int) -> None:
        """Log that autograd unpacked this."""
        ...


class Transfers(Protocol):
    """Records on their way out and back: what carries out the residency machine's commands. Waits are stated."""

    def watch(self, record: int) -> None:
        """Report `Sole` when no other code holds the record any more (new records are watched from the start)."""
        ...

    def events(self) -> list[Event]:
        """Return what happened in the background since the last call."""
        ...

    def write(self, record: int, nbytes: int) -> bool:
        """Start to write a record, whose fast bytes go when that landed; False if it is held. Raises `SpillFull`."""
        ...

    def keep(self, record: int) -> bool:
        """Keep a leaving record; False if it has left already."""
        ...

    def release(self, record: int) -> bool:
        """Give up a clean record's fast bytes; False if it cannot be moved now."""
        ...

    def prefetch(self, record: int) -> bool:
        """Start to bring a record back if there is room now; False if there is none."""
        ...

    def fetch(self, record: int) -> None:
        """Start to bring a record back, waiting for room. Raises `BudgetTooSmall`."""
        ...

    def wait(self, record: int) -> None:
        """Wait for a record's transfer. Raises `SpillError` if it failed."""
        ...

    def forget_freed(self) -> None:
        """Stop counting memory of other allocators that was freed since. Quick: called while an allocation waits."""
        ...


class Foresight(Protocol):
    """What a plan tells of the step ahead."""

    def stage(self, record: int) -> None:
        """Bring a record closer without taking fast memory: it is due before long."""
        ...

    def expect(self, need_bytes: int | None) -> None:
        """Note how much memory the step takes until its next save or use (None: not known)."""
        ...

    def prepare(self) -> None:
        """Make room for what is expected, and let the device catch up if it is far behind. May wait."""
        ...


class ShellMemory(Protocol):
    """What a backend offers on which what the program holds may leave: parameters, gradients, optimizer state.

    Such a storage stays where it is while its block is away. It is a record that may leave whenever no operator uses
    it, and that has to be lent to every operator that is told of (`observe.touches`).
    """

    on_shortage: Callable[[], bool]
    """Asked when nothing more can leave; True: something has been found that may."""

    def shell_of(self, storage: int) -> int | None:
        """Return the record of a storage, by its number in torch, if it is one that the program holds."""
        ...

    def adopt_shell(self, tensor: torch.Tensor, *, kind: str, least_bytes: int) -> tuple[int, int] | None:
        """Make the storage of a tensor a record; return its number and bytes (None: it is one, or cannot be)."""
        ...

    def shells_in_log(self) -> dict[int, int]:
        """Return the keys of all records that may leave, by the numbers that the log has for their storages."""
        ...

    def bury_shells(self) -> None:
        """Forget the storages that no code holds any more."""
        ...

    def is_all_there(self) -> bool:
        """Tell whether the program has all blocks."""
        ...

    def lend(self, record: int) -> bool:
        """Give a storage its block for an operator of this thread; False if the block is not there yet."""
        ...

    def take_back(self, record: int, *, wrote: bool) -> bool:
        """End what `lend` began; return whether an operator has written the storage, this one or another."""
        ...

    def may_leave(self, record: int) -> bool:
        """Tell whether a record was not kept for good."""
        ...

    def keep_for_good(self, record: int) -> None:
        """Leave a storage that is lent its block for good: the program knows its address."""
        ...


class StepMemory(SavedTensors, Transfers, Foresight, Protocol):
    """What a running step asks of fast memory."""

    @property
    def remakes(self) -> Remakes | None:
        """What gives records up without a copy and takes them when they were made again, where that is possible."""
        ...

    @property
    def shells(self) -> ShellMemory | None:
        """What lets tensors leave that the program holds, where that is possible."""
        ...


class Backend(Budget, StepMemory, Observation, Protocol):
    """Fast memory with a budget, the way to the tier below it, and the log of a step."""

    device: torch.device

    def rest(self) -> None:
        """Stop watching operators: the step has ended."""
        ...


class AskedByAllocator:
    """The parts of a backend that one whose allocator asks for room itself, and has one tier below, does without."""

    def stage(self, record: int) -> None:
        """Do nothing: there is one tier only."""

    def expect(self, need_bytes: int | None) -> None:
        """Do nothing: the allocator asks when it needs room."""

    def prepare(self) -> None:
        """Do nothing: the allocator asks when it needs room."""

    def figures(self) -> dict[str, object]:
        """Return nothing more."""
        return {}

    @property
    def remakes(self) -> Remakes | None:
        """Nothing can be made again."""
        return None

    @property
    def shells(self) -> ShellMemory | None:
        """What the program holds stays."""
        return None

    def run(self, operator: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run an operator again: the allocator asks when it needs room."""
        return operator(*args, **kwargs)

    @property
    def clock(self) -> Clock | None:
        """The host runs operators itself."""
        return None

    def rest(self) -> None:
        """Go on watching: what runs between steps is named in errors too."""
