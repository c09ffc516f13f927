"""Create and load a model three times as large as its budget, against writing and reading its bytes once.

Each round starts one fresh process for each contender: raw writes and reads past the page cache, stock's creation in
memory, and Lowtide's creation and loading in a memory cgroup of `--limit` bytes (which needs root).
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

if not __package__:
    # Run as a file, Python puts this directory on the path instead of the one that holds it.
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

from benchmarks.direct_reads import drop_file
from benchmarks.jobs import ROOT, Answer, launch
from benchmarks.kernel_swap import memory_limit
from lowtide.core.units import format_bytes, parse_bytes

CONTENDERS = ("write", "stock", "create", "read", "load")


@dataclass(frozen=True, slots=True, kw_only=True)
class CreationJob:
    """One process that creates or loads; `save`: stock writes the checkpoint that is loaded."""

    contender: str
    spill: str
    checkpoint: str
    layers: int
    width: int
    nbytes: int
    budget_bytes: int
    save: bool = False
    source: str = ""


def main(arguments: list[str] | None = None) -> int:
    """Run the rounds and print a table; exit with 1 if values differ or a process was killed."""
    options = _parser().parse_args(arguments)
    nbytes = options.layers * (options.width + 1) * options.width * 4
    answers: dict[str, list[Answer]] = {}
    with tempfile.TemporaryDirectory(prefix="lowtide-benchmark-", dir=options.spill) as spill:
        checkpoint = Path(spill) / "model.safetensors"
        for round_ in range(options.rounds):
            for contender in CONTENDERS:
                job = CreationJob(
                    contender=contender,
                    spill=spill,
                    checkpoint=str(checkpoint),
                    layers=options.layers,
                    width=options.width,
                    nbytes=nbytes,
                    budget_bytes=nbytes // 3,
                    save=round_ == 0,
                )
                if checkpoint.exists():
                    drop_file(checkpoint)
                if contender in ("create", "load"):
                    with memory_limit(nbytes=nbytes // 3 + parse_bytes(options.room)) as prefix:
                        answer = _launch(job, prefix=prefix)
                else:
                    answer = _launch(job)
                answers.setdefault(contender, []).append(answer)
                print(f"{contender}: {answer.failure or answer.facts}", file=sys.stderr, flush=True)
    failed = [answer.failure for found in answers.values() for answer in found if answer.failure is not None]
    if failed:
        print(failed[0], file=sys.stderr)
        return 1
    lines = {name: _line(found) for name, found in answers.items()}
    digests = {a.facts["digest"] for found in answers.values() for a in found if "digest" in a.facts}
    # Whoever creates draws random numbers as well as writes: both are there without Lowtide.
    alone_s = max(lines["write"]["seconds"], lines["stock"]["seconds"])
    ratios = {
        "create_of_the_slower_of_writing_and_drawing": lines["create"]["seconds"] / alone_s,
        "load_of_reading_once": lines["load"]["seconds"] / lines["read"]["seconds"],
        "load_and_touch_of_reading_once": (lines["load"]["seconds"] + lines["load"]["touch_seconds"])
        / lines["read"]["seconds"],
    }
    facts = {"model_bytes": nbytes, "budget_bytes": nbytes // 3, "lines": lines, "ratios": ratios}
    options.out.write_text(json.dumps(facts, indent=2) + "\n")
    print(f"model {format_bytes(nbytes)}, budget {format_bytes(nbytes // 3)}")
    for name, line in (*lines.items(), *ratios.items()):
        print(f"{name:20} {line}")
    return int(len(digests) != 1)


def _launch(job: CreationJob, prefix: list[str] | tuple[()] = ()) -> Answer:
    return launch(job, prefix=prefix, worker="benchmarks.creation_worker")


def _line(found: list[Answer]) -> dict[str, Any]:
    timed = [name for name in ("seconds", "touch_seconds", "cpu_seconds") if name in found[0].facts]
    return {
        **{name: statistics.median(answer.facts[name] for answer in found) for name in timed},
        "rss_peak_bytes": max(answer.facts["rss_peak_bytes"] for answer in found),
    }


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--layers", type=int, default=50)
    parser.add_argument("--width", type=int, default=4096)
    parser.add_argument("--room", default="450MiB", help="of the kernel's limit beyond the budget: Python and PyTorch")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--spill", default=None, help="directory on the disk to measure")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results" / "creation.json")
    return parser


if __name__ == "__main__":
    sys.exit(main())
