"""`lowtide report`: one HTML page about a step: memory, lanes, every transfer with its reason, and other policies."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import click

from lowtide.cli.cases import (
    check_floor,
    model_options,
    progress,
    read_machine,
    read_policies,
    read_trace,
    warn_of_mixed_times,
    words,
)
from lowtide.cli.checks import check_output
from lowtide.cli.compare import DEFAULT_BUDGETS
from lowtide.cli.output import console, facts, warn, write_text
from lowtide.core.units import format_bytes
from lowtide.errors import BadArgument

if TYPE_CHECKING:
    from lowtide.core.machine import Machine
    from lowtide.core.trace import Trace
    from lowtide.report import Comparison, Focus
    from lowtide.report.compare import Answer, Case, Setting


# What a page shows unless it is told: the product, and four that differ most from it and from one another.
DEFAULT_POLICIES = ("auto", "belady", "capuchin", "superneurons", "vdnn")


@dataclass(frozen=True, slots=True, kw_only=True)
class Wish:
    """What the user asked for. An empty `policies` means a few, with auto on top."""

    source: Path
    budget: str | None
    budgets: str | None
    policies: tuple[str, ...]
    machine: str | None
    keep_times: bool
    can_recompute: bool
    allocator: str | None
    jobs: int


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--budget", metavar="B", help="The budget shown in detail: 2GiB, or 60%. Needed with a trace.")
@click.option(
    "--policies", metavar="A,B", help="Policies to show, the main one first, or all (default: auto and four others)."
)
@click.option("--budgets", metavar="B,C", help=f"More budgets for the plot; {DEFAULT_BUDGETS} if not given.")
@click.option("--machine", metavar="M", help="A preset (see docs/machines.md), a machine file, or here.")
@model_options
@click.option("-o", "--out", required=True, type=click.Path(path_type=Path), metavar="FILE", help="The page to write.")
@click.option("--perfetto", type=click.Path(path_type=Path), metavar="FILE", help="Also save a Perfetto/Chrome trace.")
@click.option("--jobs", type=int, metavar="N", help="Processes; as many as this machine has cores if not given.")
@click.argument("source", metavar="SOURCE", type=click.Path(path_type=Path))
def command(
    *,
    budget: str | None,
    policies: str | None,
    budgets: str | None,
    machine: str | None,
    keep_times: bool,
    no_recompute: bool,
    allocator: str | None,
    out: Path,
    perfetto: Path | None,
    jobs: int | None,
    source: Path,
) -> int:
    """Write one HTML page about a step; it needs no network and no other file.

    SOURCE is a trace, or the results of 'lowtide compare --json'. Of those, the plot and the table are taken as they
    are, and the trace they name is simulated again at one budget (--budget, or the first of them) for the timelines.

    \b
    Examples:
      lowtide report step.trace --budget 2GiB -o report.html
      lowtide report r50.trace --budget 50% --machine v100 -o r50.html
      lowtide report all.json --budget 60% --policies auto,vdnn -o all.html
    """
    if jobs is not None and jobs < 1:
        raise BadArgument(f"--jobs {jobs} is too few: pass 1 or more")
    check_output(out, others=[source, perfetto])
    check_output(perfetto, others=[source])
    wish = Wish(
        source=source,
        budget=budget,
        budgets=budgets,
        policies=tuple(read_policies(policies)) if policies is not None else (),
        machine=machine,
        keep_times=keep_times,
        can_recompute=not no_recompute,
        allocator=allocator,
        jobs=jobs or os.cpu_count() or 1,
    )
    from lowtide.report import html_report, perfetto_json

    compared = _read_comparison(source)
    note = ""
    focus: Focus | None
    if compared is None:
        comparison, focus = _from_trace(wish)
    else:
        comparison, focus, note = _from_comparison(wish, compared)
    if focus is None and perfetto is not None:
        raise BadArgument(f"a Perfetto trace needs timelines: {note}")
    page = html_report(comparison, focus, note=note)
    if focus is not None and perfetto is not None:
        write_text(perfetto, perfetto_json([step.timeline for step in focus.steps], focus.problem.trace))
    write_text(out, page)
    if note:
        warn(note)
    _tell(comparison, focus, page=page, out=out, perfetto=perfetto)
    return 0


def _from_trace(wish: Wish) -> tuple[Comparison, Focus]:
    """Return every policy at every budget, and one budget in detail."""
    from lowtide.report import budget_of
    from lowtide.report.compare import Setting, cases_of, comparison_of

    if not wish.source.exists():
        read_trace(wish.source)  # says so
    if wish.budget is None:
        raise BadArgument("a report of a trace needs --budget, such as 2GiB or 60%")
    target = read_machine(wish.machine)
    trace = read_trace(wish.source)
    warn_of_mixed_times(trace, [target], keep_times=wish.keep_times or wish.machine is None)
    stated = [wish.budget, *words(wish.budgets or DEFAULT_BUDGETS, what="--budgets")]
    budgets_bytes = [budget_of(text, static_bytes=trace.static_bytes, peak_bytes=trace.peak_bytes) for text in stated]
    check_floor(trace, budgets_bytes=budgets_bytes[:1], machines=[target])
    setting = Setting(
        trace=trace,
        machines=(target,),
        keep_times=wish.keep_times or wish.machine is None,
        can_recompute=wish.can_recompute,
        allocator=wish.allocator,
    )
    names = wish.policies or DEFAULT_POLICIES
    cases = [
        replace(case, detail=case.budget_bytes == budgets_bytes[0])
        for case in cases_of(policies=names, budgets_bytes=budgets_bytes, machines=1)
    ]
    answers = _answers(setting, cases, wish)
    comparison = comparison_of(setting, [answer.result for answer in answers], trace_path=str(wish.source))
    return comparison, _focus(setting, budgets_bytes[0], answers, wish)


def _from_comparison(wish: Wish, compared: Comparison) -> tuple[Comparison, Focus | None, str]:
    """Return a comparison, the steps at one of its budgets if its trace is at hand, and what to say if it is not."""
    from lowtide.report import Outcome, budget_of
    from lowtide.report.compare import Case, Setting

    if wish.budgets is not None:
        raise BadArgument("--budgets is for a trace: a comparison has its own, made with 'lowtide compare --budgets'")
    if wish.keep_times or not wish.can_recompute or wish.allocator is not None:
        raise BadArgument("a comparison was simulated already: pass --keep-times and the like to 'lowtide compare'")
    target = _machine_of(compared, wish.machine)
    trace, note = _trace_of(compared, wish.source)
    if trace is None:
        return compared, None, note
    here = [result for result in compared.results if result.machine == target.name]
    first = next((result.budget_bytes for result in here if isinstance(result, Outcome)), compared.peak_bytes)
    budget_bytes = first
    if wish.budget is not None:
        budget_bytes = budget_of(wish.budget, static_bytes=compared.static_bytes, peak_bytes=compared.peak_bytes)
    check_floor(trace, budgets_bytes=[budget_bytes], machines=[target])
    setting = Setting(
        trace=trace,
        machines=(target,),
        keep_times=compared.keep_times,
        can_recompute=compared.can_recompute,
        allocator=compared.allocator,
    )
    names = wish.policies or tuple(dict.fromkeys(result.policy for result in here))
    cases = [Case(policy=name, machine=0, budget_bytes=budget_bytes, detail=True) for name in names]
    answers = _answers(setting, cases, wish)
    known = {(result.policy, result.budget_bytes) for result in here}
    added = [answer.result for answer in answers if (answer.result.policy, answer.result.budget_bytes) not in known]
    merged = replace(compared, results=(*compared.results, *added))
    return merged, _focus(setting, budget_bytes, answers, wish), note


def _answers(setting: Setting, cases: Sequence[Case], wish: Wish) -> list[Answer]:
    from lowtide.report.compare import run_cases

    with progress("simulating") as on_done:
        return run_cases(setting, cases, jobs=wish.jobs, on_done=on_done)


def _focus(setting: Setting, budget_bytes: int, answers: Sequence[Answer], wish: Wish) -> Focus:
    """Return the steps that ran: as the user ordered them, or auto and then the fastest first."""
    from lowtide.report import Focus, problem_of

    steps = [answer.settled for answer in answers if answer.settled is not None]
    if not steps:
        reason = next(getattr(answer.result, "reason", "") for answer in answers)
        raise BadArgument(f"none of these policies runs in {format_bytes(budget_bytes)}: {reason}")
    if not wish.policies:
        steps.sort(key=lambda step: (step.timeline.policy != "auto", step.bound, step.timeline.step_s))
    problem = problem_of(
        setting.trace,
        setting.machines[0],
        budget_bytes=budget_bytes,
        keep_times=setting.keep_times,
        can_recompute=setting.can_recompute,
    )
    return Focus(problem=problem, steps=tuple(steps))


def _read_comparison(path: Path) -> Comparison | None:
    """Return the comparison in a file, or None if it is something else: a trace, or nothing at all."""
    from lowtide.report import load_comparison
    from lowtide.report.comparison_file import looks_like_comparison

    try:
        content = path.read_bytes()
    except OSError:
        return None
    return load_comparison(path) if looks_like_comparison(content) else None


def _machine_of(compared: Comparison, name: str | None) -> Machine:
    names = [machine.name for machine in compared.machines]
    if name is None and compared.machines:
        return compared.machines[0]
    for machine in compared.machines:
        if machine.name == name:
            return machine
    raise BadArgument(f"the comparison has no machine {name!r}: choose one of {', '.join(names) or 'none'}")


def _trace_of(compared: Comparison, source: Path) -> tuple[Trace | None, str]:
    """Return the trace that was compared, looked for where it was and beside the comparison; else say why not."""
    from lowtide.report.compare import digest_of

    stated = Path(compared.trace_path)
    for path in dict.fromkeys((stated, source.parent / stated.name)):
        if path.is_file():
            trace = read_trace(path)
            if digest_of(trace) == compared.digest:
                return trace, ""
            return None, f"no timelines: {path} is not the trace that was compared"
    return None, f"no timelines: the trace {stated} that was compared is not there"


def _tell(comparison: Comparison, focus: Focus | None, *, page: str, out: Path, perfetto: Path | None) -> None:
    rows = [("page", f"{out}, {format_bytes(len(page.encode()))}")]
    if perfetto is not None:
        rows.append(("Perfetto", f"{perfetto}: open it in ui.perfetto.dev or chrome://tracing"))
    if focus is not None:
        machine = focus.problem.machine
        where = "an assumed machine: run 'lowtide probe'" if machine.source == "assumed" else machine.name
        rows.append(("in detail", f"{format_bytes(focus.problem.budget_bytes)} on {where}"))
        rows.append(("timelines", ", ".join(step.timeline.policy for step in focus.steps)))
    ran = sum(not hasattr(result, "reason") for result in comparison.results)
    rows.append(("compared", f"{len(comparison.results)} cases, of which {ran} run"))
    console().print(facts(f"Report on {comparison.model or 'the step'}, simulated", rows))
