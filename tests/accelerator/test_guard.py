"""An operator for which there is no room gets it: in the middle of it, or before it where the allocator cannot ask."""

from __future__ import annotations

import copy
import gc
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack

import lowtide
import lowtide.emulator
from lowtide.errors import BudgetTooSmall, NativeUnavailable
from lowtide.execute.backends.accelerator.guard import Guard
from lowtide.execute.backends.accelerator.memory import DeviceMemory
from lowtide.execute.backends.oom_messages import concerns
from lowtide.execute.observe import operators
from tests.accelerator.devices import IS_EMULATED
from tests.accelerator.training import gradient, start, tight_bytes

MIB = 1 << 20

needs_asking = pytest.mark.skipif(not IS_EMULATED, reason="the device's allocator does not ask for room")


class Ballast:
    """Memory that is given up, a block at a time, when room is asked for."""

    def __init__(self, memory: DeviceMemory, *, blocks: int) -> None:
        self.blocks = [torch.zeros(MIB // 4, device=memory.device) for _ in range(blocks)]
        self.asked: list[int] = []
        self.refused: list[tuple[str, int]] = []
        self.errors: list[BaseException] = []
        self.threads: set[int] = set()
        self._memory = memory
        self.guard: Guard

    def make_room(self, need_bytes: int) -> bool:
        self.asked.append(need_bytes)
        while self.blocks and self._memory.free_bytes < need_bytes:
            self.blocks.pop()
        return self._memory.free_bytes >= need_bytes

    def one_block(self, lacking_bytes: int) -> bool:
        self.asked.append(lacking_bytes)
        self.threads.add(threading.get_ident())
        if not self.blocks:
            self.refused.append((self.guard.running, lacking_bytes))
            return False
        self.blocks.pop()
        return True

    def note_refusal(self, op: str, need_bytes: int) -> None:
        self.refused.append((op, need_bytes))

    def look(self) -> None:
        pass

    def failed(self, error: BaseException) -> None:
        self.errors.append(error)


@contextmanager
def crowded(device: torch.device, *, blocks: int, asks: bool = True, spare_bytes: int = 0) -> Iterator[Ballast]:
    """Leave `spare_bytes` on the device beside some ballast, and watch."""
    gc.collect()  # what other tests left in cycles must not come free inside
    memory = DeviceMemory(device)
    ballast = Ballast(memory, blocks=blocks)
    memory.limit(memory.allocated_bytes() + spare_bytes)
    ballast.guard = Guard(memory, ballast, asks=asks)
    if asks:
        memory.ask(ballast.one_block)
    ballast.guard.start()
    try:
        yield ballast
    finally:
        ballast.guard.stop()
        memory.ask(None)
        memory.lift_limit()
    assert not ballast.errors


@needs_asking
def test_room_is_made_in_the_middle_of_an_operator(device: torch.device) -> None:
    x = torch.randn(MIB // 4, device=device)
    expected = x.sin()
    with crowded(device, blocks=3) as ballast:
        found = x.sin()
        assert torch.equal(found.cpu(), expected.cpu())
    assert len(ballast.blocks) == 2, "one block was enough"
    assert not ballast.refused


@needs_asking
def test_more_leaves_until_it_is_enough(device: torch.device) -> None:
    x = torch.randn(MIB, device=device)
    with crowded(device, blocks=6) as ballast:
        found = x.cos()
    assert len(ballast.blocks) == 2
    assert torch.equal(found.cpu(), x.cos().cpu())


@needs_asking
def test_where_nothing_more_can_leave_it_is_refused_by_name(device: torch.device) -> None:
    x = torch.randn(MIB, device=device)
    with crowded(device, blocks=2) as ballast:
        with pytest.raises(torch.OutOfMemoryError):
            x.tan()
    assert ballast.refused == [("aten::tan", 2 * MIB)]
    x.tan()


@needs_asking
def test_room_is_made_on_autograds_thread_too(device: torch.device) -> None:
    x = torch.randn(MIB // 4, device=device, requires_grad=True)
    y = x.sin().sum()
    y.backward(retain_graph=True)
    with crowded(device, blocks=8) as ballast:
        y.backward()
    assert len(ballast.blocks) < 8
    assert ballast.threads - {threading.get_ident()}


@pytest.mark.parametrize("asks", [pytest.param(True, marks=needs_asking), False])
def test_running_statistics_are_updated_once(asks: bool, device: torch.device) -> None:
    x = torch.randn(64, 256, 32, device=device)

    def run(norm: nn.BatchNorm1d) -> Tensor:
        out: Tensor = norm(x)
        return out

    torch.manual_seed(0)
    stock = nn.BatchNorm1d(256).to(device)
    expected = run(stock)
    other = nn.BatchNorm1d(256).to(device)
    run(nn.BatchNorm1d(256).to(device))
    with crowded(device, blocks=5, asks=asks, spare_bytes=4096) as ballast:
        found = run(other)
    assert len(ballast.blocks) < 5, "it must have lacked room, else nothing is shown"
    assert torch.equal(found.cpu(), expected.cpu())
    for name, value in stock.state_dict().items():
        assert torch.equal(value.cpu(), other.state_dict()[name].cpu()), name


@needs_asking
def test_running_statistics_do_not_cross_the_link(device: torch.device) -> None:
    """They would wait in line behind the copies of records, and the host with them."""
    norm = nn.BatchNorm1d(64).to(device)
    x = torch.randn(16, 64, device=device, requires_grad=True)
    emulator = lowtide.emulator.current()
    assert emulator is not None
    emulator.reset_stats()
    with crowded(device, blocks=1, spare_bytes=MIB):
        norm(x).sum().backward()
    assert emulator.stats().d2h.copies == 0


@pytest.mark.parametrize("asks", [pytest.param(True, marks=needs_asking), False])
def test_random_numbers_are_drawn_once(asks: bool, device: torch.device) -> None:
    x = torch.ones(MIB // 4, device=device)

    def run() -> tuple[Tensor, Tensor]:
        torch.manual_seed(11)
        return functional.dropout(x, 0.5), torch.rand(10, device=device)

    expected = run()
    with crowded(device, blocks=5, asks=asks, spare_bytes=8192) as ballast:
        found = run()
    assert len(ballast.blocks) < 5, "it must have lacked room, else nothing is shown"
    assert all(torch.equal(a.cpu(), b.cpu()) for a, b in zip(found, expected, strict=True))


@needs_asking
def test_an_operator_that_changes_its_argument_runs_once(device: torch.device) -> None:
    x = torch.zeros(MIB // 4, device=device)
    with crowded(device, blocks=5) as ballast:
        x.add_(torch.ones(1, device=device).expand_as(x).clone())
    assert len(ballast.blocks) < 5
    assert bool((x == 1).all())


@needs_asking
def test_an_operator_of_another_library_gets_room_and_runs_once(device: torch.device) -> None:
    library = torch.library.Library("lowtide_test", "DEF")
    library.define("twice(Tensor x) -> Tensor")
    calls = []

    def twice(x: Tensor) -> Tensor:
        calls.append(1)
        return x + x

    library.impl("twice", twice, "CompositeExplicitAutograd")
    x = torch.ones(MIB // 4, device=device)
    with crowded(device, blocks=3) as ballast:
        found = torch.ops.lowtide_test.twice(x)
    assert calls == [1]
    assert len(ballast.blocks) == 2
    assert bool((found == 2).all())


def test_where_the_allocator_cannot_ask_all_leaves_before_an_operator_that_was_not_seen(device: torch.device) -> None:
    x = torch.randn(MIB // 4, device=device)
    with crowded(device, blocks=6, asks=False) as ballast:
        x.sin()
        assert not ballast.blocks


def test_where_the_allocator_cannot_ask_an_operator_that_was_seen_gets_what_it_took(device: torch.device) -> None:
    x = torch.randn(MIB // 4, device=device)
    with crowded(device, blocks=6, asks=False) as ballast:
        x.sin()
        ballast.asked.clear()
        x.sin()
    assert ballast.asked == [MIB]


def test_operators_of_the_host_are_left_alone(device: torch.device) -> None:
    with crowded(device, blocks=1, asks=False) as ballast:
        torch.ones(10).add(1)
    assert ballast.asked == []


def test_a_copy_of_a_model_inside_a_step_does_not_look_at_its_bytes_one_by_one(
    device: torch.device, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = nn.Linear(64, 64).to(device)
    read: list[int] = []
    item = torch.UntypedStorage.__getitem__
    monkeypatch.setattr(torch.UntypedStorage, "__getitem__", lambda self, at: read.append(1) or item(self, at))
    with lowtide.fit(model, budget={str(device): "64MiB"}, spill=tmp_path) as tide, tide.step():
        copied = copy.deepcopy(model.state_dict())
    assert torch.equal(copied["weight"].cpu(), model.weight.detach().cpu())
    assert not read


@pytest.mark.parametrize("recompute", [False, True])
def test_a_training_is_exact_where_the_allocator_cannot_ask(
    recompute: bool, device: torch.device, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on CUDA."""
    monkeypatch.setattr(DeviceMemory, "can_ask", False)
    monkeypatch.setattr(DeviceMemory, "ask", lambda _self, _callback: None)
    x, expected = start(device)
    budget = {str(device): tight_bytes(device)}
    with lowtide.fit(budget=budget, spill=tmp_path, policy="auto", recompute=recompute) as tide:
        assert all(torch.equal(gradient(tide, x), expected) for _ in range(5))
        stats = tide.stats()
    assert int(str(stats["swapped_in_bytes"])) > 0
    assert int(str(stats["peak_bytes"])) <= budget[str(device)]


def test_where_the_allocator_cannot_ask_a_refusal_is_told(
    device: torch.device, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(DeviceMemory, "can_ask", False)
    monkeypatch.setattr(DeviceMemory, "ask", lambda _self, _callback: None)
    x, _ = start(device)
    with lowtide.fit(budget={str(device): tight_bytes(device, activations=1)}, spill=tmp_path) as tide:
        with pytest.raises(BudgetTooSmall, match="aten::"):
            gradient(tide, x)


def test_without_a_compiler_a_device_is_refused_with_the_reason(
    device: torch.device, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(operators, "_tried", lambda: "no C++ compiler found: install g++")
    threads = threading.active_count()
    with pytest.raises(NativeUnavailable, match="install g"):
        lowtide.fit(budget={str(device): "64MiB"}, spill=tmp_path)
    assert threading.active_count() == threads
    assert list(tmp_path.iterdir()) == []


def test_no_dispatch_mode_is_on(device: torch.device) -> None:
    with crowded(device, blocks=0, asks=False):
        assert _get_current_dispatch_mode_stack() == []
        assert not torch._C._is_torch_function_mode_enabled()


def test_operators_below_a_mode_of_the_programs_are_seen(device: torch.device) -> None:
    class Doubles(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            if func is torch.ops.aten.sin.default:
                return torch.ops.aten.cos.default(*args)
            return func(*args, **(kwargs or {}))

    class Names:
        wants_operands = True

        def __init__(self) -> None:
            self.device = device
            self.names: list[str] = []

        def began(self, operator: torch._ops.OpOverload, _args: object, _kwargs: object) -> None:
            self.names.append(operator._schema.name)

        def ended(self, _token: object, _results: object) -> None:
            raise AssertionError("nobody wants to know")

        def failed(self, error: Exception) -> None:
            raise error

    watcher = Names()
    x = torch.ones(4, device=device)
    operators.watch(watcher)
    try:
        with Doubles():
            x.sin()
    finally:
        operators.unwatch(watcher)
    assert watcher.names == ["aten::cos"]


@pytest.mark.parametrize(
    ("text", "index"),
    [
        ("CUDA out of memory. Tried to allocate 20.00 MiB. GPU 1 has a total capacity of 23.65 GiB of which", 1),
        ("XPU out of memory. Tried to allocate 20.00 MiB. GPU 0 has a total capacity of 16.00 GiB.", 0),
        ("sim out of memory. Tried to allocate 1.00 MiB. sim:1 has a total capacity of 8.00 MiB of which", 1),
    ],
)
def test_an_error_tells_which_device_it_is_about(text: str, index: int) -> None:
    error = torch.OutOfMemoryError(text)
    assert concerns(error, torch.device("cuda", index))
    assert not concerns(error, torch.device("cuda", 1 - index))
    assert concerns(torch.OutOfMemoryError("no room"), torch.device("cuda", index))
