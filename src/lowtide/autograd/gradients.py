"""Gradients that leave while backward still runs, and are back when it returns.

A parameter's gradient is finished long before the optimizer reads it: a large linear layer's, which comes first in
backward, lies in memory while the layers below need theirs. Here it is saved like a tensor that autograd keeps for
later, with a key and events of its own, and asked back when backward ends; so plans, policies and traces treat it as
any other saved storage.

Note [Nobody sees it gone]: a gradient that was taken is not in `.grad`. Python code that looks there meanwhile (a hook
of the program, an optimizer that steps inside backward, whoever catches an error of backward) gets it back first, by a
property that stands on `torch.nn.Parameter` only while something is taken. C++ code would find no gradient; what reads
gradients from C++ during backward is `torch.distributed`'s reducer, so nothing is taken where that may run. A gradient
that somebody holds already (a view of a flat buffer, one kept from an earlier step) is not taken either.

Note [Taking]: a gradient is taken by a hook of its parameter, which runs while AccumulateGrad holds its mutex: nobody
adds to it at that moment. It is noted as taken and watched before `.grad` is emptied, so an interruption anywhere in
between finds it twice and not nowhere; and it is held until `.grad` is empty, because what `.grad` points to while it
is being emptied must not be half freed for another thread that looks. Before backward runs on a second thread at the
same time, everything is given back, and nothing is taken from then on: see `backwards`.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Iterable, Sequence
from functools import cache, partial
from typing import Any, Generic, Protocol, TypeVar

import torch
from torch.utils.hooks import RemovableHandle

from lowtide.autograd.backwards import lock, runs_alone, tell, tell_no_more

_GRAD: Any = torch.nn.Parameter.grad  # as PyTorch has it, below the property

H = TypeVar("H")


class Saves(Protocol[H]):
    """What keeps tensors and gives them back: the runtime, or the ledger of a step that is not executed."""

    def takes(self, tensor: torch.Tensor) -> bool:
        """Tell whether a tensor is of a kind and size to be saved, and nobody else holds its memory."""

    def save(self, tensor: torch.Tensor) -> H:
        """Save a tensor, as one event of the step."""

    def unpack(self, handle: H) -> torch.Tensor:
        """Give a saved tensor back, as one event of the step."""

    def hasten(self, handles: Sequence[H]) -> None:
        """Start to bring back what is away, as far as there is room, unless a plan does."""

    def refused(self, what: str) -> None:
        """Take note of what is not managed (R6)."""

    def put(self, parameter: torch.Tensor, gradient: torch.Tensor) -> None:
        """Make a tensor the gradient of a parameter, whatever became of the parameter's own data."""


class Gradients(Generic[H]):
    """Takes the gradients of the parameters it knows, from their accumulation to the end of backward.

    Those of fewer than `least_bytes` never. `fake`: they are tensors without data, which nobody looks at.
    """

    def __init__(self, saves: Saves[H], *, least_bytes: int, fake: bool = False) -> None:
        self._saves = saves
        self._least_bytes = least_bytes
        self._fake = fake
        self._hook = self._accumulated  # one object, by which it is found again
        reference = weakref.ref(self)
        self._before_second = lambda: _stop_if_alive(reference)
        self._hooks: list[RemovableHandle] = []
        self._most_hooks = 1024
        self._taken: dict[int, tuple[torch.nn.Parameter, H]] = {}
        self._runs: dict[int, list[torch.nn.Parameter]] = {}
        self._stopped = False
        tell(self._before_second)

    def know(self, parameters: Iterable[torch.Tensor]) -> None:
        """Follow the gradients of parameters, or of those that these tensors are views of."""
        for tensor in parameters:
            parameter = tensor if tensor._base is None else tensor._base
            if self._may_leave(parameter) and not self._knows(parameter):
                self._hooks.append(parameter.register_post_accumulate_grad_hook(self._hook))  # type: ignore[no-untyped-call]  # torch's
        if len(self._hooks) > self._most_hooks:
            self._hooks = [hook for hook in self._hooks if hook.hooks_dict_ref() is not None]
            self._most_hooks = 2 * len(self._hooks) + 1024

    def give_back(self) -> None:
        """Put every gradient back where it belongs."""
        self._runs.clear()
        self._give_back([parameter for parameter, _ in list(self._taken.values())])

    def give_back_one(self, parameter: torch.Tensor) -> None:
        """Put a parameter's gradient back if it was taken. It stays taken if that fails."""
        with lock:
            taken = self._taken.get(id(parameter))
            if taken is None:
                return
            gradient = self._saves.unpack(taken[1])
            later = _GRAD.__get__(parameter)
            if later is not None and not _is_same_memory(later, gradient):
                gradient = _sum(gradient, later)
            self._saves.put(parameter, gradient)
            self.forget_one(parameter)

    def forget_one(self, parameter: torch.Tensor) -> None:
        """Let go of a taken gradient: it is back, or the program has put another in its place."""
        with lock:
            self._taken.pop(id(parameter), None)
            if not self._taken:
                _unwatch(self)

    def close(self) -> list[Exception]:
        """Give everything back and follow nobody any more; return why some could not be: those gradients are lost."""
        self._stopped = True
        tell_no_more(self._before_second)
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        self._runs.clear()
        lost: list[Exception] = []
        for parameter, _ in list(self._taken.values()):
            try:
                self.give_back_one(parameter)
            except Exception as error:  # noqa: BLE001  # the others are to come back in any case
                lost.append(error)
            finally:
                self.forget_one(parameter)
        return lost

    @property
    def any_taken(self) -> bool:
        """Whether a gradient is not where it belongs."""
        return bool(self._taken)

    def _may_leave(self, parameter: torch.Tensor) -> bool:
        if self._stopped or torch.compiler.is_compiling() or not parameter.requires_grad or not parameter.is_leaf:
            return False
        plain = isinstance(parameter, torch.nn.Parameter) if self._fake else type(parameter) is torch.nn.Parameter
        return plain and parameter.numel() * parameter.itemsize >= self._least_bytes

    def _knows(self, parameter: torch.Tensor) -> bool:
        hooks = parameter._post_accumulate_grad_hooks
        return bool(hooks) and any(hook is self._hook for hook in hooks.values())

    def _accumulated(self, parameter: torch.Tensor) -> None:
        """Take a gradient that is finished; see Note [Taking]."""
        with lock:
            self.give_back_one(parameter)  # of an earlier backward, or of one around this
            if not self._stopped and not runs_alone():  # a run that C++ has begun, or a thread that helps out
                self._stop()
            run = torch._C._current_graph_task_id()
            if run < 0 or self._stopped or _reducers_may_run() or not self._is_ours_alone(parameter):
                return
            if run not in self._runs:
                self._runs[run] = []
                torch.autograd.Variable._execution_engine.queue_callback(partial(self._ended, run))
            assert isinstance(parameter, torch.nn.Parameter)
            self._runs[run].append(parameter)
            gradient = _GRAD.__get__(parameter)
            self._taken[id(parameter)] = (parameter, self._saves.save(gradient))
            _watch(self)
            _GRAD.__set__(parameter, None)
            del gradient

    def _stop(self) -> None:
        """Take nothing any more, for good, and have everything back: backward runs on several threads at once."""
        with lock:
            if not self._stopped:
                self._stopped = True
                self._saves.refused("gradients of backward on several threads at once")
            self.give_back()

    def _ended(self, run: int) -> None:
        self._give_back(self._runs.pop(run, []))

    def _give_back(self, parameters: Sequence[torch.nn.Parameter]) -> None:
        handles = [taken[1] for parameter in parameters if (taken := self._taken.get(id(parameter))) is not None]
        if handles:
            self._saves.hasten(handles)
        for parameter in parameters:
            self.give_back_one(parameter)

    def _is_ours_alone(self, parameter: torch.Tensor) -> bool:
        gradient = _GRAD.__get__(parameter)
        if gradient is None or gradient.requires_grad or not self._saves.takes(gradient):
            return False
        if self._fake:
            return True
        plain = not gradient.__dict__ and not gradient._backward_hooks and not weakref.getweakrefcount(gradient)
        return plain and _holders(gradient) == _holders_of_one_that_nobody_has()


def _stop_if_alive(reference: weakref.ref[Gradients[Any]]) -> None:
    gradients = reference()
    if gradients is not None:
        gradients._stop()


def _is_same_memory(later: torch.Tensor, gradient: torch.Tensor) -> bool:
    return later.layout is torch.strided and later.data_ptr() == gradient.data_ptr()  # a sparse one has no address


def _sum(gradient: torch.Tensor, later: torch.Tensor) -> torch.Tensor:
    """Add what a backward inside backward has accumulated meanwhile, as AccumulateGrad would have."""
    if later.requires_grad:
        with torch.enable_grad():
            return gradient + later
    with torch.no_grad():
        gradient += later
    return gradient


def _holders(tensor: torch.Tensor) -> tuple[int, int]:
    return sys.getrefcount(tensor), tensor._use_count()  # type: ignore[attr-defined]  # torch's, without a stub


@cache
def _holders_of_one_that_nobody_has() -> tuple[int, int]:
    """Return what `_holders` says of a gradient which only its parameter and one caller have: PyTorch's own count."""
    parameter = torch.nn.Parameter(torch.empty(0))
    _GRAD.__set__(parameter, torch.empty(0))
    gradient = _GRAD.__get__(parameter)
    return _holders(gradient)


def _reducers_may_run() -> bool:
    return torch.distributed.is_available() and torch.distributed.is_initialized()


# ---- Note [Nobody sees it gone] ----

_watching: list[Gradients[Any]] = []
_before: list[object] = []  # what another library had put there


def _watch(gradients: Gradients[Any]) -> None:
    if gradients in _watching:
        return
    if not _watching:
        _before[:] = [torch.nn.Parameter.__dict__["grad"]] if "grad" in torch.nn.Parameter.__dict__ else []
        torch.nn.Parameter.grad = property(_get, _set, _delete)  # type: ignore[assignment]
    _watching.append(gradients)


def _unwatch(gradients: Gradients[Any]) -> None:
    if gradients not in _watching:
        return
    _watching.remove(gradients)
    if not _watching:
        if _before:
            torch.nn.Parameter.grad = _before.pop()  # type: ignore[assignment]
        else:
            del torch.nn.Parameter.grad


def _get(parameter: torch.Tensor) -> torch.Tensor | None:
    for gradients in _watching.copy():
        gradients.give_back_one(parameter)
    found: torch.Tensor | None = _GRAD.__get__(parameter)
    return found


def _set(parameter: torch.Tensor, gradient: torch.Tensor | None) -> None:
    with lock:
        _GRAD.__set__(parameter, gradient)
        for gradients in _watching.copy():
            gradients.forget_one(parameter)


def _delete(parameter: torch.Tensor) -> None:
    with lock:
        _GRAD.__delete__(parameter)
        for gradients in _watching.copy():
            gradients.forget_one(parameter)
