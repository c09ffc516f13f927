"""Measure what Lowtide's allocator costs where blocks are small: nanoseconds for a block, milliseconds for a tiny step.

Rounds alternate between PyTorch's allocator and Lowtide's in one process, so that both see the same machine.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

if not __package__:
    # Run as a file, Python puts this directory on the path instead of the one that holds it.
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

from rich.console import Console
from rich.table import Table

from benchmarks.jobs import ROOT

SIZES = (64, 1 << 10, 16 << 10, 60 << 10, 256 << 10)
BLOCKS = 20_000
STEPS = 200


def main(arguments: list[str] | None = None) -> int:
    """Measure, print a table, write the results."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results" / "small-blocks.json")
    options = parser.parse_args(arguments)
    lines = [
        *(
            _compared(f"a block of {nbytes:,} bytes", lambda nbytes=nbytes: _blocks_s(nbytes), options)
            for nbytes in SIZES
        ),
        _compared("a training step of a tiny MLP", _step_s, options, managed=True),
    ]
    options.out.write_text(json.dumps({"rounds": options.rounds, "lines": lines}, indent=1) + "\n")
    table = Table("what", "PyTorch", "Lowtide", "ratio")
    for line in lines:
        table.add_row(
            line["what"],
            f"{line['stock_s'] * 1e6:.2f} us",
            f"{line['lowtide_s'] * 1e6:.2f} us",
            f"{line['ratio']:.2f}x",
        )
    Console().print(table)
    return 0


def _compared(
    what: str, measure: Callable[..., float], options: argparse.Namespace, *, managed: bool = False
) -> dict[str, Any]:
    """Return medians of alternating rounds, and the median of the ratios within a round."""
    import lowtide

    stock, ours = [], []
    for _ in range(options.rounds):
        stock.append(measure())
        with lowtide.fit(budget="8GiB") as tide:
            ours.append(measure(tide.step) if managed else measure())
    return {
        "what": what,
        "stock_s": statistics.median(stock),
        "lowtide_s": statistics.median(ours),
        "ratio": statistics.median(b / a for a, b in zip(stock, ours, strict=True)),
    }


def _blocks_s(nbytes: int) -> float:
    """Return the seconds to allocate and free one block, 16 alive at a time."""
    import torch

    alive: list[object] = [None] * 16
    begun = time.perf_counter()
    for index in range(BLOCKS):
        alive[index % 16] = torch.empty(nbytes, dtype=torch.uint8)
    return (time.perf_counter() - begun) / BLOCKS


def _step_s(step: Callable[[], AbstractContextManager[Any]] = nullcontext) -> float:
    """Return the median seconds of a step whose tensors are all small."""
    import torch

    torch.manual_seed(0)
    model = torch.nn.Sequential(*(layer for _ in range(8) for layer in (torch.nn.Linear(64, 64), torch.nn.ReLU())))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    inputs = torch.randn(32, 64)
    times_s = []
    for _ in range(STEPS):
        begun = time.perf_counter()
        with step():
            model(inputs).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        times_s.append(time.perf_counter() - begun)
    return statistics.median(times_s[10:])


if __name__ == "__main__":
    sys.exit(main())
