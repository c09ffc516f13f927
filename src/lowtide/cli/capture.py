"""`lowtide capture`: one step of a script as a trace file."""

from __future__ import annotations

from pathlib import Path

import click

from lowtide.cli.checks import check_output, check_script
from lowtide.cli.output import console, echo_json, facts, print_traceback
from lowtide.core.units import format_bytes, format_seconds
from lowtide.errors import BadArgument, LowtideError


@click.command(context_settings={"allow_interspersed_args": False, "help_option_names": ["-h", "--help"]})
@click.option(
    "-o", "--output", required=True, type=click.Path(path_type=Path), metavar="FILE", help="Where to write the trace."
)
@click.option("--steps", default=2, show_default=True, help="Training steps to run; the last one is kept.")
@click.option("--json", "as_json", is_flag=True, help="Print the summary as JSON.")
@click.argument("script", type=click.Path(path_type=Path))
@click.argument("args", nargs=-1, type=click.UNPROCESSED)
def command(*, output: Path, steps: int, as_json: bool, script: Path, args: tuple[str, ...]) -> int:
    """Run SCRIPT unmanaged for a few training steps and write a trace of the last one.

    Everything after SCRIPT goes to the script. The trace feeds 'lowtide plan', also on another machine.

    \b
    Examples:
      lowtide capture -o step.trace train.py --batch-size 32
      lowtide plan --floor step.trace
    """
    if steps < 1:
        raise BadArgument(f"{steps} steps record nothing: pass --steps 1 or more")
    check_script(script)
    check_output(output)
    from lowtide.capture import capture_script
    from lowtide.core.serialize import save

    try:
        trace = capture_script(script, list(args), steps=steps)
    except LowtideError:
        raise
    except Exception as error:  # noqa: BLE001 - whatever the script raises is the script's to show
        print_traceback(error)
        return 1
    save(trace, output)
    if as_json:
        echo_json(
            {
                "file": str(output),
                "operators": len(trace.ops),
                "storages": len(trace.storages),
                "saved": len(trace.saves),
                "static_bytes": trace.static_bytes,
                "peak_bytes": trace.peak_bytes,
                "floor_bytes": trace.floor_bytes(),
                "step_s": trace.duration_s,
            }
        )
        return 0
    rows = [
        ("operators", f"{len(trace.ops)}"),
        ("storages", f"{len(trace.storages)}, of which autograd saved {len(trace.saves)}"),
        ("peak", f"{format_bytes(trace.peak_bytes)}, of which {format_bytes(trace.static_bytes)} static"),
        ("step", format_seconds(trace.duration_s)),
        ("next", f"lowtide plan --floor {output}"),
    ]
    console().print(facts(f"{output}", rows))
    return 0
