"""Train one case of `benchmarks/agreement.py`, simulate it, and print both as JSON."""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import lowtide
import lowtide.execute.device_tide as runtime
from benchmarks.agreement import MODELS, Case
from lowtide import registry, zoo
from lowtide.capture.builder import Recorded
from lowtide.core.plan import Problem
from lowtide.errors import LowtideError
from lowtide.estimate.predict import with_durations
from lowtide.execute.recorder import Recorder
from lowtide.simulate import simulate


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
    training = zoo.build(case.model, **MODELS[case.model]).training()
    budget_bytes = 1 << 40
    if case.share is not None:
        budget_bytes = round(case.floor_bytes + case.share * (case.peak_bytes - case.floor_bytes))
    recordings = _kept_recordings()
    measured: list[dict[str, Any]] = []
    with lowtide.fit(
        training.model, training.optimizer, budget=budget_bytes, spill=case.spill, policy=case.policy
    ) as tide:
        for index in range(case.warmup_steps + 2 * case.steps):
            planned, recorded = index >= case.warmup_steps, index % 2 == 0
            if planned and recorded:
                tide._alert = 1  # records this step; the plan stays as it is
            if index == case.warmup_steps:
                runtime._MOST_LESSONS = 0  # Capuchin has changed its plan by its waits: now it is settled
            before: dict[str, Any] = tide.stats()
            with tide.step():
                training.step()
            stats: dict[str, Any] = tide.stats()
            if planned and not recorded:
                measured.append({**stats, "recompute_s": stats["recompute_s"] - before["recompute_s"]})
        if case.share is None:
            return {"floor_bytes": tide.trace().floor_bytes(), "peak_bytes": measured[-1]["last_step_peak_bytes"]}
        plan = tide.plan()
        made_from = next(one for one in recordings if one.trace is tide.trace())
        problem = _typical(tide._problem(made_from), [tide._problem(one) for one in recordings[-case.steps :]])
    policy = registry.policy(case.policy)
    timeline = simulate(problem, plan, policy=policy)
    times_s = [one["last_step_s"] for one in measured]
    measured_s = statistics.median(times_s)
    peak_bytes = max(one["last_step_peak_bytes"] for one in measured)
    return {
        "budget_bytes": budget_bytes,
        "peak_bytes": peak_bytes,
        "simulated_peak_bytes": timeline.peak_bytes,
        "peak_ratio": timeline.peak_bytes / peak_bytes,
        "measured_s": measured_s,
        "steps_s": times_s,
        "simulated_s": timeline.step_s,
        "time_ratio": timeline.step_s / measured_s,
        "compute_s": timeline.compute_s,
        "stall_s": timeline.stall_s,
        "measured_stall_s": statistics.median(one["last_step_stall_s"] for one in measured),
        "moved_out_bytes": timeline.moved_out_bytes,
        "recompute_s": timeline.recompute_s,
        "measured_recompute_s": statistics.median(one["recompute_s"] for one in measured),
    }


def _kept_recordings() -> list[Recorded]:
    """Return a list that every recording of this process will be added to."""
    kept: list[Recorded] = []
    stop = Recorder.stop

    def keep(recorder: Recorder, *, gradients: Iterable[int] = ()) -> Recorded | None:
        recorded = stop(recorder, gradients=gradients)
        if recorded is not None:
            kept.append(recorded)
        return recorded

    Recorder.stop = keep  # type: ignore[method-assign]
    return kept


def _typical(planned: Problem, problems: Sequence[Problem]) -> Problem:
    """Return the problem that was planned, with the medians of several recordings as every operator's times."""
    names = [op.name for op in planned.trace.ops]
    alike = [one.trace for one in (planned, *problems) if [op.name for op in one.trace.ops] == names]
    times_s = [[one.ops[index].duration_s for one in alike] for index in range(len(names))]
    trace = with_durations(planned.trace, lambda index, _op: statistics.median(times_s[index]))
    return replace(planned, trace=trace, watch_s=statistics.median(one.watch_s for one in problems))


if __name__ == "__main__":
    main()
