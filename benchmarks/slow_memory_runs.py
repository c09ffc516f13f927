"""Trains on slow memory for real, imitated where there is none: python -m benchmarks.slow_memory_runs

A CNN, an RNN and a transformer, fast memory at 20, 40 and 60% of the step's peak. Each round runs every contender once,
one after the other, each in a fresh process; a cell is the median over rounds of its median step against that of stock
PyTorch in the same round. Every contender's parameters have to be those of stock, bit for bit. `--sweep` varies the
constants of the imitation instead.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any

MODELS: dict[str, dict[str, Any]] = {
    "resnet18": {"batch": 8, "image": 64},
    "seq2seq": {"batch": 32, "width": 256, "vocab": 4000, "tokens": 8},
    "gpt": {"batch": 4, "layers": 4, "width": 256, "heads": 4, "tokens": 128, "vocab": 8000},
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
    "soft2lm",
    "two_level",
    "first_touch",
)
# Constants that are multiplied, in turn; the cache is stated.
SWEEP: dict[str, tuple[float, ...]] = {
    "read": (0.5, 2.0),
    "write": (0.5, 2.0),
    "mixed": (0.7, 1.4),
    "latency": (0.0, 10.0),
    "migration": (0.5, 2.0),
    "cache": (8.0, 32.0),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One training. `share` None: stock PyTorch, or, to learn its peak, everything in fast memory (`budget_bytes`).

    `scale` is how much faster this machine's memory is than that of the machine that is imitated. `changed` is a
    constant of the imitation, and its factor; of the cache, its MiB.
    """

    model: str
    policy: str = ""
    budget_bytes: int = 0
    steps: int
    warmup: int
    machine: str = "optane"
    scale: float = 0.0
    threads: int = 0
    spill: str = ""
    changed: tuple[str, float] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What a training took and computed."""

    step_s: float
    digest: str
    peak_bytes: int = 0
    decision_s: float = 0.0
    predicted_s: float = 0.0
    recorded_s: float = 0.0
    stats: dict[str, Any] | None = None
    failure: str = ""


# ---- one training ----


def work(job: Job) -> Answer:
    """Train in this process."""
    import torch

    import lowtide
    from lowtide import registry, zoo

    if job.threads:
        torch.set_num_threads(job.threads)
    torch.manual_seed(0)
    workload = zoo.build(job.model, **MODELS[job.model])
    training = workload.training()
    if not job.policy:
        step_s = _steps(job, training.step, nullcontext)
        return Answer(step_s=step_s, digest=_digest(workload.model))
    policy, decisions = registry.policy(job.policy), [0.0]
    plan = policy.plan

    def timed(problem: Any) -> Any:
        begun_s = time.perf_counter()
        try:
            return plan(problem)
        finally:
            decisions.append(time.perf_counter() - begun_s)

    policy.plan = timed  # type: ignore[method-assign]
    slow = slow_memory(job) if job.scale else None
    with lowtide.fit(
        workload.model,
        training.optimizer,
        budget=job.budget_bytes,
        spill=job.spill,
        slow=slow,
        policy=policy,
    ) as tide:
        step_s = _steps(job, training.step, tide.step)
        stats, found, trace = dict(tide.stats()), tide.plan(), tide.trace()
    assert int(str(stats["peak_reserved_bytes"])) <= job.budget_bytes
    predicted = found.prediction.step_s if found is not None and found.prediction is not None else 0.0
    return Answer(
        step_s=step_s,
        digest=_digest(workload.model),
        peak_bytes=trace.peak_bytes,
        decision_s=max(decisions),
        predicted_s=predicted,
        recorded_s=trace.duration_s,
        stats=json.loads(json.dumps(stats, default=str)),
    )


def slow_memory(job: Job) -> Any:
    """Return the slow memory that a job imitates."""
    from lowtide.estimate import machine
    from lowtide.tiers.slow import Emulation, open_slow

    medium = open_slow(f"cxl:?emulate={job.machine}")
    imitated, cache_bytes = machine(job.machine), 0
    if job.changed is not None:
        what, factor = job.changed
        tier, link = next((name, link) for name, link in imitated.links.items() if link.access is not None)
        access = link.access
        assert access is not None
        if what == "cache":
            cache_bytes = int(factor * 2**20)
        elif what == "migration":
            link = replace(
                link,
                write_bytes_per_s=factor * link.write_bytes_per_s,
                read_bytes_per_s=factor * link.read_bytes_per_s,
            )
        else:
            name = {"read": "read_bytes_per_s", "write": "write_bytes_per_s", "mixed": "mixed_share"}.get(
                what, "latency_s"
            )
            value = factor * getattr(access, name)
            access = replace(access, **{name: min(value, 1.0) if what == "mixed" else value})
        imitated = replace(imitated, links={tier: replace(link, access=access)})
    medium.emulation = Emulation(machine=imitated, scale=job.scale, cache_bytes=cache_bytes)
    return medium


def _steps(job: Job, step: Callable[[], None], inside: Callable[[], AbstractContextManager[Any]]) -> float:
    times_s = []
    for _ in range(job.warmup + job.steps):
        begun_s = time.perf_counter()
        with inside():
            step()
        times_s.append(time.perf_counter() - begun_s)
    return statistics.median(times_s[job.warmup :])


def _digest(model: Any) -> str:
    found = hashlib.sha256()
    for parameter in model.parameters():
        found.update(parameter.detach().numpy().tobytes())
    return found.hexdigest()


def launch(job: Job) -> Answer:
    """Train in a process of its own."""
    command = [sys.executable, "-m", "benchmarks.slow_memory_runs", "--job", json.dumps(asdict(job))]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        lines = done.stderr.strip().splitlines()
        return Answer(step_s=0.0, digest="", failure=lines[-1] if lines else f"exit code {done.returncode}")
    return Answer(**json.loads(done.stdout.splitlines()[-1]))


# ---- rounds ----


def jobs_of(model: str, peak_bytes: int, common: Job, options: argparse.Namespace) -> Iterator[tuple[str, Job]]:
    """Yield the contenders of a model by their names; a column is after the slash."""
    for share in map(float, options.shares.split(",")):
        budget_bytes = int(share * peak_bytes)
        for policy in options.policies.split(","):
            one = replace(common, model=model, policy=policy, budget_bytes=budget_bytes)
            if not options.sweep:
                yield f"{policy}/{share:.0%}", one
                continue
            yield f"{policy}, as it is/{share:.0%}", one
            for what, factors in SWEEP.items():
                for factor in factors:
                    unit = " MiB" if what == "cache" else " times"
                    yield f"{policy}, {what} {factor:g}{unit}/{share:.0%}", replace(one, changed=(what, factor))


def measure(options: argparse.Namespace, spill: str) -> list[dict[str, Any]]:
    """Run all rounds and return one row for each contender."""
    from lowtide.estimate import machine
    from lowtide.estimate.calibrate import measure_memory_bytes_per_s

    fast = machine(options.machine).memory_bytes_per_s
    assert fast is not None
    common = Job(
        model="",
        steps=options.steps,
        warmup=options.warmup,
        machine=options.machine,
        scale=options.scale or measure_memory_bytes_per_s() / fast,
        threads=options.threads,
        spill=spill,
    )
    print(f"scale {common.scale:.4f}", file=sys.stderr)
    peaks, contenders = {}, {}
    for model in options.models.split(","):
        unpressed = launch(replace(common, model=model, policy="keep_all", budget_bytes=1 << 36, scale=0.0))
        if unpressed.failure:
            raise SystemExit(f"{model}: {unpressed.failure}")
        peaks[model] = unpressed.peak_bytes
        contenders[model] = dict(jobs_of(model, unpressed.peak_bytes, common, options))
    found: dict[tuple[str, str], list[tuple[float, Answer]]] = {}
    begun_s = time.monotonic()
    for number, model in product(range(options.rounds), contenders):
        base = launch(replace(common, model=model))
        for name, job in contenders[model].items():
            if options.seconds and time.monotonic() - begun_s > options.seconds:
                break
            answer = launch(job)
            found.setdefault((model, name), []).append((base.step_s, answer))
            same = "" if answer.digest == base.digest else "  NOT THE SAME BITS"
            told = answer.failure or f"{answer.step_s / base.step_s:.3f}{same}"
            print(f"{model} round {number} {name}: {told}", file=sys.stderr, flush=True)
            if same and not answer.failure:
                raise SystemExit(f"{model} {name} computed something else than stock")
    return [_row(model, name, answers, peaks[model]) for (model, name), answers in found.items()]


def _row(model: str, name: str, answers: Sequence[tuple[float, Answer]], peak_bytes: int) -> dict[str, Any]:
    contender, _, share = name.partition("/")
    row: dict[str, Any] = {"model": model, "contender": contender, "share": share, "peak_bytes": peak_bytes}
    failed = [answer.failure for _, answer in answers if answer.failure]
    if failed:
        return row | {"failure": failed[0]}
    last = answers[-1][1]
    return row | {
        "rounds": len(answers),
        "slowdown": statistics.median(answer.step_s / stock_s for stock_s, answer in answers),
        "step_s": statistics.median(answer.step_s for _, answer in answers),
        "stock_s": statistics.median(stock_s for stock_s, _ in answers),
        "decision_s": statistics.median(answer.decision_s for _, answer in answers),
        "predicted": last.predicted_s / last.recorded_s if last.recorded_s else 0.0,
        "stats": last.stats,
    }


# ---- tables ----


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Return slowdowns as markdown: measured, and in brackets what the planner had predicted."""
    columns = list(dict.fromkeys((row["model"], row["share"]) for row in rows))
    lines = ["| | " + " | ".join(f"{model} {share}" for model, share in columns) + " | decides in |"]
    lines.append("|---|" + "---:|" * (len(columns) + 1))
    for contender in dict.fromkeys(row["contender"] for row in rows):
        own = {(row["model"], row["share"]): row for row in rows if row["contender"] == contender}
        cells = [
            "-"
            if at not in own
            else "failed"
            if "failure" in own[at]
            else f"{own[at]['slowdown']:.3f} ({own[at]['predicted']:.3f})"
            for at in columns
        ]
        decided = max((row["decision_s"] for row in own.values() if "decision_s" in row), default=0.0)
        lines.append(f"| {contender} | " + " | ".join(cells) + f" | {decided:.1f} s |")
    failures = [
        f"{row['contender']} {row['model']} {row['share']}: {row['failure']}" for row in rows if "failure" in row
    ]
    return "\n".join([*lines, "", *failures])


def cost_table(rows: Sequence[dict[str, Any]], *, fast: float, slow: float, rest: float) -> str:
    """Return what a step costs against the machine with all of the peak in fast memory; prices a GiB, and all else."""
    columns = list(dict.fromkeys((row["model"], row["share"]) for row in rows))
    lines = ["| | " + " | ".join(f"{model} {share}" for model, share in columns) + " |"]
    lines.append("|---|" + "---:|" * len(columns))
    for contender in dict.fromkeys(row["contender"] for row in rows):
        own_rows = {(row["model"], row["share"]): row for row in rows if row["contender"] == contender}
        cells = []
        for row in (own_rows.get(at, {}) for at in columns):
            if "slowdown" not in row:
                cells.append("failed" if row else "-")
                continue
            gib, share = row["peak_bytes"] / 2**30, float(row["share"].rstrip("%")) / 100
            own = rest + fast * gib * share + slow * gib
            cells.append(f"{row['slowdown'] * own / (rest + fast * gib) - 1:+.1%}")
        lines.append(f"| {contender} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main(arguments: list[str] | None = None) -> int:
    """Run the rounds, write a JSON file and print the tables."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--job", help=argparse.SUPPRESS)
    parser.add_argument("--machine", default="optane")
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--policies", default=",".join(POLICIES))
    parser.add_argument("--shares", default=",".join(map(str, SHARES)))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=7)
    parser.add_argument("--warmup", type=int, default=4)
    parser.add_argument("--seconds", type=float, default=0.0, help="no training begins later than that (0: all do)")
    parser.add_argument("--threads", type=int, default=0, help="of PyTorch (0: its own choice)")
    parser.add_argument("--scale", type=float, default=0.0, help="0: this machine's memory against the other's")
    parser.add_argument("--sweep", action="store_true", help="vary the constants of the imitation")
    parser.add_argument("--prices", default="4.0,2.0,100", help="fast and slow memory a GiB, and all else")
    parser.add_argument("--out", type=Path, default=Path("slow_memory_runs.json"))
    options = parser.parse_args(arguments)
    if options.job:
        values = json.loads(options.job)
        changed = values.pop("changed")
        print(json.dumps(asdict(work(Job(**values, changed=tuple(changed) if changed else None)))))
        return 0
    with tempfile.TemporaryDirectory(prefix="lowtide-benchmark-") as spill:
        rows = measure(options, spill)
    options.out.write_text(json.dumps(rows, indent=2) + "\n")
    fast, slow, rest = map(float, options.prices.split(","))
    print(table(rows))
    if not options.sweep:
        print(cost_table(rows, fast=fast, slow=slow, rest=rest))
    return int(any("failure" in row for row in rows))


if __name__ == "__main__":
    sys.exit(main())
