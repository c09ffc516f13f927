"""Predict managed steps from a capture of the unmanaged script alone, then run the script managed, and compare.

For each script: `lowtide probe` measures the machine, `lowtide capture` records one unmanaged step, and the step and
its peak are predicted for policies and budgets as `lowtide simulate` does it, with the trace's operator times and with
`--machine here`. Only then does `lowtide run` train it inside those budgets. All are commands that a user has.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

if not __package__:
    # Run as a file, Python puts this directory on the path instead of the one that holds it.
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

from rich.console import Console

from benchmarks.jobs import ROOT
from benchmarks.pages import table, write_page
from lowtide import registry
from lowtide.core.machine import Machine
from lowtide.core.serialize import load_trace
from lowtide.core.timeline import Timeline
from lowtide.core.trace import Trace
from lowtide.estimate.calibrate import load_machine
from lowtide.report import budget_of, problem_of, settle

SCRIPT = ROOT / "benchmarks" / "prediction_script.py"
MODELS = ("unet", "densenet", "convnext", "lstm", "vit", "mixer")
POLICIES = ("auto", "capuchin", "vdnn")
# Of what activations add to the static bytes.
BUDGETS = ("70%", "45%")
PEAK_TOLERANCE = 0.01
TRACE_TOLERANCE = 0.10
HERE_TOLERANCE = 0.20
WARMUP_STEPS = 5


def main(arguments: list[str] | None = None) -> int:
    """Predict and measure all cases; write what was found."""
    options = _parser().parse_args(arguments)
    console = Console(stderr=True)
    lines: list[dict[str, Any]] = json.loads(options.out.read_text())["cases"] if options.append else []
    lines = [line for line in lines if line["model"] not in options.models]
    with tempfile.TemporaryDirectory(prefix="lowtide-prediction-", dir=options.spill) as spill:
        for model in options.models:
            for line in _cases(model, options, Path(spill)):
                lines.append(line)
                console.print(_sentence(line), soft_wrap=True)
                options.out.write_text(json.dumps({"cases": lines}, indent=1) + "\n")
    lines.sort(key=lambda line: MODELS.index(line["model"]))
    print(markdown(lines), end="")
    if options.page is not None:
        write_page(markdown(lines), options.page, script="prediction.py")
    return 0


def _cases(model: str, options: argparse.Namespace, spill: Path) -> list[dict[str, Any]]:
    """Return the predictions and the measurements of one script; predictions come first."""
    path = spill / f"{model}.trace"
    script = [str(SCRIPT), model, *(["--batch", str(options.batch)] if options.batch else [])]
    _lowtide("probe", "--spill", str(spill), cache=spill)  # not the machine that the user keeps
    captured = json.loads(_lowtide("capture", "--json", "-o", str(path), "--steps", "7", *script))
    trace, machine = load_trace(path), load_machine(path=spill / "machine.json")
    if machine is None:
        raise SystemExit("lowtide probe left no machine: look at the spill directory")
    lines = []
    for budget in options.budgets:
        for policy in options.policies:
            told, here = (_predicted(trace, machine, budget, policy, keep_times=keep) for keep in (True, False))
            lines.append(
                {
                    "model": model,
                    "policy": policy,
                    "budget": budget,
                    "budget_bytes": told.budget_bytes,
                    "unmanaged_s": captured["step_s"],
                    "operators": captured["operators"],
                    "predicted_s": told.step_s,
                    "predicted_peak_bytes": told.peak_bytes,
                    "predicted_stall_s": told.stall_s,
                    "predicted_recompute_s": told.recompute_s,
                    "predicted_out_bytes": told.moved_out_bytes,
                    "here_s": here.step_s,
                    "here_peak_bytes": here.peak_bytes,
                    "here_compute_s": here.compute_s,
                }
            )
    stock = _steps(script, steps=WARMUP_STEPS + options.steps, spill=spill, budget_bytes=1 << 40, policy="auto")
    for line in lines:
        steps = _steps(
            script,
            steps=WARMUP_STEPS + options.steps,
            spill=spill,
            budget_bytes=line["budget_bytes"],
            policy=line["policy"],
        )
        line.update(
            measured_s=statistics.median(one["step_s"] for one in steps),
            steps_s=[one["step_s"] for one in steps],
            measured_peak_bytes=max(one["peak_bytes"] for one in steps),
            measured_stall_s=statistics.median(one["stall_s"] for one in steps),
            measured_recompute_s=statistics.median(one["recompute_s"] for one in steps),
            measured_out_bytes=statistics.median(one["moved_out_bytes"] for one in steps),
            planned=sum(one["planned"] for one in steps),
            roomy_s=statistics.median(one["step_s"] for one in stock),
        )
    return lines


def _predicted(trace: Trace, machine: Machine, budget: str, policy: str, *, keep_times: bool) -> Timeline:
    """Return what `lowtide simulate TRACE --budget B --policy P` says, with `--machine here` unless times are kept."""
    budget_bytes = budget_of(budget, static_bytes=trace.static_bytes, peak_bytes=trace.peak_bytes)
    problem = problem_of(trace, machine, budget_bytes=budget_bytes, keep_times=keep_times)
    return settle(problem, registry.policy(policy)).timeline


def _steps(script: list[str], *, steps: int, spill: Path, budget_bytes: int, policy: str) -> list[dict[str, Any]]:
    """Return the settled steps of a run."""
    log = spill / "steps.jsonl"
    log.unlink(missing_ok=True)
    budget = ("--budget", str(budget_bytes), "--spill", str(spill), "--policy", policy)
    _lowtide("run", "--quiet", "--log", str(log), *budget, *script, "--steps", str(steps))
    return [json.loads(line) for line in log.read_text().splitlines()][WARMUP_STEPS:]


def _lowtide(*arguments: str, cache: Path | None = None) -> str:
    paths = (str(ROOT / "src"), os.environ.get("PYTHONPATH", ""))
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in paths if path)}
    if cache is not None:
        environment["LOWTIDE_CACHE"] = str(cache)
    done = subprocess.run(
        [sys.executable, "-m", "lowtide.cli", *arguments],
        capture_output=True,
        text=True,
        env=environment,
        check=False,
    )
    if done.returncode != 0:
        raise SystemExit(f"lowtide {' '.join(arguments)} failed: {done.stderr[-2000:]}")
    return done.stdout


def errors(line: dict[str, Any]) -> tuple[float, float, float]:
    """Return how far off the peak, the time with the trace's times and that with the machine's were."""
    return (
        line["predicted_peak_bytes"] / line["measured_peak_bytes"] - 1,
        line["predicted_s"] / line["measured_s"] - 1,
        line["here_s"] / line["measured_s"] - 1,
    )


def _sentence(line: dict[str, Any]) -> str:
    peak, time, here = errors(line)
    return (
        f"{line['model']} {line['policy']} {line['budget']}: {line['measured_s']:.3f} s measured, "
        f"{time:+.1%} by the trace, {here:+.1%} by the machine, peak {peak:+.2%}; "
        f"stall {line['predicted_stall_s']:.3f} / {line['measured_stall_s']:.3f}, unmanaged {line['unmanaged_s']:.3f} "
        f"/ {line['roomy_s']:.3f}, planned {line['planned']}"
    )


def markdown(lines: list[dict[str, Any]]) -> str:
    """Return the cases as a table in Markdown, and how many are within the goals."""
    goals = (PEAK_TOLERANCE, TRACE_TOLERANCE, HERE_TOLERANCE)
    within = [sum(abs(errors(line)[k]) <= goal for line in lines) for k, goal in enumerate(goals)]
    count = len(lines)
    said = (
        f"Peak within {PEAK_TOLERANCE:.0%}: {within[0]} of {count} cases. Step time within {TRACE_TOLERANCE:.0%} with "
        f"the trace's times: {within[1]}. Within {HERE_TOLERANCE:.0%} with `--machine here`: {within[2]}.\n\n"
    )
    headings = (
        "script",
        "policy",
        "budget",
        "peak",
        "predicted",
        "step",
        "by the trace",
        "by the machine",
        "unmanaged",
    )
    rows = []
    for line in lines:
        peak, time, here = errors(line)
        rows.append(
            (
                line["model"],
                f"`{line['policy']}`",
                line["budget"],
                f"{line['measured_peak_bytes'] / 2**20:,.1f} MiB",
                f"{peak:+.1%}",
                f"{line['measured_s']:.3f} s",
                f"{time:+.1%}",
                f"{here:+.1%}",
                f"{line['unmanaged_s']:.3f} s",
            )
        )
    return said + table(headings, rows, texts=3)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--policies", nargs="+", default=list(POLICIES))
    parser.add_argument("--budgets", nargs="+", default=list(BUDGETS), help="shares of what activations add")
    parser.add_argument("--steps", type=int, default=6, help="steps measured in each case")
    parser.add_argument("--batch", type=int, default=None, help="another batch size, to try the script itself")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results" / "prediction.json")
    parser.add_argument("--append", action="store_true", help="keep the other scripts' cases in the output")
    parser.add_argument("--page", type=Path, default=None, help="put the table into this page")
    parser.add_argument("--spill", type=Path, default=None, help="directory on the disk to spill to")
    return parser


if __name__ == "__main__":
    sys.exit(main())
