"""An operator that finds no room is run again, and only where that changes nothing."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode

import lowtide.emulator
from lowtide.execute.backends.accelerator.guard import Guard
from lowtide.execute.backends.accelerator.memory import DeviceMemory
from lowtide.execute.backends.oom_messages import concerns
from tests.accelerator.devices import IS_EMULATED

MIB = 1 << 20


class Ballast:
    """Memory that is given up, a block at a time, when room is asked for."""

    def __init__(self, device: torch.device, *, blocks: int) -> None:
        self.blocks = [torch.zeros(MIB // 4, device=device) for _ in range(blocks)]
        self.asked: list[int] = []
        self.refused: list[str] = []
        self.stingy = True

    def make_room(self, need_bytes: int) -> bool:
        self.asked.append(need_bytes)
        if self.stingy and len(self.asked) == 1:
            return True  # nothing leaves before an operator has failed
        if self.blocks:
            self.blocks.pop()
        return bool(self.blocks)

    def refusal(self, op: str, need_bytes: int) -> torch.OutOfMemoryError:
        self.refused.append(op)
        return torch.OutOfMemoryError(f"{op} lacks {need_bytes}")

    def look(self) -> None:
        pass


@contextmanager
def crowded(device: torch.device, ballast: Ballast, *, spare_bytes: int = 0) -> Iterator[Guard]:
    """Leave `spare_bytes` on the device, and watch."""
    memory = DeviceMemory(device)
    memory.limit(memory.allocated_bytes() + spare_bytes)
    guard = Guard(memory, ballast)
    guard.start()
    try:
        yield guard
    finally:
        guard.stop()
        memory.lift_limit()


def test_an_operator_without_room_is_run_again_after_something_left(device: torch.device) -> None:
    x = torch.randn(MIB // 4, device=device)
    expected = x.sin()
    ballast = Ballast(device, blocks=3)
    with crowded(device, ballast):
        found = x.sin()
    assert torch.equal(found.cpu(), expected.cpu())
    assert len(ballast.blocks) == 2, "one block was enough"
    assert not ballast.refused


def test_more_leaves_until_it_is_enough(device: torch.device) -> None:
    x = torch.randn(MIB, device=device)
    ballast = Ballast(device, blocks=6)
    with crowded(device, ballast):
        found = x.cos()
    assert len(ballast.blocks) == 2
    assert torch.equal(found.cpu(), x.cos().cpu())


def test_where_nothing_more_can_leave_it_is_refused_by_name(device: torch.device) -> None:
    x = torch.randn(MIB, device=device)
    ballast = Ballast(device, blocks=2)
    with crowded(device, ballast):
        with pytest.raises(torch.OutOfMemoryError, match="aten::tan lacks"):
            x.tan()
    assert ballast.refused == ["aten::tan"]
    x.tan()


def test_running_statistics_are_updated_once(device: torch.device) -> None:
    x = torch.randn(64, 256, 32, device=device)

    def run(norm: nn.BatchNorm1d) -> Tensor:
        out: Tensor = norm(x)
        return out

    torch.manual_seed(0)
    stock = nn.BatchNorm1d(256).to(device)
    expected = run(stock)
    other = nn.BatchNorm1d(256).to(device)
    run(nn.BatchNorm1d(256).to(device))
    ballast = Ballast(device, blocks=5)
    with crowded(device, ballast, spare_bytes=4096):
        found = run(other)
    assert len(ballast.blocks) < 5, "it must have failed at first, else nothing is shown"
    assert torch.equal(found.cpu(), expected.cpu())
    for name, value in stock.state_dict().items():
        assert torch.equal(value.cpu(), other.state_dict()[name].cpu()), name


@pytest.mark.skipif(not IS_EMULATED, reason="a real device does not count its copies")
def test_running_statistics_do_not_cross_the_link(device: torch.device) -> None:
    """They would wait in line behind the copies of records, and the host with them."""
    norm = nn.BatchNorm1d(64).to(device)
    x = torch.randn(16, 64, device=device, requires_grad=True)
    ballast = Ballast(device, blocks=1)
    emulator = lowtide.emulator.current()
    assert emulator is not None
    emulator.reset_stats()
    with crowded(device, ballast, spare_bytes=MIB):
        norm(x).sum().backward()
    assert emulator.stats().d2h.copies == 0


def test_random_numbers_are_drawn_once(device: torch.device) -> None:
    x = torch.ones(MIB // 4, device=device)

    def run() -> tuple[Tensor, Tensor]:
        torch.manual_seed(11)
        return functional.dropout(x, 0.5), torch.rand(10, device=device)

    expected = run()
    ballast = Ballast(device, blocks=5)
    with crowded(device, ballast, spare_bytes=8192):
        found = run()
    assert len(ballast.blocks) < 5, "it must have failed at first, else nothing is shown"
    assert all(torch.equal(a.cpu(), b.cpu()) for a, b in zip(found, expected, strict=True))


def test_an_operator_that_changes_its_argument_is_not_run_again(device: torch.device) -> None:
    x = torch.zeros(10, device=device)
    calls = 0
    memory = DeviceMemory(device)
    ballast = Ballast(device, blocks=5)
    guard = Guard(memory, ballast)

    def fails_half_way() -> Tensor:
        nonlocal calls
        calls += 1
        x.add_(1)
        raise torch.OutOfMemoryError("Tried to allocate 5.00 MiB")

    from lowtide.execute.backends.accelerator.guard import _traits

    with pytest.raises(torch.OutOfMemoryError, match="lacks 5242880"):
        guard._run(_traits(torch.ops.aten.add_.Tensor), fails_half_way, (x, 1), {}, [x])
    assert calls == 1
    assert (x == 1).all()
    assert ballast.asked == []


def test_an_operator_of_another_library_is_not_run_again(device: torch.device) -> None:
    library = torch.library.Library("lowtide_test", "DEF")
    library.define("twice(Tensor x) -> Tensor")
    calls = []

    def twice(x: Tensor) -> Tensor:
        calls.append(1)
        raise torch.OutOfMemoryError("Tried to allocate 1.00 MiB")

    library.impl("twice", twice, "CompositeExplicitAutograd")
    ballast = Ballast(device, blocks=3)
    x = torch.zeros(10, device=device)
    with crowded(device, ballast, spare_bytes=MIB):
        with pytest.raises(torch.OutOfMemoryError, match="lowtide_test::twice"):
            torch.ops.lowtide_test.twice(x)
    assert len(calls) == 1


def test_operators_of_the_host_are_left_alone(device: torch.device) -> None:
    ballast = Ballast(device, blocks=1)
    with crowded(device, ballast):
        torch.ones(10).add(1)
    assert ballast.asked == []


def test_the_guard_makes_way_for_a_mode_of_the_programs(device: torch.device) -> None:
    class Mine(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            return func(*args, **(kwargs or {}))

    guard = Guard(DeviceMemory(device), Ballast(device, blocks=0))
    guard.start()
    with Mine() as mine:
        guard.stop()  # the step ended inside the program's mode
        assert _get_current_dispatch_mode() is mine
        torch.ones(10, device=device)
        guard.start()
    assert _get_current_dispatch_mode() is guard
    guard.stop()
    assert _get_current_dispatch_mode() is None


@pytest.mark.parametrize(
    ("text", "index"),
    [
        ("CUDA out of memory. Tried to allocate 20.00 MiB. GPU 1 has a total capacity of 23.65 GiB of which", 1),
        ("XPU out of memory. Tried to allocate 20.00 MiB. GPU 0 has a total capacity of 16.00 GiB.", 0),
        ("sim out of memory. Tried to allocate 1.00 MiB. sim:1 has a total capacity of 8.00 MiB of which", 1),
        ("lowtide: aten::mm asked for 7 bytes; 9 bytes are in use on cuda:1 and nothing more can leave", 1),
    ],
)
def test_an_error_tells_which_device_it_is_about(text: str, index: int) -> None:
    error = torch.OutOfMemoryError(text)
    assert concerns(error, torch.device("cuda", index))
    assert not concerns(error, torch.device("cuda", 1 - index))
    assert concerns(torch.OutOfMemoryError("no room"), torch.device("cuda", index))
