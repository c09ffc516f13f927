"""`lowtide estimate`: will it fit, and how slow will it be, before anything runs."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from lowtide.cli.cases import budget_for, check_budget, check_floor, read_trace, recompute_option, verified
from lowtide.cli.checks import check_policy
from lowtide.cli.models import build_trace, check_model, find_machine, model_options
from lowtide.cli.output import console, echo_json, facts
from lowtide.core.trace import Phase, Reach
from lowtide.core.units import format_bytes, format_rate, format_seconds
from lowtide.errors import BadArgument, PlanError
from lowtide.zoo.huggingface import PREFIX

if TYPE_CHECKING:
    from lowtide.cli.models import Wanted
    from lowtide.core.machine import Machine
    from lowtide.core.plan import Plan, Problem
    from lowtide.core.trace import Trace
    from lowtide.report import Settled


# A change that saves less than a tenth is not worth a line.
_WORTH_TELLING = 0.9
_DAY_S = 86400


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@model_options
@click.option("--inference", is_flag=True, help="Estimate generation word by word instead of training.")
@click.option("--tokens", type=int, default=1024, show_default=True, metavar="N", help="With --inference: of a text.")
@click.option("--checkpoint", type=click.Path(path_type=Path), metavar="DIR", help="A folder of safetensors files.")
@click.option("--machine", required=True, metavar="M", help="A preset (see docs/machines.md), a machine file, or here.")
@click.option("--budget", metavar="B", help="Tensor memory, such as 8GiB or 60%; the machine's memory if not given.")
@click.option("--fast", metavar="F", help="Fast memory as a share of the peak, such as 40%, above slow memory.")
@click.option("--policy", default="auto", show_default=True, metavar="P", help="The policy; see 'lowtide policies'.")
@recompute_option
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of a table.")
@click.argument("trace_path", metavar="[TRACE]", required=False, type=click.Path(path_type=Path))
def command(
    *,
    model: str | None,
    hf_config: Path | None,
    batch: int | None,
    dtype: str,
    sizes: tuple[str, ...],
    inference: bool,
    tokens: int,
    checkpoint: Path | None,
    machine: str,
    budget: str | None,
    fast: str | None,
    policy: str,
    no_recompute: bool,
    as_json: bool,
    trace_path: Path | None,
) -> int:
    """Tell whether a training step fits in a machine's memory, and how long it takes there.

    The step is a TRACE, or a model by name, which is not executed. Times are predicted from floating-point
    operations and bytes, and the step is simulated as 'lowtide simulate' does it. Where it does not fit, the exit code
    is 2, and the table says what would help. On a machine with slow memory that operators read in place (optane, cxl),
    models are placed in it too, and --fast says how much fast memory there is above it.

    \b
    Examples:
      lowtide estimate --model resnet50 --batch 256 --machine v100
      lowtide estimate --model llama-7b --machine a100 --dtype bfloat16
      lowtide estimate --hf-config config.json --machine rtx3090 --budget 12GiB
      lowtide estimate --checkpoint llama-folder --inference --budget 4GiB
      lowtide estimate step.trace --machine a100 --json
      lowtide estimate --model resnet50 --batch 64 --machine optane --fast 40%
    """
    if checkpoint is not None:
        _check_alone(model, hf_config, trace_path)
        hf_config = None if inference else checkpoint / "config.json"
    if inference:
        _inference(
            None if checkpoint else check_model(model, hf_config=hf_config, batch=batch, dtype=dtype, sizes=sizes),
            checkpoint,
            machine=find_machine(machine),
            budget=budget,
            batch=batch or 1,
            tokens=tokens,
            as_json=as_json,
        )
        return 0
    if (trace_path is None) != (model is not None or hf_config is not None):
        raise BadArgument("estimate needs a trace or --model NAME (or --hf-config FILE), and not both")
    wanted = check_model(model, hf_config=hf_config, batch=batch, dtype=dtype, sizes=sizes)
    target = find_machine(machine)
    check_budget(budget)
    _check_fast(fast, budget, target)
    if fast is None and budget is None and target.capacity_bytes is None:
        raise BadArgument(f"machine {target.name!r} does not state its memory: pass --budget")
    policy = check_policy(policy)
    if wanted is not None:
        trace = build_trace(wanted, fake=True, machine=machine)
    else:
        assert trace_path is not None
        trace = read_trace(trace_path)
    from lowtide.report import problem_of

    problem = problem_of(trace, target, budget_bytes=0, keep_times=wanted is not None, can_recompute=not no_recompute)
    trace = problem.trace
    budget_bytes = target.capacity_bytes if budget is None else budget_for(budget, trace)
    if fast is not None:
        budget_bytes = int(_share(fast) * trace.peak_bytes)
    assert budget_bytes is not None
    answer = _answer(replace(problem, budget_bytes=budget_bytes), policy)
    if not answer["fits"]:
        remedies = remedies_for(trace, budget_bytes=budget_bytes, wanted=wanted)
        answer["remedies"] = [asdict(remedy) for remedy in remedies]
    if as_json:
        echo_json(answer)
    else:
        _print(answer, target)
    if not answer["fits"]:
        check_floor(trace, budgets_bytes=[budget_bytes])
    return 0


def _check_alone(*others: object) -> None:
    if any(other is not None for other in others):
        raise BadArgument("--checkpoint already names a model: leave out --model, --hf-config and the trace")


def _check_fast(fast: str | None, budget: str | None, target: Machine) -> None:
    if fast is None:
        return
    _share(fast)
    if budget is not None:
        raise BadArgument("--fast and --budget both say how much fast memory there is: pass one of them")
    if not target.addressable:
        raise BadArgument(
            f"machine {target.name!r} has no slow memory that operators read in place, so --fast means nothing "
            "there: pass --budget, or a machine such as optane or cxl"
        )


def _inference(
    wanted: Wanted | None,
    checkpoint: Path | None,
    *,
    machine: Machine,
    budget: str | None,
    batch: int,
    tokens: int,
    as_json: bool,
) -> None:
    from lowtide.cli.inference import answer_inference, of_checkpoint, of_model
    from lowtide.core.units import parse_bytes

    if tokens < 1:
        raise BadArgument(f"--tokens {tokens} is too few: pass 1 or more")
    check_budget(budget)
    if checkpoint is not None:
        found, name = of_checkpoint(checkpoint, batch=batch, tokens=tokens), checkpoint.resolve().name
    elif wanted is not None:
        found, name = of_model(wanted, tokens=tokens), wanted.name.removeprefix(PREFIX)
    else:
        raise BadArgument("--inference needs --model NAME, --hf-config FILE or --checkpoint DIR")
    if budget is None:
        if machine.capacity_bytes is None:
            raise BadArgument(f"machine {machine.name!r} does not state its memory: pass --budget")
        budget_bytes = machine.capacity_bytes
    elif budget.strip().endswith("%"):
        budget_bytes = int(_share(budget) * found.peak_bytes)
    else:
        budget_bytes = parse_bytes(budget)
    answer_inference(found, model=name, machine=machine, budget_bytes=budget_bytes, as_json=as_json)


def _share(text: str) -> float:
    """Return the share that a text such as "40%" states."""
    try:
        share = float(text.strip().removesuffix("%")) / 100
    except ValueError:
        share = -1.0
    if not text.strip().endswith("%") or not 0 < share <= 10:
        raise BadArgument(f"cannot read --fast {text!r}: write a share of the step's peak, such as 40%")
    return share


def _answer(problem: Problem, policy: str) -> dict[str, Any]:
    from lowtide.estimate.parts import parts_of
    from lowtide.estimate.predictors.allocators import reserved_peak, stream_of

    trace, machine, budget_bytes = problem.trace, problem.machine, problem.budget_bytes
    stream, floor_op = stream_of(trace), trace.floor_op()
    settled = _settled(problem, policy)
    fits = settled is not None
    timeline = None if settled is None else settled.timeline
    return {
        "fits": fits,
        "parts": {part.value: asdict(share) for part, share in parts_of(trace).items()},
        "floor_op": None if floor_op is None else f"{floor_op.name} {floor_op.place}".rstrip(),
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
        "policy": policy,
        "managed_step_s": None if timeline is None else timeline.step_s,
        "managed_peak_bytes": None if timeline is None else timeline.peak_bytes,
        "stall_s": None if timeline is None else timeline.stall_s,
        "recompute_s": None if timeline is None else timeline.recompute_s,
        "moved_out_bytes": None if timeline is None else timeline.moved_out_bytes,
        "moved_in_bytes": None if timeline is None else timeline.moved_in_bytes,
        "written_bytes_per_day": None if timeline is None else _per_day(timeline.moved_out_bytes, timeline.step_s),
        "read_bytes_per_day": None if timeline is None else _per_day(timeline.moved_in_bytes, timeline.step_s),
        "slow_s": None if timeline is None else timeline.slow_s,
        "placed_bytes": None if settled is None else _placed_bytes(settled.plan, trace),
        "slowdown": None if timeline is None or not trace.duration_s else timeline.step_s / trace.duration_s,
    }


def _per_day(nbytes: int, step_s: float) -> float:
    """Return what steps of so many bytes move in a day of nothing else."""
    return nbytes * _DAY_S / step_s if step_s else 0.0


def _settled(problem: Problem, policy: str) -> Settled | None:
    """Return the plan and the step that follows from it; None: no policy could make the step fit."""
    floor_bytes = problem.trace.floor_bytes()
    if problem.budget_bytes >= floor_bytes:
        return verified(problem, policy)
    if not problem.addressable():
        return None
    try:  # what operators read in place need not fit
        return verified(problem, policy)
    except PlanError:
        return None


def _placed_bytes(plan: Plan, trace: Trace) -> int:
    """Return the most bytes that live in slow memory at once."""
    from lowtide.plan.costs.tier_bytes import tier_curves
    from lowtide.plan.costs.writes import Writes

    written = Writes(trace).of((), (), plan.places)
    curves = tier_curves(trace, (), plan.places, written=written)
    return max((max(curve.values()) for curve in curves.values()), default=0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Remedy:
    """A change to a step, and about how much memory it needs then at least."""

    change: str
    needed_bytes: int


def remedies_for(trace: Trace, *, budget_bytes: int, wanted: Wanted | None) -> list[Remedy]:
    """Return what would make a step need less, or have more; the trace's own floor comes first."""
    from lowtide.estimate.parts import Part, parts_of
    from lowtide.estimate.presets import PRESETS

    floor_bytes, floor_op = trace.floor_bytes(), trace.floor_op()
    # Where every tensor can leave, no state is in the way: the floor is what one operator works on.
    pages = trace.reach is Reach.TOUCHED
    static_bytes = 0 if pages else trace.static_bytes
    updating = floor_op is not None and floor_op.phase is Phase.UPDATE
    enough = sorted(
        (capacity, name)
        for name, preset in PRESETS.items()
        if (capacity := preset.machine.capacity_bytes) is not None
        and capacity >= floor_bytes
        # Where the state cannot leave, the floor is another.
        and (preset.machine.moves_pages or not pages)
    )
    having = ", ".join(f"{name} ({format_bytes(nbytes)})" for nbytes, name in enough[:2])
    found = [Remedy(change=f"a larger budget{f': {having}' if having else ''}", needed_bytes=floor_bytes)]
    if wanted is not None and wanted.batch > 1 and not (pages and updating):
        each_bytes = (floor_bytes - static_bytes) / wanted.batch
        batch = max(1, int((budget_bytes - static_bytes) / each_bytes)) if each_bytes > 0 else 1
        needed_bytes = static_bytes + int(batch * each_bytes)
        found.append(Remedy(change=f"batch {batch} instead of {wanted.batch}", needed_bytes=needed_bytes))
    if wanted is not None and wanted.dtype in ("float32", "float64"):
        half = floor_bytes // (2 if wanted.dtype == "float32" else 4)
        found.append(Remedy(change="--dtype bfloat16 for everything", needed_bytes=half))
    if pages:
        return found
    parts = parts_of(trace)
    state, gradients = parts[Part.OPTIMIZER].most_bytes, parts[Part.GRADIENTS].most_bytes
    lean, frozen = floor_bytes - state, max(floor_bytes - state - gradients, parts[Part.WEIGHTS].most_bytes)
    if lean < _WORTH_TELLING * floor_bytes:
        found.append(Remedy(change="an optimizer without state, as plain SGD", needed_bytes=lean))
    if frozen < _WORTH_TELLING * floor_bytes:
        found.append(Remedy(change="frozen weights, small adapters (LoRA)", needed_bytes=frozen))
    return found


def _print(answer: dict[str, Any], machine: Machine) -> None:
    reserved = ", ".join(f"{format_bytes(nbytes)} {model}" for model, nbytes in answer["reserved_bytes"].items())
    link = machine.links["spill"]
    rows = [
        ("machine", f"{machine.name}, {format_bytes(answer['budget_bytes'])} of tensor memory"),
        ("link", f"{format_rate(link.write_bytes_per_s)} out, {format_rate(link.read_bytes_per_s)} in"),
        *((part, _part(share)) for part, share in answer["parts"].items()),
        (
            "peak, unmanaged",
            f"{format_bytes(answer['peak_bytes'])}, of which {format_bytes(answer['static_bytes'])} static",
        ),
        ("allocator would take", reserved),
        ("floor", f"{format_bytes(answer['floor_bytes'])}, set by {answer['floor_op'] or 'nothing'}"),
        ("step, unmanaged", f"{format_seconds(answer['step_s'])}, {answer['flops'] / 1e12:.3g} TFLOP"),
    ]
    if not answer["fits"]:
        lacking = format_bytes(answer["floor_bytes"] - answer["budget_bytes"])
        rows.append(("verdict", f"does not fit: the floor is {lacking} above the budget"))
        larger, *others = answer["remedies"]
        rows.append(("would fit", _remedy(larger)))
        rows += [("would fit", _remedy(each)) for each in others if each["needed_bytes"] <= answer["budget_bytes"]]
        rows += [
            ("not enough alone", _remedy(each)) for each in others if each["needed_bytes"] > answer["budget_bytes"]
        ]
    elif answer["fits_unmanaged"]:
        rows.append(("verdict", "fits without moving anything"))
    else:
        step = f"{format_seconds(answer['managed_step_s'])} a step"
        rows += [
            ("moved in a step", f"{_moved(answer['moved_out_bytes'], answer['moved_in_bytes'])}"),
            ("moved in a day", f"{_moved(answer['written_bytes_per_day'], answer['read_bytes_per_day'])}"),
            ("stalled", format_seconds(answer["stall_s"])),
            *([("run again", format_seconds(answer["recompute_s"]))] if answer["recompute_s"] else []),
            *_slow_rows(answer),
            ("verdict", f"fits with policy {answer['policy']}: {step}, {answer['slowdown']:.2f}x"),
        ]
    console().print(facts(f"{answer['model'] or 'The step'}, simulated", rows))


def _moved(out_bytes: float, in_bytes: float) -> str:
    return f"{format_bytes(int(out_bytes))} written, {format_bytes(int(in_bytes))} read"


def _slow_rows(answer: dict[str, Any]) -> list[tuple[str, str]]:
    if not answer["placed_bytes"]:
        return []
    share = answer["budget_bytes"] / answer["peak_bytes"]
    return [
        ("in slow memory", f"{format_bytes(answer['placed_bytes'])} at most, read in place or moved"),
        ("slower operators", f"{format_seconds(answer['slow_s'])} longer in all"),
        ("fast memory", f"{share:.0%} of the peak costs {answer['slowdown'] - 1:.1%} of the step"),
    ]


def _remedy(remedy: dict[str, Any]) -> str:
    return f"{format_bytes(remedy['needed_bytes'])}: {remedy['change']}"


def _part(share: dict[str, int]) -> str:
    most, at_peak = share["most_bytes"], share["at_peak_bytes"]
    told = format_bytes(most)
    return told if format_bytes(at_peak) == told else f"{told} at most, {format_bytes(at_peak)} at the peak"
