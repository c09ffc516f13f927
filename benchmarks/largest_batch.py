"""The largest batch in a fixed budget, stock's and Lowtide's, and what a sample costs in each.

The budget is stock's peak of live bytes at a small batch, so that batch is the largest that stock can train in it.
Lowtide's is searched: 14 times that, then more until the budget is refused, to a sixteenth, in processes of their own.
In each round stock trains its batch, Lowtide 14 times that, and stock this one without a budget, whose losses have to
be the same.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

if not __package__:
    # Run as a file, Python puts this directory on the path instead of the one that holds it.
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

from benchmarks.jobs import ROOT, Job, launch
from benchmarks.pages import table, write_page

MODELS = {"resnet110": {"classes": 10}, "gpt_deep": {"vocabulary": 512}}
GOAL = 14
_NAMES = {"stock": "stock PyTorch", "lowtide": "Lowtide", "stock without a budget": "stock PyTorch without a budget"}
_MOST = 64
_RESOLUTION = 16


def main(arguments: list[str] | None = None) -> int:
    """Search and measure; exit with 1 where the goal is missed or losses differ."""
    options = _parser().parse_args(arguments)
    found: dict[str, Any] = json.loads(options.out.read_text()) if options.append else {}
    with tempfile.TemporaryDirectory(prefix="lowtide-benchmark-", dir=options.spill) as spill:
        for model in options.models:
            job = Job(
                model=model,
                contender="stock",
                spill=spill,
                batch=options.batch,
                steps=options.steps,
                warmup_steps=options.warmup,
                threads=options.threads,
                **MODELS[model],
            )
            found[model] = measured(job, rounds=options.rounds)
            options.out.write_text(json.dumps(found, indent=1) + "\n")
    lines = markdown(found)
    print(lines, end="")
    if options.page is not None:
        write_page(lines, options.page, script="largest_batch.py")
    return int(any(one["times"] < GOAL or not one["losses_identical"] for one in found.values()))


def measured(job: Job, *, rounds: int) -> dict[str, Any]:
    """Return a model's budget, the largest batch in it, and the times of all contenders."""
    counted = launch(replace(job, count_live=True, warmup_steps=1, steps=2))
    if counted.failure is not None:
        raise SystemExit(f"{job.model}: stock's live bytes cannot be counted: {counted.failure}")
    budget_bytes = counted.facts["peak_bytes"]
    times, reason = largest(job, budget_bytes=budget_bytes)
    inside = replace(job, contender="lowtide", budget_bytes=budget_bytes)
    jobs = {
        "stock": job,
        "lowtide": replace(inside, batch=GOAL * job.batch),
        "stock without a budget": replace(job, batch=GOAL * job.batch),
    }
    step_s: dict[str, list[float]] = {name: [] for name in jobs}
    facts: dict[str, dict[str, Any]] = {}
    for _ in range(rounds):
        for name, one in jobs.items():
            answer = launch(one)
            if answer.failure is not None:
                raise SystemExit(f"{job.model}, {name}: {answer.failure}")
            facts[name] = answer.facts
            step_s[name].append(statistics.median(answer.facts["step_s"]))
            print(f"{job.model} {name}: {step_s[name][-1] / one.batch * 1e3:.1f} ms a sample", file=sys.stderr)
    return {
        "title": facts["stock"]["title"],
        "threads": facts["stock"]["threads"],
        "rounds": rounds,
        "steps": job.steps,
        "budget_bytes": budget_bytes,
        "times": times,
        "refused": reason,
        "losses_identical": facts["lowtide"]["losses"] == facts["stock without a budget"]["losses"],
        "contenders": {
            name: {
                "batch": one.batch,
                "peak_bytes": budget_bytes if name == "stock" else facts[name].get("peak_bytes"),
                "step_s": step_s[name],
                "sample_s": statistics.median(step_s[name]) / one.batch,
                "moved_out_bytes": facts[name]["moved_out_bytes_per_step"],
                "recompute_s": facts[name].get("recompute_s"),
            }
            for name, one in jobs.items()
        },
    }


def largest(job: Job, *, budget_bytes: int) -> tuple[int, str]:
    """Return how many times the job's batch trains within a budget, to a sixteenth, and why more do not."""
    reason = ""

    def works(times: int) -> bool:
        nonlocal reason
        tried = replace(job, contender="lowtide", budget_bytes=budget_bytes, batch=times * job.batch)
        answer = launch(replace(tried, warmup_steps=1, steps=1))
        print(f"{job.model}, {times} times: {answer.failure or 'works'}", file=sys.stderr)
        reason = answer.failure or reason
        return answer.failure is None

    good, bad = 1, GOAL
    while bad <= _MOST and works(bad):
        good, bad = bad, 2 * bad
    while bad - good > max(1, good // _RESOLUTION):
        middle = (good + bad) // 2
        if works(middle):
            good = middle
        else:
            bad = middle
    return good, reason


def markdown(found: dict[str, Any]) -> str:
    """Return a table of all models."""
    rows = []
    for one in found.values():
        for name, line in one["contenders"].items():
            stock_s = one["contenders"]["stock"]["sample_s"]
            peak = line["peak_bytes"]
            rows.append(
                (
                    one["title"].split(", batch")[0],
                    _NAMES[name],
                    f"{line['batch']:,}",
                    "" if peak is None else f"{peak / 2**20:,.1f} MiB",
                    f"{line['sample_s'] * 1e3:,.1f} ms",
                    f"{line['sample_s'] / stock_s:.2f}x",
                    f"{line['moved_out_bytes'] / 2**20:,.0f} MiB" if line["moved_out_bytes"] else "none",
                )
            )
    said = " ".join(
        f"{one['title'].split(', batch')[0]}: in {one['budget_bytes'] / 2**20:,.1f} MiB Lowtide trains {one['times']} "
        f"times stock's batch; at {GOAL} times, losses are {'identical' if one['losses_identical'] else 'DIFFERENT'}."
        for one in found.values()
    )
    first = next(iter(found.values()))
    counts = ((first["threads"], "thread"), (first["rounds"], "round"), (first["steps"], "step"))
    threads, rounds, steps = (f"{count} {noun}{'s' * (count != 1)}" for count, noun in counts)
    how = f"{threads}, {rounds} of {steps}."
    headings = ("model", "contender", "batch", "peak live", "a sample", "of stock's", "out in a step")
    return f"{said} {how}\n\n{table(headings, rows, texts=2)}"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--models", nargs="+", choices=list(MODELS), default=list(MODELS))
    parser.add_argument("--batch", type=int, default=4, help="stock's batch; the budget is what it needs")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--steps", type=int, default=2, help="measured steps of a process")
    parser.add_argument("--warmup", type=int, default=4, help="steps before the measured ones")
    parser.add_argument("--threads", type=int, default=None, help="compute threads; PyTorch's default if not given")
    parser.add_argument("--append", action="store_true", help="keep the other models' results")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results" / "largest-batch.json")
    parser.add_argument("--page", type=Path, default=None, help="put the table into this page")
    parser.add_argument("--spill", type=Path, default=None, help="directory on the disk to spill to")
    return parser


if __name__ == "__main__":
    sys.exit(main())
