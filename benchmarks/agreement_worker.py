"""Train one case of `benchmarks/agreement.py`, simulate it, and print both as JSON."""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import Any

import lowtide
from benchmarks.agreement import MODELS, Case
from lowtide import registry, zoo
from lowtide.capture.builder import Recorded
from lowtide.capture.recorder import Recorder
from lowtide.core.plan import Problem
from lowtide.core.trace import Kind
from lowtide.errors import LowtideError
from lowtide.estimate.calibrate import SPILL
from lowtide.estimate.predict import with_durations
from lowtide.estimate.traffic import Traffic, link_seen
from lowtide.execute.tide import feedback
from lowtide.execute.tide.cpu import CpuTide
from lowtide.simulate import simulate

_STATE = (Kind.PARAM, Kind.GRAD, Kind.OPTIMIZER)


def main() -> None:
    """Read a case from standard input, write what was measured to standard output."""
    case = Case(**json.load(sys.stdin))
    try:
        print(json.dumps(_measure(case)))
    except LowtideError as error:
        print(json.dumps({"failure": f"{type(error).__name__}: {error}"}))


def _measure(case: Case) -> dict[str, Any]:
    import torch

    torch.manual_seed(0)
    training = zoo.build(case.model.removesuffix("_state"), **MODELS[case.model]).training()
    budget_bytes = 1 << 40
    if case.share is not None:
        budget_bytes = round(case.floor_bytes + case.share * (case.peak_bytes - case.floor_bytes))
    recordings = _kept_recordings()
    measured: list[dict[str, Any]] = []
    carried: list[Traffic] = []
    with lowtide.fit(
        training.model, training.optimizer, budget=budget_bytes, spill=case.spill, policy=case.policy
    ) as tide:
        assert isinstance(tide, CpuTide)
        for index in range(case.warmup_steps + 2 * case.steps):
            planned, recorded = index >= case.warmup_steps, index % 2 == 0
            if planned and recorded:
                tide._learning._alert = 1  # records this step; the plan stays as it is
            if index == case.warmup_steps:
                feedback._MOST_LESSONS = 0  # Capuchin has changed its plan by its waits: now it is settled
            before, traffic = tide.stats(), tide.traffic()
            with tide.step():
                training.step()
            stats = tide.stats()
            if planned and recorded:
                carried.append(tide.traffic().plus(traffic, times=-1))
            elif planned:
                since = ("recompute_s", "swapped_out_bytes")
                measured.append({**stats, **{name: stats[name] - before[name] for name in since}})  # type: ignore[operator]
        if case.share is None:
            return {"floor_bytes": tide.trace().floor_bytes(), "peak_bytes": measured[-1]["last_step_peak_bytes"]}
        plan, problem = tide.plan(), tide._problem
    assert plan is not None, "eight steps are enough for a plan"
    assert problem is not None, "a plan answers a problem"
    problems = _as_recorded(problem, list(zip(recordings[-case.steps :], carried, strict=True)))
    policy = registry.policy(case.policy)
    timelines = [simulate(one, plan, policy=policy) for one in problems]
    simulated_s = statistics.median(one.step_s for one in timelines)
    simulated_peak_bytes = max(one.peak_bytes for one in timelines)
    times_s = [one["last_step_s"] for one in measured]
    measured_s = statistics.median(times_s)
    peak_bytes = max(one["last_step_peak_bytes"] for one in measured)
    moved = [problem.trace.storages[swap.gap.storage] for swap in plan.swaps]
    moved_bytes = sum(one.nbytes for one in moved)
    state_bytes = sum(one.nbytes for one in moved if one.kind in _STATE)
    return {
        "budget_bytes": budget_bytes,
        "peak_bytes": peak_bytes,
        "simulated_peak_bytes": simulated_peak_bytes,
        "peak_ratio": simulated_peak_bytes / peak_bytes,
        "links": [asdict(one.machine.links[SPILL]) for one in problems],
        "measured_s": measured_s,
        "steps_s": times_s,
        "simulated_s": simulated_s,
        "simulated_steps_s": [one.step_s for one in timelines],
        "time_ratio": simulated_s / measured_s,
        "compute_s": statistics.median(one.compute_s for one in timelines),
        "stall_s": statistics.median(one.stall_s for one in timelines),
        "measured_stall_s": statistics.median(one["last_step_stall_s"] for one in measured),
        "state_share": state_bytes / max(1, moved_bytes),
        "moved_out_bytes": timelines[0].moved_out_bytes,
        "measured_out_bytes": statistics.median(one["swapped_out_bytes"] for one in measured),
        "recompute_s": statistics.median(one.recompute_s for one in timelines),
        "measured_recompute_s": statistics.median(one["recompute_s"] for one in measured),
    }


def _kept_recordings() -> list[Recorded]:
    """Return a list that every recording of this process will be added to."""
    kept: list[Recorded] = []
    stop = Recorder.stop

    def keep(self: Recorder) -> Recorded | None:
        recorded = stop(self)
        if recorded is not None:
            kept.append(recorded)
        return recorded

    Recorder.stop = keep  # type: ignore[method-assign]
    return kept


def _as_recorded(planned: Problem, steps: Sequence[tuple[Recorded, Traffic]]) -> list[Problem]:
    """Return the problem that was planned, once for each recording of the same operators, as that step found it.

    Not one problem with the median of every operator: where each step is disturbed at some operator or other, the
    medians add up to less than any of the steps.
    """
    names = [op.name for op in planned.trace.ops]
    problems = []
    for one, traffic in steps:
        if [op.name for op in one.trace.ops] == names:
            trace = with_durations(planned.trace, lambda index, _op, ops=one.trace.ops: ops[index].duration_s)
            links = {SPILL: link_seen(planned.machine.links[SPILL], traffic)}
            problems.append(replace(planned, trace=trace, machine=replace(planned.machine, links=links)))
    return problems


if __name__ == "__main__":
    main()
