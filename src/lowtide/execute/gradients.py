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
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Sequence
from typing import Any, Generic, Protocol, TypeVar

import torch
from torch.utils.hooks import RemovableHandle

from lowtide.errors import SpillError

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


class Gradients(Generic[H]):
    """Takes the gradients of the parameters it knows, from their accumulation to the end of backward.

    `fake`: they are tensors without data, which nobody looks at.
    """

    def __init__(self, saves: Saves[H], *, fake: bool = False) -> None:
        self._saves = saves
        self._fake = fake
        self._hooks: dict[int, tuple[weakref.ref[torch.Tensor], RemovableHandle]] = {}
        self._offered: list[torch.nn.Parameter] = []
        self._taken: dict[int, tuple[torch.nn.Parameter, H]] = {}
        self._backward = -1  # the run of backward that gives back at its end

    def know(self, tensor: torch.Tensor) -> None:
        """Follow the gradients of a parameter that autograd saves, or a view of which it does."""
        parameter = tensor if tensor._base is None else tensor._base
        known = self._hooks.get(id(parameter))
        if known is not None and known[0]() is parameter:
            return
        plain = isinstance(parameter, torch.nn.Parameter) if self._fake else type(parameter) is torch.nn.Parameter
        if plain and not torch.compiler.is_compiling():
            handle = parameter.register_post_accumulate_grad_hook(self._accumulated)  # type: ignore[no-untyped-call]  # torch's
            self._hooks[id(parameter)] = (weakref.ref(parameter), handle)

    def take_offered(self) -> None:
        """Take the gradients that are finished; not from their own hook, because others may run after it."""
        offered, self._offered = self._offered, []
        for parameter in offered:
            if id(parameter) not in self._taken and self._is_ours_alone(parameter):
                handle = self._saves.save(_GRAD.__get__(parameter))
                self._taken[id(parameter)] = (parameter, handle)
                _GRAD.__set__(parameter, None)
        if self._taken:
            _watch(self)

    @property
    def offers(self) -> bool:
        """Whether gradients wait to be taken."""
        return bool(self._offered)

    def give_back(self) -> None:
        """Put every gradient back where it belongs."""
        self._offered.clear()
        if self._taken:
            self._saves.hasten([handle for _, handle in self._taken.values()])
        for parameter, _ in list(self._taken.values()):
            self.give_back_one(parameter)

    def give_back_one(self, parameter: torch.Tensor) -> None:
        """Put a parameter's gradient back if it was taken. It stays taken if that fails."""
        taken = self._taken.get(id(parameter))
        if taken is None:
            return
        gradient = self._saves.unpack(taken[1])
        later = _GRAD.__get__(parameter)
        if later is not None:  # backward ran inside backward, and added to it: as AccumulateGrad would have
            with torch.no_grad():
                gradient += later
        _GRAD.__set__(parameter, gradient)
        self.forget_one(parameter)

    def forget_one(self, parameter: torch.Tensor) -> None:
        """Let go of a taken gradient: the program has put another in its place."""
        self._taken.pop(id(parameter), None)
        if not self._taken:
            _unwatch(self)

    def close(self) -> list[SpillError]:
        """Give everything back and follow nobody any more; return what could not be read: those gradients are lost."""
        for _, hook in self._hooks.values():
            hook.remove()
        self._hooks.clear()
        self._offered.clear()
        lost: list[SpillError] = []
        for parameter, _ in list(self._taken.values()):
            try:
                self.give_back_one(parameter)
            except SpillError as error:
                lost.append(error)
                self.forget_one(parameter)
        return lost

    def _accumulated(self, parameter: torch.Tensor) -> None:
        if id(parameter) in self._taken:
            self.give_back_one(parameter)
        if not isinstance(parameter, torch.nn.Parameter) or _reducers_may_run():
            return
        backward = torch._C._current_graph_task_id()
        if backward < 0:
            return
        if backward != self._backward:
            self._backward = backward
            torch.autograd.Variable._execution_engine.queue_callback(self.give_back)
        self._offered.append(parameter)

    def _is_ours_alone(self, parameter: torch.nn.Parameter) -> bool:
        gradient = _GRAD.__get__(parameter)
        if gradient is None or gradient.requires_grad or not self._saves.takes(gradient):
            return False
        if self._fake:
            return True
        plain = not gradient.__dict__ and not gradient._backward_hooks and not weakref.getweakrefcount(gradient)
        return plain and _holders(gradient) == _holders_of_one_that_nobody_has()


def _holders(tensor: torch.Tensor) -> tuple[int, int]:
    return sys.getrefcount(tensor), tensor._use_count()  # type: ignore[attr-defined]  # torch's, without a stub


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


def _watch(gradients: Gradients[Any]) -> None:
    if gradients in _watching:
        return
    _watching.append(gradients)
    torch.nn.Parameter.grad = property(_get, _set, _delete)  # type: ignore[assignment]


def _unwatch(gradients: Gradients[Any]) -> None:
    if gradients not in _watching:
        return
    _watching.remove(gradients)
    if not _watching:
        del torch.nn.Parameter.grad


def _get(parameter: torch.Tensor) -> torch.Tensor | None:
    for gradients in _watching.copy():
        gradients.give_back_one(parameter)
    found: torch.Tensor | None = _GRAD.__get__(parameter)
    return found


def _set(parameter: torch.Tensor, gradient: torch.Tensor | None) -> None:
    _GRAD.__set__(parameter, gradient)
    for gradients in _watching.copy():
        gradients.forget_one(parameter)


def _delete(parameter: torch.Tensor) -> None:
    _GRAD.__delete__(parameter)
    for gradients in _watching.copy():
        gradients.forget_one(parameter)
