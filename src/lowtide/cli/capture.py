"""`lowtide capture`: one training step as a trace file, of a script or of a model from the zoo, run or not."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from lowtide.cli.checks import check_output, check_script
from lowtide.cli.models import build_trace, check_model, model_options
from lowtide.cli.output import console, echo_json, facts, print_traceback
from lowtide.core.units import format_bytes, format_seconds
from lowtide.errors import BadArgument, LowtideError

if TYPE_CHECKING:
    from lowtide.core.trace import Trace


@click.command(context_settings={"allow_interspersed_args": False, "help_option_names": ["-h", "--help"]})
@click.option(
    "-o",
    "--out",
    "--output",
    "output",
    required=True,
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Where to write the trace.",
)
@model_options
@click.option("--fake", is_flag=True, help="With --model: do not execute, only follow shapes; any size works.")
@click.option("--machine", metavar="M", help="With --model: predict operator times for this machine, such as v100.")
@click.option("--steps", default=3, show_default=True, help="Steps to run; from the third on, the median is kept.")
@click.option("--json", "as_json", is_flag=True, help="Print the summary as JSON.")
@click.argument("script", required=False, type=click.Path(path_type=Path))
@click.argument("args", nargs=-1, type=click.UNPROCESSED)
def command(
    *,
    output: Path,
    model: str | None,
    hf_config: Path | None,
    batch: int | None,
    dtype: str,
    sizes: tuple[str, ...],
    fake: bool,
    machine: str | None,
    steps: int,
    as_json: bool,
    script: Path | None,
    args: tuple[str, ...],
) -> int:
    """Record one training step of SCRIPT, or of a model by name, as a trace.

    SCRIPT runs unmanaged for a few steps; everything after it goes to the script. With --model there is no script:
    the model is run here, or with --fake only its shapes are, which takes seconds and hardly any memory. The trace
    feeds 'lowtide plan', 'lowtide estimate' and the rest, also on another machine.

    \b
    Examples:
      lowtide capture -o step.trace train.py --batch-size 32
      lowtide capture -o r50.trace --model resnet50 --batch 32
      lowtide capture -o g.trace --model gpt3-175b --fake --machine a100
    """
    if steps < 1:
        raise BadArgument(f"{steps} steps are too few to record: pass --steps 1 or more")
    named = model is not None or hf_config is not None
    if (script is None) != named:
        raise BadArgument("capture needs a script or --model NAME, and not both")
    if not named and (fake or machine is not None):
        raise BadArgument("--fake and --machine need --model NAME: a script is executed and measured")
    if script is not None:
        check_script(script)
    wanted = check_model(model, hf_config=hf_config, batch=batch, dtype=dtype, sizes=sizes)
    check_output(output, others=[script])
    if wanted is not None:
        trace = build_trace(wanted, fake=fake, machine=machine, steps=steps)
    else:
        assert script is not None
        from lowtide import capture_script

        try:
            trace = capture_script(script, list(args), steps=steps)
        except LowtideError:
            raise
        except Exception as error:  # noqa: BLE001 - whatever the script raises is the script's to show
            print_traceback(error)
            return 1
    from lowtide.core.serialize import save

    save(trace, output)
    _tell(trace, output, as_json=as_json)
    return 0


def _movable(trace: Trace) -> int:
    return len({gap.storage for gap in trace.gaps()})


def _tell(trace: Trace, output: Path, *, as_json: bool) -> None:
    flops = sum(op.flops for op in trace.ops)
    times = f"predicted for {trace.timed_for}" if trace.timed_for else "measured"
    if as_json:
        echo_json(
            {
                "file": str(output),
                "model": trace.model,
                "operators": len(trace.ops),
                "storages": len(trace.storages),
                "movable": _movable(trace),
                "static_bytes": trace.static_bytes,
                "peak_bytes": trace.peak_bytes,
                "floor_bytes": trace.floor_bytes(),
                "step_s": trace.duration_s,
                "flops": flops,
                "times": times,
            }
        )
        return
    rows = [
        ("operators", f"{len(trace.ops)}, {flops / 1e12:.3g} TFLOP"),
        ("storages", f"{len(trace.storages)}, of which {_movable(trace)} could be elsewhere for a while"),
        ("peak", f"{format_bytes(trace.peak_bytes)}, of which {format_bytes(trace.static_bytes)} static"),
        ("step", f"{format_seconds(trace.duration_s)}, {times}"),
        ("next", f"lowtide plan --floor {output}"),
    ]
    origin = "simulated" if trace.timed_for else "measured"
    console().print(facts(f"{trace.model or 'The step'}, {origin}", [("trace", str(output)), *rows]))
