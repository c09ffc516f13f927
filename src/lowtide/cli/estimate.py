"""`lowtide estimate`: will it fit, and how slow will it be, before anything runs."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from lowtide.cli.cases import budget_for, check_budget, check_floor, read_trace
from lowtide.cli.checks import check_policy
from lowtide.cli.models import build_trace, check_model, find_machine, model_options
from lowtide.cli.output import console, echo_json, facts
from lowtide.core.units import format_bytes, format_rate, format_seconds
from lowtide.errors import BadArgument

if TYPE_CHECKING:
    from lowtide.core.machine import Machine
    from lowtide.core.plan import Plan
    from lowtide.core.trace import Trace


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@model_options
@click.option("--machine", required=True, metavar="M", help="A preset (see docs/machines.md), a machine file, or here.")
@click.option("--budget", metavar="B", help="Tensor memory, such as 8GiB or 60%; the machine's memory if not given.")
@click.option("--policy", default="auto", show_default=True, metavar="P", help="What decides; see 'lowtide policies'.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of a table.")
@click.argument("trace_path", metavar="[TRACE]", required=False, type=click.Path(path_type=Path))
def command(
    *,
    model: str | None,
    batch: int | None,
    dtype: str,
    sizes: tuple[str, ...],
    machine: str,
    budget: str | None,
    policy: str,
    as_json: bool,
    trace_path: Path | None,
) -> int:
    """Tell whether a training step fits in a machine's memory, and how long it takes there.

    The step is a TRACE, or a model by name, which is not executed. Times are predicted from floating-point
    operations and bytes. A budget below what one operator needs is refused with exit code 2. Policies swap only here;
    'lowtide simulate' also lets them recompute.

    \b
    Examples:
      lowtide estimate --model resnet50 --batch 256 --machine v100
      lowtide estimate --model bert-large --machine rtx3090 --budget 12GiB
      lowtide estimate step.trace --machine a100 --json
    """
    if (trace_path is None) == (model is None):
        raise BadArgument("estimate needs a trace or --model NAME, and not both")
    wanted = check_model(model, batch=batch, dtype=dtype, sizes=sizes)
    target = find_machine(machine)
    check_budget(budget)
    if budget is None and target.capacity_bytes is None:
        raise BadArgument(f"machine {target.name!r} does not say how much memory it has: pass --budget")
    check_policy(policy)
    if wanted is not None:
        trace = build_trace(wanted, fake=True, machine=machine)
    else:
        assert trace_path is not None
        from lowtide.estimate.predict import retime

        trace = retime(read_trace(trace_path), target)
    budget_bytes = target.capacity_bytes if budget is None else budget_for(budget, trace)
    assert budget_bytes is not None
    answer = _answer(trace, target, budget_bytes=budget_bytes, policy=policy)
    if as_json:
        echo_json(answer)
    else:
        _print(answer, target)
    return 0


def _answer(trace: Trace, machine: Machine, *, budget_bytes: int, policy: str) -> dict[str, Any]:
    check_floor(trace, budgets_bytes=[budget_bytes])
    from lowtide.estimate.predictors.allocators import reserved_peak, stream_of

    stream = stream_of(trace)
    plan = _plan(trace, machine, budget_bytes=budget_bytes, policy=policy)
    predicted = plan.prediction
    return {
        "model": trace.model,
        "machine": machine.name,
        "machine_source": machine.source,
        "budget_bytes": budget_bytes,
        "static_bytes": trace.static_bytes,
        "peak_bytes": trace.peak_bytes,
        "floor_bytes": trace.floor_bytes(),
        "reserved_bytes": {model: reserved_peak(stream, model) for model in ("arena", "pytorch", "bfc")},
        "fits_unmanaged": trace.peak_bytes <= budget_bytes,
        "flops": sum(each.flops for each in trace.ops),
        "step_s": trace.duration_s,
        "policy": plan.policy,
        "managed_step_s": None if predicted is None else predicted.step_s,
        "managed_peak_bytes": None if predicted is None else predicted.peak_bytes,
        "stall_s": None if predicted is None else predicted.stall_s,
        "moved_out_bytes": None if predicted is None else predicted.moved_out_bytes,
        "slowdown": None if predicted is None or not trace.duration_s else predicted.step_s / trace.duration_s,
    }


def _plan(trace: Trace, machine: Machine, *, budget_bytes: int, policy: str) -> Plan:
    from lowtide import registry
    from lowtide.core.plan import Problem

    return registry.policy(policy).plan(Problem(trace=trace, machine=machine, budget_bytes=budget_bytes))


def _print(answer: dict[str, Any], machine: Machine) -> None:
    reserved = ", ".join(f"{format_bytes(nbytes)} {model}" for model, nbytes in answer["reserved_bytes"].items())
    link = machine.links["spill"]
    rows = [
        ("machine", f"{machine.name}, {format_bytes(answer['budget_bytes'])} of tensor memory"),
        ("link", f"{format_rate(link.write_bytes_per_s)} out, {format_rate(link.read_bytes_per_s)} in"),
        (
            "peak, unmanaged",
            f"{format_bytes(answer['peak_bytes'])}, of which {format_bytes(answer['static_bytes'])} static",
        ),
        ("allocator would take", reserved),
        ("floor", format_bytes(answer["floor_bytes"])),
        ("step, unmanaged", f"{format_seconds(answer['step_s'])}, {answer['flops'] / 1e12:.3g} TFLOP"),
    ]
    if answer["fits_unmanaged"]:
        rows.append(("verdict", "fits without moving anything"))
    elif answer["managed_step_s"] is None:
        rows.append(("verdict", f"policy {answer['policy']} decides while the step runs: nothing is predicted"))
    else:
        step = f"{format_seconds(answer['managed_step_s'])} a step"
        rows += [
            ("moved out", format_bytes(answer["moved_out_bytes"])),
            ("stalled", format_seconds(answer["stall_s"])),
            ("verdict", f"fits with policy {answer['policy']}: {step}, {answer['slowdown']:.2f}x"),
        ]
    title = f"Estimate for {answer['model'] or 'the step'}"
    console().print(facts(title, rows))
