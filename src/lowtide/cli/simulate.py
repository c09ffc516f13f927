"""`lowtide simulate`: one step under one policy on a virtual clock, in figures, as a timeline, or for Perfetto."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from lowtide.cli.cases import check_floor, model_options, read_machine, read_trace, warn_of_mixed_times
from lowtide.cli.checks import check_output, check_policy
from lowtide.cli.output import console, echo_json, facts, write_text
from lowtide.core.units import format_rate

if TYPE_CHECKING:
    from lowtide.core.timeline import Timeline
    from lowtide.report import Summary
    from lowtide.report.case import Encoding

_DENSITY = 0.5  # about what a ReLU leaves


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--policy", default="auto", show_default=True, metavar="P", help="The policy; see 'lowtide policies'.")
@click.option(
    "--budget", required=True, metavar="B", help="Tensor memory: 2GiB, or 60% of the bytes that activations add."
)
@click.option("--machine", metavar="M", help="A preset (see docs/machines.md), a machine file, or here.")
@click.option("--codec", metavar="C", help="Put a codec before the spill: zvc or fp16; see 'lowtide codecs'.")
@click.option(
    "--density", type=float, metavar="D", help="The share of values that ReLUs leave, for --codec zvc; else 0.5."
)
@model_options
@click.option("--out", type=click.Path(path_type=Path), metavar="FILE", help="Save the timeline here.")
@click.option("--perfetto", type=click.Path(path_type=Path), metavar="FILE", help="Save a Perfetto/Chrome trace here.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of a table.")
@click.argument("trace_path", metavar="TRACE", type=click.Path(path_type=Path))
def command(
    *,
    policy: str,
    budget: str,
    machine: str | None,
    codec: str | None,
    density: float | None,
    keep_times: bool,
    no_recompute: bool,
    allocator: str | None,
    out: Path | None,
    perfetto: Path | None,
    as_json: bool,
    trace_path: Path,
) -> int:
    """Run the step recorded in TRACE under a policy, on a virtual clock.

    Without --machine, operators take the trace's times and the link is this machine's. With it, both are the named
    machine's. A budget that the policy cannot meet is refused with exit code 2, and no file is written. With --codec,
    the output of ReLUs travels without its zeros (zvc), or everything in half precision (fp16, which no training here
    does), at the rates that one thread has on this machine.

    \b
    Examples:
      lowtide simulate step.trace --budget 2GiB
      lowtide simulate r50.trace --policy vdnn --budget 60% --machine v100
      lowtide simulate step.trace --budget 50% --perfetto step.json
      lowtide simulate step.trace --budget 50% --codec zvc --density 0.4
    """
    if codec is None and density is not None:
        raise click.UsageError("--density needs a codec: name one with --codec")
    policy = check_policy(policy)
    check_output(out, others=[trace_path, perfetto])
    check_output(perfetto, others=[trace_path])
    target = read_machine(machine)
    trace = read_trace(trace_path)
    from lowtide import registry
    from lowtide.core.serialize import save
    from lowtide.report import budget_of, perfetto_json, problem_of, settle, summarize

    warn_of_mixed_times(trace, [target], keep_times=keep_times or machine is None)
    budget_bytes = budget_of(budget, static_bytes=trace.static_bytes, peak_bytes=trace.peak_bytes)
    check_floor(trace, budgets_bytes=[budget_bytes], machines=[target])
    problem = problem_of(
        trace,
        target,
        budget_bytes=budget_bytes,
        keep_times=keep_times or machine is None,
        can_recompute=not no_recompute,
    )
    encoding = _encoding(codec, density=_DENSITY if density is None else density) if codec is not None else None
    timeline = settle(problem, registry.policy(policy), allocator=allocator, encoding=encoding).timeline
    timeline = replace(timeline, policy=policy)
    if encoding is not None:
        timeline = replace(timeline, notes=(*timeline.notes, _told(encoding)))
    summary = summarize(timeline, infinite_s=problem.trace.duration_s)
    if out is not None:
        save(timeline, out)
    if perfetto is not None:
        write_text(perfetto, perfetto_json([timeline], problem.trace))
    if as_json:
        echo_json(_answer(timeline, summary))
    else:
        _print(timeline, summary, [path for path in (out, perfetto) if path is not None])
    return 0


def _encoding(name: str, *, density: float) -> Encoding:
    from lowtide.codecs import Stats, ZeroValue, codec, measure
    from lowtide.core.plan import CodecCost
    from lowtide.report.case import Encoding

    found, stats = codec(name), Stats(density=density)
    rates = measure(found, stats)
    cost = CodecCost(
        name=name,
        encode_bytes_per_s=rates.encode_bytes_per_s,
        decode_bytes_per_s=rates.decode_bytes_per_s,
        ratio=found.ratio_model(stats),
    )
    return Encoding(codec=cost, everything=not isinstance(found, ZeroValue))


def _told(encoding: Encoding) -> str:
    cost, what = encoding.codec, "everything" if encoding.everything else "ReLU's results"
    encode, decode = format_rate(cost.encode_bytes_per_s), format_rate(cost.decode_bytes_per_s)
    return f"{what} through {cost.name}: {cost.ratio:.1%} left, encoded at {encode}, decoded at {decode}"


def _answer(timeline: Timeline, summary: Summary) -> dict[str, Any]:
    return {
        "policy": timeline.policy,
        "machine": timeline.machine,
        "model": timeline.model,
        "budget_bytes": timeline.budget_bytes,
        "step_s": timeline.step_s,
        "infinite_s": summary.infinite_s,
        "slowdown": summary.slowdown(timeline),
        "compute_s": timeline.compute_s,
        "recompute_s": timeline.recompute_s,
        "stall_s": timeline.stall_s,
        "waits_s": summary.waits_s,
        "peak_bytes": timeline.peak_bytes,
        "reserved_peak_bytes": timeline.reserved_peak_bytes,
        "moved_out_bytes": timeline.moved_out_bytes,
        "moved_in_bytes": timeline.moved_in_bytes,
        "writes": summary.writes,
        "reads": summary.reads,
        "trials": timeline.trials,
        "notes": list(timeline.notes),
    }


def _print(timeline: Timeline, summary: Summary, written: list[Path]) -> None:
    from lowtide.report.summary import rows

    shown = [*rows(timeline, summary), *(("wrote", str(path)) for path in written)]
    console().print(facts(f"{timeline.model or 'The step'} under {timeline.policy}, simulated", shown))
