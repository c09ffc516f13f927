"""Train a model whose state does not fit, in a process that the kernel limits, against the same training in memory.

Each round starts one fresh process for each contender in turn: stock, stock with tcmalloc preloaded, and Lowtide at
each budget, which creates the model inside it, in a memory cgroup of `--limit` bytes if that is given (which needs
root). Results go to a JSON file.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from contextlib import nullcontext
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from typing import Any

if not __package__:
    # Run as a file, Python puts this directory on the path instead of the one that holds it.
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

import torch

from benchmarks.jobs import ROOT, Answer, Job, launch
from benchmarks.kernel_swap import memory_group
from benchmarks.models import MODELS, Benchmark, Sizes
from lowtide.core.units import parse_bytes


def main(arguments: list[str] | None = None) -> int:
    """Run the rounds and print a table; exit with 1 if Lowtide's losses differ or a process failed."""
    options = _parser().parse_args(arguments)
    state_bytes = _state_bytes(MODELS[options.model](Sizes(scale=options.scale)))
    limit = parse_bytes(options.limit) if options.limit else None
    answers: dict[str, list[Answer]] = {}
    with tempfile.TemporaryDirectory(prefix="lowtide-benchmark-", dir=options.spill) as spill:
        job = Job(
            model=options.model,
            contender="stock",
            spill=spill,
            steps=options.steps,
            warmup_steps=options.warmup,
            scale=options.scale,
        )
        jobs = {name: replace(job, contender=name) for name in ("stock", *options.rivals)}
        for text in options.budgets:
            budget = _budget_bytes(text, state_bytes=state_bytes)
            jobs[f"lowtide {text}"] = replace(job, contender="lowtide", budget_bytes=budget, created_inside=True)
        for _ in range(options.rounds):
            for name, one in jobs.items():
                answer = _answer(one, limit_bytes=limit if one.contender == "lowtide" else None)
                answers.setdefault(name, []).append(answer)
                print(f"{name}: {answer.failure or answer.facts['step_s']}", file=sys.stderr, flush=True)
    lines = {name: _line(found, answers["stock"]) for name, found in answers.items()}
    facts = {"model": options.model, "state_bytes": state_bytes, "limit_bytes": limit, "lines": lines}
    options.out.write_text(json.dumps(facts, indent=2) + "\n")
    for name, line in lines.items():
        print(f"{name:20} {line}")
    return int(any("failure" in line or line["losses_identical"] is False for line in lines.values()))


def _state_bytes(benchmark: Benchmark) -> int:
    """Return the bytes of parameters, gradients and optimizer state, which exist without memory here."""
    with torch.device("meta"):
        module = benchmark.build()
    optimizer = benchmark.optimizer(module)
    for parameter in module.parameters():
        parameter.grad = torch.empty_like(parameter)
    optimizer.step()
    moments = [kept for state in optimizer.state.values() for kept in state.values() if torch.is_tensor(kept)]
    return 2 * sum(parameter.nbytes for parameter in module.parameters()) + sum(moment.nbytes for moment in moments)


def _budget_bytes(text: str, *, state_bytes: int) -> int:
    """Return the budget that `text` states in bytes, or as a share of the state, such as "25%"."""
    if text.endswith("%"):
        return int(Fraction(text.removesuffix("%")) * state_bytes / 100)
    return parse_bytes(text)


def _answer(job: Job, *, limit_bytes: int | None) -> Answer:
    """Return what the job measured, and the most that the kernel charged to it if it had a limit."""
    with memory_group(nbytes=limit_bytes) if limit_bytes is not None else nullcontext() as group:
        answer = launch(job, prefix=group.prefix if group is not None else ())
        charged = {"charged_peak_bytes": group.peak_bytes()} if group is not None else {}
    return replace(answer, facts=answer.facts | charged)


def _line(found: list[Answer], stock: list[Answer]) -> dict[str, Any]:
    failed = [answer.failure for answer in found if answer.failure is not None]
    if failed:
        return {"failure": failed[0]}
    step_s = [statistics.median(answer.facts["step_s"]) for answer in found]
    compared = not any(answer.failure for answer in stock)
    pairs = list(zip(found, stock, strict=True)) if compared else []
    ratios = [
        statistics.median(mine.facts["step_s"]) / statistics.median(theirs.facts["step_s"]) for mine, theirs in pairs
    ]
    least = [answer.facts["least_traffic_bytes"] for answer in found if answer.facts.get("least_traffic_bytes")]
    moved = [answer.facts["moved_in_bytes_per_step"] + answer.facts["moved_out_bytes_per_step"] for answer in found]
    return {
        "step_s": statistics.median(step_s),
        "ratio_to_stock": statistics.median(ratios) if compared else None,
        "rss_peak_bytes": max(answer.facts["rss_peak_bytes"] for answer in found),
        "charged_peak_bytes": max(answer.facts.get("charged_peak_bytes", 0) for answer in found),
        "peak_bytes": max(answer.facts.get("peak_reserved_bytes", 0) for answer in found),
        "read_bytes_per_step": statistics.median(answer.facts["moved_in_bytes_per_step"] for answer in found),
        "written_bytes_per_step": statistics.median(answer.facts["moved_out_bytes_per_step"] for answer in found),
        "share_of_least_traffic": statistics.median(moved) / statistics.median(least) if least else None,
        "stall_s": statistics.median(answer.facts.get("stall_s", 0.0) for answer in found),
        "losses_identical": all(mine.facts["losses"] == theirs.facts["losses"] for mine, theirs in pairs)
        if compared
        else None,
    }


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--model", default="gpt_large")
    parser.add_argument("--budgets", nargs="*", default=["2GiB"], help='bytes, or shares of the state such as "25%%"')
    parser.add_argument("--rivals", nargs="*", choices=["tcmalloc"], default=["tcmalloc"])
    parser.add_argument("--limit", default="", help="bytes that the kernel allows Lowtide's process in all")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--warmup", type=int, default=3)
    parser.add_argument("--scale", type=int, default=1, help="divides the batch, for a quick try")
    parser.add_argument("--spill", type=Path, default=None)
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results" / "state.json")
    return parser


if __name__ == "__main__":
    sys.exit(main())
