"""Make the tables of docs/benchmarks-accelerator.md out of result files."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

if not __package__:
    # Run as a file, Python puts this directory on the path instead of the one that holds it.
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

from benchmarks.accelerator_results import goals
from benchmarks.jobs import ROOT
from benchmarks.pages import table, write_page

PAGE = ROOT / "docs" / "benchmarks-accelerator.md"
SCRIPT = "accelerator_table.py"

_NAMES = {
    "unmanaged": "unmanaged, unlimited",
    "save_on_cpu": "`save_on_cpu(pin_memory=True)`",
    "one_block_ahead": "TRL-style, one block ahead (ours)",
    "checkpoint": "`torch.utils.checkpoint`",
}
_HEADINGS = (
    "",
    "step",
    "to unmanaged",
    "copies hidden",
    "bound",
    "to bound",
    "device peak",
    "out + in a step",
    "same losses",
)


def markdown(results: dict[str, Any]) -> str:
    """Return the tables of a result file."""
    settings, machine = results["settings"], results["environment"]
    line = (
        f"Measured on {machine['cpu']} ({machine['cores']} cores), {machine['system']} {machine['kernel']}, Python "
        f"{machine['python']}, torch {machine['torch']}, {machine['threads']} compute thread(s). {settings['rounds']} "
        f"rounds, each with a fresh process for each contender: {settings['steps']} measured steps after "
        f"{settings['warmup']} warm-up steps; medians, ratios within a round."
    )
    parts = [line]
    for facts in results["models"].values():
        parts.append(_about(facts, share=settings["share"]))
        parts += [_link(name, link) for name, link in facts["links"].items()]
    return "\n\n".join(parts) + "\n"


def _about(facts: dict[str, Any], *, share: float) -> str:
    return (
        f"### {facts['title']}\n\n{facts['parameters'] / 1e6:.1f} M parameters; static {_mib(facts['static_bytes'])}, "
        f"unmanaged peak {_mib(facts['peak_bytes'])}; budget {_mib(facts['budget_bytes'])} ({share:.0%} of what "
        f"activations add), floor {_mib(facts['floor_bytes'])}."
    )


def _link(name: str, link: dict[str, Any]) -> str:
    title = "A link that can hide the traffic" if name == "hiding" else f"Link of the `{name}` preset"
    rates = f"{link['d2h_bytes_per_s'] / 1e6:.0f} MB/s out, {link['h2d_bytes_per_s'] / 1e6:.0f} MB/s back"
    rows = table(_HEADINGS, [_row(line) for line in link["contenders"]])
    told = [
        f"- {'met' if met else 'missed'}: {text}" for text, met in goals(link["contenders"], hides=name == "hiding")
    ]
    told += [f"- {_name(line)} failed: {why}" for line in link["contenders"] for why in line.get("failures", [])]
    return f"**{title}** ({rates}; {_pressure(link['contenders'])})\n\n{rows}\n" + "\n".join(told)


def _pressure(lines: list[dict[str, Any]]) -> str:
    """Return how Lowtide's traffic relates to compute, as measured in the timed rounds."""
    ours = next((line for line in lines if line["key"] == "lowtide" and "traffic_share" in line), None)
    if ours is None:
        return "Lowtide did not run"
    shares = ", ".join(f"{share:.0%} of compute in {phase}" for phase, share in ours["traffic_share"].items())
    return f"Lowtide's bytes over the link's rate: {shares}"


def _name(line: dict[str, Any]) -> str:
    if line["contender"] == "lowtide":
        return "Lowtide" if line["policy"] == "auto" else f"Lowtide, policy `{line['policy']}`"
    return _NAMES[line["contender"]]


def _row(line: dict[str, Any]) -> tuple[str, ...]:
    if "step_s" not in line:
        return (_name(line), "failed", *[""] * (len(_HEADINGS) - 2))
    moved = (line["d2h_bytes_per_step"], line["h2d_bytes_per_step"])
    bounded = line["contender"] != "unmanaged" and any(moved)
    return (
        _name(line),
        f"{line['step_s']:.2f} s",
        f"{line['ratio_to_unmanaged']:.2f}x",
        "" if line["hidden_share"] is None else f"{line['hidden_share']:.0%}",
        f"{line['bound_s']:.2f} s" if bounded else "",
        f"{line['ratio_to_bound']:.2f}x" if bounded else "",
        _mib(line["peak_bytes"]),
        f"{_mib(moved[0])} + {_mib(moved[1])}" if any(moved) else "none",
        "yes" if line["losses_identical"] else "no",
    )


def _mib(nbytes: float) -> str:
    return f"{nbytes / 2**20:,.0f} MiB"


def main(arguments: list[str] | None = None) -> int:
    """Print the tables of result files, or put them into the page."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("results", type=Path, nargs="+")
    parser.add_argument("--page", type=Path, default=None, help="put them into this page instead of printing them")
    options = parser.parse_args(arguments)
    tables = "\n".join(markdown(json.loads(path.read_text())) for path in options.results)
    if options.page is None:
        print(tables, end="")
    else:
        write_page(tables, options.page, script=SCRIPT)
    return 0


if __name__ == "__main__":
    sys.exit(main())
