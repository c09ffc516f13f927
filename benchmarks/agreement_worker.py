"""Train one case of `benchmarks/agreement.py`, simulate it, and print both as JSON."""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Sequence
from typing import Any

import lowtide
import lowtide.execute.tide as runtime
from benchmarks.agreement import MODELS, RECORDINGS, Case
from lowtide import registry, zoo
from lowtide.core.plan import Problem
from lowtide.core.trace import Trace
from lowtide.errors import LowtideError
from lowtide.estimate.predict import with_durations
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
    runtime._RECORDINGS = RECORDINGS  # more than usual: operator times are medians
    times_s, peaks, recompute_s, before_s, traces = [], [], [], 0.0, []
    with lowtide.fit(
        training.model, training.optimizer, budget=budget_bytes, spill=case.spill, policy=case.policy
    ) as tide:
        for _ in range(case.steps):
            with tide.step():
                training.step()
            stats: dict[str, Any] = tide.stats()
            times_s.append(stats["last_step_s"])
            peaks.append(stats["last_step_peak_bytes"])
            recompute_s.append(stats["recompute_s"] - before_s)
            before_s = stats["recompute_s"]
            traces.append(tide.trace())
        if case.share is None:
            return {"floor_bytes": tide.trace().floor_bytes(), "peak_bytes": peaks[-1]}
        trace, plan, machine = _typical(traces[1:RECORDINGS]), tide.plan(), tide.machine
    policy = registry.policy(case.policy)
    problem = Problem(
        trace=trace, machine=machine, budget_bytes=budget_bytes, can_recompute=bool(plan and plan.recomputes)
    )
    timeline = simulate(problem, plan, policy=policy)
    measured_s = statistics.median(times_s[case.warmup_steps :])
    peak_bytes = max(peaks[case.warmup_steps :])
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
        "measured_stall_s": stats["last_step_stall_s"],
        "moved_out_bytes": timeline.moved_out_bytes,
        "recompute_s": timeline.recompute_s,
        "measured_recompute_s": statistics.median(recompute_s[case.warmup_steps :]),
    }


def _typical(traces: Sequence[Trace]) -> Trace:
    """Return the last of several recordings of one step, with the median of every operator's times."""
    last = traces[-1]
    alike = [one for one in traces if len(one.ops) == len(last.ops)]
    times_s = [[one.ops[index].duration_s for one in alike] for index in range(len(last.ops))]
    return with_durations(last, lambda index, _op: statistics.median(times_s[index]))


if __name__ == "__main__":
    main()
