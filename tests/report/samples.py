"""What the tests of reports share: a recorded step, a slow link, and a comparison with its steps in detail."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path

from lowtide.core.machine import Link
from lowtide.core.serialize import load_trace
from lowtide.core.trace import Trace
from lowtide.report import Comparison, Focus, budget_of, problem_of
from lowtide.report.compare import Setting, cases_of, comparison_of, run_cases
from lowtide.testing.traces import machine_of

DATA = Path(__file__).parent.parent / "data"
# Slow enough for the step of the recorded VGG to stall under most policies.
MACHINE = machine_of(Link(write_bytes_per_s=5e7, read_bytes_per_s=5e7, write_latency_s=1e-4, read_latency_s=1e-4))
POLICIES = ("auto", "swap_all", "vdnn", "lru", "dtr", "keep_all", "infinite_memory")


@cache
def vgg() -> Trace:
    return replace(load_trace(DATA / "vgg.trace"), model="vgg")


def share(trace: Trace, text: str) -> int:
    return budget_of(text, static_bytes=trace.static_bytes, peak_bytes=trace.peak_bytes)


@cache
def sample() -> tuple[Comparison, Focus]:
    """Return several policies at two budgets on the recorded VGG, the smaller one in detail."""
    trace = vgg()
    setting = Setting(trace=trace, machines=(MACHINE,))
    small, large = share(trace, "70%"), share(trace, "85%")
    cases = [
        replace(case, detail=case.budget_bytes == small)
        for case in cases_of(policies=POLICIES, budgets_bytes=[small, large], machines=1)
    ]
    answers = run_cases(setting, cases, jobs=1)
    steps = tuple(answer.settled for answer in answers if answer.settled is not None)
    comparison = comparison_of(setting, [answer.result for answer in answers], trace_path="vgg.trace")
    return comparison, Focus(problem=problem_of(trace, MACHINE, budget_bytes=small), steps=steps)
