"""A training on one device: a step is watched, a plan is made from it, the next steps follow that."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace

import torch

from lowtide.capture.builder import Recorded
from lowtide.capture.recorder import Recorder
from lowtide.core.machine import Machine
from lowtide.core.plan import Plan, Problem
from lowtide.core.step_record import Expected, StepRecord
from lowtide.core.trace import Reach, Trace
from lowtide.core.units import format_bytes
from lowtide.errors import BadArgument
from lowtide.estimate.calibrate import SPILL
from lowtide.estimate.traffic import link_seen
from lowtide.execute.backends.oom_messages import concerns, may_be_refusal
from lowtide.execute.backends.protocol import Usage
from lowtide.execute.step.runtime import Runtime
from lowtide.execute.step.saved import UseWait
from lowtide.execute.tide.feedback import Planned, Taught, Wait, executed
from lowtide.execute.tide.opening import Opened
from lowtide.execute.tide.places import located
from lowtide.execute.tide.tide import Tide
from lowtide.execute.update.slices import SlicedUpdates
from lowtide.plan.costs.sweep import planned_bytes
from lowtide.plan.policy import Observes, Policy
from lowtide.plan.verify import check_executable
from lowtide.residency.schedule import Requests, compile_plan

# The first step of a kind is planned at once; the second is recorded again, because only then does the optimizer's
# state exist, is the allocator warm, and do operators take the time they will go on taking.
_RECORDINGS = 2
# Steps to record after one that matched no plan: it is planned once it repeats (R8).
_ALERT_STEPS = 8
# What a watched step takes longer, by call, beside what a recording says about seeing them all. Measured: 100 us to
# remember one that is to run again; assumed: every tenth is.
_REMEMBER_S = 10e-6


class DeviceTide(Tide):
    """See `Tide`; `opened` is the one device's memory, or the CPU's, which is closed with the tide."""

    def __init__(
        self,
        models: Sequence[torch.nn.Module],
        optimizers: Sequence[torch.optim.Optimizer],
        opened: Opened,
        *,
        policy: Policy,
        recompute: bool | None = None,
        moves_nothing: bool = False,
    ) -> None:
        super().__init__()
        self._backend, self._machine = opened.backend, opened.machine
        self._budget_bytes, self._spill_name = opened.budget_bytes, opened.spill_name
        self._policy = policy
        self._moves = not moves_nothing
        # What the tensors of a slice take is pinned by its operators, beside everything else that is.
        self._slices = SlicedUpdates(
            slice_bytes=self._budget_bytes // 8, whole_bytes=self._budget_bytes // 2, operators=True
        )
        try:
            if recompute is None:
                recompute = self._policy.about.recomputes
            # What is worth moving depends on the budget: a small model under a small one works as a large one does.
            self._least_bytes = min(max(self._budget_bytes // 4096, 4096), 256 << 10)
            self._runtime = Runtime(
                self._backend, self._policy, least_bytes=self._least_bytes, remakes=recompute and not moves_nothing
            )
            # Plans know of the link to host memory only: where that holds less than the device, what is held moves as
            # memory runs out.
            host_bytes = self._backend.figures().get("host_budget_bytes", 0)
            is_planned = self._moves and isinstance(host_bytes, int) and host_bytes >= self._budget_bytes
            self._recorder = Recorder(
                self._backend,
                models,
                optimizers,
                reach=Reach.HELD if is_planned and self._backend.shells is not None else Reach.SAVED,
                least_bytes=self._least_bytes,
                held=self._runtime.held_keys,
            )
            try:
                if self._moves:
                    self._runtime.know_holders([*models, *optimizers])
                    self._runtime.watch_touches(True)
                self._backend.open(budget_bytes=self._budget_bytes, on_pressure=self._runtime.on_pressure)
            except BaseException:
                self._runtime.stop_touches()
                raise
        except BaseException:
            self._backend.close()
            raise
        self._recorded: dict[tuple[int, ...], int] = {}
        self._alert = 1
        self._expected: dict[tuple[int, ...], Expected] = {}
        self._revisions = 0
        self._remake_before_s = 0.0
        self._planned = Taught()
        self._seen: set[int] = set()
        self._trace: Trace | None = None
        self._plan: Plan | None = None
        self._step_stall_s = 0.0
        self._looks: tuple[int, ...] = ()
        self._step_figures: dict[str, object] = {}
        self._static_bytes = self._held_bytes()
        if self._moves:
            if self._backend.shells is not None:
                self._slices.made = self._runtime.adopt_state
            self._slices.on()
        self._opened()

    # ---- the loop ----

    def hooks(self) -> AbstractContextManager[None]:
        return self._runtime.hooks()

    @contextmanager
    def turning_refusals_into_errors(self) -> Iterator[None]:
        refusals = self._backend.refusals
        try:
            yield
        except RuntimeError as error:
            if not may_be_refusal(error):
                raise
            refused, self._runtime.refused_touch = self._runtime.refused_touch, None
            if refused is not None:
                raise located(refused, error, self._recorder.models()) from error
            if self._runtime.failure is not None:  # Ctrl-C while it waited for room, for one
                raise self._runtime.take_failure() from error
            if self._backend.refusals == refusals or not concerns(error, self._backend.device):
                raise
            raise located(self._backend.too_small(), error, self._recorder.models()) from error

    def know(self, optimizer: torch.optim.Optimizer) -> None:
        self._recorder.know(optimizer)
        if self._moves:
            self._runtime.know_holders([optimizer])

    def know_models(self, models: Sequence[torch.nn.Module]) -> None:
        self._recorder.know_models(models)
        if self._moves:
            self._runtime.know_holders(models)

    def _known(self) -> tuple[list[torch.nn.Module], list[torch.optim.Optimizer]]:
        return self._recorder.models(), self._recorder.optimizers()

    @property
    def first_save_s(self) -> float | None:
        return self._runtime.first_save_s

    def begin_step(self) -> None:
        self._inside = True
        self._backend.refresh_static()
        self._static_bytes = self._held_bytes()
        recording = self._alert > 0
        if self._moves:
            pressed = self._under_pressure or self._backend.refusals > 0
            self._runtime.watch_touches(recording or pressed or self._runtime.moves_held)
        self._runtime.begin_step(recording=recording)
        if recording:
            self._recorder.start(static_bytes=self._held_bytes())
        else:
            self._backend.observe(names=self._under_pressure, log=False)
        self._started = time.perf_counter()
        self._before = self._backend.usage()
        self._remake_before_s = self._remake_s()

    def _held_bytes(self) -> int:
        """Return the bytes of all that is alive, wherever it is."""
        usage = self._backend.usage()
        return usage.live_bytes + usage.away_bytes

    def end_step(self) -> None:
        self.finish_step()
        self.learn()

    def finish_step(self) -> None:
        """Do what belongs to a step that went well; it has ended when this returns."""
        self._inside = False
        self._looks = self._runtime.end_ticks()
        try:
            with self.turning_refusals_into_errors():
                self._runtime.end_step()
        except BaseException:
            self._recorder.cancel()
            raise
        finally:
            self._backend.rest()
        self._step_s.append(time.perf_counter() - self._started)
        usage = self._backend.usage()
        self._step_stall_s = usage.stall_s - self._before.stall_s
        self._step_figures = {
            name: value for name, value in self._backend.figures().items() if name.startswith("last_step_")
        }
        if self._runtime.failure is not None:
            self._recorder.cancel()
            raise self._runtime.take_failure()
        self._records.append(self._record(usage))

    def _record(self, usage: Usage) -> StepRecord:
        peak_bytes = self._step_figures.get("last_step_peak_bytes", usage.peak_bytes)
        assert isinstance(peak_bytes, int)
        return StepRecord(
            step=len(self._step_s),
            step_s=self._step_s[-1],
            stall_s=self._step_stall_s,
            recompute_s=self._remake_s() - self._remake_before_s,
            budget_bytes=self._budget_bytes,
            peak_bytes=peak_bytes,
            moved_out_bytes=usage.written_bytes - self._before.written_bytes,
            moved_in_bytes=usage.read_bytes - self._before.read_bytes,
        )

    def abandon_step(self) -> None:
        self._inside = False
        self._runtime.end_ticks()
        self._runtime.abandon_step()
        self._backend.rest()
        self._recorder.cancel()

    def learn(self) -> None:
        """Learn from the step that has ended, and plan the next."""
        matcher = self._runtime.matcher
        followed = matcher.finish()
        signature = tuple(matcher.signature)
        if followed is not None and signature in self._expected:
            self._records[-1] = replace(self._records[-1], planned=True, expected=self._expected[signature])
        self._alert = max(0, self._alert - 1)
        if not signature:  # an evaluation pass: nothing was saved
            self._recorder.cancel()
            if not self._recorded:
                self._alert = max(1, self._alert)
            return
        times_recorded = self._recorded.get(signature, 0)
        if self._recorder.recording:
            recorded = self._recorder.stop(trains_from_s=self.first_save_s)
            # Another kind of step than all before is planned once it repeats; the very first at once.
            repeats = not self._recorded or hash(signature) in self._seen
            if recorded is not None:
                recorded = replace(recorded, looks=self._looks)
                self._trace = recorded.trace
            if recorded is not None and times_recorded < _RECORDINGS and (repeats or followed is not None):
                problem = self._problem(recorded)
                self._follow(Planned(problem=problem, recorded=recorded, plan=self._policy.plan(problem)), signature)
                times_recorded = self._recorded[signature] = times_recorded + 1
        elif followed is not None:
            self._revise(signature)
        self._seen.add(hash(signature))
        if times_recorded == 0:
            self._alert = _ALERT_STEPS
        elif times_recorded < _RECORDINGS:
            self._alert = max(1, self._alert)
        elif followed is not None:
            self._alert = 0

    def _follow(self, planned: Planned, signature: tuple[int, ...]) -> None:
        plan, recorded = planned.plan, planned.recorded
        check_executable(plan, planned.problem)
        self._expected[signature] = Expected(
            unmanaged_s=planned.problem.trace.duration_s,
            planned_s=None if plan.prediction is None else plan.prediction.step_s,
            before_training_s=recorded.before_training_s,
        )
        requests = Requests(plan, recorded, planned_bytes(planned.problem, plan.swaps, plan.recomputes))
        self._plan = requests.as_plan(plan)
        self._runtime.matcher.add(compile_plan(plan, recorded, signature, requests=requests))
        if isinstance(self._policy, Observes):
            self._planned.keep(signature, planned)

    def _revise(self, signature: tuple[int, ...]) -> None:
        """Let a policy that observes planned steps change its plan by the one that has just ended."""
        planned, waits = self._planned.get(signature), self._runtime.waits
        if planned is None or not waits:
            return
        timeline = executed(
            planned,
            list(_in_trace(waits, planned)),
            begun_s=self._started,
            step_s=self._step_s[-1],
            recompute_s=self._remake_s() - self._remake_before_s,
            stall_s=self._step_stall_s,
        )
        taught = self._planned.learn(signature, self._policy, timeline)
        if taught is not None:
            self._revisions += 1
            self._follow(taught, signature)

    def _remake_s(self) -> float:
        return self._runtime.remaker.busy_s if self._runtime.remaker is not None else 0.0

    def _problem(self, recorded: Recorded) -> Problem:
        """Return what a policy has to plan; it may run operators again only where their calls were seen."""
        calls = sum(len(numbers) for numbers in recorded.calls.values())
        return Problem(
            trace=recorded.trace,
            machine=self._machine,
            budget_bytes=self._budget_bytes,
            tier=SPILL,
            can_recompute=calls > 0,
            watch_s=recorded.numbering_s + calls * _REMEMBER_S,
        )

    @property
    def _under_pressure(self) -> bool:
        return self._trace is None or self._trace.peak_bytes > self._budget_bytes

    # ---- answers ----

    def __repr__(self) -> str:
        if self._closed:
            state = "closed"
        else:
            kind = "peak" if self._backend.exact_budget else "advisory peak"
            state = f"{kind} {format_bytes(self._backend.usage().peak_bytes)}, spill to {self._spill_name}"
        steps = f"{self.steps} step{'s' * (self.steps != 1)}"
        return f"<Tide: budget {format_bytes(self._budget_bytes)}, policy {self._policy.name}, {steps}, {state}>"

    def stats(self) -> dict[str, object]:
        usage = self._backend.usage()
        return {
            "budget_bytes": self._budget_bytes,
            "budget_exact": self._backend.exact_budget,
            "over_budget_bytes": self._over_budget_bytes(usage),
            "peak_bytes": usage.peak_bytes,
            "peak_reserved_bytes": usage.peak_reserved_bytes,
            "static_bytes": self._static_bytes,
            "swapped_out_bytes": usage.written_bytes,
            "swapped_in_bytes": usage.read_bytes,
            "stall_s": usage.stall_s,
            "last_step_stall_s": self._step_stall_s,
            "step_s": statistics.median(self._step_s) if self._step_s else 0.0,
            "last_step_s": self._step_s[-1] if self._step_s else 0.0,
            "steps": self.steps,
            **self._slowdown(),
            "policy": self._policy.name,
            "planned_swaps": len(self._plan.swaps) if self._plan is not None else 0,
            "plan_revisions": self._revisions,
            "planned_recomputes": len(self._plan.recomputes) if self._plan is not None else 0,
            **self._runtime.figures(),
            "unmanaged": dict(self._runtime.unmanaged),
            **self._backend.figures(),
            **self._step_figures,  # of the step that ended, not of the one that has begun since
        }

    def _over_budget_bytes(self, usage: Usage) -> int:
        """Return by how much the budget was passed: never, where allocations are refused."""
        return 0 if self._backend.exact_budget else max(0, usage.peak_bytes - self._budget_bytes)

    def trace(self, device: str | None = None) -> Trace:
        self._check_device(device)
        if self._trace is None:
            if self._step_s:
                least = format_bytes(self._least_bytes)
                raise BadArgument(f"no step was recorded: none saved a tensor of {least} or more for backward")
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
        traffic = self._backend.usage().traffic
        if traffic is None:
            return self._machine
        links = {**self._machine.links, SPILL: link_seen(self._machine.links[SPILL], traffic)}
        return replace(self._machine, links=links, source="seen")

    @property
    def device_name(self) -> str:
        """The device's name, as in a budget."""
        return str(self._backend.device)

    @property
    def budget_bytes(self) -> int:
        """The budget."""
        return self._budget_bytes

    @property
    def runtime(self) -> Runtime:
        """What manages saved tensors."""
        return self._runtime

    def _check_device(self, device: str | None) -> None:
        if device not in (None, self.device_name):
            raise BadArgument(f"this tide is on {self.device_name}: there is nothing to tell of {device!r}")

    # ---- the end ----

    def _let_go(self, *, bring_back: bool) -> None:
        self._recorder.cancel()
        self._slices.off()
        try:
            self._runtime.close(bring_back=bring_back)
        finally:
            try:
                self._backend.close(bring_back=bring_back)
            finally:
                self._runtime.stop_touches()


def _in_trace(waits: Iterable[UseWait], planned: Planned) -> Iterator[Wait]:
    """Yield waits by the operators and storages of the trace that was planned."""
    saves, positions = planned.problem.trace.saves, planned.recorded.positions
    for wait in waits:
        # An earlier step's graph numbers its saves otherwise.
        if wait.key < len(saves) and wait.event < len(positions):
            storage, op = saves[wait.key].storage, positions[wait.event]
            yield Wait(storage, op, wait.start_s, wait.end_s, demanded=wait.demanded)
