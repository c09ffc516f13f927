"""Compares everything that knows slow memory in the simulator, and writes a table: python -m benchmarks.slow_memory

A CNN, an RNN and a transformer, fast memory at 20, 40 and 60% of the step's peak. Every plan passes the verifier before
its step is simulated; a slowdown is against all of the step in fast memory. Prices turn that into cost a step.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from lowtide import capture_model, registry
from lowtide.core.machine import Machine
from lowtide.core.plan import Problem
from lowtide.core.trace import Reach, Trace
from lowtide.estimate import machine
from lowtide.plan.policies.deeptm import DeepTm
from lowtide.plan.policy import Policy
from lowtide.plan.verify import replay
from lowtide.simulate import simulate

MODELS = {
    "resnet50": {"batch": 64},
    "seq2seq": {"batch": 64, "tokens": 16},
    "gpt2": {"batch": 8},
}
SHARES = (0.2, 0.4, 0.6)
POLICIES = (
    "auto",
    "deeptm",
    "sentinel",
    "cori",
    "autotm_async",
    "autotm",
    "autotm_static",
    "tahoe",
    "tiertrain",
    "halo",
    "two_level",
    "first_touch",
    "bandwidth_aware",
    "soft2lm",
)
ABLATIONS = {
    "no aggregation": {"aggregates": False},
    "no contiguous migration": {"contiguous": False},
    "neither": {"aggregates": False, "contiguous": False},
    "fixed weights": {"adapts_weights": False},
    "no earned heat": {"earns_heat": False},
    "fixed weights, no earned heat": {"adapts_weights": False, "earns_heat": False},
    "no agent": {"learned": False},
    "no agent, fixed weights": {"learned": False, "adapts_weights": False},
}


# What the constants of slow memory are multiplied by, in turn.
SWEEP = {
    "read_bytes_per_s": (0.5, 2.0),
    "write_bytes_per_s": (0.5, 2.0),
    "mixed_share": (0.7, 1 / 0.7),
    "latency_s": (0.0, 10.0),
    "migration": (0.5, 2.0),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """One step of one model under one policy."""

    model: str
    share: float
    policy: str
    slowdown: float | None
    slow_s: float
    stall_s: float
    moved_bytes: int
    decision_s: float
    note: str


def measured(name: str, policy: Policy, model: str, share: float, problem: Problem) -> Result:
    """Return what a policy makes of a problem; its slowdown is None where it does not keep the budget."""
    begun_s = time.perf_counter()
    plan = policy.plan(problem)
    decision_s = time.perf_counter() - begun_s
    fits = plan.prediction is not None and plan.prediction.peak_bytes <= problem.budget_bytes
    slowdown, slow_s, stall_s, moved = None, 0.0, 0.0, 0
    if fits:
        replay(plan, problem)
        timeline = simulate(problem, plan)
        slowdown = timeline.step_s / problem.trace.duration_s
        slow_s, stall_s = timeline.slow_s, timeline.stall_s
        moved = timeline.moved_in_bytes + timeline.moved_out_bytes
    return Result(
        model=model,
        share=share,
        policy=name,
        slowdown=slowdown,
        slow_s=slow_s,
        stall_s=stall_s,
        moved_bytes=moved,
        decision_s=decision_s,
        note="; ".join(plan.notes),
    )


def table(results: Sequence[Result]) -> str:
    """Return the slowdowns as markdown, one row for each policy."""
    columns = list(dict.fromkeys((result.model, result.share) for result in results))
    lines = ["| policy | " + " | ".join(f"{model} {share:.0%}" for model, share in columns) + " | decides in |"]
    lines.append("|---|" + "---:|" * (len(columns) + 1))
    for policy in dict.fromkeys(result.policy for result in results):
        own = {(result.model, result.share): result for result in results if result.policy == policy}
        cells = [
            "-" if (found := own.get(column)) is None or found.slowdown is None else f"{found.slowdown:.3f}"
            for column in columns
        ]
        slowest = max(result.decision_s for result in own.values())
        lines.append(f"| {policy} | " + " | ".join(cells) + f" | {slowest:.1f} s |")
    return "\n".join(lines)


def cost_table(results: Sequence[Result], traces: dict[str, Trace], *, fast: float, slow: float, compute: float) -> str:
    """Return the cost of a step, against all in fast memory, with prices a GiB of each memory and of all else.

    A machine costs `compute` and its memory; what it costs a step is that times the step's time. Slow memory is bought
    for the whole peak.
    """
    lines = ["| policy | model | fast memory | step | cost of a step |", "|---|---|---:|---:|---:|"]
    for result in results:
        if result.slowdown is None:
            continue
        gib = traces[result.model].peak_bytes / 2**30
        whole = compute + fast * gib
        own = compute + fast * gib * result.share + slow * gib
        cost = result.slowdown * own / whole
        lines.append(
            f"| {result.policy} | {result.model} | {result.share:.0%} | {result.slowdown:.3f} | {cost - 1:+.1%} |"
        )
    return "\n".join(lines)


def varied(target: Machine) -> Iterator[tuple[str, Machine]]:
    """Yield a machine as it is, and with each constant of its slow memory changed alone."""
    yield "as it is", target
    tier, link = next((tier, link) for tier, link in target.links.items() if link.access is not None)
    access = link.access
    assert access is not None
    for name, factors in SWEEP.items():
        for factor in factors:
            if name == "migration":
                rates = {each: factor * getattr(link, each) for each in ("write_bytes_per_s", "read_bytes_per_s")}
                changed = replace(link, **rates)
            else:
                changed = replace(link, access=replace(access, **{name: factor * getattr(access, name)}))
            yield f"{name} x {factor:.2g}", replace(target, links={**target.links, tier: changed})


def sweep(target: Machine, policies: Sequence[str], models: Sequence[str], *, share: float) -> str:
    """Return slowdowns by constant, as markdown."""
    columns = [(model, policy) for model in models for policy in policies]
    lines = ["| | " + " | ".join(f"{model}, {policy}" for model, policy in columns) + " |"]
    lines.append("|---|" + "---:|" * len(columns))
    traces = {
        model: capture_model(model, fake=True, machine=target, reach=Reach.TOUCHED, **MODELS[model]) for model in models
    }
    for name, machine_then in varied(target):
        cells = []
        for model, policy in columns:
            trace = traces[model]
            budget_bytes = int(share * trace.peak_bytes)
            problem = Problem(trace=trace, machine=machine_then, budget_bytes=budget_bytes, can_place=True)
            found = measured(policy, registry.policy(policy), model, share, problem)
            cells.append("-" if found.slowdown is None else f"{found.slowdown:.3f}")
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--machine", default="optane")
    parser.add_argument("--policies", default=",".join(POLICIES))
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--ablations", action="store_true", help="DeepTM with each mechanism switched off in turn")
    parser.add_argument("--json", type=Path, help="append the results here, one a line")
    parser.add_argument("--prices", default="4.0,2.0,100", help="fast and slow memory a GiB, and all else")
    parser.add_argument(
        "--sweep", type=float, metavar="SHARE", help="vary the device's constants at this share instead"
    )
    arguments = parser.parse_args()
    target = machine(arguments.machine)
    if arguments.sweep:
        print(sweep(target, arguments.policies.split(","), arguments.models.split(","), share=arguments.sweep))
        return
    contenders: dict[str, Policy] = {name: registry.policy(name) for name in arguments.policies.split(",") if name}
    if arguments.ablations:
        contenders = {"deeptm": DeepTm(), **{name: DeepTm(**off) for name, off in ABLATIONS.items()}}
    results: list[Result] = []
    traces = {}
    for model in arguments.models.split(","):
        trace = capture_model(model, fake=True, machine=target, reach=Reach.TOUCHED, **MODELS[model])
        traces[model] = trace
        for share in SHARES:
            problem = Problem(trace=trace, machine=target, budget_bytes=int(share * trace.peak_bytes), can_place=True)
            for name, policy in contenders.items():
                results.append(measured(name, policy, model, share, problem))
                told = results[-1]
                print(f"{model} {share:.0%} {name}: {told.slowdown}, {told.decision_s:.2f} s, {told.note}", flush=True)
                if arguments.json is not None:
                    with arguments.json.open("a") as file:
                        file.write(json.dumps(asdict(told)) + "\n")
    fast, slow, compute = map(float, arguments.prices.split(","))
    print(table(results))
    print(cost_table(results, traces, fast=fast, slow=slow, compute=compute))


if __name__ == "__main__":
    main()
