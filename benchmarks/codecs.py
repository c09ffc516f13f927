"""Measure what codecs gain on a disk that is throttled: the same training with and without them, in turn.

Each round trains one after the other in one process: swaps only, swaps through codecs, and the same two with
recomputation. All losses must be the same to the last bit.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

if not __package__:
    # Run as a file, Python puts this directory on the path instead of the one that holds it.
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

import torch
from rich.console import Console
from rich.table import Table

import lowtide
from benchmarks.jobs import ROOT
from benchmarks.models import MODELS, Benchmark, Sizes
from benchmarks.slow_disk import SlowDisk

WAYS: dict[str, dict[str, Any]] = {
    "swaps": {"recompute": False, "codecs": []},
    "swaps through codecs": {"recompute": False},
    "and recomputes": {"codecs": []},
    "both": {},
}


def main(arguments: list[str] | None = None) -> int:
    """Measure, print a table, write the results."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--models", nargs="+", default=["vgg16", "resnet50", "gpt"])
    parser.add_argument("--scale", type=int, default=8, help="divides the batch")
    parser.add_argument("--share", type=float, default=0.45, help="of what activations add to the static bytes")
    parser.add_argument("--disk", type=float, default=300e6, help="bytes a second, each way")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=7)
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results" / "codecs.json")
    options = parser.parse_args(arguments)
    rows = [_measured(name, options) for name in options.models]
    options.out.write_text(json.dumps({"scale": options.scale, "disk": options.disk, "rows": rows}, indent=1) + "\n")
    table = Table("model", *WAYS, "gain of codecs")
    for row in rows:
        gain = row["step_s"]["swaps"] / row["step_s"]["swaps through codecs"]
        table.add_row(row["model"], *(f"{row['step_s'][way]:.2f} s" for way in WAYS), f"{gain:.2f}x")
    Console().print(table)
    return 0


def _measured(name: str, options: argparse.Namespace) -> dict[str, Any]:
    benchmark = MODELS[name](Sizes(scale=options.scale))
    static_bytes, peak_bytes = _need(benchmark)
    budget = static_bytes + int(options.share * (peak_bytes - static_bytes))
    step_s: dict[str, list[float]] = {way: [] for way in WAYS}
    losses, stats = set(), {}
    for _ in range(options.rounds):
        for way, settings in WAYS.items():
            seen, stats[way] = _trained(benchmark, budget, options, settings)
            step_s[way].append(stats[way]["last_step_s"])
            losses.add(tuple(seen))
    assert len(losses) == 1, "the bits differ"
    return {
        "model": name,
        "budget_bytes": budget,
        "step_s": {way: statistics.median(times) for way, times in step_s.items()},
        "swapped_out_bytes": {way: each["swapped_out_bytes"] for way, each in stats.items()},
        "encoded_bytes": {way: each.get("encoded_bytes", 0) for way, each in stats.items()},
    }


def _need(benchmark: Benchmark) -> tuple[int, int]:
    with tempfile.TemporaryDirectory() as directory:
        model, optimizer, batch = _made(benchmark)
        with lowtide.fit(model, optimizer, budget="16GiB", spill=directory) as tide:
            for _ in range(3):
                _step(benchmark, model, optimizer, batch, tide)
            trace = tide.trace()
    return trace.static_bytes, trace.peak_bytes


def _trained(
    benchmark: Benchmark, budget: int, options: argparse.Namespace, settings: dict[str, Any]
) -> tuple[list[float], dict[str, Any]]:
    with tempfile.TemporaryDirectory() as directory:
        model, optimizer, batch = _made(benchmark)
        disk = SlowDisk(Path(directory), bytes_per_s=options.disk)
        with lowtide.fit(model, optimizer, budget=budget, spill=disk, **settings) as tide:
            losses = [_step(benchmark, model, optimizer, batch, tide) for _ in range(options.steps)]
            stats: dict[str, Any] = tide.stats()
    return losses, stats


def _made(benchmark: Benchmark) -> tuple[torch.nn.Module, torch.optim.Optimizer, tuple[torch.Tensor, torch.Tensor]]:
    torch.manual_seed(0)
    model = benchmark.build()
    return model, benchmark.optimizer(model), benchmark.batch(torch.Generator().manual_seed(0))


def _step(
    benchmark: Benchmark,
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    batch: tuple[torch.Tensor, torch.Tensor],
    tide: lowtide.Tide,
) -> float:
    with tide.step():
        torch.manual_seed(1)
        loss = benchmark.loss(model(batch[0]), batch[1])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.item()


if __name__ == "__main__":
    raise SystemExit(main())
