"""`lowtide plan`: what a recorded step needs, and what a policy would do with a budget."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from lowtide.cli.cases import (
    budget_for,
    check_budget,
    check_floor,
    progress,
    read_machine,
    read_trace,
    recompute_option,
    verified,
    warn_of_mixed_times,
)
from lowtide.cli.checks import check_policy
from lowtide.cli.output import console, echo_json, facts
from lowtide.core.units import format_bytes, format_rate, format_seconds
from lowtide.errors import BadArgument, PlanError

if TYPE_CHECKING:
    from lowtide.core.machine import Machine
    from lowtide.core.plan import Plan, Problem
    from lowtide.core.trace import Trace
    from lowtide.report import Point, Settled, Wanted


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option(
    "--floor", "floor_only", is_flag=True, help="Only show the smallest budget, and the operator that sets it."
)
@click.option("--budget", metavar="B", help="Plan for this much tensor memory, such as 2GiB.")
@click.option("--pareto", is_flag=True, help="Show memory against time, from the floor to the peak.")
@click.option("--max-slowdown", metavar="S", help="Find the smallest budget with a step at most this much slower: 5%.")
@click.option("--max-written", metavar="B", help="Find the smallest budget that writes at most B a step, such as 2GiB.")
@click.option("--policy", default="auto", show_default=True, metavar="P", help="The policy; see 'lowtide policies'.")
@click.option("--machine", metavar="M", help="A preset (see docs/machines.md), a machine file, or here.")
@recompute_option
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of a table.")
@click.argument("trace_path", metavar="TRACE", type=click.Path(path_type=Path))
def command(
    *,
    floor_only: bool,
    budget: str | None,
    pareto: bool,
    max_slowdown: str | None,
    max_written: str | None,
    policy: str,
    machine: str | None,
    no_recompute: bool,
    as_json: bool,
    trace_path: Path,
) -> int:
    """Show the memory that the step in TRACE needs and, with --budget, the plan of a policy.

    Runs nothing: the step is simulated, as 'lowtide simulate' does it. Without --machine, operators take the trace's
    times and the disk is the one that 'lowtide probe' measured, or an ordinary one if that was never run; with it, both
    are the named machine's. A budget below the floor is refused with exit code 2, unless the machine has slow memory
    that operators use in place.

    \b
    Examples:
      lowtide plan --floor step.trace
      lowtide plan --budget 2GiB step.trace
      lowtide plan --budget 8GiB --machine v100 step.trace
      lowtide plan --budget 8GiB --machine optane --policy deeptm step.trace
      lowtide plan --budget 2GiB --policy swap_all --json step.trace
      lowtide plan --pareto step.trace
      lowtide plan --max-slowdown 5% --max-written 10GiB step.trace
    """
    limited = max_slowdown is not None or max_written is not None
    asked = {"--floor": floor_only, "--budget": budget is not None, "--pareto": pareto, "--max-...": limited}
    if sum(asked.values()) > 1:
        names = " and ".join(name for name, given in asked.items() if given)
        raise BadArgument(f"{names} ask different questions: pass one of them")
    wanted = _wanted(max_slowdown, max_written)
    check_budget(budget)
    policy = check_policy(policy)
    target = read_machine(machine)
    trace = read_trace(trace_path)
    from lowtide.report import problem_of
    from lowtide.report.case import can_place

    keep_times = machine is None
    problem = problem_of(trace, target, budget_bytes=0, keep_times=keep_times, can_recompute=not no_recompute)
    trace = problem.trace
    budget_bytes = None if budget is None else budget_for(budget, trace)
    need = _need(trace)
    if pareto or limited:
        warn_of_mixed_times(trace, [target], keep_times=True)
        points = _points(problem, policy, wanted if limited else None)
        if as_json:
            echo_json({**need, "policy": policy, "machine": target.name, "points": [asdict(one) for one in points]})
        else:
            _print_need(trace, floor_only=False)
            _print_points(trace, points, policy=policy, machine=target)
        return 0
    if budget_bytes is None:
        if as_json:
            echo_json(need)
        else:
            _print_need(trace, floor_only=floor_only)
        return 0
    if budget_bytes < trace.floor_bytes() and not can_place(trace, target) and not as_json:
        _print_need(trace, floor_only=False)  # the figures are the answer to a budget that is too small
    check_floor(trace, budgets_bytes=[budget_bytes], machines=[target])
    warn_of_mixed_times(trace, [target], keep_times=True)
    settled = verified(replace(problem, budget_bytes=budget_bytes), policy)
    if as_json:
        echo_json({**need, **_decisions(trace, settled, machine=target)})
    else:
        _print_need(trace, floor_only=False)
        _print_plan(trace, settled, machine=target)
    return 0


def _wanted(max_slowdown: str | None, max_written: str | None) -> Wanted:
    from lowtide.memory.budget import parse_budget
    from lowtide.report import Wanted

    slowdown = None
    if max_slowdown is not None:
        try:
            slowdown = 1 + float(max_slowdown.strip().removesuffix("%")) / 100
        except ValueError:
            slowdown = 0.0
        if not max_slowdown.strip().endswith("%") or not 1 <= slowdown < 1e6:
            raise BadArgument(f"cannot read --max-slowdown {max_slowdown!r}: write a share of the step, such as 5%")
    written = None if max_written is None else 0 if max_written.strip() == "0" else parse_budget(max_written).fast_bytes
    return Wanted(slowdown=slowdown, written_bytes=written)


def _points(problem: Problem, policy: str, wanted: Wanted | None) -> Sequence[Point]:
    """Return the whole frontier, or the one point with the least memory that meets what is wanted."""
    from lowtide import registry
    from lowtide.report import frontier, smallest

    chosen = registry.policy(policy)
    if wanted is None:
        with progress("budgets") as on_done:
            points = frontier(problem, chosen, on_done=on_done)
        if points:
            return points
        raise PlanError(f"policy {policy} has no plan for any budget up to {format_bytes(problem.trace.peak_bytes)}")
    point = smallest(problem, chosen, wanted)
    if point is None:
        raise PlanError(
            f"policy {policy} is not within these limits even with {format_bytes(problem.trace.peak_bytes)}, "
            "the whole peak: allow more"
        )
    return (point,)


def _need(trace: Trace) -> dict[str, Any]:
    op = trace.floor_op()
    return {
        "static_bytes": trace.static_bytes,
        "peak_bytes": trace.peak_bytes,
        "floor_bytes": trace.floor_bytes(),
        "floor_op": None if op is None else op.name,
        "floor_module": None if op is None else op.module,
        "step_s": trace.duration_s,
        "times": _origin(trace),
    }


def _decisions(trace: Trace, settled: Settled, *, machine: Machine) -> dict[str, Any]:
    plan, timeline = settled.plan, settled.timeline
    return {
        "policy": plan.policy,
        "budget_bytes": plan.budget_bytes,
        "machine": machine.name,
        "machine_source": machine.source,
        "swaps": len(plan.swaps),
        "swapped_bytes": sum(trace.storages[swap.gap.storage].nbytes for swap in plan.swaps),
        "recomputes": len(plan.recomputes),
        "places": len(plan.places),
        "placed_bytes": _placed_bytes(trace, plan),
        "predicted_slow_s": None if plan.prediction is None else plan.prediction.slow_s,
        "predicted_peak_bytes": timeline.peak_bytes,
        "predicted_step_s": timeline.step_s,
        "predicted_stall_s": timeline.stall_s,
        "predicted_recompute_s": timeline.recompute_s,
        "notes": list(plan.notes),
    }


def _placed_bytes(trace: Trace, plan: Plan) -> int:
    return sum(trace.storages[one.storage].nbytes if one.nbytes is None else one.nbytes for one in plan.places)


def _origin(trace: Trace) -> str:
    return f"predicted for {trace.timed_for}" if trace.timed_for else "measured"


def _print_need(trace: Trace, *, floor_only: bool) -> None:
    op = trace.floor_op()
    floor = ("floor", f"{format_bytes(trace.floor_bytes())} ({trace.floor_bytes()} bytes)")
    setter = ("set by", "nothing: the trace has no operators" if op is None else f"{op.name} {op.place}".rstrip())
    rows = [floor, setter]
    if not floor_only:
        rows = [
            ("static", format_bytes(trace.static_bytes)),
            ("peak, unmanaged", format_bytes(trace.peak_bytes)),
            *rows,
            ("step, unmanaged", f"{format_seconds(trace.duration_s)}, {_origin(trace)}"),
        ]
    origin = "simulated" if trace.timed_for else "measured"
    console().print(facts(f"What {trace.model or 'the step'} needs, {origin}", rows))


def _print_plan(trace: Trace, settled: Settled, *, machine: Machine) -> None:
    plan, timeline = settled.plan, settled.timeline
    moved = sum(trace.storages[swap.gap.storage].nbytes for swap in plan.swaps)
    swaps = f"{len(plan.swaps)} of {len(trace.gaps())} gaps, {format_bytes(moved)}"
    link = machine.links["spill"]
    rates = f"{format_rate(link.write_bytes_per_s)} write, {format_rate(link.read_bytes_per_s)} read, {machine.source}"
    slower = timeline.step_s / trace.duration_s if trace.duration_s else 1.0
    stalled = f"stalled {format_seconds(timeline.stall_s)}"
    rows = [
        ("budget", format_bytes(plan.budget_bytes)),
        ("swaps", "decided while the step runs" if plan.prediction is None and not plan.swaps else swaps),
        *([("recomputes", f"{len(plan.recomputes)} of {len(trace.gaps())} gaps")] if plan.recomputes else []),
        *([("in slow memory", _stays(trace, plan))] if plan.places else []),
        ("predicted peak", format_bytes(timeline.peak_bytes)),
        ("predicted step", f"{format_seconds(timeline.step_s)}, {slower:.2f}x unmanaged, {stalled}"),
        ("machine", machine.name),
        ("disk", f"{rates}: run 'lowtide probe'" if machine.source == "assumed" else rates),
    ]
    rows.extend(("note", note) for note in timeline.notes)
    console().print()
    console().print(facts(f"What policy {plan.policy} would do, simulated", rows))


def _stays(trace: Trace, plan: Plan) -> str:
    stays = f"{len(plan.places)} stays, {format_bytes(_placed_bytes(trace, plan))}"
    if plan.prediction is None:
        return stays
    return f"{stays}; operators take {format_seconds(plan.prediction.slow_s)} longer"


def _print_points(trace: Trace, points: Sequence[Point], *, policy: str, machine: Machine) -> None:
    from rich.table import Table

    table = Table(box=None, pad_edge=False, padding=(0, 1))
    placed = any(point.placed_bytes for point in points)
    for name in ("budget", "of peak", "time", "swapped", "recomputed", *["placed"] * placed, "written", "stall"):
        table.add_column(name, justify="right", no_wrap=True)
    for point in points:
        table.add_row(
            format_bytes(point.budget_bytes),
            f"{point.budget_bytes / trace.peak_bytes:.0%}",
            f"{point.slowdown:.2f}x",
            format_bytes(point.swapped_bytes),
            format_bytes(point.recomputed_bytes),
            *[format_bytes(point.placed_bytes)] * placed,
            format_bytes(point.written_bytes),
            format_seconds(point.stall_s),
        )
    console().print()
    where = "an assumed machine" if machine.source == "assumed" else machine.name
    console().print(f"Memory against time under {policy} on {where}, simulated", style="bold")
    console().print(table)
