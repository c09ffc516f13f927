"""Run a model whose weights do not fit in memory, straight from its checkpoint folder, against other ways to do so.

Each round starts one fresh process for each contender, in a memory cgroup of `--limit` bytes (which needs root), stock
in memory outside of it. The checkpoint's pages are dropped from the page cache before each: pages that are cached for
another group would make everybody look fast. Lowtide's process reads the files directly between groups of passes and of
words: a disk's rate changes from minute to minute, and shares of another minute's rate say nothing.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

if not __package__:
    # Run as a file, Python puts this directory on the path instead of the one that holds it.
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

from benchmarks.direct_reads import drop_pages, shards
from benchmarks.jobs import ROOT, Answer, launch
from benchmarks.kernel_swap import memory_limit
from lowtide.core.units import format_bytes, parse_bytes

CONTENDERS = ("stock", "lowtide", "accelerate", "mmap")


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeJob:
    """One process that makes passes and generates; `make`: it writes the checkpoint instead."""

    contender: str
    checkpoint: str
    spill: str
    budget_bytes: int
    tokens: int
    passes: int
    words: int
    layers: int
    dtype: str
    shape: str = "842m"
    make: bool = False
    source: str = ""


def main(arguments: list[str] | None = None) -> int:
    """Run the rounds and print a table; exit with 1 if logits differ or a process was killed."""
    options = _parser().parse_args(arguments)
    with tempfile.TemporaryDirectory(prefix="lowtide-benchmark-", dir=options.spill) as spill:
        checkpoint = options.checkpoint or Path(spill) / "checkpoint"
        limit_bytes = parse_bytes(options.limit)
        answers: dict[str, list[Answer]] = {}

        def job(contender: str, budget_bytes: int, *, make: bool = False) -> ServeJob:
            return ServeJob(
                contender=contender,
                checkpoint=str(checkpoint),
                spill=spill,
                budget_bytes=budget_bytes,
                tokens=options.tokens,
                passes=options.passes,
                words=options.words,
                layers=options.layers,
                dtype=options.dtype,
                shape=options.shape,
                make=make,
            )

        if not (checkpoint / "config.json").exists():
            made = _launch(job("stock", 0, make=True))
            if made.failure is not None:
                print(made.failure, file=sys.stderr)
                return 1
        budgets = [parse_bytes(text) for text in options.budgets]
        for _ in range(options.rounds):
            for contender in options.contenders:
                for budget_bytes in budgets if contender == "lowtide" else [0]:
                    name = f"lowtide {format_bytes(budget_bytes)}" if budget_bytes else contender
                    drop_pages(checkpoint)
                    limited = contender != "stock" and limit_bytes
                    with memory_limit(nbytes=limit_bytes) if limited else nullcontext([]) as prefix:
                        answer = _launch(job(contender, budget_bytes), prefix=prefix)
                    answers.setdefault(name, []).append(answer)
                    print(f"{name}: {answer.failure or answer.facts}", file=sys.stderr, flush=True)
        weights_bytes = sum(file.stat().st_size for file in shards(checkpoint))
    results = {name: _line(found, answers.get("stock"), weights_bytes) for name, found in answers.items()}
    facts = {
        "limit": options.limit,
        "weights_bytes": weights_bytes,
        "tokens": options.tokens,
        "words": options.words,
        "lines": results,
    }
    options.out.write_text(json.dumps(facts, indent=2) + "\n")
    print(f"weights {format_bytes(weights_bytes)}, limit {options.limit}")
    for name, line in results.items():
        print(f"{name:20} {line}")
    return int(any(line.get("failure") or line["identical"] is False for line in results.values()))


def _launch(job: ServeJob, prefix: list[str] | tuple[()] = ()) -> Answer:
    return launch(job, prefix=prefix, worker="benchmarks.serve_worker")


def _line(found: list[Answer], stock: list[Answer] | None, weights_bytes: int) -> dict[str, Any]:
    failed = [answer.failure for answer in found if answer.failure is not None]
    if failed:
        return {"failure": failed[0], "identical": None}
    pass_s = statistics.median(second for answer in found for second in answer.facts["pass_s"])
    word_s = statistics.median(second for answer in found for second in answer.facts["word_s"])
    line = {
        "load_s": statistics.median(answer.facts["load_s"] for answer in found),
        "pass_s": pass_s,
        "word_s": word_s,
        "busy_share_of_cores": statistics.median(answer.facts["busy_share_of_cores"] for answer in found),
        "rss_peak_bytes": max(answer.facts["rss_peak_bytes"] for answer in found),
        "identical": None,
    }
    if stock is not None and stock[0].failure is None:
        line["identical"] = all(answer.facts["digest"] == stock[0].facts["digest"] for answer in found)
    read = [answer.facts["read_bytes_per_pass"] for answer in found if "read_bytes_per_pass" in answer.facts]
    if read:
        per_pass = statistics.median(read)
        line |= {
            "read_share_of_weights": per_pass / weights_bytes,
            "read_share_of_minimum": per_pass
            / max(1, statistics.median(answer.facts["least_read_bytes_per_pass"] for answer in found)),
            "stalled_share": statistics.median(answer.facts["stalled_share"] for answer in found),
            "direct_read_bytes_per_s": statistics.median(_direct_rate(answer) for answer in found),
            "share_of_direct_rate": statistics.median(_share_of_direct_rate(answer, "pass") for answer in found),
            "word_share_of_direct_rate": statistics.median(_share_of_direct_rate(answer, "word") for answer in found),
        }
    return line


def _direct_rate(answer: Answer) -> float:
    return statistics.median(answer.facts["direct_read_bytes_per_s"])


def _share_of_direct_rate(answer: Answer, what: str) -> float:
    rate = answer.facts[f"read_bytes_per_{what}"] / statistics.median(answer.facts[f"{what}_s"])
    return float(rate / _direct_rate(answer))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--contenders", nargs="+", default=list(CONTENDERS), choices=CONTENDERS)
    parser.add_argument("--budgets", nargs="+", default=["1GiB"], help="of tensor memory, for Lowtide")
    parser.add_argument("--limit", default="1.5GiB", help="bytes that the kernel allows each process but stock; 0: any")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--passes", type=int, default=5, help="forward passes in each of two groups, after three to warm up"
    )
    parser.add_argument("--tokens", type=int, default=32, help="of the text that a pass is given")
    parser.add_argument("--words", type=int, default=8, help="to generate one by one, in each of two groups")
    parser.add_argument("--layers", type=int, default=14)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--shape", default="842m", choices=["842m", "7b"], help="of a Llama; 7b has --layers 32")
    parser.add_argument("--checkpoint", type=Path, help="folder to keep the checkpoint in (default: made and removed)")
    parser.add_argument("--spill", default=None, help="directory on the disk to measure")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results" / "serve.json")
    return parser


if __name__ == "__main__":
    sys.exit(main())
