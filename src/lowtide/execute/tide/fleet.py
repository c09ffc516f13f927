"""A training that is spread over several devices of one process: a tide on each, and this in front of them.

Every device has its own budget, log, plan and transfers. What they share is the program: a step begins, ends or is
abandoned on all of them; autograd's one pair of hooks hands a saved tensor to the device that it is on; and where an
operator copies between two, each looks after its own memory (see Note [Several devices]).
"""

from __future__ import annotations

import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial

import torch
from torch.autograd.graph import saved_tensors_hooks

from lowtide.autograd.kept import KeptTensor
from lowtide.core.machine import Machine
from lowtide.core.plan import Plan
from lowtide.core.step_record import Expected, StepRecord
from lowtide.core.trace import Trace
from lowtide.core.units import format_bytes
from lowtide.errors import BadArgument
from lowtide.execute.step.runtime import Handle
from lowtide.execute.tide.device import DeviceTide
from lowtide.execute.tide.tide import Tide


class Fleet(Tide):
    """See `Tide`; `tides` are open, one for each device, and are closed with it."""

    def __init__(self, tides: Sequence[DeviceTide]) -> None:
        super().__init__()
        self._tides = {tide.device_name: tide for tide in tides}
        self._runtimes = {tide.runtime.backend.device: tide.runtime for tide in tides}
        self._first = tides[0].runtime
        self._opened()

    # ---- the loop ----

    @contextmanager
    def hooks(self) -> Iterator[None]:
        with ExitStack() as hooked:
            hooked.enter_context(saved_tensors_hooks(self._pack, _unpack))
            for runtime in self._runtimes.values():
                hooked.enter_context(runtime.hooked())
            yield

    def _pack(self, tensor: torch.Tensor) -> Handle:
        # What is on no device of ours is kept, and counted by the first.
        return self._runtimes.get(tensor.device, self._first).pack(tensor)

    @contextmanager
    def turning_refusals_into_errors(self) -> Iterator[None]:
        with ExitStack() as turning:
            for tide in self._tides.values():
                turning.enter_context(tide.turning_refusals_into_errors())
            yield

    def know(self, optimizer: torch.optim.Optimizer) -> None:
        for tide in self._tides.values():
            tide.know(optimizer)

    def know_models(self, models: Sequence[torch.nn.Module]) -> None:
        for tide in self._tides.values():
            tide.know_models(models)

    def _known(self) -> tuple[list[torch.nn.Module], list[torch.optim.Optimizer]]:
        return next(iter(self._tides.values()))._known()

    @property
    def first_save_s(self) -> float | None:
        return min((tide.first_save_s for tide in self._tides.values() if tide.first_save_s is not None), default=None)

    def begin_step(self) -> None:
        self._inside = True
        for tide in self._tides.values():
            tide.begin_step()
        self._started = time.perf_counter()

    def end_step(self) -> None:
        try:
            for tide in self._tides.values():
                tide.finish_step()
        except BaseException:
            self.abandon_step()  # also where it went well: nothing is learnt from it
            raise
        self._inside = False
        self._step_s.append(time.perf_counter() - self._started)
        _each([tide.learn for tide in self._tides.values()])
        self._records.append(self._record([tide.records[-1] for tide in self._tides.values()]))

    def _record(self, parts: Sequence[StepRecord]) -> StepRecord:
        """Return one record of a step on all devices; it is as slow as the slowest is expected to be."""
        expected = [part.expected for part in parts if part.expected is not None]
        planned = [each.planned_s for each in expected if each.planned_s is not None]
        whole = len(expected) == len(parts)
        return StepRecord(
            step=len(self._step_s),
            step_s=self._step_s[-1],
            stall_s=sum(part.stall_s for part in parts),
            recompute_s=sum(part.recompute_s for part in parts),
            budget_bytes=sum(part.budget_bytes for part in parts),
            peak_bytes=sum(part.peak_bytes for part in parts),
            moved_out_bytes=sum(part.moved_out_bytes for part in parts),
            moved_in_bytes=sum(part.moved_in_bytes for part in parts),
            planned=all(part.planned for part in parts),
            expected=Expected(
                unmanaged_s=max(each.unmanaged_s for each in expected),
                planned_s=max(planned, default=None),
                before_training_s=min(each.before_training_s for each in expected),
            )
            if whole
            else None,
        )

    def abandon_step(self) -> None:
        self._inside = False
        _each([tide.abandon_step for tide in self._tides.values()])

    # ---- answers ----

    def __repr__(self) -> str:
        budgets = ", ".join(f"{name} {format_bytes(tide.budget_bytes)}" for name, tide in self._tides.items())
        steps = f"{self.steps} step{'s' * (self.steps != 1)}"
        return f"<Tide: budget {budgets}, policy {self.stats()['policy']}, {steps}{', closed' * self._closed}>"

    def stats(self) -> dict[str, object]:
        devices = {name: tide.stats() for name, tide in self._tides.items()}
        return {
            **{name: _total([stats[name] for stats in devices.values()]) for name in next(iter(devices.values()))},
            "step_s": statistics.median(self._step_s) if self._step_s else 0.0,
            "last_step_s": self._step_s[-1] if self._step_s else 0.0,
            "steps": self.steps,
            **self._slowdown(),
            "devices": devices,
        }

    def trace(self, device: str | None = None) -> Trace:
        return self._on(device).trace()

    def plan(self, device: str | None = None) -> Plan | None:
        return self._on(device).plan()

    def machine_of(self, device: str | None = None) -> Machine:
        return self._on(device).machine

    def machine_seen(self, device: str | None = None) -> Machine:
        return self._on(device).machine_seen()

    def _on(self, device: str | None) -> DeviceTide:
        if device in self._tides:
            return self._tides[device]
        names = ", ".join(self._tides)
        what = "there is one for each device" if device is None else f"there is nothing to tell of {device!r}"
        raise BadArgument(f"this tide is on {names}: {what}; name one, as in trace('{next(iter(self._tides))}')")

    # ---- the end ----

    def _let_go(self, *, bring_back: bool) -> None:
        _each([partial(tide._close, bring_back=bring_back) for tide in self._tides.values()])


def _unpack(handle: Handle) -> torch.Tensor:
    return handle.get() if isinstance(handle, KeptTensor) else handle.runtime.unpack(handle)


def _each(calls: Sequence[Callable[[], None]]) -> None:
    """Make every call, whatever the others raise; then raise what the first one that failed did."""
    failure: BaseException | None = None
    for call in calls:
        try:
            call()
        except BaseException as error:  # noqa: BLE001  # nothing may be left half open
            failure = failure or error
    if failure is not None:
        raise failure


def _total(figures: Sequence[object]) -> object:
    """Return one figure for several devices: a sum of numbers or counts, and of texts those that differ."""
    first = figures[0]
    if isinstance(first, bool):
        return all(figures)
    if isinstance(first, int | float):
        return sum(figure for figure in figures if isinstance(figure, int | float))
    if isinstance(first, dict):
        return dict(sum((Counter(figure) for figure in figures if isinstance(figure, dict)), Counter()))
    return ", ".join(dict.fromkeys(map(str, figures)))
