"""What programs see of autograd is what they see without Lowtide, though everything leaves at every operator."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import forward_ad, graph
from torch.nn import functional
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack
from torch.utils.checkpoint import checkpoint

import lowtide
from lowtide.execute.tide.cpu import CpuTide
from tests.bitwise.record import bits

Program = Callable[[], object]
MIB = 2**20
WIDTH, ROWS, STEPS = 160, 192, 3  # activations and weights of 100 KB and more, which may leave


def rows() -> Tensor:
    return torch.randn(ROWS, WIDTH)


def leaf() -> Tensor:
    return rows().requires_grad_()


def layers(count: int = 3) -> nn.Sequential:
    return nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU()) for _ in range(count)))


def gradients(model: nn.Module) -> list[Tensor | None]:
    return [parameter.grad for parameter in model.parameters()]


def message(body: Callable[[], object]) -> str:
    """Return what a body raises."""
    try:
        body()
    except Exception as error:  # noqa: BLE001
        return f"{type(error).__name__}: {error}"
    return "nothing"


ways_out: list[Callable[[], object]] = []


def leave() -> None:
    """Have everything away that may leave, under Lowtide."""
    for way_out in ways_out:
        way_out()


def backward(loss: Tensor, *, retain_graph: bool = False) -> None:
    leave()
    loss.backward(retain_graph=retain_graph)


# ---- programs ----


def saved_tensors_are_the_programs_own() -> object:
    x = leaf()
    y = x.exp()
    z = y * x
    saved = z.grad_fn._saved_self  # type: ignore[union-attr]
    same = [
        y.grad_fn._saved_result is y,  # type: ignore[union-attr]
        saved is y,
        z.grad_fn._saved_other is x,  # type: ignore[union-attr]
        saved.data_ptr() == y.data_ptr(),
        saved.untyped_storage()._cdata == y.untyped_storage()._cdata,
        saved._version == y._version,
    ]
    backward(z.sum())
    return same, x.grad, message(lambda: z.grad_fn._saved_self)  # type: ignore[union-attr]


def hooks_on_saved_tensors() -> object:
    x, seen = leaf(), []
    y = x.sin() * x.cos()
    y.grad_fn._raw_saved_self.register_hooks(  # type: ignore[union-attr]
        lambda tensor: seen.append(float(tensor.sum())) or tensor * 2, lambda tensor: tensor / 2
    )
    again = message(lambda: y.grad_fn._raw_saved_self.register_hooks(lambda one: one, lambda one: one))  # type: ignore[union-attr]
    backward(y.sum())
    return seen, x.grad, again


def hooks_around_a_pass() -> object:
    model, x, packed = layers(), leaf(), []

    def pack(tensor: Tensor) -> Tensor:
        packed.append(tuple(tensor.shape))
        return tensor.detach().clone()

    with graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = model(x).square().mean()
    backward(loss)
    with graph.save_on_cpu():
        again = model(x).sin().sum()
    backward(again)
    return packed, x.grad, gradients(model)


def hooks_are_forbidden() -> object:
    model, x = layers(), leaf()
    with graph.disable_saved_tensors_hooks("none here"):
        backward(model(x).square().mean())
        refused = message(lambda: graph.saved_tensors_hooks(lambda one: one, lambda one: one).__enter__())
    return refused, x.grad, gradients(model)


def hooks_on_gradients() -> object:
    model, x, seen = layers(), leaf(), []
    first = next(model.parameters())
    first.register_hook(lambda grad: grad * 3)
    first.register_post_accumulate_grad_hook(lambda parameter: seen.append(float(parameter.grad.sum())))
    y = model(x)
    y.retain_grad()
    y.register_hook(lambda grad: seen.append(float(grad.abs().sum())))
    y.grad_fn.register_prehook(lambda grads: seen.append(len(grads)))
    together = graph.register_multi_grad_hook(list(model.parameters()), lambda grads: seen.append(len(grads)))
    backward(y.square().mean())
    together.remove()  # it holds the parameters, which hold it, and Python does not see that circle
    return seen, x.grad, y.grad, gradients(model)


def threads_with_models_of_their_own() -> object:
    models = [layers() for _ in range(3)]
    inputs = [leaf() for _ in models]

    def train(model: nn.Module, x: Tensor) -> None:
        for _ in range(2):
            backward(model(x).square().mean())

    threads = [threading.Thread(target=train, args=pair) for pair in zip(models, inputs, strict=True)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [x.grad for x in inputs], [gradients(model) for model in models]


def replicas_of_one_model() -> object:
    """As DataParallel does: replicas forward on threads of their own, one backward for all of them."""
    model, found = layers(), {}
    halves = leaf(), leaf()

    def forward(at: int) -> None:
        found[at] = torch.func.functional_call(model, dict(model.named_parameters()), (halves[at],))

    threads = [threading.Thread(target=forward, args=(at,)) for at in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    backward(torch.cat([found[0], found[1]]).square().mean())
    return gradients(model), [half.grad for half in halves]


def transforms_of_functions() -> object:
    model, x = layers(), rows()
    weights = {name: value.detach() for name, value in model.named_parameters()}

    def loss(weights: dict[str, Tensor], x: Tensor) -> Tensor:
        return torch.func.functional_call(model, weights, (x,)).square().mean()

    leave()
    grads = torch.func.grad(loss)(weights, x)
    leave()
    each = torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0))(weights, x.view(2, -1, WIDTH))
    value, tangent = torch.func.jvp(lambda one: model(one).sin(), (x,), (x * 2,))
    _, pull = torch.func.vjp(lambda one: model(one).cos(), x)
    return list(grads.values()), list(each.values()), value, tangent, pull(x)


def forward_mode() -> object:
    model, x = layers(), rows()
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(x, x.sin())
        leave()
        primal, tangent = forward_ad.unpack_dual(model(dual).square())
        return primal.detach(), tangent.detach()


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(3):
            x = torch.sigmoid(self.linear(x)) * x
        return x


SCRIPTED: list[nn.Module] = []


def torchscript() -> object:
    if not SCRIPTED:
        with torch.random.fork_rng():
            SCRIPTED.append(nn.Sequential(*(torch.jit.script(Layer()) for _ in range(3))))
            for _ in range(4):  # it compiles by what it sees: from here on every run is the same
                backward(SCRIPTED[0](leaf()).square().mean())
    model = SCRIPTED[0]
    model.zero_grad()
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.1)
    x = leaf()
    backward(model(x).square().mean())
    return x.grad, gradients(model)


def compiled_region() -> object:
    model, x = layers(), leaf()
    middle = torch.compile(lambda y: (y.sin() * model[1](y)).relu(), backend="aot_eager")
    try:
        backward(model[2](middle(model[0](x))).square().mean())
        return x.grad, gradients(model)
    finally:
        torch._dynamo.reset()  # what it keeps of the region holds the model, which later budgets would count


class Bag(nn.Module):
    """An embedding with sparse gradients inside a checkpoint, and the same weight used as a matrix outside."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(ROWS, WIDTH, sparse=True)

    def looked_up(self, scale: Tensor, ids: Tensor) -> Tensor:
        return self.table(ids) * scale

    def forward(self, x: Tensor, ids: Tensor) -> Tensor:
        inside = checkpoint(self.looked_up, x, ids, use_reentrant=True)
        return inside.square().sum() + (x @ self.table.weight.T).sin().sum()  # type: ignore[no-any-return]


def dense_and_sparse_gradients() -> object:
    """Dense from outside of a reentrant checkpoint, sparse from inside of it, in either order of arrival."""
    bag, x = Bag(), leaf()
    ids = torch.randint(ROWS, (ROWS,))
    backward(bag(x, ids))
    first = bag.table.weight.grad.is_sparse, bag.table.weight.grad.to_dense()
    backward(bag.looked_up(x, ids).sum())
    bag.zero_grad()
    backward(bag.looked_up(x, ids).sum())
    backward(bag(x, ids))
    return first, bag.table.weight.grad.is_sparse, bag.table.weight.grad.to_dense(), x.grad


def double_backward() -> object:
    model, x = layers(), leaf()
    (grad,) = torch.autograd.grad(model(x).square().mean(), x, create_graph=True)
    leave()
    backward(grad.square().sum() + model(x).sum())
    return x.grad, gradients(model)


def a_graph_that_is_kept() -> object:
    model, x = layers(), leaf()
    loss = model(x).square().mean()
    backward(loss, retain_graph=True)
    backward(loss)
    return x.grad, gradients(model), message(loss.backward)


def changes_in_place() -> object:
    x = leaf()
    y = x.sigmoid()
    leave()
    with torch.no_grad():
        y.mul_(2)
    return message(lambda: backward(y.sum())).partition("Hint")[0]


def changes_of_views() -> object:
    x = leaf()
    base = x * 1
    base[: ROWS // 2].mul_(base[ROWS // 2 :].clone())
    view = base.view(2, -1)
    leave()
    view[1].add_(view[0].detach().sin())
    backward(base.sum())
    return x.grad, base._version, view._version


class Twice(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, other: Tensor) -> tuple[Tensor, Tensor]:
        kept, index = x * other, x.argmax(1)
        ctx.save_for_backward(x, other, kept)
        ctx.mark_non_differentiable(index)
        return kept, index

    @staticmethod
    def backward(ctx: Any, grad: Tensor, _index: Tensor) -> tuple[Tensor, Tensor | None]:
        x, other, kept = ctx.saved_tensors
        return grad * other + kept, grad * x if ctx.needs_input_grad[1] else None


def functions_of_ones_own() -> object:
    x, other = leaf(), leaf()
    kept, index = Twice.apply(x, other)
    backward((kept.sin() * Twice.apply(kept, other.detach())[0]).sum())
    return x.grad, other.grad, index


def checkpoints() -> object:
    model, x = layers(), leaf()
    y = checkpoint(model[0], x, use_reentrant=False)
    y = checkpoint(lambda z: functional.dropout(model[1](z), 0.3), y, use_reentrant=True)
    backward(model[2](y).square().mean())
    return x.grad, gradients(model)


def anomalies_are_named() -> object:
    x = leaf()
    with torch.autograd.set_detect_anomaly(True, check_nan=True):
        y = (x - x).sqrt()
        return message(lambda: backward((y * 0).sum()))


def no_mode_is_on() -> object:
    """PyTorch takes other formulas where a dispatch mode is on."""
    x, stacks = leaf(), []
    y = x.prod(1).sin()
    y.register_hook(lambda _grad: stacks.append(len(_get_current_dispatch_mode_stack())))
    stacks.append(len(_get_current_dispatch_mode_stack()))
    backward(y.sum())
    return stacks, torch._C._is_torch_function_mode_enabled(), x.grad


PROGRAMS = [
    saved_tensors_are_the_programs_own,
    hooks_on_saved_tensors,
    hooks_around_a_pass,
    hooks_are_forbidden,
    hooks_on_gradients,
    threads_with_models_of_their_own,
    replicas_of_one_model,
    transforms_of_functions,
    forward_mode,
    torchscript,
    compiled_region,
    dense_and_sparse_gradients,
    double_backward,
    a_graph_that_is_kept,
    changes_in_place,
    changes_of_views,
    functions_of_ones_own,
    checkpoints,
    anomalies_are_named,
    no_mode_is_on,
]


# ---- what they find ----


def frozen(value: object) -> object:
    """Return a value with its tensors as bits."""
    if isinstance(value, Tensor):
        return bits(value)
    if isinstance(value, list | tuple):
        return [frozen(one) for one in value]
    return value


def found(program: Program, step: Callable[[], AbstractContextManager[object]] = nullcontext) -> list[object]:
    results = []
    for number in range(STEPS):
        torch.manual_seed(number)
        with step():
            results.append(frozen(program()))
    return results


@pytest.fixture(autouse=True, scope="module")
def leave_nothing_alive() -> Iterator[None]:
    """Let go of what the programs keep from run to run: later budgets would count it."""
    yield
    SCRIPTED.clear()
    torch._dynamo.reset()


@pytest.fixture(params=["announced", "by faults alone"])
def tide(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[CpuTide]:
    """A tide under which all that may leave does, again and again, and comes back as announced or by faults."""
    with lowtide.fit(budget="256MiB", spill=tmp_path, policy="lru", recompute=True) as tide:
        assert isinstance(tide, CpuTide)
        tide.memory.native.announce(int(request.param == "announced"))
        try:
            yield tide
        finally:
            tide.memory.native.announce(1)  # for the tides that follow


@pytest.mark.filterwarnings("ignore:Anomaly Detection", "ignore:Error detected in")
@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.__name__)
def test_a_program_finds_what_it_finds_without_lowtide(program: Program, tide: CpuTide) -> None:
    native = tide.memory.native
    expected = found(program)

    def all_leave() -> None:
        native.leave_all()
        native.settle()

    native.stress(1, 5)
    ways_out.append(all_leave)
    try:
        assert found(program, tide.step) == expected
    finally:
        native.stress(0, 0)
        ways_out.clear()
    assert native.range_counters().read > 0, "nothing came back: this shows nothing"
