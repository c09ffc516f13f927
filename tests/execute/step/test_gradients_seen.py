"""Gradients that are away, and who might notice: other threads, exchanged data, interruptions, too little room."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lowtide
from lowtide.autograd import gradients as gradients_module
from lowtide.capture.fake import capture_fake
from lowtide.capture.training import Training as Captured
from lowtide.tiers import FileMedium, Latency
from tests.execute.step.test_gradients import (
    _STOCK_GRAD,
    HeavyHead,
    Step,
    Tied,
    _nothing_is_left_behind,  # noqa: F401  # a fixture for every test here too
    after_gradient,
    heavy,
    moved_gradient_bytes,
    swapping,
)
from tests.execute.training import NO_PRESSURE_BYTES, Training, digest


def at_once(works: Iterable[Callable[[], object]]) -> None:
    """Do each on a thread of its own, all at the same time."""
    threads = [threading.Thread(target=work) for work in works]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def steps_by(backward: Callable[[Training], None], training: Training, step: Step) -> dict[str, object]:
    """Train four steps whose forward and backward is this; return everything that must be equal."""
    for _ in range(4):
        with step():
            backward(training)
            training.gradients.append("".join(digest(p.grad) for p in training.model.parameters()))
            training.optimizer.step()
            training.optimizer.zero_grad()
        training.done += 1
    return training.result()


@pytest.mark.parametrize("readers", [1, 3])
def test_threads_that_read_a_gradient_while_backward_runs_see_all_of_it_or_nothing(
    readers: int, tmp_path: Path
) -> None:
    """Each waits for the same slow disk: the gradient is put back once."""
    expected = heavy().steps(4).result()
    training = heavy()
    weight = training.model.head[2].weight
    seen: set[str] = set()

    def read(_parameter: Tensor) -> None:
        at_once(lambda: seen.add(digest(weight.grad)) for _ in range(readers))

    after_gradient(training.model.body[0].weight, read)
    with swapping(training, Latency(FileMedium([tmp_path]), read_s=0.01)) as tide:  # type: ignore[arg-type]
        training.steps(4, tide.step)
        assert moved_gradient_bytes(tide) > 0
    assert training.result() == expected
    assert len(seen) == 4


def test_two_runs_of_backward_at_once_add_up(tmp_path: Path) -> None:
    """Weights that two threads share: what each adds is the same whoever comes first."""
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(64, 256), nn.Linear(256, 256), nn.Linear(256, 8))
    x = torch.randn(32, 64)

    def run(step: Step) -> list[str]:
        model.zero_grad()
        with step():
            losses = [model(x).square().sum() for _ in range(2)]
            at_once(loss.backward for loss in losses)
        return [digest(parameter.grad) for parameter in model.parameters()]

    expected = run(nullcontext)
    with lowtide.fit(model, budget=NO_PRESSURE_BYTES, spill=tmp_path, policy="swap_all") as tide:
        assert [run(tide.step) for _ in range(8)] == [expected] * 8
        unmanaged: Any = tide.stats()["unmanaged"]
        assert unmanaged["gradients of backward on several threads at once"] == 1


class Meets(torch.autograd.Function):
    """Passes a gradient on once both runs of backward have come as far as they are to."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, here: threading.Event, there: threading.Event) -> Tensor:
        ctx.events = here, there
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        here, there = ctx.events
        here.set()
        there.wait(10)
        return gradient, None, None


def test_a_run_of_backward_that_begins_while_a_gradient_is_away_finds_it(tmp_path: Path) -> None:
    """The first has taken it and ends while the second adds to it: who finds none there would put his own in place."""
    shared, small = nn.Parameter(torch.ones(4 << 20)), nn.Parameter(torch.ones(4))

    def run(step: Step) -> list[float]:
        shared.grad = small.grad = None
        with step():
            taken, begun = threading.Event(), threading.Event()
            # The shared one's gradient comes first; then this thread waits until the other run is under way.
            first = Meets.apply(small, taken, begun).sum() + (shared * 2).sum()
            second = Meets.apply(shared, begun, taken).sum()
            at_once((first.backward, second.backward))
        assert shared.grad is not None
        return shared.grad.unique().tolist()

    assert run(nullcontext) == [3.0]
    with lowtide.fit([nn.ParameterList([shared, small])], budget="256MiB", spill=tmp_path, policy="swap_all") as tide:
        assert [run(tide.step) for _ in range(4)] == [[3.0]] * 4
        unmanaged: Any = tide.stats()["unmanaged"]
        assert unmanaged["gradients of backward on several threads at once"] == 1


def test_a_budget_that_is_refused_leaves_nothing_on_the_parameters(tmp_path: Path) -> None:
    model = nn.Linear(1024, 1024)
    engine = torch.autograd._engine_run_backward
    with pytest.raises(lowtide.BudgetTooSmall):
        lowtide.fit(model, budget=1 << 16, spill=tmp_path)
    assert not model.weight._post_accumulate_grad_hooks
    assert torch.autograd._engine_run_backward is engine


def test_each_step_may_run_backward_on_a_thread_of_its_own(tmp_path: Path) -> None:
    def backward(training: Training) -> None:
        at_once([training.loss().backward])

    training = heavy()
    with swapping(training, tmp_path) as tide:
        got = steps_by(backward, training, tide.step)
        assert moved_gradient_bytes(tide) > 0
        assert tide.stats()["unmanaged"] == {}
    assert got == steps_by(backward, heavy(), nullcontext)


def exchange_empty(weight: nn.Parameter) -> Callable[[Tensor], None]:
    def hook(_parameter: Tensor) -> None:
        weight.data = torch.empty(0)

    return hook


def exchange_dtype(weight: nn.Parameter) -> Callable[[Tensor], None]:
    def hook(_parameter: Tensor) -> None:
        weight.data = weight.data.double()

    return hook


@pytest.mark.parametrize("exchange", [exchange_empty, exchange_dtype])
def test_a_parameter_whose_data_was_exchanged_still_gets_its_gradient(
    exchange: Callable[[nn.Parameter], Callable[[Tensor], None]], tmp_path: Path
) -> None:
    def run(training: Training, step: Step) -> list[str]:
        training.steps(2, step)
        weight = training.model.head[2].weight
        before = weight.data
        after_gradient(training.model.body[2].weight, exchange(weight))
        with step():
            training.loss().backward()
        weight.data = before
        return [digest(parameter.grad) for parameter in training.model.parameters()]

    training = heavy()
    with swapping(training, tmp_path) as tide:
        assert run(training, tide.step) == run(heavy(), nullcontext)
        assert moved_gradient_bytes(tide) > 0


def test_where_gradients_do_not_fit_the_model_stays_usable(tmp_path: Path) -> None:
    """Everything but the end of backward fits: all gradients at once do not."""
    make = partial(Training, partial(_wide, 8), shape=(4, 64))
    training = make()
    static = sum(p.numel() * 4 for p in training.model.parameters())
    with pytest.raises(lowtide.BudgetTooSmall):
        with lowtide.fit(training.model, budget=int(1.6 * static), spill=tmp_path) as tide:
            with tide.step():
                training.loss().backward()
    assert nn.Parameter.grad is _STOCK_GRAD
    training.optimizer.zero_grad()
    assert training.steps(2).result() == make().steps(2).result()


def _wide(layers: int) -> nn.Module:
    return nn.Sequential(nn.Linear(64, 512), *(nn.Linear(512, 512) for _ in range(layers)), nn.Linear(512, 10))


def lines_of(function: Callable[..., Any]) -> list[int]:
    code = function.__code__
    return sorted({line for _, _, line in code.co_lines() if line is not None and line > code.co_firstlineno})


_WHERE = [
    (function.__qualname__, line - function.__code__.co_firstlineno)
    for function in (gradients_module.Gradients._accumulated, gradients_module.Gradients.give_back_one)
    for line in lines_of(function)
]


@pytest.mark.parametrize(("name", "offset"), _WHERE)
def test_an_interruption_anywhere_leaves_the_gradients_that_stock_leaves(
    name: str, offset: int, tmp_path: Path
) -> None:
    """Ctrl-C before any line that takes or gives back: afterwards every gradient there is has its whole value."""
    stock = heavy().steps(2)
    stock.loss().backward()
    expected = [digest(parameter.grad) for parameter in stock.model.parameters()]
    training = heavy()
    fired = []

    def trace(frame: Any, event: str, _argument: object) -> Any:
        if frame.f_code.co_qualname != name:
            return None
        if event == "line" and frame.f_lineno - frame.f_code.co_firstlineno == offset and not fired:
            fired.append(offset)
            raise KeyboardInterrupt
        return trace

    with swapping(training, tmp_path) as tide:
        training.steps(2, tide.step)
        try:
            with tide.step():
                sys.settrace(trace)
                try:
                    training.loss().backward()
                finally:
                    sys.settrace(None)
        except KeyboardInterrupt:
            pass
        got = [digest(parameter.grad) for parameter in training.model.parameters()]
    assert all(mine in (theirs, "none") for mine, theirs in zip(got, expected, strict=True))
    if fired and name.endswith("_accumulated"):
        finished = [mine for mine in got if mine != "none"]
        assert finished, "the one that was being taken is there"


def test_a_graph_on_a_gradient_survives_a_backward_around_it(tmp_path: Path) -> None:
    class Around(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor, model: nn.Module) -> Tensor:
            ctx.model = model
            return x.clone()

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
            with torch.enable_grad():
                x = torch.ones(4, 256, requires_grad=True)
                torch.tanh(ctx.model.shared(x)).sum().backward(create_graph=True)
                x.grad = None  # which has a graph that has x
            return grad, None

    def run(step: Step) -> tuple[bool, str]:
        torch.manual_seed(1)
        model = Tied()
        with step():
            hidden = Around.apply(torch.tanh(model.first(torch.ones(4, 64))), model)
            model.last(model.shared(hidden)).sum().backward()
        gradient = model.shared.weight.grad
        assert gradient is not None
        found = gradient.requires_grad, digest(gradient)
        model.zero_grad()
        return found

    with lowtide.fit(budget=NO_PRESSURE_BYTES, spill=tmp_path, policy="swap_all") as tide:
        assert run(tide.step) == run(nullcontext)


def test_gradients_of_weights_that_autograd_saves_only_as_casts_leave_too(tmp_path: Path) -> None:
    def backward(training: Training) -> None:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = training.loss()
        loss.backward()

    training = heavy()
    with swapping(training, tmp_path) as tide:
        got = steps_by(backward, training, tide.step)
        assert moved_gradient_bytes(tide) > 0
    assert got == steps_by(backward, heavy(), nullcontext)


def test_parameters_can_still_be_swapped_whole(tmp_path: Path) -> None:
    """PyTorch refuses `swap_tensors` for a tensor that somebody has a weak reference to."""
    training = heavy()
    with swapping(training, tmp_path) as tide:
        training.steps(2, tide.step)
        torch.__future__.set_swap_module_params_on_conversion(True)
        try:
            training.model.double()
        finally:
            torch.__future__.set_swap_module_params_on_conversion(False)


def test_a_closed_tide_follows_no_parameter(tmp_path: Path) -> None:
    training = heavy()
    tide = swapping(training, tmp_path)
    with tide.step():
        training.loss()
        tide.close()
        training.loss()
    assert not any(parameter._post_accumulate_grad_hooks for parameter in training.model.parameters())


def test_a_capture_that_fails_leaves_parameters_as_they_were() -> None:
    class Looks(torch.autograd.Function):
        @staticmethod
        def forward(_ctx: Any, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(_ctx: Any, grad: Tensor) -> Tensor:
            return grad * grad.sum().item()

    def make() -> Captured:
        model = HeavyHead()

        def step() -> None:
            model.last(model.head(Looks.apply(model.body(torch.zeros(4, 3, 32, 32))))).sum().backward()

        return Captured(step=step, model=model)

    with pytest.raises(lowtide.BadArgument, match="values"):
        capture_fake(make, least_bytes=4096)
