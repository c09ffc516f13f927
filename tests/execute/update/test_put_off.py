"""Updates that are put off: nobody can tell, whoever looks first, and their traffic hides in the next forward pass."""

from __future__ import annotations

import copy
import ctypes
import errno
import gc
import io
import os
import pickle
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import lowtide
from lowtide.core.trace import Kind
from lowtide.tiers import Direction, Fault, FaultKind, Faulty, FileMedium
from tests.execute.update.optimizers import FUSED, OPTIMIZERS

WIDTH, LAYERS = 256, 6
BUDGET = 6 * WIDTH * WIDTH * 4  # of 24 such tensors of parameters, gradients and moments
# What they do is not element by element, or changes small tensors beside the large ones.
AT_ONCE = (("asgd", "foreach", False), ("adagrad", "fused", True))
FORMS = [(name, "foreach", value) for name in OPTIMIZERS for value in (False, True)] + [
    (name, "fused", True) for name in FUSED
]


class Training:
    """A training whose parameters, gradients and moments are several times the budget."""

    def __init__(self, name: str = "adamw", form: str = "foreach", *, on: bool = False) -> None:
        torch.manual_seed(3)
        self.model = torch.nn.Sequential(*[torch.nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)])
        kind, options = OPTIMIZERS[name]
        self.optimizer = kind(self.model.parameters(), **{"lr": 1e-3, **options, form: on})
        self.losses: list[float] = []

    def forward_and_back(self) -> None:
        torch.manual_seed(10 + len(self.losses))
        loss = self.model(torch.randn(16, WIDTH)).square().mean()
        loss.backward()
        self.losses.append(loss.item())

    def step(self) -> None:
        self.forward_and_back()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def steps(self, count: int, around: Callable[[], Any] = nullcontext) -> Training:
        for _ in range(count):
            with around():
                self.step()
        return self

    def values(self) -> list[Tensor]:
        states = [value for state in self.optimizer.state.values() for value in state.values()]
        return [*self.model.parameters(), *(value for value in states if isinstance(value, Tensor))]

    @property
    def weight(self) -> Tensor:
        return self.model[0].weight

    def moment(self) -> Tensor:
        return self.optimizer.state[self.weight]["exp_avg"]


def assert_equal(one: Training, other: Training) -> None:
    assert one.losses == other.losses
    for mine, theirs in zip(one.values(), other.values(), strict=True):
        assert torch.equal(mine, theirs)


def built_inside(spill: Any, *args: Any, **options: Any) -> Training:
    """Return a training whose parameters are ranges of our own: those of others cannot be barred."""
    with lowtide.init(budget=BUDGET, spill=spill):
        return Training(*args, **options)


@contextmanager
def fitted(training: Training, spill: Any, **options: Any) -> Iterator[Any]:
    options = {"budget": BUDGET, "policy": "lru", "put_off": True, **options}
    with lowtide.fit(training.model, training.optimizer, spill=spill, **options) as tide:
        yield tide


def waiting(tide: Any) -> int:
    return int(tide.memory.native.update_counters().waiting)


@pytest.mark.parametrize(("name", "form", "on"), FORMS)
def test_every_optimizer_trains_exactly(name: str, form: str, on: bool, tmp_path: Path) -> None:
    stock = Training(name, form, on=on).steps(4)
    late = built_inside(tmp_path, name, form, on=on)
    with fitted(late, tmp_path, policy="auto") as tide:
        late.steps(4, tide.step)
        assert (waiting(tide) > 0) is ((name, form, on) not in AT_ONCE)
        stats = tide.stats()
    assert stats["peak_reserved_bytes"] <= stats["budget_bytes"]
    assert_equal(stock, late)


def test_nothing_is_put_off_where_the_state_fits(tmp_path: Path) -> None:
    training = built_inside(tmp_path)
    with fitted(training, tmp_path, budget="64MiB") as tide:
        training.steps(2, tide.step)
        assert tide.stats()["operators_put_off"] == 0


def test_a_model_from_before_is_updated_at_once(tmp_path: Path) -> None:
    stock = Training().steps(3)
    training = Training()
    with fitted(training, tmp_path) as tide:
        training.steps(3, tide.step)
        assert waiting(tide) == 0
        assert training.weight[0, :3].tolist() == stock.weight[0, :3].tolist()
    assert_equal(stock, training)


def test_an_update_runs_in_the_forward_pass_that_follows(tmp_path: Path) -> None:
    training = built_inside(tmp_path)
    with fitted(training, tmp_path, policy="auto") as tide:
        training.steps(5, tide.step)
        trace, stats = tide.trace(), tide.stats()
        assert tide.plan() is not None
        assert stats["faults"] == 0
    names = [op.name for op in trace.ops]
    updates = [at for at, name in enumerate(names) if name == "aten::addcdiv_"]
    layers = [at for at, name in enumerate(names) if name == "aten::addmm"]
    assert sum(one.kind is Kind.PARAM and one.nbytes == WIDTH * WIDTH * 4 for one in trace.storages) == LAYERS
    assert sum(one.kind is Kind.OPTIMIZER and one.nbytes == WIDTH * WIDTH * 4 for one in trace.storages) == 2 * LAYERS
    large = [at for at in updates if at < layers[-1]]
    assert len(large) == LAYERS  # small ones are updated at once, after backward
    assert large[0] < layers[0] < large[1] < layers[1]


# ---- whoever looks ----


def _address_of(tensor: Tensor) -> int:
    return tensor.data_ptr()


def _value_at(address: int) -> float:
    return ctypes.c_float.from_address(address).value


LOOKS: dict[str, Callable[[Training], object]] = {
    "operator": lambda training: training.weight.sum().item(),
    "moment": lambda training: training.moment().sum().item(),
    "numpy": lambda training: training.weight.detach().numpy().sum().item(),
    "view": lambda training: training.weight.detach()[3:5].t().sum().item(),
    "address": lambda training: _value_at(_address_of(training.weight)),
    "list": lambda training: training.weight[0, :3].tolist(),
    "item": lambda training: training.weight[7, 7].item(),
    "deepcopy": lambda training: copy.deepcopy(training.model)[0].weight.sum().item(),
    "pickle": lambda training: pickle.loads(pickle.dumps(training.weight)).sum().item(),
    "save": lambda training: _saved(training)["model"]["0.weight"].sum().item(),
    "saved moment": lambda training: _saved(training)["optimizer"]["state"][0]["exp_avg"].sum().item(),
    "another thread": lambda training: _in_thread(lambda: training.weight.sum().item()),
    "evaluation": lambda training: _evaluate(training),
    "version": lambda training: (training.weight._version, training.moment()._version),
    "a child": lambda training: _in_child(lambda: training.weight.sum().item()),
}


def _saved(training: Training) -> dict[str, Any]:
    file = io.BytesIO()
    torch.save({"model": training.model.state_dict(), "optimizer": training.optimizer.state_dict()}, file)
    file.seek(0)
    return dict(torch.load(file))


def _in_thread(look: Callable[[], object]) -> object:
    found: list[object] = []
    thread = threading.Thread(target=lambda: found.append(look()))
    thread.start()
    thread.join()
    return found[0]


def _in_child(look: Callable[[], object]) -> object:
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        torch.set_num_threads(1)
        os.write(write, repr(look()).encode())
        os._exit(0)
    os.close(write)
    with os.fdopen(read) as answer:
        text = answer.read()
    assert os.waitpid(child, 0)[1] == 0
    return text


def _evaluate(training: Training) -> float:
    with torch.inference_mode():
        return training.model(torch.ones(1, WIDTH)).sum().item()


@pytest.mark.parametrize("look", LOOKS)
@pytest.mark.parametrize("inside", [True, False], ids=["in the step", "after it"])
def test_whoever_looks_finds_the_update_done(look: str, inside: bool, tmp_path: Path) -> None:
    def run(training: Training, step: Callable[[], Any]) -> list[object]:
        found = []
        training.steps(2, step)
        for _ in range(2):
            with step():
                training.forward_and_back()
                training.optimizer.step()
                if inside:
                    found.append(LOOKS[look](training))
                training.optimizer.zero_grad()
            if not inside:
                found.append(LOOKS[look](training))
        return found

    stock, late = Training(), built_inside(tmp_path)
    expected = run(stock, nullcontext)
    with fitted(late, tmp_path) as tide:
        assert run(late, tide.step) == expected
    assert_equal(stock, late)


def test_an_address_from_before_finds_the_update_done(tmp_path: Path) -> None:
    stock = Training().steps(3)
    late = built_inside(tmp_path)
    address = late.weight.data_ptr() + 4 * (WIDTH * WIDTH // 2)
    with fitted(late, tmp_path) as tide:
        late.steps(3, tide.step)
        before = tide.memory.native.update_counters()
        assert _value_at(address) == stock.weight.flatten()[WIDTH * WIDTH // 2].item()
        after = tide.memory.native.update_counters()
        assert after.asked == before.asked + 1
        assert after.waiting == before.waiting - 1
    assert_equal(stock, late)


def test_what_a_program_writes_comes_after_the_update(tmp_path: Path) -> None:
    def change(training: Training) -> None:
        with torch.no_grad():
            training.forward_and_back()
            training.optimizer.step()
            training.weight.mul_(2)
            training.moment().add_(0.5)
            for parameter in training.model.parameters():
                parameter.grad.mul_(3)
            training.optimizer.step()
            training.optimizer.zero_grad(set_to_none=False)
            training.model[1].weight.copy_(torch.ones(WIDTH, WIDTH))
            training.model[2].weight.data = torch.full((WIDTH, WIDTH), 0.25)

    def forward_and_back(training: Training) -> None:
        with torch.enable_grad():
            Training.forward_and_back(training)

    stock, late = Training().steps(2), built_inside(tmp_path)
    for training in (stock, late):
        training.forward_and_back = lambda training=training: forward_and_back(training)  # type: ignore[method-assign]
    change(stock)
    stock.steps(2)
    with fitted(late, tmp_path) as tide:
        late.steps(2, tide.step)
        with tide.step():
            change(late)
        late.steps(2, tide.step)
    assert_equal(stock, late)


@pytest.mark.parametrize("at", [0, -1], ids=["the first", "the last"])
def test_a_gradient_that_is_written_through_an_address_was_read_before(at: int, tmp_path: Path) -> None:
    """No operator announces the write: a fault runs the update that still has to read the gradient."""

    def step(training: Training) -> None:
        training.forward_and_back()
        training.optimizer.step()

    stock, late = Training().steps(2), built_inside(tmp_path)
    with lowtide.init(budget=BUDGET, spill=tmp_path):
        for parameter in late.model.parameters():
            parameter.grad = torch.zeros_like(parameter)
    address = late.model[at].weight.grad.data_ptr()
    with fitted(late, tmp_path) as tide:
        for _ in range(2):
            with tide.step():
                step(late)
                late.optimizer.zero_grad(set_to_none=False)
        with tide.step():
            step(late)
            written, late_calls = ctypes.c_float.from_address(address), waiting(tide)
            assert late_calls == LAYERS
            written.value = 1e6
            assert waiting(tide) == LAYERS - 1
            late.optimizer.zero_grad(set_to_none=False)
    step(stock)
    assert_equal(stock, late)


@contextmanager
def put_off(tide: Any) -> Iterator[None]:
    native = tide.memory.native
    native.put_off(1)
    try:
        with torch.no_grad():
            yield
    finally:
        native.put_off(0)


def _raw(tensor: Tensor) -> object:
    return tensor[:2].tolist()


@pytest.mark.parametrize("look", [_raw, Tensor.sum, Tensor.numpy], ids=["raw", "operator", "numpy"])
@pytest.mark.parametrize("lists", [False, True], ids=["tensors", "lists"])
def test_what_an_operator_that_is_put_off_makes_may_be_kept(
    look: Callable[[Tensor], object], lists: bool, tmp_path: Path
) -> None:
    """It has no bytes until somebody looks; what is made from it is made in passing where nobody keeps it."""

    def made(first: Tensor, second: Tensor) -> list[Tensor]:
        if lists:
            doubled = torch._foreach_mul([first, second], 2.0)
            return [*doubled, *torch._foreach_add(torch._foreach_sqrt(torch._foreach_abs(doubled)), 1.0)]
        doubled = first * 2
        return [doubled, doubled.abs().sqrt() + second]

    training = built_inside(tmp_path)
    with fitted(training, tmp_path) as tide:
        training.steps(1, tide.step)
        weights = [training.model[at].weight.detach() for at in range(2)]
        expected = [value.clone() for value in made(*weights)]
        before = waiting(tide)
        with put_off(tide):
            found = made(*weights)
        assert waiting(tide) > before
        for mine, theirs in zip(reversed(found), reversed(expected), strict=True):
            assert str(look(mine)) == str(look(theirs))
            assert torch.equal(mine, theirs)
        assert waiting(tide) == before


def test_an_in_place_change_of_a_saved_parameter_is_noticed_as_ever(tmp_path: Path) -> None:
    def run(training: Training) -> None:
        hidden = training.model[0](torch.randn(4, WIDTH)) ** 2
        loss = training.model[1](hidden).sum()
        loss.backward(retain_graph=True)
        training.optimizer.step()
        loss.backward()

    with pytest.raises(RuntimeError, match="modified by an inplace operation") as stock:
        run(Training())
    late = built_inside(tmp_path)
    with fitted(late, tmp_path) as tide:
        late.steps(1, tide.step)
        with pytest.raises(RuntimeError, match="modified by an inplace operation") as mine, tide.step():
            run(late)
    assert str(mine.value).split("is at version")[0] == str(stock.value).split("is at version")[0]


def test_by_faults_alone_the_bits_are_the_same(tmp_path: Path) -> None:
    stock = Training().steps(5)
    late = built_inside(tmp_path)
    with fitted(late, tmp_path) as tide:
        late.steps(2, tide.step)
        tide.memory.native.touch(0)  # nothing is announced any more
        late.steps(3, tide.step)
        assert tide.memory.native.update_counters().asked > 0
    assert_equal(stock, late)


def test_under_stress_the_bits_are_the_same(tmp_path: Path) -> None:
    stock = Training().steps(5)
    late = built_inside(tmp_path)
    with fitted(late, tmp_path, policy="auto") as tide:
        tide.memory.native.stress(2, 7)
        try:
            late.steps(5, tide.step)
        finally:
            tide.memory.native.stress(0, 0)
    assert_equal(stock, late)


def test_gradients_clipped_scaled_and_accumulated(tmp_path: Path) -> None:
    def run(training: Training, step: Callable[[], Any]) -> None:
        schedule = torch.optim.lr_scheduler.ExponentialLR(training.optimizer, gamma=0.5)
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
        for _ in range(4):
            with step():
                for part in range(2):
                    torch.manual_seed(part)
                    loss = training.model(torch.randn(16, WIDTH)).square().mean()
                    scaler.scale(loss).backward()
                scaler.unscale_(training.optimizer)
                torch.nn.utils.clip_grad_norm_(training.model.parameters(), 0.1)
                scaler.step(training.optimizer)
                scaler.update()
                training.optimizer.zero_grad()
                schedule.step()
                training.losses.append(loss.item())

    stock, late = Training(), built_inside(tmp_path)
    run(stock, nullcontext)
    with fitted(late, tmp_path) as tide:
        run(late, tide.step)
        assert tide.stats()["operators_put_off"] > 0
    assert_equal(stock, late)


# ---- the end, and what goes wrong ----


def test_a_model_that_is_gone_is_not_updated_any_more(tmp_path: Path) -> None:
    training = built_inside(tmp_path)
    other = torch.nn.Linear(4, 4)
    with lowtide.fit(other, None, budget=BUDGET, spill=tmp_path, policy="lru", put_off=True) as tide:
        training.steps(2, tide.step)
        assert waiting(tide) == LAYERS
        run = tide.memory.native.update_counters().run
        weight = weakref.ref(training.weight)
        del training
        gc.collect()
        assert weight() is None
        with tide.step():
            other(torch.ones(1, 4))
        assert waiting(tide) == 0
        assert tide.memory.native.update_counters().run == run


def test_an_exception_in_a_step_leaves_the_updates_to_come(tmp_path: Path) -> None:
    stock = Training().steps(3)
    late = built_inside(tmp_path)
    with fitted(late, tmp_path) as tide:
        late.steps(2, tide.step)
        with pytest.raises(ZeroDivisionError), tide.step():
            late.model[0](torch.ones(1, WIDTH))
            raise ZeroDivisionError
        late.steps(1, tide.step)
    assert_equal(stock, late)


class Breakable(Faulty):
    """A disk whose reads fail while it is `broken`."""

    broken = False

    def read_at(self, offset: int, into: memoryview) -> None:
        if self.broken:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        super().read_at(offset, into)


def test_an_update_whose_state_cannot_be_read_is_done_when_it_can(tmp_path: Path) -> None:
    stock = Training().steps(4)
    disk = Breakable(FileMedium([tmp_path]), script=())
    late = built_inside(tmp_path)
    with fitted(late, disk) as tide:
        late.steps(3, tide.step)
        disk.broken = True
        with pytest.raises(lowtide.SpillError), tide.step():
            late.forward_and_back()
        late.losses = late.losses[:3]
        late.optimizer.zero_grad()
        disk.broken = False
        late.steps(1, tide.step)
    assert_equal(stock, late)


def test_what_cannot_be_updated_at_the_end_is_said_and_is_no_number(tmp_path: Path) -> None:
    disk = Breakable(FileMedium([tmp_path]), script=())
    late = built_inside(tmp_path)
    with pytest.raises(lowtide.SpillError):
        with fitted(late, disk) as tide:
            late.steps(3, tide.step)
            disk.broken = True
    stock = Training().steps(3)
    whole = [torch.equal(mine, theirs) for mine, theirs in zip(late.values(), stock.values(), strict=True)]
    lost = [bool(value.isnan().any()) for value in late.values()]
    assert any(lost)
    assert [right or gone for right, gone in zip(whole, lost, strict=True)] == [True] * len(whole)


def test_a_fault_of_the_disk_at_any_read_is_raised_or_does_no_harm(tmp_path: Path) -> None:
    stock = Training().steps(3)
    for nth in range(1, 40, 6):
        late = built_inside(tmp_path)
        fault = Fault(direction=Direction.READ, nth=nth, kind=FaultKind.EIO)
        medium = Faulty(FileMedium([tmp_path]), script=(fault,))
        with fitted(late, medium) as tide:
            done = 0
            while done < 3:
                try:
                    with tide.step():
                        late.forward_and_back()
                        late.optimizer.step()
                        late.optimizer.zero_grad()
                    done += 1
                except lowtide.SpillError:
                    late.losses = late.losses[:done]
                    late.optimizer.zero_grad()
                    if waiting(tide) == 0:
                        break  # in the middle of an update that was not put off
        if done == 3:
            assert_equal(stock, late)
