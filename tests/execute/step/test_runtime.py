"""The runtime over a backend that is made up: whatever happens between a question and its answer."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import lowtide
from lowtide.execute.backends.protocol import AskedByAllocator, Packed
from lowtide.execute.step.runtime import Runtime
from lowtide.plan.policies.lru import Lru
from lowtide.residency.events import Event, ReadFailed, Sole, Written
from lowtide.residency.machine import Residence


class Scripted(AskedByAllocator):
    """A backend in which the test decides what is where; it keeps every tensor, so nothing is ever wrong."""

    device = torch.device("cpu")
    gradients = None

    def __init__(self) -> None:
        self.tensors: dict[int, Tensor] = {}
        self.away: set[int] = set()
        self.pending: list[Event] = []
        self.refuse: BaseException | None = None
        self.written: list[int] = []

    def storage_bytes(self, tensor: Tensor) -> int:
        return tensor.untyped_storage().nbytes()

    def pack(self, tensor: Tensor) -> Packed:
        number = len(self.tensors) + 1
        self.tensors[number] = tensor.detach()
        return Packed(number, number, True, tensor.untyped_storage().nbytes(), tensor._version)

    def version(self, pack: int) -> int:
        return 0

    def tensor(self, pack: int, _dtype: torch.dtype) -> Tensor | None:
        return None if pack in self.away else self.tensors[pack]

    def close_pack(self, pack: int) -> None:
        pass

    def forget_freed(self) -> None:
        pass

    def watch(self, record: int) -> None:
        pass

    def events(self) -> list[Event]:
        events, self.pending = self.pending, []
        return events

    def write(self, record: int, _nbytes: int) -> bool:
        self.written.append(record)
        return True

    def keep(self, record: int) -> bool:
        return record not in self.away

    def fetch(self, record: int) -> None:
        if self.refuse is not None:
            raise self.refuse

    def wait(self, record: int) -> None:
        self.away.discard(record)

    def mark_unpack(self, pack: int) -> None:
        pass


def scripted() -> tuple[Runtime, Scripted]:
    backend = Scripted()
    runtime = Runtime(backend, Lru(), least_bytes=1, strict=True)  # type: ignore[arg-type]
    runtime.begin_step()
    return runtime, backend


def test_a_fetch_that_finds_no_room_is_not_counted_as_on_its_way() -> None:
    runtime, backend = scripted()
    handle = runtime.pack(torch.ones(10))
    backend.pending = [Sole(1)]
    assert runtime.on_pressure(1) == 40
    backend.away.add(1)
    backend.pending = [Written(1, resident=False)]
    backend.refuse = lowtide.BudgetTooSmall(budget_bytes=1, needed_bytes=2, op="test")
    with pytest.raises(lowtide.BudgetTooSmall):
        runtime.unpack(handle)
    assert runtime.machine.where(1) is Residence.AWAY
    assert runtime.on_pressure(1) == 0, "an allocation would wait for it for ever"
    backend.refuse = None
    assert torch.equal(runtime.unpack(handle), torch.ones(10))


def test_a_write_that_lands_between_the_answer_and_the_keep_is_fetched_again() -> None:
    runtime, backend = scripted()
    handle = runtime.pack(torch.ones(10))
    backend.pending = [Sole(1)]
    runtime.on_pressure(1)
    backend.away.add(1)  # it landed, and the runtime has not heard of it
    assert torch.equal(runtime.unpack(handle), torch.ones(10))


def test_a_failed_prefetch_is_forgotten_and_a_later_need_fetches() -> None:
    runtime, backend = scripted()
    handle = runtime.pack(torch.ones(10))
    backend.pending = [Sole(1)]
    runtime.on_pressure(1)
    backend.away.add(1)
    backend.pending = [Written(1, resident=False), ReadFailed(1)]
    assert torch.equal(runtime.unpack(handle), torch.ones(10))


def test_an_error_while_making_room_is_kept_and_the_allocation_told_to_give_up() -> None:
    runtime, backend = scripted()

    def fail() -> list[Event]:
        raise ValueError("broken")

    backend.events = fail  # type: ignore[method-assign]
    assert runtime.on_pressure(1) < 0
    assert isinstance(runtime.take_failure(), ValueError)
    assert runtime.failure is None
