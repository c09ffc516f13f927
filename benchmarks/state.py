"""Train a model whose state does not fit, in a process that the kernel limits, against the same training in memory.

Each round starts one fresh process for each contender in turn: stock, stock with tcmalloc preloaded, and Lowtide at
each budget, in a memory cgroup of `--limit` bytes if that is given (which needs root). Results go to a JSON file.
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

from benchmarks.jobs import ROOT, Answer, Job, launch
from benchmarks.kernel_swap import memory_limit
from lowtide.core.units import parse_bytes


def main(arguments: list[str] | None = None) -> int:
    """Run the rounds and print a table; exit with 1 if losses differ or a process was killed."""
    options = _parser().parse_args(arguments)
    answers: dict[str, list[Answer]] = {}
    with tempfile.TemporaryDirectory(prefix="lowtide-benchmark-", dir=options.spill) as spill:
        job = Job(model=options.model, contender="stock", spill=spill, steps=options.steps, warmup_steps=options.warmup)
        jobs = {"stock": job, "tcmalloc": replace(job, contender="tcmalloc")}
        for text in options.budgets:
            jobs[f"lowtide {text}"] = replace(job, contender="lowtide", budget_bytes=parse_bytes(text))
        for _ in range(options.rounds):
            for name, one in jobs.items():
                if one.contender == "lowtide" and options.limit:
                    with memory_limit(nbytes=parse_bytes(options.limit)) as prefix:
                        answer = launch(one, prefix=prefix)
                else:
                    answer = launch(one)
                answers.setdefault(name, []).append(answer)
                print(f"{name}: {answer.failure or answer.facts['step_s']}", file=sys.stderr, flush=True)
    results = {name: _line(found, answers["stock"]) for name, found in answers.items()}
    options.out.write_text(
        json.dumps({"limit": options.limit, "model": options.model, "lines": results}, indent=2) + "\n"
    )
    for name, line in results.items():
        print(f"{name:20} {line}")
    return int(any(line.get("failure") or line["losses_identical"] is False for line in results.values()))


def _line(found: list[Answer], stock: list[Answer]) -> dict[str, Any]:
    failed = [answer.failure for answer in found if answer.failure is not None]
    if failed:
        return {"failure": failed[0], "losses_identical": None}
    step_s = [statistics.median(answer.facts["step_s"]) for answer in found]
    ratios = [mine / statistics.median(theirs.facts["step_s"]) for mine, theirs in zip(step_s, stock, strict=True)]
    least = [answer.facts["least_traffic_bytes"] for answer in found if answer.facts.get("least_traffic_bytes")]
    moved = [answer.facts["moved_in_bytes_per_step"] + answer.facts["moved_out_bytes_per_step"] for answer in found]
    return {
        "step_s": statistics.median(step_s),
        "ratio_to_stock": statistics.median(ratios),
        "rss_peak_bytes": max(answer.facts["rss_peak_bytes"] for answer in found),
        "peak_bytes": max(answer.facts.get("peak_reserved_bytes", 0) for answer in found),
        "read_bytes_per_step": statistics.median(answer.facts["moved_in_bytes_per_step"] for answer in found),
        "written_bytes_per_step": statistics.median(answer.facts["moved_out_bytes_per_step"] for answer in found),
        "share_of_least_traffic": statistics.median(moved) / statistics.median(least) if least else None,
        "stall_s": statistics.median(answer.facts.get("stall_s", 0.0) for answer in found),
        "losses_identical": all(
            mine.facts["losses"] == theirs.facts["losses"] for mine, theirs in zip(found, stock, strict=True)
        ),
    }


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--model", default="gpt_large")
    parser.add_argument("--budgets", nargs="+", default=["2GiB"])
    parser.add_argument("--limit", default="", help="bytes that the kernel allows Lowtide's process in all")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--warmup", type=int, default=3)
    parser.add_argument("--spill", type=Path, default=None)
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results" / "state.json")
    return parser


if __name__ == "__main__":
    sys.exit(main())
