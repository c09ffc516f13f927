"""Compare `auto` with every other policy on the zoo's traces: at which budgets and machines is another one faster?

Traces are captured without executing, operator times are predicted for each machine, budgets are shares of what lies
between the floor and the peak; steps are simulated. Policies that do not fit where `auto` does are counted. Beside it
stands a time that no plan of swaps and recomputations is faster than (plan/costs/lower_bound.py).
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

if not __package__:
    # Run as a file, Python puts this directory on the path instead of the one that holds it.
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

from rich.console import Console

from benchmarks.jobs import ROOT
from benchmarks.pages import table, write_page
from lowtide import registry, zoo
from lowtide.capture.fake import capture_fake
from lowtide.core.trace import Trace
from lowtide.estimate.presets import PRESETS, machine
from lowtide.plan.costs.lower_bound import least_step_s
from lowtide.report import Comparison, Outcome, compare
from lowtide.report.case import problem_of

# Sizes that a laptop can hold as a trace and a card of the machines below cannot hold as a training.
MODELS: dict[str, dict[str, int]] = {
    "alexnet": {"batch": 512},
    "vgg16": {"batch": 64},
    "resnet50": {"batch": 64},
    "resnet152": {"batch": 32},
    "inception_v3": {"batch": 64},
    "densenet121": {"batch": 64},
    "unet": {"batch": 16},
    "seq2seq": {"batch": 64},
    "bert_base": {"batch": 32},
    "gpt": {"batch": 8},
    "vit": {"batch": 64},
}
MACHINES = ("titan-x", "v100", "a100", "rtx4090")
SHARES = (0.02, 0.2, 0.5, 0.8)
# It does not pay for memory at all: nobody is compared with it.
UNFAIR = ("infinite_memory",)
WITHIN = 0.01


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """One trace on one machine at one budget: `auto` and the best of the others."""

    model: str
    machine: str
    share: float
    budget_bytes: int
    auto_s: float
    best: str
    best_s: float
    infinite_s: float
    least_s: float
    unfit: int

    @property
    def behind(self) -> float:
        """By which share of the best one's time `auto` is slower (below zero: faster)."""
        return self.auto_s / self.best_s - 1

    @property
    def above_bound(self) -> float:
        """By which share of the lower bound `auto` is slower."""
        return self.auto_s / self.least_s - 1


def main(arguments: list[str] | None = None) -> int:
    """Compare everywhere; exit with 1 if `auto` is behind by more than 1% somewhere."""
    options = _parser().parse_args(arguments)
    console = Console(stderr=True)
    policies = [name for name in registry.policy_names() if name not in UNFAIR]
    cells: list[Cell] = []
    if options.results:
        cells = [Cell(**one) for path in options.results for one in json.loads(path.read_text())["cells"]]
        options.out.write_text(json.dumps(_document(cells, policies), indent=1) + "\n")
        options.models = []
    for model in options.models:
        trace = _trace(model)
        floor_bytes, peak_bytes = trace.floor_bytes(), trace.peak_bytes
        budgets = {share: round(floor_bytes + share * (peak_bytes - floor_bytes)) for share in options.shares}
        found = compare(
            trace,
            policies=policies,
            budgets_bytes=list(budgets.values()),
            machines=[machine(name) for name in options.machines],
            jobs=options.jobs,
        )
        cells += [
            _cell(model, found, name, share, budgets[share], least_s=_least_s(trace, name, budgets[share]))
            for name in options.machines
            for share in budgets
        ]
        worst = max((cell for cell in cells if cell.model == model), key=lambda cell: cell.behind)
        console.print(_sentence(worst), soft_wrap=True)
        options.out.write_text(json.dumps(_document(cells, policies), indent=1) + "\n")
    print(markdown(cells), end="")
    if options.page is not None:
        write_page(markdown(cells), options.page, script="auto.py")
    return 1 if any(cell.behind > WITHIN for cell in cells) else 0


def _trace(model: str) -> Trace:
    return capture_fake(lambda: zoo.build(model, **MODELS[model]).training())


def _least_s(trace: Trace, name: str, budget_bytes: int) -> float:
    """Return what no plan of swaps and recomputations is faster than."""
    problem = problem_of(trace, machine(name), budget_bytes=budget_bytes)
    return least_step_s(replace(problem, trace=problem.trace.under(budget_bytes)))


def _cell(model: str, found: Comparison, name: str, share: float, budget_bytes: int, *, least_s: float) -> Cell:
    here = [one for one in found.results if one.machine == machine(name).name and one.budget_bytes == budget_bytes]
    ran = [one for one in here if isinstance(one, Outcome) and not one.over_budget]
    auto = next(one for one in ran if one.policy == "auto")
    best = min((one for one in ran if one.policy != "auto"), key=lambda one: one.step_s)
    return Cell(
        model=model,
        machine=name,
        share=share,
        budget_bytes=budget_bytes,
        auto_s=auto.step_s,
        best=best.policy,
        best_s=best.step_s,
        infinite_s=auto.infinite_s,
        least_s=least_s,
        unfit=len(here) - len(ran),
    )


def _document(cells: list[Cell], policies: list[str]) -> dict[str, Any]:
    return {"sizes": MODELS, "policies": policies, "cells": [asdict(cell) for cell in cells]}


def _sentence(cell: Cell) -> str:
    return (
        f"{cell.model}: at worst {cell.behind:+.2%} of {cell.best}, on {cell.machine} at {cell.share:.0%} "
        f"({cell.auto_s:.3f} s, without a budget {cell.infinite_s:.3f} s)"
    )


def markdown(cells: list[Cell]) -> str:
    """Return, in Markdown, how far `auto` is behind the best of the others: by model and machine, over the budgets."""
    within = sum(cell.behind <= WITHIN for cell in cells)
    shares = sorted({cell.share for cell in cells})
    rows: dict[tuple[str, str], list[Cell]] = {}
    for cell in sorted(cells, key=lambda cell: cell.share):
        rows.setdefault((cell.model, cell.machine), []).append(cell)
    lines = [
        (model, name, *(f"{cell.behind:+.2%} `{cell.best}`, {_slower(cell)}" for cell in row))
        for (model, name), row in rows.items()
    ]
    above = sorted(cell.above_bound for cell in cells)
    count = (
        f"Within {WITHIN:.0%} of the best of the others in {within} of {len(cells)} cases; at most "
        f"{max(cell.behind for cell in cells):+.2%}. Above the lower bound by {above[len(above) // 2]:.1%} in the "
        f"median case, by less than 5% in {sum(one < 0.05 for one in above)}, by {above[-1]:.0%} at worst.\n\n"
    )
    return count + table(("model", "machine", *(f"{share:.0%}" for share in shares)), lines, texts=2)


def _slower(cell: Cell) -> str:
    return f"{cell.auto_s / cell.infinite_s:.2f}x ({cell.least_s / cell.infinite_s:.2f}x)"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--models", nargs="+", choices=tuple(MODELS), default=list(MODELS))
    parser.add_argument("--machines", nargs="+", choices=tuple(PRESETS), default=list(MACHINES))
    parser.add_argument(
        "--shares", nargs="+", type=float, default=list(SHARES), help="budget = floor + share x (peak - floor)"
    )
    parser.add_argument("--page", type=Path, default=None, help="put the table into this page")
    parser.add_argument("--results", nargs="+", type=Path, help="join these instead of comparing")
    parser.add_argument("--jobs", type=int, default=2, help="processes")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results" / "auto.json")
    return parser


if __name__ == "__main__":
    sys.exit(main())
