"""What the program holds leaves the device too: parameters, gradients and optimizer state, to the bit."""

from __future__ import annotations

import copy
import gc
import io
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

import lowtide
from lowtide.errors import BudgetTooSmall, SpillError
from lowtide.execute.observe import touches
from lowtide.tiers.file import FileMedium
from lowtide.tiers.wrappers import Direction, Fault, FaultKind, Faulty
from tests.accelerator.devices import IS_EMULATED, device, races, shake
from tests.bitwise.record import Record, assert_identical

MIB = 1 << 20
WIDTH, LAYERS, BATCH = 256, 8, 32
LAYER_BYTES = WIDTH * WIDTH * 4

StepContext = Callable[[], AbstractContextManager[object]]
Make = Callable[[Iterator[nn.Parameter]], torch.optim.Optimizer]

OPTIMIZERS: dict[str, Make] = {
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=1e-2),
    "adamw_single": lambda parameters: torch.optim.AdamW(parameters, lr=1e-2, foreach=False),
    "adam_fused": lambda parameters: torch.optim.Adam(parameters, lr=1e-2, fused=True),
    "sgd_momentum": lambda parameters: torch.optim.SGD(parameters, lr=1e-2, momentum=0.9, nesterov=True),
    "rmsprop": lambda parameters: torch.optim.RMSprop(parameters, lr=1e-3, momentum=0.9, centered=True),
}


class Net(nn.Module):
    """Layers of one size, whose last shares its weight with the first, with a normalisation and a frozen layer."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS))
        self.norm = nn.BatchNorm1d(WIDTH)
        self.frozen = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.layers[-1].weight = self.layers[0].weight

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.relu(layer(x)) + 0.5 * x
        out: Tensor = self.frozen(self.norm(x))
        return out


class Training:
    """A training that can be run with and without Lowtide from the same beginning."""

    def __init__(self, optimizer: str = "adamw") -> None:
        self.device = device()
        torch.manual_seed(11)
        self.model = Net().to(self.device)
        self.optimizer = OPTIMIZERS[optimizer](self.model.parameters())
        self.record = Record()

    def batch(self, index: int) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(index)
        made = [torch.randn(BATCH, WIDTH, generator=generator) for _ in range(2)]
        return made[0].to(self.device), made[1].to(self.device)

    def loss(self, index: int) -> Tensor:
        x, y = self.batch(index)
        return functional.mse_loss(self.model(x), y)

    def body(self, index: int) -> None:
        loss = self.loss(index)
        loss.backward()  # type: ignore[no-untyped-call]
        self.record.add("loss", loss)
        self.optimizer.step()
        self.optimizer.zero_grad()

    def run(self, step: StepContext = nullcontext, *, body: Callable[[Training, int], None] | None = None) -> Record:
        for index in range(4):
            self.record.step = index
            with step():
                (body or Training.body)(self, index)
        return self.record

    def note(self) -> Record:
        self.record.step = 100
        self.record.add_state([self.model], [self.optimizer])
        return self.record

    def held_bytes(self) -> int:
        tensors = [*self.model.parameters(), *self.model.buffers()]
        tensors += [value for state in self.optimizer.state.values() for value in state.values()]
        return sum(tensor.nbytes for tensor in tensors)


def stock(optimizer: str = "adamw", body: Callable[[Training, int], None] | None = None) -> tuple[Record, int]:
    """Return what a training computes without Lowtide, and the bytes that it holds at the end."""
    training = Training(optimizer)
    training.run(body=body)
    return training.note(), training.held_bytes()


def managed(
    spill: Path,
    *,
    budget_bytes: int,
    optimizer: str = "adamw",
    body: Callable[[Training, int], None] | None = None,
    seed: int = 1,
    cpu_bytes: int = 64 * MIB,
    policy: str = "auto",
) -> tuple[Record, dict[str, Any]]:
    """Train inside a budget while everything is late and races are looked for; nothing may be found."""
    gc.collect()
    shake(seed, races=True)
    training = Training(optimizer)
    budget = {"device": budget_bytes, "cpu": cpu_bytes}
    with lowtide.fit(training.model, training.optimizer, budget=budget, spill=spill, policy=policy) as tide:
        training.run(tide.step, body=body)
        stats = dict(tide.stats())
    training.note()
    assert not races()
    assert stats["peak_bytes"] <= stats["peak_reserved_bytes"] <= budget_bytes
    return training.record, stats


def opened(training: Training, budget_bytes: int, spill: Path) -> lowtide.Tide:
    budget = {"device": budget_bytes, "cpu": 64 * MIB}
    return lowtide.fit(training.model, training.optimizer, budget=budget, spill=spill)


@pytest.fixture(autouse=True)
def calm() -> Iterator[None]:
    gc.collect()
    yield
    torch.accelerator.synchronize()
    shake(None)


SMALL = 8 * LAYER_BYTES  # of 9 layers with as much gradient, and up to twice or thrice as much state


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_a_model_whose_state_exceeds_the_device_trains_exactly(optimizer: str, tmp_path: Path) -> None:
    expected, held_bytes = stock(optimizer)
    assert held_bytes > 1.5 * SMALL, "gradients beside: nothing would press"
    found, stats = managed(tmp_path, budget_bytes=SMALL, optimizer=optimizer)
    assert_identical(expected, found)
    assert stats["swapped_out_bytes"] > held_bytes - SMALL


@pytest.mark.parametrize("policy", ["lru", "belady", "swap_all"])
def test_under_every_kind_of_policy(policy: str, tmp_path: Path) -> None:
    expected, _ = stock()
    found, _ = managed(tmp_path, budget_bytes=SMALL, policy=policy)
    assert_identical(expected, found)


def test_with_little_pinned_memory_it_goes_on_to_the_disk(tmp_path: Path) -> None:
    expected, _ = stock()
    found, stats = managed(tmp_path, budget_bytes=SMALL, cpu_bytes=2 * MIB)
    assert_identical(expected, found)
    assert stats["disk_written_bytes"] > 0
    assert stats["host_peak_bytes"] <= 2 * MIB


# ---- loops ----


def clipped(training: Training, index: int) -> None:
    training.loss(index).backward()  # type: ignore[no-untyped-call]
    norm = nn.utils.clip_grad_norm_(training.model.parameters(), 0.01)
    training.record.add("norm", norm)
    training.optimizer.step()
    training.optimizer.zero_grad()


def accumulated(training: Training, index: int) -> None:
    for part in range(3):
        (training.loss(10 * index + part) / 3).backward()  # type: ignore[no-untyped-call]
    training.record.add_gradients([training.model])
    training.optimizer.step()
    training.optimizer.zero_grad(set_to_none=False)


def evaluated(training: Training, index: int) -> None:
    training.body(index)
    training.model.eval()
    with torch.no_grad():
        training.record.add("evaluation", training.loss(100 + index))
    training.model.train()


def copied(training: Training, index: int) -> None:
    """Copies of everything in the middle, and one that is loaded again."""
    training.loss(index).backward()  # type: ignore[no-untyped-call]
    state = {name: value.cpu() for name, value in training.model.state_dict().items()}
    moments = copy.deepcopy(training.optimizer.state_dict())
    training.optimizer.step()
    training.optimizer.zero_grad()
    if index == 2:
        training.model.load_state_dict(state)
        training.optimizer.load_state_dict(moments)
    file = io.BytesIO()
    torch.save(training.model.state_dict(), file)
    file.seek(0)
    for name, value in torch.load(file, map_location="cpu").items():
        training.record.add(f"saved {name}", value)


def replaced(training: Training, index: int) -> None:
    """The program gives parameters other data, and changes them past autograd."""
    training.loss(index).backward()  # type: ignore[no-untyped-call]
    with torch.no_grad():
        weight = training.model.layers[2].weight
        weight.data = weight.data * 0.5
        training.model.layers[3].weight.data.mul_(0.5)
        torch._foreach_mul_(list(training.model.layers[4].parameters()), 0.5)
    training.optimizer.step()
    training.optimizer.zero_grad()


LOOPS = {each.__name__: each for each in (clipped, accumulated, evaluated, replaced)}


@pytest.mark.parametrize("loop", LOOPS)
def test_loops_are_exact(loop: str, tmp_path: Path) -> None:
    expected, _ = stock(body=LOOPS[loop])
    found, stats = managed(tmp_path, budget_bytes=SMALL, body=LOOPS[loop], seed=2)
    assert_identical(expected, found)
    assert stats["swapped_in_bytes"] > 0


def test_copies_and_loads_in_the_middle_are_exact(tmp_path: Path) -> None:
    """A copy of the optimizer's state on the device is the program's own: there has to be room for it."""
    expected, held_bytes = stock(body=copied)
    found, stats = managed(tmp_path, budget_bytes=held_bytes, body=copied, seed=3)
    assert_identical(expected, found)
    assert stats["swapped_in_bytes"] > 0


# ---- outside of steps, and what nobody announces ----


def test_between_steps_everything_can_be_looked_at_from_any_thread(tmp_path: Path) -> None:
    expected, _ = stock()
    training = Training()
    with opened(training, SMALL, tmp_path) as tide:
        training.run(tide.step)
        assert tide.stats()["held_away_bytes"] > 0
        looking = threading.Thread(target=training.note)
        looking.start()
        looking.join()
    assert_identical(expected, training.record)


def test_an_address_that_somebody_asked_for_stays(tmp_path: Path) -> None:
    training = Training()
    weight = training.model.layers[5].weight
    with opened(training, SMALL, tmp_path) as tide:
        with tide.step():
            training.body(0)
        training.record.step = 1
        address = weight.data_ptr()
        assert address
        with tide.step():
            training.body(1)
        assert weight.untyped_storage().data_ptr() == address
        assert tide.stats()["unmanaged"]["tensor whose address was asked for"] == 1


def test_what_announces_itself_to_nobody_raises_and_reads_nothing(tmp_path: Path) -> None:
    training = Training()
    with opened(training, SMALL, tmp_path) as tide:
        with tide.step():
            training.body(0)
        away = next(each for each in training.model.parameters() if touches.is_shell(each.untyped_storage()._cdata))
        with pytest.raises(RuntimeError, match="away from the device"):
            torch._C.TensorBase.data_ptr(away)
        assert bool(torch.isfinite(away).all())


def test_a_storage_keeps_its_identity_size_and_views(tmp_path: Path) -> None:
    training = Training()
    weight = training.model.layers[1].weight
    before, row = weight.untyped_storage()._cdata, weight.detach()[3]
    with lowtide.fit(
        training.model, training.optimizer, budget={"device": SMALL, "cpu": 64 * MIB}, spill=tmp_path
    ) as tide:
        with tide.step():
            training.body(0)
        assert weight.untyped_storage()._cdata == before
        assert weight.untyped_storage().nbytes() == LAYER_BYTES
        assert torch.equal(row.cpu(), weight.detach().cpu()[3])
    assert not touches.is_shell(before)


# ---- limits ----


def test_a_budget_that_no_operator_fits_in_is_refused_with_the_figure(tmp_path: Path) -> None:
    training = Training()
    with pytest.raises(BudgetTooSmall) as refused:
        with lowtide.fit(
            training.model, training.optimizer, budget={"device": LAYER_BYTES, "cpu": 64 * MIB}, spill=tmp_path
        ) as tide:
            with tide.step():
                training.body(0)
    assert refused.value.needed_bytes > LAYER_BYTES
    assert refused.value.device == str(training.device)
    for parameter in training.model.parameters():  # all are back
        assert bool(torch.isfinite(parameter).all())


def test_a_model_that_is_larger_than_its_budget_leaves_when_the_tide_opens(tmp_path: Path) -> None:
    training = Training()
    before = [parameter.detach().cpu() for parameter in training.model.parameters()]
    with lowtide.fit(
        training.model, training.optimizer, budget={"device": 4 * LAYER_BYTES, "cpu": 64 * MIB}, spill=tmp_path
    ):
        assert torch.accelerator.memory_allocated() <= 4 * LAYER_BYTES
    for mine, theirs in zip(training.model.parameters(), before, strict=True):
        assert torch.equal(mine.cpu(), theirs)


def test_unchanged_bytes_are_not_written_again(tmp_path: Path) -> None:
    """In evaluation each layer leaves once, and comes back in every pass."""
    training = Training()
    training.model.eval()
    with (
        lowtide.fit(training.model, budget={"device": 4 * LAYER_BYTES, "cpu": 64 * MIB}, spill=tmp_path) as tide,
        torch.no_grad(),
    ):
        for index in range(5):
            with tide.step():
                training.loss(index)
        stats = tide.stats()
    assert stats["swapped_out_bytes"] <= training.held_bytes()
    assert stats["swapped_in_bytes"] > 3 * (training.held_bytes() - 4 * LAYER_BYTES)


@pytest.mark.skipif(not IS_EMULATED, reason="memory is counted to the byte")
def test_what_the_program_lets_go_of_takes_no_memory_below_the_device(tmp_path: Path) -> None:
    training = Training()
    with lowtide.fit(
        training.model, training.optimizer, budget={"device": SMALL, "cpu": 64 * MIB}, spill=tmp_path
    ) as tide:
        with tide.step():
            training.body(0)
        assert tide.stats()["held_away_bytes"] > 0
        for parameter in training.model.parameters():
            parameter.data = torch.empty(0, device=training.device)
        training.optimizer.state.clear()
        with tide.step():
            pass
        assert tide.stats()["held_away_bytes"] == 0


def test_a_read_that_fails_raises_and_the_pass_is_exact_when_it_is_repeated(tmp_path: Path) -> None:
    """No parameter is ever lost silently: the operator that needs it raises, and the next touch reads again."""
    training = Training()
    training.model.eval()
    with torch.no_grad():
        expected = training.loss(0).cpu()
    faults = [Fault(direction=Direction.READ, nth=3, kind=FaultKind.EIO)]
    medium = Faulty(FileMedium([tmp_path]), script=faults)
    budget = {"device": 4 * LAYER_BYTES, "cpu": MIB}
    with lowtide.fit(training.model, budget=budget, spill=medium) as tide, torch.no_grad():
        with pytest.raises(SpillError, match="of a parameter cannot be read back"):
            for _ in range(3):
                with tide.step():
                    assert torch.equal(training.loss(0).cpu(), expected)
        with tide.step():
            assert torch.equal(training.loss(0).cpu(), expected)


def test_outside_of_a_step_the_operator_itself_says_why(tmp_path: Path) -> None:
    training = Training()
    with opened(training, 2 * LAYER_BYTES, tmp_path):
        kept = [torch.zeros(LAYER_BYTES // 4, device=training.device)]
        with pytest.raises(RuntimeError, match="away from the device: budget"):
            kept += [parameter.detach() * 2.0 for parameter in training.model.parameters()]
        kept.clear()
        assert bool(training.model.layers[4].weight.cpu().isfinite().all())


class Seen(TorchDispatchMode):
    """A program's own mode, which sees its operators."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


def test_a_programs_own_mode_sees_nothing_of_it(tmp_path: Path) -> None:
    training = Training()
    training.model.eval()
    x, _ = training.batch(0)

    def names() -> list[str]:
        with Seen() as seen, torch.no_grad():
            training.model(x)
        return seen.names

    expected = names()
    with opened(training, 4 * LAYER_BYTES, tmp_path) as tide:
        for _ in range(2):
            with tide.step():
                assert names() == expected
        assert int(str(tide.stats()["swapped_in_bytes"])) > 0
