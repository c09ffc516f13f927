"""Shows every operator of a step on fake tensors to the ledger, with its operands, results and work.

Note [Accumulation]: where gradients meet, the engine adds in place if it alone holds the first of them, except under a
dispatch mode, where it never does. So such additions are made in place here.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.hooks import RemovableHandle

from lowtide.capture.builder import Scope
from lowtide.capture.flops import flops_of
from lowtide.capture.ledger import Ledger
from lowtide.capture.schema import given, is_operator, looks_at_shapes, tensors_in, written_arguments
from lowtide.core.log import Event
from lowtide.estimate.predict import moved_bytes


class Watch(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch leaves it untyped
    """Stands below autograd and above the fake tensors. `flops` and `moved_bytes` are those of each operator."""

    def __init__(self, ledger: Ledger) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.flops: list[float] = []
        self.moved_bytes: list[int] = []
        self._ledger = ledger
        self._in_backward = False
        self._path: list[str] = []
        self._alone: tuple[int, int] | None = None
        self._measure_alone()

    def __torch_dispatch__(
        self, func: Any, types: Iterable[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run an operator and log what it touches."""
        del types
        kwargs = kwargs or {}
        if self._ledger.paused or not hasattr(func, "_schema"):
            return func(*args, **kwargs)
        name = func._schema.name
        if name == "aten::add" and self._accumulates(args, kwargs):
            func, name = torch.ops.aten.add_.Tensor, "aten::add_"
        if self._ledger.recording and is_operator(name) and not name.startswith("profiler::"):
            return self._operator(name, func, args, kwargs)
        out = func(*args, **kwargs)
        for tensor in tensors_in(out):
            self._ledger.made(tensor)
        return out

    def _operator(self, name: str, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        ledger = self._ledger
        self.follow_backward()
        number = ledger.name(name)
        ledger.log(Event.OP_BEGIN, number, Scope.FUNCTION)
        operands = list(tensors_in((args, kwargs)))
        untouched = ledger.follows_touches and looks_at_shapes(name)
        ledger.begin_operands({ledger.read(tensor) for tensor in (() if untouched else operands)})
        read = [tensor.nbytes for tensor in operands]
        del operands
        out = func(*args, **kwargs)
        changed, results = given(written_arguments(func._schema), args, kwargs), list(tensors_in(out))
        for tensor in changed:
            ledger.write(tensor, tensor._version + 1)  # autograd counts the change only after this mode has returned
        for tensor in results:
            if not any(tensor is other for other in changed):
                ledger.write(tensor, tensor._version)
        ledger.log(Event.OP_END, number, Scope.FUNCTION)
        self.flops.append(flops_of(func, args, kwargs, out))
        written = [tensor.nbytes for tensor in changed or results]
        self.moved_bytes.append(moved_bytes(name, read=read, written=written))
        return out

    def _accumulates(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Tell whether an addition is the engine's, which stock does in place; see Note [Accumulation]."""
        if torch._C._current_graph_task_id() == -1 or torch.is_grad_enabled() or kwargs or len(args) != 2:
            return False
        if not isinstance(args[1], torch.Tensor) or args[0].shape != args[1].shape or args[0].dtype != args[1].dtype:
            return False
        holders = _holders(args)
        if self._alone is None:
            self._alone = holders
        return holders is not None and holders == self._alone

    def _measure_alone(self) -> None:
        """Find out what `_holders` says of a gradient that only autograd's engine holds: nothing promises it."""
        with torch.enable_grad(), self:
            x = torch.ones(2, requires_grad=True)
            torch.autograd.backward((x * 2 + x * 3).sum())

    def follow_backward(self) -> None:
        """Log where the backward pass begins and ends."""
        inside = torch._C._current_graph_task_id() != -1
        if inside != self._in_backward:
            self._in_backward = inside
            event = Event.OP_BEGIN if inside else Event.OP_END
            self._ledger.log(event, self._ledger.name("backward"), Scope.BACKWARD)

    @contextmanager
    def scopes(self, model: torch.nn.Module | None) -> Iterator[None]:
        """Log which module runs, and when an optimizer does."""

        def enter(optimizer: torch.optim.Optimizer, *_: object) -> None:
            self.follow_backward()
            self._mark(Event.OP_BEGIN, optimizer)

        def leave(optimizer: torch.optim.Optimizer, *_: object) -> None:
            self._mark(Event.OP_END, optimizer)

        handles = [register_optimizer_step_pre_hook(enter), register_optimizer_step_post_hook(leave)]
        if model is not None:
            for name, module in model.named_modules():
                handles += self._name_module(module, name or type(model).__name__)
        with ExitStack() as stack:
            for handle in handles:
                stack.callback(handle.remove)
            yield

    def _mark(self, event: Event, optimizer: torch.optim.Optimizer) -> None:
        name = f"Optimizer.step#{type(optimizer).__name__}.step"
        self._ledger.log(event, self._ledger.name(name), Scope.USER)

    def _name_module(self, module: torch.nn.Module, name: str) -> list[RemovableHandle]:
        def enter(_module: torch.nn.Module, _args: object) -> None:
            self._path.append(name)
            self._ledger.log(Event.MODULE, self._ledger.name(name))

        def leave(_module: torch.nn.Module, _args: object, _output: object) -> None:
            self._path.pop()
            self._ledger.log(Event.MODULE, self._ledger.name(self._path[-1] if self._path else ""))

        return [module.register_forward_pre_hook(enter), module.register_forward_hook(leave)]


def _holders(args: tuple[Any, ...]) -> tuple[int, int] | None:
    """Return how many hold the first argument and its storage (None: this version of torch does not tell)."""
    count = getattr(torch._C, "_storage_Use_Count", None)
    if count is None:
        return None
    return args[0]._use_count() if hasattr(args[0], "_use_count") else 0, count(args[0].untyped_storage()._cdata)
