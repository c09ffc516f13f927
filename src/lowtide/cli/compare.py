"""`lowtide compare`: many policies at many budgets on many machines, on one trace."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

import click

from lowtide.cli.cases import (
    check_floor,
    model_options,
    progress,
    read_machines,
    read_policies,
    read_trace,
    warn_of_mixed_times,
    words,
)
from lowtide.cli.checks import check_output
from lowtide.cli.output import console, write_json
from lowtide.core.units import format_bytes, format_seconds
from lowtide.errors import BadArgument

if TYPE_CHECKING:
    from rich.table import Table

    from lowtide.report import Comparison, Outcome, Refusal

DEFAULT_BUDGETS = "40%,60%,80%"


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--policies", default="all", show_default=True, metavar="A,B", help="Which; see 'lowtide policies'.")
@click.option(
    "--budgets",
    default=DEFAULT_BUDGETS,
    show_default=True,
    metavar="B,C",
    help="Bytes such as 2GiB, or shares of the bytes that activations add.",
)
@click.option("--machines", metavar="M,N", help="Presets (see docs/machines.md), machine files, or here.")
@model_options
@click.option("--json", "out", type=click.Path(path_type=Path), metavar="FILE", help="Save all results here.")
@click.option("--jobs", type=int, metavar="N", help="Processes; as many as this machine has cores if not given.")
@click.argument("trace_path", metavar="TRACE", type=click.Path(path_type=Path))
def command(
    *,
    policies: str,
    budgets: str,
    machines: str | None,
    keep_times: bool,
    no_recompute: bool,
    allocator: str | None,
    out: Path | None,
    jobs: int | None,
    trace_path: Path,
) -> int:
    """Simulate the step recorded in TRACE under many policies, and print the fastest of them.

    Budgets may be bytes, or percent of the bytes that activations add: 0% is the static bytes, 100% the unmanaged
    peak. A policy that does not fit is listed with the operator that needs more. Exit code 1 if a policy failed by
    itself.

    \b
    Examples:
      lowtide compare step.trace
      lowtide compare r50.trace --machines v100,a100 --budgets 30%,50%
      lowtide compare step.trace --policies auto,vdnn,capuchin --json all.json
    """
    names = read_policies(policies)
    wanted = words(budgets, what="--budgets")
    if jobs is not None and jobs < 1:
        raise BadArgument(f"--jobs {jobs} is too few: pass 1 or more")
    check_output(out, others=[trace_path])
    targets = read_machines(machines)
    trace = read_trace(trace_path)
    warn_of_mixed_times(trace, targets, keep_times=keep_times or machines is None)
    from lowtide.report import budget_of, compare, encode_comparison

    budgets_bytes = [budget_of(text, static_bytes=trace.static_bytes, peak_bytes=trace.peak_bytes) for text in wanted]
    check_floor(trace, budgets_bytes=budgets_bytes, machines=targets)
    with progress(f"{len(names)} policies") as on_done:
        comparison = compare(
            trace,
            policies=names,
            budgets_bytes=budgets_bytes,
            machines=targets,
            jobs=jobs or os.cpu_count() or 1,
            keep_times=keep_times or machines is None,
            can_recompute=not no_recompute,
            allocator=allocator,
            trace_path=str(trace_path),
            on_done=on_done,
        )
    if out is not None:
        write_json(out, encode_comparison(comparison))
    _print(comparison, dict(zip(budgets_bytes, wanted, strict=True)), out)
    return 1 if any(getattr(result, "crashed", False) for result in comparison.results) else 0


def _print(comparison: Comparison, stated: dict[int, str], out: Path | None) -> None:
    from lowtide.report import Outcome, Refusal
    from lowtide.report.page import best_first

    screen = console()
    screen.print(
        f"{comparison.model or 'The step'}, simulated: {comparison.operators} operators, "
        f"peak {format_bytes(comparison.peak_bytes)} unmanaged, floor {format_bytes(comparison.floor_bytes)}"
    )
    for machine in comparison.machines:
        for budget_bytes, text in stated.items():
            found = [
                result
                for result in comparison.results
                if (result.machine, result.budget_bytes) == (machine.name, budget_bytes)
            ]
            ran = [result for result in best_first(found) if isinstance(result, Outcome)]
            share = f" ({text})" if text.endswith("%") else ""
            screen.print()
            screen.print(f"{machine.name}, budget {format_bytes(budget_bytes)}{share}", style="bold")
            if ran:
                screen.print(_table(ran))
            for result in found:
                if isinstance(result, Refusal):
                    screen.print(f"{result.policy}: {_reason(result)}", style="dim", soft_wrap=True)
    screen.print()
    if any(isinstance(result, Outcome) and result.unplanned_bytes for result in comparison.results):
        screen.print("* the plan alone did not fit: more left when memory ran out")
    if any(isinstance(result, Outcome) and result.over_budget for result in comparison.results):
        screen.print("! a bound: it ignores the budget")
    screen.print("time: step time as a multiple of that with infinite memory")
    if out is not None:
        screen.print(f"wrote {out}: lowtide report {out} -o report.html", soft_wrap=True)


def _table(ran: list[Outcome]) -> Table:
    from rich.table import Table

    table = Table(box=None, pad_edge=False, padding=(0, 1))
    table.add_column("policy", no_wrap=True)
    for name in ("time", "step", "peak", "moved", "recompute", "stall"):
        table.add_column(name, justify="right", no_wrap=True)
    for result in ran:
        mark = "!" if result.over_budget else "*" if result.unplanned_bytes else ""
        table.add_row(
            f"{result.policy}{mark}",
            f"{result.slowdown:.2f}x",
            format_seconds(result.step_s),
            format_bytes(result.peak_bytes),
            format_bytes(result.moved_out_bytes + result.moved_in_bytes),
            format_seconds(result.recompute_s),
            format_seconds(result.stall_s),
        )
    return table


def _reason(result: Refusal) -> str:
    if result.needed_bytes is not None:
        lacking = format_bytes(result.needed_bytes - result.budget_bytes)
        return f"does not fit, '{result.op}' needs {format_bytes(result.needed_bytes)}, {lacking} too much"
    return f"failed, {result.reason}" if result.crashed else result.reason
