"""`auto` is held against the optimum of the joint problem: swap, encode and recompute together, solved by HiGHS."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import Phase, assume, given, settings
from hypothesis import strategies as st

from lowtide.core.machine import Link
from lowtide.core.plan import IDENTITY, CodecCost, Problem
from lowtide.core.trace import Kind, Save, Storage, Trace
from lowtide.core.trace import Phase as StepPhase
from lowtide.errors import BadArgument
from lowtide.plan.auto.exact import MOST_GAPS, solve
from lowtide.plan.costs.lower_bound import least_step_s
from lowtide.plan.policies.auto import Auto
from lowtide.testing.optimum import optimum
from lowtide.testing.shapes import resnet_trace, transformer_trace, unet_trace
from lowtide.testing.traces import Step, chain_trace, machine_of, make_trace, training_trace
from tests.plan.policies.recomputing import problem_of

WITHIN = 1.02
HALF = CodecCost(name="half", encode_bytes_per_s=20e9, decode_bytes_per_s=20e9, ratio=0.5)


def problem_on(trace: Trace, bytes_per_s: float, share: float, *codecs: CodecCost, duplex: bool = False) -> Problem:
    link = Link(write_bytes_per_s=bytes_per_s, read_bytes_per_s=bytes_per_s, duplex=duplex)
    return replace(problem_of(trace, share), machine=machine_of(link), codecs=(IDENTITY, *codecs))


def auto_s(problem: Problem) -> float:
    plan = Auto().plan(problem)
    assert plan.prediction is not None
    assert plan.prediction.peak_bytes <= problem.budget_bytes
    return plan.prediction.step_s


@pytest.mark.parametrize("bytes_per_s", [1e8, 1e9, 5e9])
@pytest.mark.parametrize("share", [0.3, 0.6])
def test_no_plan_of_all_is_faster_than_the_programme_says(bytes_per_s: float, share: float) -> None:
    """Every plan of a tiny step tried: the programme's optimum is below, and not far below."""
    problem = problem_on(chain_trace(3), bytes_per_s, share)
    best, found = optimum(problem), solve(problem)
    assert best is not None
    assert found is not None
    assert found.least_step_s <= best.prediction.step_s * (1 + 1e-6)
    assert best.prediction.step_s <= WITHIN * found.least_step_s
    assert least_step_s(problem) <= found.least_step_s * (1 + 1e-6), "the bound for large steps is below both"


@pytest.mark.parametrize(
    ("trace", "bytes_per_s", "share"),
    [
        (chain_trace(8), 1e8, 0.3),
        (chain_trace(8), 1e8, 0.6),
        (unet_trace(2), 1e8, 0.6),
        (resnet_trace(2), 1e8, 0.6),
        (transformer_trace(1), 1e8, 0.6),
        (transformer_trace(1), 1e8, 0.3),
    ],
    ids=lambda value: value.model if isinstance(value, Trace) else str(value),
)
def test_auto_is_within_two_percent_of_the_optimum(trace: Trace, bytes_per_s: float, share: float) -> None:
    problem = problem_on(trace, bytes_per_s, share, HALF)
    found = solve(problem)
    assert found is not None
    assert found.gap <= 0.01
    assert "HiGHS" in found.solver
    assert found.seconds > 0
    assert found.solver in found.told()
    ours = auto_s(problem)
    assert found.least_step_s * (1 - 1e-6) <= ours <= WITHIN * found.least_step_s


@st.composite
def small_steps(draw: st.DrawFn) -> Problem:
    """Return a chain of layers of any size and time.

    Without connections that skip layers: of a chain of operators that run again, the programme does not count all that
    is held at once, so that its optimum need not be a plan there.
    """
    layers = draw(st.integers(3, 7))
    last = 2 * layers - 1
    sizes = [draw(st.integers(1, 4)) << 18 for _ in range(layers)]
    times_s = [draw(st.integers(2, 20)) * 1e-4 for _ in range(layers)]
    storages, saves, forward, backward = [], [], [], []
    for k in range(layers):
        back, free = last - k, k + 2
        storages.append(Storage(nbytes=sizes[k], kind=Kind.ACTIVATION, first_op=k, last_op=back, producer=k))
        saves.append(Save(storage=k, packed_op=k, free_op=min(free, back), uses=(back,), released_op=back))
        reads = (k - 1,) if k else ()
        forward.append(Step(name=f"layer{k}", phase=StepPhase.FORWARD, duration_s=times_s[k], reads=reads, writes=(k,)))
        backward.append(
            Step(name=f"layer{k}.backward", phase=StepPhase.BACKWARD, duration_s=2 * times_s[k], reads=(k,))
        )
    trace = make_trace([*forward, *reversed(backward)], storages, saves)
    return problem_on(
        trace,
        draw(st.sampled_from([2e8, 5e8, 1e9, 3e9])),
        draw(st.floats(0.15, 0.9)),
        *((HALF,) if draw(st.booleans()) else ()),
        duplex=draw(st.booleans()),
    )


@given(problem=small_steps())
@settings(max_examples=25, deadline=None, phases=[Phase.generate], derandomize=True)
def test_auto_is_within_two_percent_of_the_optimum_of_random_steps(problem: Problem) -> None:
    assume(problem.budget_bytes >= problem.trace.floor_bytes())
    found = solve(problem)
    assert found is not None
    ours = auto_s(problem)
    assert found.least_step_s * (1 - 1e-6) <= ours <= WITHIN * found.least_step_s


def test_steps_that_are_too_long_or_follow_each_other_are_refused() -> None:
    with pytest.raises(BadArgument, match=f"too many for the programme, which takes {MOST_GAPS}"):
        solve(problem_on(chain_trace(40), 1e9, 0.5))
    with pytest.raises(BadArgument, match="follow each other"):
        solve(problem_on(training_trace(2), 1e9, 0.5))
