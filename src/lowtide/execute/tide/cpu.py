"""A training on the CPU: every tensor's pages may leave; a step is watched and planned, the next ones follow."""

from __future__ import annotations

import os
import statistics
import time
import warnings
import weakref
from collections.abc import Hashable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from lowtide.capture.builder import Recorded
from lowtide.capture.recorder import Recorder
from lowtide.core.machine import Machine
from lowtide.core.plan import Plan, Problem
from lowtide.core.step_record import Expected, StepRecord
from lowtide.core.trace import RANGE_BYTES, Trace
from lowtide.core.units import format_bytes
from lowtide.errors import BadArgument, BudgetTooSmall
from lowtide.estimate.calibrate import SPILL
from lowtide.estimate.traffic import Moved, Traffic, link_seen
from lowtide.execute.backends.oom_messages import may_be_refusal
from lowtide.execute.tide.encoding import Samples, codec_costs, codec_drag
from lowtide.execute.tide.feedback import Planned, Taught, Wait, executed
from lowtide.execute.tide.learning import Learning
from lowtide.execute.tide.places import located
from lowtide.execute.tide.tide import Tide
from lowtide.execute.update.put_off import PutOff
from lowtide.execute.update.rehearsal import rehearse
from lowtide.execute.update.slices import SlicedUpdates
from lowtide.memory.ranges import RangeMemory, RangeUsage
from lowtide.plan.policy import Observes, Policy
from lowtide.plan.verify import check_executable
from lowtide.residency.range_schedule import RangeSchedule, compile_ranges

# An unpressed step is recorded for any budget: its updates are in slices that fit all of them.
_RECORDED_SLICE_BYTES = 1 << 20
# Shorter ones are not for want of bytes.
_LEAST_WAIT_S = 100e-6


class CpuTide(Tide):
    """See `Tide`; `memory` is closed with the tide. `moves_nothing`: every step is recorded, and none planned."""

    def __init__(
        self,
        models: Sequence[torch.nn.Module],
        optimizers: Sequence[torch.optim.Optimizer],
        memory: RangeMemory,
        *,
        machine: Machine,
        budget_bytes: int,
        spill_name: str,
        policy: Policy,
        recompute: bool | None = None,
        max_error: float = 0.0,
        put_off: bool = False,
        moves_nothing: bool = False,
    ) -> None:
        super().__init__()
        self._memory, self._machine = memory, machine
        self._moves_nothing, self._max_error = moves_nothing, max_error
        self._budget_bytes, self._spill_name = budget_bytes, spill_name
        self._policy = policy
        self._recomputes = policy.about.recomputes if recompute is None else recompute
        # What is too small to be moved in this budget may be worth it in another: a trace knows all ranges.
        self._recorder = Recorder(memory, models, optimizers, reach=memory.reach, least_bytes=RANGE_BYTES)
        self._learning = Learning()
        self._signature_of: dict[int, tuple[object, ...]] = {}  # by the native number of its plan
        self._expected: dict[int, Expected] = {}  # likewise
        self._next_plan = -1
        self._taught = Taught()
        self._samples: dict[Hashable, Samples] = {}
        self._storages_of: dict[Hashable, list[int]] = {}  # by the plan's numbers, of plans that may change
        self._revisions = 0
        self._trace: Trace | None = None
        self._plan: Plan | None = None
        self._problem: Problem | None = None  # that the plan answers
        self._traffic_planned: Traffic | None = None  # what had moved when the last plan was made
        self._step_stall_s = 0.0
        self._recompute_before_s = 0.0
        self._peaks = (0, 0)
        self._warned = False
        self._last_peak_bytes = 0
        self._announced = True  # whether operators are, in this step
        self._strangers = 0  # the most blocks of other allocators that a step has used
        # What the tensors of a slice take is pinned by its operators, beside everything else that is.
        self._put_off = PutOff(memory, budget_bytes=budget_bytes)
        self._slices = SlicedUpdates(
            slice_bytes=_RECORDED_SLICE_BYTES if moves_nothing else budget_bytes // 8,
            puts_off=self._put_off if put_off else None,
        )
        try:
            memory.open(budget_bytes)
        except BaseException:
            memory.close()
            raise
        self._slices.on()
        self._to_come_bytes = 0  # of an optimizer's state that never leaves, and does not exist yet
        self._rehearsing = False
        self._rehearsed: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()
        self._before_updates = register_optimizer_step_pre_hook(self._before_update)
        self._static_bytes = memory.held_bytes()
        self._opened()

    # ---- the loop ----

    def hooks(self) -> AbstractContextManager[None]:
        return nullcontext()

    @contextmanager
    def turning_refusals_into_errors(self) -> Iterator[None]:
        refusals = self._memory.refusals
        try:
            yield
            self._raise_sounded()
        except RuntimeError as error:
            if not may_be_refusal(error):
                raise
            interruption = self._memory.interruption()
            if interruption is not None:
                raise interruption from error
            self._raise_trouble(error)
            if self._memory.refusals == refusals:
                raise
            if self._memory.was_sounded:  # the error's frames tell where the step was stopped, not what did not fit
                raise self._too_small() from error
            raise located(self._too_small(), error, self._recorder.models()) from error

    def _raise_sounded(self) -> None:
        if self._memory.was_sounded:
            raise self._too_small()

    def _raise_trouble(self, cause: BaseException | None = None) -> None:
        """Raise what went wrong where nothing could be raised; warn of the first write that failed (R4)."""
        trouble, warning = self._memory.take_errors()
        if warning and not self._warned:
            self._warned = True
            warnings.warn(f"lowtide: {warning}; keeping the data in memory", RuntimeWarning, stacklevel=4)
        if isinstance(trouble, BudgetTooSmall):
            trouble = self._too_small()
        if trouble is not None:
            raise (trouble if cause is None else located(trouble, cause, self._recorder.models())) from cause

    def _too_small(self) -> BudgetTooSmall:
        floor_bytes = 0 if self._trace is None else self._trace.floor_bytes()
        return self._memory.too_small(floor_bytes=floor_bytes, more_bytes=self._to_come_bytes)

    def _before_update(self, optimizer: torch.optim.Optimizer, _args: object, _kwargs: object) -> None:
        """Refuse a step that did not fit before it changes anything, with all that it and the update need."""
        if not self._inside or self._rehearsing or self._moves_nothing or os.getpid() != self._pid:
            return
        if optimizer not in self._rehearsed:
            self._rehearsing = self._put_off.paused = True
            try:
                self._to_come_bytes = rehearse(
                    optimizer, least_bytes=self._memory.least_bytes, refused=self._memory.was_sounded
                )
            finally:
                self._rehearsing = self._put_off.paused = False
        if self._memory.was_sounded:
            # What a program may have been written to catch; `turning_refusals_into_errors` gives it its name.
            raise torch.OutOfMemoryError(f"lowtide: {self._too_small()}")
        self._rehearsed.add(optimizer)

    def know(self, optimizer: torch.optim.Optimizer) -> None:
        self._recorder.know(optimizer)

    def know_models(self, models: Sequence[torch.nn.Module]) -> None:
        self._recorder.know_models(models)

    def _known(self) -> tuple[list[torch.nn.Module], list[torch.optim.Optimizer]]:
        return self._recorder.models(), self._recorder.optimizers()

    @property
    def first_save_s(self) -> float | None:
        began_ns = self._memory.native.grad_began_ns()
        return began_ns / 1e9 if began_ns else None

    def begin_step(self) -> None:
        self._inside = True
        memory = self._memory
        memory.forget_freed()
        usage = memory.usage()
        self._peaks = (max(self._peaks[0], usage.peak_bytes), max(self._peaks[1], usage.peak_reserved_bytes))
        memory.native.reset_peaks()
        self._static_bytes = usage.held_bytes
        recorded = self._moves_nothing or self._learning.records
        elsewhere = usage.counted.away + usage.counted.slow > 0
        self._announced = recorded or self._timed or self._under_pressure or elsewhere
        memory.announce(self._announced)
        if recorded:
            self._recorder.start(static_bytes=usage.held_bytes)
        memory.native.grad_forget()
        self._to_come_bytes = 0
        memory.sound(True)
        memory.native.step_begin(self._next_plan)
        self._started = time.perf_counter()
        self._before = usage
        self._recompute_before_s = usage.counted.again_ns / 1e9

    def end_step(self) -> None:
        self._inside = False
        ended = self._memory.native.step_end()
        self._step_s.append(time.perf_counter() - self._started)
        self._strangers = max(self._strangers, self._memory.native.take_strangers())
        usage = self._memory.usage()
        self._step_stall_s = usage.stall_s - self._before.stall_s
        self._last_peak_bytes = usage.peak_bytes
        try:
            self._raise_trouble()
            self._raise_sounded()
        except BaseException:
            self._recorder.cancel()
            raise
        finally:
            self._memory.sound(False)
        self._records.append(self._record(usage, expected=self._expected.get(-1 if ended.plan is None else ended.plan)))
        if self._announced or usage.moved_since(self._before):
            self._learn(ended.plan, resized=ended.resized)
        # Else everything fits, as it is known to, and there was nothing to follow or to learn.

    def _record(self, usage: RangeUsage, *, expected: Expected | None) -> StepRecord:
        counted, before = usage.counted, self._before.counted
        return StepRecord(
            step=len(self._step_s),
            step_s=self._step_s[-1],
            stall_s=self._step_stall_s,
            recompute_s=(counted.again_ns - before.again_ns) / 1e9,
            budget_bytes=self._budget_bytes,
            peak_bytes=usage.peak_bytes,
            moved_out_bytes=counted.written - before.written,
            moved_in_bytes=counted.read - before.read,
            planned=expected is not None,
            expected=expected,
        )

    def abandon_step(self) -> None:
        self._inside = False
        self._memory.native.step_abandon()
        self._memory.sound(False)
        self._recorder.cancel()
        self._memory.take_errors()

    def _learn(self, followed: int | None, *, resized: bool) -> None:
        """Learn from the step that has ended, and plan the next; `resized`: it was a known one in another size."""
        signature = None if followed is None else self._signature_of[followed]
        if self._recorder.recording:
            recorded = self._recorder.stop(trains_from_s=self.first_save_s)
            if recorded is not None and not recorded.trace.ops:
                self._learning.nothing_seen()
                return
            if self._moves_nothing:
                self._trace = self._trace if recorded is None else recorded.trace
                return
            if recorded is not None:
                signature = _signature(recorded)
                if self._learning.is_worth_planning(signature, followed=followed is not None):
                    self._trace = recorded.trace
                    followed = self._planned(recorded, signature)
                    self._learning.planned(signature)
        elif followed is not None and signature is not None:
            followed = self._revise(signature) or followed
        if followed is not None:
            self._next_plan = followed
        self._learning.ended(signature, followed=followed is not None, resized=resized)

    def _planned(self, recorded: Recorded, signature: tuple[object, ...]) -> int:
        self._measure_again()
        problem = Problem(
            trace=recorded.trace.under(self._budget_bytes),
            machine=self._machine,
            budget_bytes=self._budget_bytes,
            tier=self._memory.tiers[0],
            tiers=self._memory.tiers,
            can_recompute=self._recomputes,
            can_place=bool(self._machine.addressable),
        )
        if self._memory.codecs and recorded.trace.peak_bytes > self._budget_bytes:
            samples = self._samples.setdefault(signature, Samples())
            samples.note(recorded, self._memory.take_samples())
            problem = replace(
                problem,
                codecs=codec_costs(self._memory.codecs),
                sampled=samples.ratios(recorded),
                max_error=self._max_error,
                codec_drag=codec_drag(),
            )
        return self._follow(Planned(problem=problem, recorded=recorded, plan=self._policy.plan(problem)), signature)

    def _measure_again(self) -> None:
        """Have the link's rates from the transfers since the last plan: those of the program's own pages, beside it."""
        if self._machine.addressable:
            return  # most of what moved, moved to slow memory, whose rates are known
        now, before = self.traffic(), self._traffic_planned
        self._traffic_planned = now
        link = link_seen(self._machine.links[SPILL], now if before is None else now.plus(before, times=-1))
        self._machine = replace(self._machine, links={**self._machine.links, SPILL: link})

    def _follow(self, planned: Planned, signature: tuple[object, ...]) -> int:
        check_executable(planned.plan, planned.problem)  # R6: a plan is followed as it stands, or not at all
        self._plan, self._problem = planned.plan, planned.problem
        schedule = compile_ranges(planned.plan, planned.recorded, tier=self._memory.tiers[0])
        number = self._add(schedule)
        self._signature_of[number] = signature
        prediction = planned.plan.prediction
        self._expected[number] = Expected(
            unmanaged_s=planned.problem.trace.duration_s,
            planned_s=None if prediction is None else prediction.step_s,
            before_training_s=planned.recorded.before_training_s,
        )
        if isinstance(self._policy, Observes):
            self._taught.keep(signature, planned)
            self._storages_of[signature] = [one.index for one in schedule.storages]
        return number

    def _revise(self, signature: tuple[object, ...]) -> int | None:
        """Let a policy that observes planned steps change its plan by the one that has just ended; return the new."""
        planned, waits = self._taught.get(signature), self._memory.native.step_waits()
        if planned is None or not waits:
            return None
        storages = self._storages_of[signature]
        timeline = executed(
            planned,
            [
                Wait(storages[storage], op, start_s, end_s, demanded=demanded)
                for op, storage, start_s, end_s, demanded in waits
                if end_s - start_s > _LEAST_WAIT_S
            ],
            begun_s=self._started,
            step_s=self._step_s[-1],
            recompute_s=self._recompute_s() - self._recompute_before_s,
            stall_s=self._step_stall_s,
        )
        taught = self._taught.learn(signature, self._policy, timeline)
        if taught is None:
            return None
        self._revisions += 1
        return self._follow(taught, signature)

    def _add(self, schedule: RangeSchedule) -> int:
        native = self._memory.native
        tiers = {name: number for number, name in enumerate(self._memory.tiers, start=self._memory.first_tier)}
        coders = self._memory.coders
        return native.plan_add(
            names=[native.name_id(name) for name in schedule.names],
            storages=[
                (
                    -1 if one.serial is None else one.serial,
                    *(one.birth or (-1, -1)),
                    one.nbytes,
                    tiers[one.tier],
                    int(one.leaves_again),
                    -1 if one.begins_in is None else tiers[one.begins_in],
                )
                for one in schedule.storages
            ],
            uses=[one.uses for one in schedule.storages],
            actions=[
                (one.op, int(one.kind), one.storage, tiers[one.tier], one.remake, coders[one.codec])
                for one in schedule.actions
            ],
            remade=schedule.remakes,
        )

    def _recompute_s(self) -> float:
        return self._memory.usage().counted.again_ns / 1e9

    @property
    def _under_pressure(self) -> bool:
        return self._trace is None or self._trace.peak_bytes > self._budget_bytes

    # ---- answers ----

    def __repr__(self) -> str:
        peak = format_bytes(self._peak_bytes()[0])
        state = "closed" if self._closed else f"peak {peak}, spill to {self._spill_name}"
        steps = f"{self.steps} step{'s' * (self.steps != 1)}"
        return f"<Tide: budget {format_bytes(self._budget_bytes)}, policy {self._policy.name}, {steps}, {state}>"

    def _peak_bytes(self) -> tuple[int, int]:
        usage = self._memory.usage()
        return max(self._peaks[0], usage.peak_bytes), max(self._peaks[1], usage.peak_reserved_bytes)

    def stats(self) -> dict[str, object]:
        usage = self._memory.usage()
        peak_bytes, peak_reserved_bytes = self._peak_bytes()
        return {
            "budget_bytes": self._budget_bytes,
            "budget_exact": True,
            "over_budget_bytes": usage.counted.beyond,
            "peak_bytes": peak_bytes,
            "peak_reserved_bytes": peak_reserved_bytes,
            "last_step_peak_bytes": self._last_peak_bytes,
            "static_bytes": self._static_bytes,
            "swapped_out_bytes": usage.counted.written,
            "swapped_in_bytes": usage.counted.read,
            "released_bytes": usage.counted.released,
            "faults": usage.counted.faults,
            "write_faults": usage.counted.write_faults,
            "stall_s": usage.stall_s,
            "last_step_stall_s": self._step_stall_s,
            "step_s": statistics.median(self._step_s) if self._step_s else 0.0,
            "last_step_s": self._step_s[-1] if self._step_s else 0.0,
            "steps": self.steps,
            **self._slowdown(),
            "policy": self._policy.name,
            "planned_swaps": len(self._plan.swaps) if self._plan is not None else 0,
            "planned_places": len(self._plan.places) if self._plan is not None else 0,
            "plan_revisions": self._revisions,
            "planned_recomputes": len(self._plan.recomputes) if self._plan is not None else 0,
            "recomputed_ops": usage.counted.calls_again,
            "recompute_s": usage.counted.again_ns / 1e9,
            "discarded_bytes": usage.counted.discarded,
            "recompute_trials": usage.counted.trials,
            "swapped_instead": usage.counted.not_discarded,
            "operators_put_off": self._put_off.operators,
            "unmanaged": {"memory of another allocator": self._strangers} if self._strangers else {},
            **self._memory.figures(),
        }

    def trace(self, device: str | None = None) -> Trace:
        self._check_device(device)
        if self._trace is None:
            if self._step_s:
                raise BadArgument("no step was recorded: none ran an operator")
            raise BadArgument("no step was recorded yet: run one inside tide.step() first")
        return self._trace

    def plan(self, device: str | None = None) -> Plan | None:
        self._check_device(device)
        return self._plan

    def machine_of(self, device: str | None = None) -> Machine:
        self._check_device(device)
        return self._machine

    def machine_seen(self, device: str | None = None) -> Machine:
        self._check_device(device)
        if self._machine.addressable:
            return self._machine  # what moved, moved mostly to slow memory, whose rates are known
        links = {**self._machine.links, SPILL: link_seen(self._machine.links[SPILL], self.traffic())}
        return replace(self._machine, links=links, source="seen")

    def traffic(self) -> Traffic:
        """Return what has moved so far, and how long that took."""
        meter = iter(self._memory.native.range_meter())
        write, read, write_waited, read_waited = (
            Moved(nbytes=nbytes, transfers=transfers, busy_s=busy_ns * 1e-9)
            for nbytes, transfers, busy_ns in zip(meter, meter, meter, strict=True)
        )
        return Traffic(write=write, read=read, write_waited=write_waited, read_waited=read_waited)

    @property
    def memory(self) -> RangeMemory:
        """What the tensors' pages are managed by."""
        return self._memory

    def _check_device(self, device: str | None) -> None:
        if device not in (None, "cpu"):
            raise BadArgument(f"this tide is on cpu: there is nothing to tell of {device!r}")

    # ---- the end ----

    def _let_go(self, *, bring_back: bool) -> None:
        del bring_back  # parameters are among what is away: the program has them in any case
        self._recorder.cancel()
        self._slices.off()
        self._before_updates.remove()
        self._memory.close()

    def _exit(self) -> None:
        """Leave everything as it is: faults serve tensors that are still read while the process ends."""


def _signature(recorded: Recorded) -> tuple[object, ...]:
    """Return what tells one kind of step from another: its operators and the sizes of what it makes."""
    trace = recorded.trace
    made = tuple(
        (birth, block.nbytes) for birth, block in zip(recorded.births, trace.storages, strict=True) if birth is not None
    )
    return tuple(op.name for op in trace.ops), made
