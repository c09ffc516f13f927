"""Watches a step through its log and turns it into a trace."""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Protocol

import torch
from torch.utils.hooks import RemovableHandle

from lowtide.capture.builder import Recorded, build_trace
from lowtide.capture.schema import is_operator
from lowtide.core.log import Log
from lowtide.core.trace import Kind, Reach


class Serials(Protocol):
    """Numbers for the storages of a log."""

    def serial_of(self, tensor: torch.Tensor) -> int:
        """Return the number under which the log knows a tensor's storage."""
        ...


class Observation(Serials, Protocol):
    """What writes the log of a step."""

    @property
    def device(self) -> torch.device:
        """Where the memory is that the log is about."""
        ...

    def observe(self, *, names: bool, log: bool) -> None:
        """Watch which operator runs, and log the step in full."""
        ...

    def take_log(self) -> Log | None:
        """Stop the log and return it (None: the step was too long to log)."""
        ...

    def forget_log(self) -> None:
        """Stop the log and forget it."""
        ...

    def mark_module(self, name: str) -> None:
        """Log that this module's operators follow."""
        ...


class Recorder:
    """Logs one step at a time. `models` and `optimizers` only give names and kinds; any step can be recorded.

    `held` says, when a step has ended, which storages the program holds that can move, by serial, and their keys.
    """

    def __init__(
        self,
        observation: Observation,
        models: Sequence[torch.nn.Module],
        optimizers: Sequence[torch.optim.Optimizer],
        *,
        reach: Reach = Reach.SAVED,
        least_bytes: int = 0,
        held: Callable[[], Mapping[int, int]] = dict,
    ) -> None:
        self._held = held
        self._observation = observation
        self._reach = reach
        self._least_bytes = least_bytes
        self._models = models
        self._optimizers = list(optimizers)
        self._found: list[weakref.ref[torch.nn.Module]] = []
        self._static_bytes = 0
        self._kinds_before: Mapping[int, Kind] = {}
        self._handles: list[RemovableHandle] = []
        self._path: list[str] = []
        self.recording = False

    def know(self, optimizer: torch.optim.Optimizer) -> None:
        """Take one more optimizer's tensors into account."""
        if all(known is not optimizer for known in self._optimizers):
            self._optimizers.append(optimizer)

    def know_models(self, models: Sequence[torch.nn.Module]) -> None:
        """Give the layers of models that were found later their names; they live as long as the program wants."""
        known = {id(model) for model in self.models()}
        self._found += [weakref.ref(model) for model in models if id(model) not in known]

    def optimizers(self) -> list[torch.optim.Optimizer]:
        """Return the optimizers that are known."""
        return list(self._optimizers)

    def models(self) -> list[torch.nn.Module]:
        """Return the models that are known and alive."""
        return [*self._models, *(model for found in self._found if (model := found()) is not None)]

    def start(self, *, static_bytes: int) -> None:
        """Log from here on; `static_bytes` are live already, wherever they are."""
        self._static_bytes = static_bytes
        self._observation.observe(names=True, log=True)
        # By the end of the step, gradients that it found may be gone, and others in their place.
        self._kinds_before = self._kinds() if self._reach is not Reach.SAVED else {}
        self._name_modules()
        self.recording = True

    def stop(self, *, trains_from_s: float | None = None) -> Recorded | None:
        """Stop and return the step as a trace (None: it was too long to record, or a fork interrupted it).

        `trains_from_s`: when, by `time.perf_counter`, autograd followed the step's first operator (None: it never did).
        """
        end_ns = time.perf_counter_ns()
        log = self._observation.take_log()
        self._unhook()
        if log is None:
            return None
        held = self._held()
        reach = Reach.SAVED if self._reach is Reach.HELD and not held else self._reach
        recorded = build_trace(
            log.entries,
            log.names,
            static_bytes=self._static_bytes,
            end_ns=end_ns if log.end_ns is None else log.end_ns,
            is_operator=is_operator,
            kinds={**self._kinds_before, **dict.fromkeys(log.gradients, Kind.GRAD), **self._kinds()},
            model=type(models[0]).__name__ if (models := self.models()) else "",
            torch_version=torch.__version__,
            reach=reach,
            least_bytes=self._least_bytes,
            held=held,
            gradients=log.gradients,
            trains_from_ns=None if trains_from_s is None else round(trains_from_s * 1e9),
        )
        trace = replace(recorded.trace, device=self._observation.device.type)
        return replace(recorded, trace=trace, needs=log.needs)

    def cancel(self) -> None:
        """Stop, and forget what was recorded."""
        if self.recording:
            self._observation.forget_log()
        self._unhook()

    def _unhook(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self.recording = False

    def _name_modules(self) -> None:
        self._path.clear()
        for model in self.models():
            if any(hasattr(module, "_orig_mod") for module in model.modules()):
                continue  # hooks would make torch.compile compile it again
            for name, module in model.named_modules():
                if not isinstance(module, torch.jit.ScriptModule):  # it takes no hooks: its operators are its owner's
                    self._hook(module, name or type(model).__name__)

    def _hook(self, module: torch.nn.Module, name: str) -> None:
        def enter(_module: torch.nn.Module, _args: object) -> None:
            self._path.append(name)
            self._observation.mark_module(name)

        def leave(_module: torch.nn.Module, _args: object, _output: object) -> None:
            if self._path:
                self._path.pop()
            self._observation.mark_module(self._path[-1] if self._path else "")

        self._handles.append(module.register_forward_pre_hook(enter))
        self._handles.append(module.register_forward_hook(leave))

    def _kinds(self) -> Mapping[int, Kind]:
        kinds: dict[int, Kind] = {}

        def note(tensors: Iterable[object], kind: Kind) -> None:
            for tensor in tensors:
                if not isinstance(tensor, torch.Tensor) or type(tensor) not in (torch.Tensor, torch.nn.Parameter):
                    continue
                if tensor.device == self._observation.device and tensor.layout is torch.strided:
                    kinds.setdefault(self._observation.serial_of(tensor), kind)

        for model in self.models():
            note(model.parameters(), Kind.PARAM)
            note(model.buffers(), Kind.BUFFER)
            note((parameter.grad for parameter in model.parameters()), Kind.GRAD)
        for optimizer in self._optimizers:
            for group in optimizer.param_groups:
                note(group["params"], Kind.PARAM)
                note((parameter.grad for parameter in group["params"]), Kind.GRAD)
            for state in optimizer.state.values():
                note(state.values(), Kind.OPTIMIZER)
        return kinds
