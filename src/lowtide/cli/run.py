"""`lowtide run`: an unmodified training script inside a budget."""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import click

from lowtide.cli.checks import (
    check_module,
    check_output,
    check_policy,
    check_script,
    check_spill,
    read_budget,
    read_codecs,
    settle_auto,
    spill_locations,
    warn_of_memory,
)
from lowtide.cli.output import ADVISORY, print_traceback, say, write_json
from lowtide.core.units import format_bytes, format_rate, format_seconds
from lowtide.emulator import Settings as EmulatorSettings
from lowtide.emulator import check as check_emulator
from lowtide.errors import LowtideError
from lowtide.launch import escapes, notes
from lowtide.launch.program import Beside, Here, find_program
from lowtide.launch.settings import Settings, leave
from lowtide.launch.shown import is_terminal, start_log
from lowtide.launch.startup import escape_of, forked_step_of, rank
from lowtide.memory.budget import device_count
from lowtide.tiers.slow import check_slow

_CAPACITY = "2GiB"
_EXIT_FAILED = 1


@click.command(context_settings={"allow_interspersed_args": False, "help_option_names": ["-h", "--help"]})
@click.option(
    "--budget", metavar="B", help="Tensor memory of each process: 2GiB, auto, 50% of auto, or cpu=2GiB,disk=40GiB."
)
@click.option("--spill", multiple=True, metavar="DIR", help="Where to spill; repeat it to stripe over several disks.")
@click.option(
    "--slow", metavar="URL", help="Memory that operators use in place, beside the budget: pmem:///PATH, cxl: or numa:1."
)
@click.option("--policy", default="auto", show_default=True, metavar="P", help="The policy; see 'lowtide policies'.")
@click.option(
    "--recompute/--no-recompute",
    default=None,
    help="Run operators again instead of moving bytes where the policy finds that cheaper (default: yes, if it can).",
)
@click.option(
    "--codecs",
    metavar="C,C",
    help="Codecs that swaps may use, or none; see 'lowtide codecs' (default: fast lossless ones).",
)
@click.option(
    "--max-error",
    type=float,
    default=0.0,
    metavar="E",
    help="Let backward see rounded activations, off by at most this share of the largest nearby value.",
)
@click.option(
    "--put-off",
    is_flag=True,
    help="Postpone updates of state that does not fit until it is next used; the results are the same.",
)
@click.option("--serve", is_flag=True, help="For inference scripts: each call of the model is a step.")
@click.option(
    "--verify", is_flag=True, help="Keep a checksum of every tensor that leaves, and check it when the tensor returns."
)
@click.option("--strict", is_flag=True, help="Refuse an advisory budget, and processes that Lowtide cannot follow.")
@click.option(
    "--json", "json_path", type=click.Path(path_type=Path), metavar="FILE", help="Write the statistics to FILE."
)
@click.option(
    "--log",
    "log_path",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Write each step to FILE as a line of JSON.",
)
@click.option("--emulate", metavar="PRESET", help="Add the simulated device 'sim', with this GPU's link.")
@click.option(
    "--capacity", metavar="BYTES", help="With --emulate: its memory, and the budget unless --budget is given."
)
@click.option("--quiet", is_flag=True, help="Print nothing unless something is wrong.")
@click.option("--no-live", is_flag=True, help="Do not show the steps in the terminal's last row.")
@click.option("-m", "is_module", is_flag=True, help="SCRIPT is a module, as in 'python -m'.")
@click.argument("script")
@click.argument("args", nargs=-1, type=click.UNPROCESSED)
def command(
    *,
    budget: str | None,
    spill: tuple[str, ...],
    slow: str | None,
    policy: str,
    verify: bool,
    recompute: bool | None,
    codecs: str | None,
    max_error: float,
    put_off: bool,
    serve: bool,
    strict: bool,
    json_path: Path | None,
    log_path: Path | None,
    emulate: str | None,
    capacity: str | None,
    quiet: bool,
    no_live: bool,
    is_module: bool,
    script: str,
    args: tuple[str, ...],
) -> int:
    """Run an unmodified PyTorch SCRIPT inside a memory budget.

    Everything after SCRIPT goes to the script, and its exit code is passed on. SCRIPT may be a launcher such as
    torchrun: then every process that trains has the budget.

    \b
    Examples:
      lowtide run --budget 2GiB train.py --epochs 3
      lowtide run --budget 2GiB -m package.train --epochs 3
      lowtide run --budget 2GiB torchrun --nproc-per-node 2 train.py
      lowtide run --budget auto --spill /fast/disk --json stats.json train.py
      lowtide run --budget 2GiB --log steps.jsonl train.py
      lowtide run --budget cpu=2GiB,disk=40GiB --spill /fast/disk train.py
      lowtide run --budget 4GiB --serve generate.py
      lowtide run --budget 2GiB --codecs zvc,pack32 train.py
      lowtide run --budget cpu=4GiB,slow=64GiB --slow pmem:///mnt/pmem train.py
      lowtide run --budget cuda:0=6GiB,cuda:1=10GiB --spill /fast/disk train.py
      lowtide run --emulate v100 --capacity 2GiB train.py
    """
    if emulate is None and capacity is not None:
        raise click.UsageError("--capacity is the memory of the simulated device: also name a preset with --emulate")
    if emulate is not None:
        capacity = capacity or _CAPACITY
        check_emulator(capacity, preset=emulate)
        budget = budget or f"device={capacity}"
    if budget is None:
        context = click.get_current_context()
        (option,) = [option for option in context.command.params if option.name == "budget"]
        raise click.MissingParameter(ctx=context, param=option)
    wanted = read_budget(budget)
    program = find_program(script, args, is_module=is_module)
    path = program.program if isinstance(program, Here) and isinstance(program.program, Path) else None
    if path is not None:
        check_script(path)
    elif isinstance(program, Here):
        check_module(str(program.program))
    where = spill_locations(spill)
    check_spill(where)
    if slow is not None:
        check_slow(slow)
    policy = check_policy(policy)
    check_output(json_path, others=[path])
    check_output(log_path, others=[path, json_path])
    warn_of_memory(where)
    settings = Settings(
        budget=wanted,
        spill=spill,
        slow=slow,
        policy=policy,
        verify=verify,
        recompute=recompute,
        codecs=read_codecs(codecs),
        max_error=max_error,
        put_off=put_off,
        serve=serve,
        strict=strict,
        quiet=quiet,
        emulate=emulate,
        capacity=capacity,
        log=None if log_path is None else str(log_path.absolute()),
        live=not (quiet or no_live) and is_terminal(sys.stderr),
    )
    start_log(log_path)
    result = (
        _beside(program, settings, where=where)
        if isinstance(program, Beside)
        else _here(program, settings, where=where)
    )
    if result is None:
        return _EXIT_FAILED
    if json_path is not None:
        write_json(json_path, result)
    if not quiet:
        for line in summary(result):
            say(line if rank() is None else f"rank {rank()}: {line}")
    code = result.get("exit_code", 0)
    assert isinstance(code, int)
    return code


def _here(program: Here, settings: Settings, *, where: Sequence[str]) -> dict[str, Any] | None:
    """Run a script or module in this process; return its statistics (None: it raised, and its traceback is shown)."""
    if settings.quiet:
        from lowtide.memory.native import build_quietly

        build_quietly()
    if settings.emulate is not None:
        _emulate(settings)
    budget, size = settle_auto(settings.budget)
    if not settings.quiet:
        say(f"budget {size}, {_choices(settings, where)}")
    from lowtide.execute.tide.script import run_script
    from lowtide.launch.shown import shown

    with _followed(settings) as (kept, ended), shown(kept, rank=rank()) as on_step:
        end_watch = escapes.watch(escape_of(kept))
        try:
            stats = run_script(
                program.program,
                list(program.arguments),
                budget=budget,
                spill=settings.location,
                slow=settings.slow,
                policy=settings.policy,
                verify=settings.verify,
                recompute=settings.recompute,
                codecs=settings.codecs,
                max_error=settings.max_error,
                put_off=settings.put_off,
                serve=settings.serve,
                strict=settings.strict,
                on_forked_step=forked_step_of(kept),
                on_step=on_step,
            )
        except LowtideError:
            raise
        except Exception as error:  # noqa: BLE001 - whatever the script raises is the script's to show
            print_traceback(error)
            return None
        finally:
            end_watch()
        return {**stats, **ended()}


def _beside(program: Beside, settings: Settings, *, where: Sequence[str]) -> dict[str, Any]:
    """Run a command in processes of its own; return how those of them fared that had the budget."""
    from lowtide.launch.command import run_command

    if not settings.quiet:
        stated = settings.budget
        size = ", ".join(f"{tier} {part}" for tier, part in stated.items()) if isinstance(stated, Mapping) else stated
        say(f"budget {size} for each process of '{Path(program.command[0]).name}', {_choices(settings, where)}")
    with _followed(settings) as (_, ended):
        code = run_command(program.command)
        return {"exit_code": code, **ended()}


def _choices(settings: Settings, where: Sequence[str]) -> str:
    from lowtide.tiers.server_url import hide_password

    slow = "" if settings.slow is None else f"slow memory {settings.slow}, "
    return (
        f"{slow}spill to {', '.join(map(hide_password, where))}, policy {settings.policy}{', verify' * settings.verify}"
    )


@contextmanager
def _followed(settings: Settings) -> Iterator[tuple[Settings, Callable[[], dict[str, Any]]]]:
    """Let the budget follow into the processes that are started; yield what tells, at the end, how those fared."""
    directory = Path(tempfile.mkdtemp(prefix="lowtide-run-"))
    kept = replace(settings, notes=str(directory))
    before = dict(os.environ)

    def ended() -> dict[str, Any]:
        processes, escaped = notes.read(directory)
        return {
            "processes": [{**asdict(note), "name": note.name} for note in processes],
            "outside_the_budget": list(dict.fromkeys(escape.reason for escape in escaped)),
        }

    leave(kept, os.environ)
    try:
        yield kept, ended
    finally:
        for name in ("LOWTIDE_RUN", "PYTHONPATH"):
            if name in before:
                os.environ[name] = before[name]
            else:
                os.environ.pop(name, None)
        shutil.rmtree(directory, ignore_errors=True)


def _emulate(settings: Settings) -> None:
    """Enable the emulator, with as many devices as the budget names."""
    from lowtide.emulator import enable

    preset = str(settings.emulate)
    emulator = enable(str(settings.capacity), preset=preset, devices=device_count(settings.budget))
    if not settings.quiet:
        say(told(emulator.settings, preset))


def told(settings: EmulatorSettings, name: str) -> str:
    """Return the line that says what is emulated."""
    h2d, d2h = format_rate(settings.h2d_bytes_per_s), format_rate(settings.d2h_bytes_per_s)
    device = "device 'sim'" if settings.devices == 1 else f"{settings.devices} devices 'sim', each"
    return f"{device} of {format_bytes(settings.capacity_bytes)}, link as {name}'s: {h2d} to it, {d2h} from it"


def summary(stats: Mapping[str, Any]) -> list[str]:
    """Return the lines that tell a person how the run went: this process, then those that it started."""
    processes = stats.get("processes", [])
    # A script that only starts others has nothing to say for itself.
    lines = _process_lines(stats) if "peak_bytes" in stats and (stats["steps"] or not processes) else []
    for process in processes:
        if process["stats"]:
            lines.append(f"{process['name']}: {'; '.join(_process_lines(process['stats']))}")
        else:
            size = format_bytes(process["budget_bytes"])
            lines.append(f"{process['name']}: stayed inside its budget of {size}, and was ended before it could report")
    if "peak_bytes" not in stats and not processes:
        lines.append("no process imported torch, so there was nothing to budget")
    lines += [f"outside the budget: {reason}" for reason in stats.get("outside_the_budget", ())]
    return lines


def _process_lines(stats: Mapping[str, Any]) -> list[str]:
    stalled = f"stalled {format_seconds(stats['stall_s'])} in all"
    if stats["steps"]:
        updates = stats.get("optimizer_steps", stats["steps"])
        steps = f"{stats['steps']} step{'s' * (stats['steps'] != 1)}"
        steps += f" ({updates} of optimizers)" * (updates > stats["steps"])
        steps += f" at {format_seconds(stats['step_s'])}, {stalled}"
        slowdown = _slowdown(stats)
    else:
        slowdown = []
        steps = "no optimizer step was seen: there was no plan, and tensors moved only when memory ran short"
        steps += f"; {stalled}" if stats["stall_s"] else ""
    peak = f"peak {format_bytes(stats['peak_bytes'])} of {format_bytes(stats['budget_bytes'])}"
    if not stats.get("budget_exact", True):
        peak += f" ({ADVISORY})"
        if stats.get("over_budget_bytes"):
            peak += f", {format_bytes(stats['over_budget_bytes'])} over the budget"
    moved = f"swapped out {format_bytes(stats['swapped_out_bytes'])}, in {format_bytes(stats['swapped_in_bytes'])}"
    if "disk_written_bytes" in stats:  # a codec, or pinned memory in between: the disk sees less
        moved += f"; written to disk {format_bytes(stats['disk_written_bytes'])}"
    lines = [steps, *slowdown, f"{peak}; {moved}"]
    if "slow_bytes" in stats:
        lines.append(
            f"slow memory held {format_bytes(stats['peak_slow_bytes'])} at most; {stats['in_place_ops']} operators "
            f"used it in place, {format_seconds(stats['slow_s'])} longer for that"
        )
    for name, one in stats.get("devices", {}).items():
        there = f"{name}: peak {format_bytes(one['peak_bytes'])} of {format_bytes(one['budget_bytes'])}"
        went, came = format_bytes(one["swapped_out_bytes"]), format_bytes(one["swapped_in_bytes"])
        lines.append(f"{there}; swapped out {went}, in {came}")
    if stats.get("unmanaged"):
        lines.append(f"not managed: {', '.join(f'{what} ({count})' for what, count in stats['unmanaged'].items())}")
    return lines


def _slowdown(stats: Mapping[str, Any]) -> list[str]:
    """Return the line that compares the steps with those predicted without a budget; none where nothing moved."""
    slowdown, unmanaged_s = stats.get("slowdown"), stats.get("predicted_unmanaged_step_s")
    if slowdown is None or unmanaged_s is None:
        return []
    return [f"slowdown {slowdown:.2f}x against a step of {format_seconds(unmanaged_s)}, predicted without a budget"]
