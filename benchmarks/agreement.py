"""Compare what the simulator predicts with what the runtime does: peak of live bytes and time of a step.

For each model, policy and budget a fresh process trains under `lowtide.fit`, takes the plan and the machine that the
runtime itself used and simulates each step that was recorded, with the operator times and transfer rates of that step.
Steps are recorded and measured in turns, so that both see the machine as it is; no step is both.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

if not __package__:
    # Run as a file, Python puts this directory on the path instead of the one that holds it.
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

from rich.console import Console

from benchmarks.jobs import ROOT, launch
from benchmarks.pages import table, write_page

POLICIES = ("auto", "capuchin", "vdnn", "superneurons")
# Budgets between the floor and the unmanaged peak.
SHARES = (0.75, 0.4, 0.1)
# Sizes that run in seconds; the kinds of the models.
MODELS: dict[str, dict[str, int]] = {
    "vgg16": {"batch": 16, "image": 128, "width": 32},
    "resnet50": {"batch": 8, "image": 160},
    "gpt": {"batch": 4, "tokens": 256, "layers": 8, "width": 384, "heads": 6, "vocab": 4096},
    # Nearly all of it is parameters, gradients and moments.
    "gpt_state": {"batch": 2, "tokens": 256, "layers": 6, "width": 768, "heads": 12, "vocab": 8192},
}
PEAK_TOLERANCE = 0.01
TIME_TOLERANCE = 0.10


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One training in a process of its own. `share` None: measure what the step needs.

    After `warmup_steps`, in which the plan is made, `steps` are recorded and as many measured.
    """

    model: str
    policy: str
    spill: str
    share: float | None
    floor_bytes: int = 0
    peak_bytes: int = 0
    steps: int = 8
    warmup_steps: int = 8
    contender: str = "lowtide"
    source: str = ""


def main(arguments: list[str] | None = None) -> int:
    """Measure all cases; exit with 1 if one disagrees by more than the tolerances."""
    options = _parser().parse_args(arguments)
    console = Console(stderr=True)
    lines: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(prefix="lowtide-agreement-", dir=options.spill) as spill:
        for model in options.models:
            sizes = _answer(Case(model=model, policy="keep_all", spill=spill, share=None, steps=1))
            if "failure" in sizes:
                console.print(f"{model}: {sizes['failure']}", style="bold red", soft_wrap=True)
                return 1
            for share in options.shares:
                for policy in options.policies:
                    case = Case(
                        model=model,
                        policy=policy,
                        spill=spill,
                        share=share,
                        floor_bytes=sizes["floor_bytes"],
                        peak_bytes=sizes["peak_bytes"],
                        steps=options.steps,
                    )
                    line = {"model": model, "policy": policy, "share": share, **_answer(case)}
                    lines.append(line)
                    console.print(_sentence(line), soft_wrap=True)
                    options.out.write_text(json.dumps({"sizes": MODELS, "cases": lines}, indent=1) + "\n")
    print(markdown(lines), end="")
    if options.page is not None:
        write_page(markdown(lines), options.page, script="agreement.py")
    return 0 if all("failure" not in line and _agrees(line) for line in lines) else 1


def _answer(case: Case) -> dict[str, Any]:
    answer = launch(case, worker="benchmarks.agreement_worker")
    return {"failure": answer.failure} if answer.failure else answer.facts


def _agrees(line: dict[str, Any]) -> bool:
    return abs(line["peak_ratio"] - 1) <= PEAK_TOLERANCE and abs(line["time_ratio"] - 1) <= TIME_TOLERANCE


def _sentence(line: dict[str, Any]) -> str:
    where = f"{line['model']} {line['policy']} {line['share']:.0%}:"
    if "failure" in line:
        return f"{where} {line['failure']}"
    return (
        f"{where} peak {line['simulated_peak_bytes'] / line['peak_bytes']:.3f}, "
        f"time {line['simulated_s']:.3f} s of {line['measured_s']:.3f} s ({line['time_ratio']:.2f})"
    )


def markdown(lines: list[dict[str, Any]]) -> str:
    """Return the cases as a table in Markdown, and how many agree."""
    ran = [line for line in lines if "failure" not in line]
    peaks = [line for line in ran if abs(line["peak_ratio"] - 1) <= PEAK_TOLERANCE]
    times = [line for line in ran if abs(line["time_ratio"] - 1) <= TIME_TOLERANCE]
    counts = (
        f"Peak within {PEAK_TOLERANCE:.0%}: {len(peaks)} of {len(ran)} cases. "
        f"Step time within {TIME_TOLERANCE:.0%}: {len(times)} of {len(ran)}.\n\n"
    )
    headings = (
        *("model", "policy", "budget", "peak", "peak, simulated", "step", "step, simulated"),
        *("state's share", "out", "out, simulated", "made again"),
    )
    rows = [
        (
            line["model"],
            f"`{line['policy']}`",
            f"{line['share']:.0%}",
            f"{line['peak_bytes'] / 2**20:,.1f} MiB",
            f"{line['peak_ratio'] - 1:+.1%}",
            f"{line['measured_s']:.3f} s",
            f"{line['time_ratio'] - 1:+.1%}",
            f"{line['state_share']:.0%}",
            f"{line['measured_out_bytes'] / 2**20:,.0f} MiB",
            f"{line['moved_out_bytes'] / 2**20:,.0f} MiB",
            f"{line['measured_recompute_s'] * 1e3:,.0f} ms",
        )
        for line in ran
    ]
    failed = [
        f"- {line['model']}, `{line['policy']}`, {line['share']:.0%}: {line['failure']}\n"
        for line in lines
        if "failure" in line
    ]
    return counts + table(headings, rows, texts=3) + ("\n" + "".join(failed) if failed else "")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--models", nargs="+", choices=tuple(MODELS), default=list(MODELS))
    parser.add_argument("--policies", nargs="+", default=list(POLICIES))
    parser.add_argument(
        "--shares", nargs="+", type=float, default=list(SHARES), help="budget = floor + share x (peak - floor)"
    )
    parser.add_argument("--steps", type=int, default=Case(model="", policy="", spill="", share=None).steps)
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results" / "agreement.json")
    parser.add_argument("--page", type=Path, default=None, help="put the table into this page")
    parser.add_argument("--spill", type=Path, default=None, help="directory on the disk to spill to")
    return parser


if __name__ == "__main__":
    sys.exit(main())
