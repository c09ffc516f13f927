"""Many policies at many budgets on many machines: each case settled by itself, in processes of its own."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from lowtide import registry
from lowtide.core import serialize
from lowtide.core.machine import Machine
from lowtide.core.plan import Problem
from lowtide.core.timeline import Lane
from lowtide.core.trace import Trace
from lowtide.errors import BadArgument, BudgetTooSmall, LowtideError
from lowtide.report.case import Settled, problem_of, settle
from lowtide.report.workers import run_all


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One policy, by name, at one budget on one machine, by its position. `detail`: keep its plan and timeline."""

    policy: str
    machine: int
    budget_bytes: int
    detail: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """A step that ran. `infinite_s` is its time with endless memory on the same machine.

    `unplanned_bytes` left because memory ran out although the policy had planned the step: its plan alone did not fit.
    `over_budget`: the policy is a bound that ignores the budget.
    """

    policy: str
    machine: str
    budget_bytes: int
    step_s: float
    infinite_s: float
    compute_s: float
    recompute_s: float
    stall_s: float
    peak_bytes: int
    reserved_peak_bytes: int
    moved_out_bytes: int
    moved_in_bytes: int
    unplanned_bytes: int = 0
    trials: int = 0
    over_budget: bool = False
    notes: tuple[str, ...] = ()

    @property
    def slowdown(self) -> float:
        """The step's time as a multiple of that with endless memory."""
        return self.step_s / self.infinite_s if self.infinite_s else 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Refusal:
    """A step that could not run: `op` alone needs `needed_bytes` (None: another reason, or, if `crashed`, a bug)."""

    policy: str
    machine: str
    budget_bytes: int
    reason: str
    op: str = ""
    needed_bytes: int | None = None
    crashed: bool = False


Result = Outcome | Refusal


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """What every policy does on one trace. `digest` tells whether a trace is the one compared.

    `keep_times`, `can_recompute` and `allocator` are how the steps were simulated, as in `Setting`.
    """

    model: str
    trace_path: str
    digest: str
    operators: int
    static_bytes: int
    peak_bytes: int
    floor_bytes: int
    floor_op: str
    machines: tuple[Machine, ...]
    results: tuple[Result, ...]
    keep_times: bool = False
    can_recompute: bool = True
    allocator: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """What all cases share; sent once to every process.

    `keep_times`: operators take the trace's times on every machine. `allocator`: the model of what is reserved.
    """

    trace: Trace
    machines: tuple[Machine, ...]
    keep_times: bool = False
    can_recompute: bool = True
    allocator: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What became of a case: the result and, where detail was asked for and it ran, the settled step."""

    result: Result
    settled: Settled | None = None


def compare(
    trace: Trace,
    *,
    policies: Sequence[str],
    budgets_bytes: Sequence[int],
    machines: Sequence[Machine],
    jobs: int = 1,
    keep_times: bool = False,
    can_recompute: bool = True,
    allocator: str | None = None,
    trace_path: str = "",
    on_done: Callable[[int, int], None] | None = None,
) -> Comparison:
    """Return what each policy does at each budget on each machine, by machine, budget and policy.

    With `jobs` above 1 cases run in as many processes. `on_done(done, total)` is called after each.
    """
    setting = Setting(
        trace=trace,
        machines=tuple(machines),
        keep_times=keep_times,
        can_recompute=can_recompute,
        allocator=allocator,
    )
    cases = cases_of(policies=policies, budgets_bytes=budgets_bytes, machines=len(machines))
    answers = run_cases(setting, cases, jobs=jobs, on_done=on_done)
    return comparison_of(setting, [answer.result for answer in answers], trace_path=trace_path)


def cases_of(*, policies: Sequence[str], budgets_bytes: Sequence[int], machines: int) -> list[Case]:
    """Return every combination once, by machine, budget and policy."""
    return [
        Case(policy=policy, machine=machine, budget_bytes=budget_bytes)
        for machine in range(machines)
        for budget_bytes in dict.fromkeys(budgets_bytes)
        for policy in dict.fromkeys(policies)
    ]


def run_cases(
    setting: Setting, cases: Sequence[Case], *, jobs: int, on_done: Callable[[int, int], None] | None = None
) -> list[Answer]:
    """Return the answers to the cases, in their order; raise `BadArgument` where a machine cannot be used at all."""
    if jobs < 1:
        raise BadArgument(f"{jobs} jobs are too few: pass 1 or more")
    solver = Solver(setting)
    for machine in {case.machine for case in cases}:
        solver.check(machine)
    return run_all(Solver(setting), cases, jobs=min(jobs, max(1, len(cases))), on_done=on_done)


def comparison_of(setting: Setting, results: Sequence[Result], *, trace_path: str) -> Comparison:
    """Return the results with what they are about."""
    trace = setting.trace
    floor_op = trace.floor_op()
    return Comparison(
        model=trace.model,
        trace_path=trace_path,
        digest=digest_of(trace),
        operators=len(trace.ops),
        static_bytes=trace.static_bytes,
        peak_bytes=trace.peak_bytes,
        floor_bytes=trace.floor_bytes(),
        floor_op="" if floor_op is None else floor_op.name,
        machines=setting.machines,
        results=tuple(results),
        keep_times=setting.keep_times,
        can_recompute=setting.can_recompute,
        allocator=setting.allocator,
    )


def digest_of(trace: Trace) -> str:
    """Return what tells one trace from another."""
    return hashlib.sha256(serialize.dumps(trace)).hexdigest()


class Solver:
    """Answers cases of one setting; the operator times on each machine are worked out once."""

    def __init__(self, setting: Setting) -> None:
        self._setting = setting
        self._problems: dict[int, Problem] = {}

    def __call__(self, case: Case) -> Answer:
        """Return the result of a case; a policy that fails has that as its result, and the comparison goes on."""
        machine = self._setting.machines[case.machine].name
        try:
            problem = replace(self._problem(case.machine), budget_bytes=case.budget_bytes)
            settled = settle(problem, registry.policy(case.policy), allocator=self._setting.allocator)
        except BudgetTooSmall as error:
            return Answer(result=_too_small(case, machine, error, self._setting.trace))
        except LowtideError as error:
            return Answer(result=_refusal(case, machine, str(error)))
        except Exception as error:  # noqa: BLE001 - a third-party policy may raise anything
            reason = f"{type(error).__name__}: {error}".strip()
            return Answer(result=replace(_refusal(case, machine, reason), crashed=True))
        # The name it was selected by: what a policy calls itself in its plans may be another.
        settled = replace(settled, timeline=replace(settled.timeline, policy=case.policy))
        return Answer(result=outcome_of(settled, problem), settled=settled if case.detail else None)

    def check(self, machine: int) -> None:
        """Raise `BadArgument` if the trace cannot be timed on a machine."""
        self._problem(machine)

    def _problem(self, machine: int) -> Problem:
        if machine not in self._problems:
            setting = self._setting
            self._problems[machine] = problem_of(
                setting.trace,
                setting.machines[machine],
                budget_bytes=0,
                keep_times=setting.keep_times,
                can_recompute=setting.can_recompute,
            )
        return self._problems[machine]


def outcome_of(settled: Settled, problem: Problem) -> Outcome:
    """Return the figures of a settled step."""
    timeline = settled.timeline
    planned = settled.plan.prediction is not None
    return Outcome(
        policy=timeline.policy,
        machine=problem.machine.name,
        budget_bytes=problem.budget_bytes,
        step_s=timeline.step_s,
        infinite_s=problem.trace.duration_s,
        compute_s=timeline.compute_s,
        recompute_s=timeline.recompute_s,
        stall_s=timeline.stall_s,
        peak_bytes=timeline.peak_bytes,
        reserved_peak_bytes=timeline.reserved_peak_bytes,
        moved_out_bytes=timeline.moved_out_bytes,
        moved_in_bytes=timeline.moved_in_bytes,
        unplanned_bytes=sum(
            span.nbytes for span in timeline.spans if planned and span.lane is Lane.OUT and span.cause == "pressure"
        ),
        trials=timeline.trials,
        over_budget=settled.bound,
        notes=timeline.notes,
    )


def _refusal(case: Case, machine: str, reason: str) -> Refusal:
    return Refusal(policy=case.policy, machine=machine, budget_bytes=case.budget_bytes, reason=" ".join(reason.split()))


def _too_small(case: Case, machine: str, error: BudgetTooSmall, trace: Trace) -> Refusal:
    """Return where the step stopped, or, if no policy could finish it, what the most demanding operator needs."""
    op, needed_bytes, floor_op = error.op, error.needed_bytes, trace.floor_op()
    if case.budget_bytes < trace.floor_bytes() and floor_op is not None:
        op, needed_bytes = floor_op.name, trace.floor_bytes()
    return replace(_refusal(case, machine, str(error)), op=op, needed_bytes=needed_bytes)
