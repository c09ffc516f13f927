"""Measure how fast one core encodes and decodes with each codec, and how much it leaves.

Each codec gets the values it is for: single precision with half of the values zero, masks, or bytes. All codecs are
measured in turn, round after round; a rate is the median of the rounds.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from pathlib import Path
from typing import Any

if not __package__:
    # Run as a file, Python puts this directory on the path instead of the one that holds it.
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

from benchmarks.jobs import ROOT
from benchmarks.pages import table, write_page
from lowtide.codecs import Stats, codec, measure

FAST = ("zvc", "pack32", "pack16", "bits", "binarize", "fp16", "bf16", "fp10", "fp8_e4m3", "fp8_e5m2")
"""The codecs that are promised a rate: they may stand in the way of a training."""
GOAL_BYTES_PER_S = 2e9
_EXACT = {"bits": "every bit", "sign": "the sign", "bound": "values within a bound"}


def main(arguments: list[str] | None = None) -> int:
    """Measure, print a table, write the results; exit with 1 if a codec is slower than it has to be."""
    options = _parser().parse_args(arguments)
    lines = measured(options.codecs, rounds=options.rounds, density=options.density)
    options.out.write_text(json.dumps({"density": options.density, "codecs": lines}, indent=1) + "\n")
    found = markdown(lines)
    print(found, end="")
    if options.page is not None:
        write_page(found, options.page, script="codec_rates.py")
    return int(slowest(lines) < GOAL_BYTES_PER_S)


def measured(names: list[str], *, rounds: int, density: float) -> list[dict[str, Any]]:
    """Return each codec's rates, in bytes of what it encodes."""
    seen = {name: [] for name in names}
    for _ in range(rounds):
        for name, found in seen.items():
            found.append(measure(codec(name), Stats(density=density)))
    return [
        {
            "name": name,
            "preserves": _EXACT[codec(name).exactness.value],
            "ratio": found[-1].ratio,
            "encode_bytes_per_s": statistics.median(one.encode_bytes_per_s for one in found),
            "decode_bytes_per_s": statistics.median(one.decode_bytes_per_s for one in found),
            "slowest_bytes_per_s": min(min(one.encode_bytes_per_s, one.decode_bytes_per_s) for one in found),
        }
        for name, found in seen.items()
    ]


def slowest(lines: list[dict[str, Any]]) -> float:
    """Return the lowest of all rates."""
    return min(min(line["encode_bytes_per_s"], line["decode_bytes_per_s"]) for line in lines)


def markdown(lines: list[dict[str, Any]]) -> str:
    """Return the rates as a table."""
    enough = sum(slowest([line]) >= GOAL_BYTES_PER_S for line in lines)
    rows = [
        (
            f"`{line['name']}`",
            line["preserves"],
            f"{line['ratio']:.1%}",
            *(f"{line[name] / 1e9:.1f} GB/s" for name in ("encode_bytes_per_s", "decode_bytes_per_s")),
        )
        for line in lines
    ]
    said = (
        f"At least {GOAL_BYTES_PER_S / 1e9:.0f} GB/s in each direction: {enough} of {len(lines)}; the slowest reaches "
        f"{slowest(lines) / 1e9:.1f} GB/s."
    )
    return f"{said}\n\n{table(('codec', 'preserves', 'size', 'encode', 'decode'), rows, texts=2)}"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--codecs", nargs="+", default=list(FAST))
    parser.add_argument("--density", type=float, default=0.5, help="the share of values that are not zero")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results" / "codec-rates.json")
    parser.add_argument("--page", type=Path, default=None, help="put the table into this page")
    return parser


if __name__ == "__main__":
    sys.exit(main())
