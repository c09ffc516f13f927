"""Turn results of `benchmarks/run.py` into Markdown tables, one for each model."""

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

from benchmarks.pages import table
from lowtide.core.units import format_rate

_NAMES = {
    "stock": "stock PyTorch",
    "tcmalloc": "stock PyTorch with tcmalloc",
    "before": "Lowtide before",
    "unpressed": "Lowtide, everything fits",
    "lowtide": "Lowtide",
    "swaps": "Lowtide, swaps only",
    "checkpoint": "`torch.utils.checkpoint`",
    "as_checkpoint": "Lowtide in checkpoint's memory",
    "naive": "naive hooks to disk",
    "kernel_swap": "kernel swap, same resident set",
}
_CELL_LETTERS = 32
_HEADINGS = (
    "",
    "budget",
    "step",
    "of stock",
    "of tcmalloc",
    "peak live",
    "resident",
    "out + in a step",
    "losses as stock",
)


def markdown(results: dict[str, Any]) -> str:
    """Return the machine's line and a table for each model."""
    machine = results["environment"]
    settings = results["settings"]
    throttled = (
        f" Lowtide's disk is held to {format_rate(rate)} each way." if (rate := settings.get("throttle")) else ""
    )
    line = (
        f"{machine['cpu']}, {machine['cores']} cores, {_gib(machine['memory_bytes'])}, {machine['system']} "
        f"{machine['kernel']}, spill on {machine['spill_filesystem']}, Python {machine['python']}, torch "
        f"{machine['torch']}, {machine['threads']} threads. {settings['rounds']} rounds of {settings['steps']} "
        f"measured steps after {settings['warmup']} warm-up steps; medians, ratios within a round.{throttled}"
    )
    return "\n\n".join([line, *(_model(facts) for facts in results["models"].values())]) + "\n"


def _model(facts: dict[str, Any]) -> str:
    tcmalloc = next((line for line in facts["contenders"] if line["contender"] == "tcmalloc"), {})
    rounds = tcmalloc.get("round_ratios_to_stock")
    rows = [_row(line, floor_bytes=facts["floor_bytes"], tcmalloc=rounds) for line in facts["contenders"]]
    about = (
        f"{facts['parameters'] / 1e6:.1f} M parameters; static {_mib(facts['static_bytes'])}, stock's peak "
        f"{_mib(facts['peak_bytes'])}, floor {_mib(facts['floor_bytes'])} (set by `{facts['floor_op']}`)."
    )
    lines = [
        f"### {facts['title']}",
        "",
        about,
        "",
        table(_HEADINGS, rows).rstrip(),
    ]
    for line in facts["contenders"]:
        lines += [f"\n{_name(line)}: {reason}" for reason in _reasons(line)]
    if "floor" in facts:
        lines += ["", _floor(facts["floor"])]
    return "\n".join(lines)


def _name(line: dict[str, Any]) -> str:
    name = _NAMES.get(line["key"]) or _NAMES[line["contender"]]
    if "policy" in line:
        name = f"{name}, `{line['policy']}`"
    return name if line["share"] is None else f"{name}, {line['share']:.0%}"


def _reasons(line: dict[str, Any]) -> list[str]:
    """Return in full why a contender was skipped or failed; its cell has room for a word only."""
    return [f"skipped: {line['skipped']}"] if "skipped" in line else [f"failed: {each}" for each in _failures(line)]


def _failures(line: dict[str, Any]) -> list[str]:
    failures: list[str] = line.get("failures", [])
    return failures


def _failed(line: dict[str, Any], *, floor_bytes: int) -> str:
    """Return a failed contender's cell: that its budget is below the floor, or the kinds of its errors."""
    kinds = sorted({failure.partition(":")[0] for failure in _failures(line)})
    if kinds == ["BudgetTooSmall"] and line.get("budget_bytes", floor_bytes) < floor_bytes:
        return f"below floor ({_mib(floor_bytes)})"
    return f"failed: {', '.join(kind if len(kind) <= _CELL_LETTERS else 'see below' for kind in kinds)}"


def _row(line: dict[str, Any], *, floor_bytes: int, tcmalloc: list[float] | None) -> tuple[str, ...]:
    name = _name(line)
    bound = line.get("budget_bytes") or line.get("limit_bytes")
    budget = _mib(bound) if bound else ""
    if "skipped" in line:
        return (name, budget, "skipped", *[""] * 6)
    if "step_s" not in line:
        return (name, budget, _failed(line, floor_bytes=floor_bytes), *[""] * 6)
    ratio = line["ratio_to_stock"]
    moved = (line["moved_out_bytes_per_step"], line["moved_in_bytes_per_step"])
    return (
        name,
        budget,
        f"{line['step_s']:.2f} s" + (" (some rounds failed)" if "failures" in line else ""),
        "" if ratio is None else f"{ratio:.2f}x",
        _of_tcmalloc(line, tcmalloc),
        _mib(line["peak_live_bytes"]) if "peak_live_bytes" in line else "",
        _mib(line["rss_peak_bytes"]),
        f"{_mib(moved[0])} + {_mib(moved[1])}" if any(moved) else "none",
        {True: "yes", False: "no", None: ""}[line["losses_identical"]],
    )


def _of_tcmalloc(line: dict[str, Any], tcmalloc: list[float] | None) -> str:
    """Return the median of the ratios to tcmalloc within a round, where it ran in every round."""
    mine = line.get("round_ratios_to_stock", [])
    if not tcmalloc or len(mine) != len(tcmalloc):
        return ""
    ratios = [one / other for one, other in zip(mine, tcmalloc, strict=True)]
    return f"{statistics.median(ratios):.2f}x"


def _floor(floor: dict[str, Any]) -> str:
    if floor["ratio_to_floor"] is None:
        return f"No budget up to twice the floor worked: {floor['reason']}"
    return (
        f"Smallest budget that works: {_mib(floor['smallest_budget_bytes'])}, {floor['ratio_to_floor']:.2f}x the floor."
    )


def _mib(nbytes: float) -> str:
    return f"{nbytes / 2**20:,.0f} MiB"


def _gib(nbytes: float) -> str:
    return f"{nbytes / 2**30:.0f} GiB"


def main(arguments: list[str] | None = None) -> int:
    """Print the tables of the given results."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("results", type=Path)
    print(markdown(json.loads(parser.parse_args(arguments).results.read_text())), end="")
    return 0


if __name__ == "__main__":
    sys.exit(main())
