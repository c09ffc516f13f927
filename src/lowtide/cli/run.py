"""`lowtide run`: an unmodified training script inside a budget."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click

from lowtide.cli.checks import (
    check_output,
    check_policy,
    check_script,
    check_spill,
    read_budget,
    settle_auto,
    spill_locations,
    warn_of_memory,
)
from lowtide.cli.output import ADVISORY, print_traceback, say, write_json
from lowtide.core.units import format_bytes, format_rate, format_seconds
from lowtide.emulator import Settings
from lowtide.emulator import check as check_emulator
from lowtide.errors import LowtideError
from lowtide.memory.budget import BudgetLike, named_devices

_CAPACITY = "2GiB"


@click.command(context_settings={"allow_interspersed_args": False, "help_option_names": ["-h", "--help"]})
@click.option("--budget", metavar="B", help="Tensor memory: 2GiB, auto, or cpu=2GiB,disk=40GiB.")
@click.option("--spill", multiple=True, metavar="DIR", help="Where to spill; repeat it to stripe over several disks.")
@click.option("--policy", default="auto", show_default=True, metavar="P", help="What decides; see 'lowtide policies'.")
@click.option(
    "--recompute/--no-recompute",
    default=None,
    help="Run operators again instead of moving bytes where the policy finds that cheaper (default: as in its paper).",
)
@click.option(
    "--verify", is_flag=True, help="Keep a checksum of everything that leaves and compare it when it comes back."
)
@click.option(
    "--json", "json_path", type=click.Path(path_type=Path), metavar="FILE", help="Write the statistics to FILE."
)
@click.option("--emulate", metavar="PRESET", help="Add the simulated device 'sim', with this GPU's link.")
@click.option("--capacity", metavar="BYTES", help="Its memory, and the budget unless that is stated; with --emulate.")
@click.option("--quiet", is_flag=True, help="Say nothing unless something is wrong.")
@click.argument("script", type=click.Path(path_type=Path))
@click.argument("args", nargs=-1, type=click.UNPROCESSED)
def command(
    *,
    budget: str | None,
    spill: tuple[str, ...],
    policy: str,
    verify: bool,
    recompute: bool | None,
    json_path: Path | None,
    emulate: str | None,
    capacity: str | None,
    quiet: bool,
    script: Path,
    args: tuple[str, ...],
) -> int:
    """Run an unmodified PyTorch SCRIPT inside a memory budget.

    Everything after SCRIPT goes to the script, and its exit code is passed on.

    \b
    Examples:
      lowtide run --budget 2GiB train.py --epochs 3
      lowtide run --budget auto --spill /fast/disk --json stats.json train.py
      lowtide run --budget cpu=2GiB,disk=40GiB --spill /fast/disk train.py
      lowtide run --budget cuda:0=6GiB,cuda:1=10GiB --spill /fast/disk train.py
      lowtide run --emulate v100 --capacity 2GiB train.py
    """
    if emulate is None and capacity is not None:
        raise click.UsageError("--capacity is the simulated device's memory: name a preset with --emulate as well")
    if emulate is not None:
        capacity = capacity or _CAPACITY
        check_emulator(capacity, preset=emulate)
        budget = budget or f"device={capacity}"
    if budget is None:
        raise click.UsageError("Missing option '--budget'.")
    wanted = read_budget(budget)
    check_script(script)
    where = spill_locations(spill)
    check_spill(where)
    check_policy(policy)
    check_output(json_path, others=[script])
    warn_of_memory(where)
    if quiet:
        from lowtide.memory.native import build_quietly

        build_quietly()
    if emulate is not None:
        _emulate(str(capacity), emulate, wanted, quiet=quiet)
    wanted, size = settle_auto(wanted)
    if not quiet:
        say(f"budget {size}, spill to {', '.join(where)}, policy {policy}{', verify' * verify}")
    stats = _run(
        script,
        list(args),
        budget=wanted,
        spill=spill[0] if len(spill) == 1 else list(spill) or None,
        policy=policy,
        verify=verify,
        recompute=recompute,
    )
    if isinstance(stats, int):
        return stats
    if json_path is not None:
        write_json(json_path, stats)
    if not quiet:
        for line in summary(stats):
            say(line)
    code = stats.get("exit_code", 0)
    assert isinstance(code, int)
    return code


def _emulate(capacity: str, preset: str, budget: BudgetLike, *, quiet: bool) -> None:
    """Enable the emulator, with as many devices as the budget names."""
    from lowtide.emulator import enable

    devices = max((1 + int(name.partition(":")[2]) for name in named_devices(budget)), default=1)
    emulator = enable(capacity, preset=preset, devices=devices)
    if not quiet:
        say(told(emulator.settings, preset))


def told(settings: Settings, name: str) -> str:
    """Return the line that says what is emulated."""
    h2d, d2h = format_rate(settings.h2d_bytes_per_s), format_rate(settings.d2h_bytes_per_s)
    device = "device 'sim'" if settings.devices == 1 else f"{settings.devices} devices 'sim', each"
    return f"{device} of {format_bytes(settings.capacity_bytes)}, link as {name}'s: {h2d} to it, {d2h} from it"


def _run(
    script: Path,
    args: list[str],
    *,
    budget: BudgetLike,
    spill: str | list[str] | None,
    policy: str,
    verify: bool,
    recompute: bool | None,
) -> dict[str, Any] | int:
    """Return the statistics of the script's run, or the exit code of one that failed."""
    from lowtide.execute.tide.script import run_script

    try:
        return run_script(script, args, budget=budget, spill=spill, policy=policy, verify=verify, recompute=recompute)
    except LowtideError:
        raise
    except Exception as error:  # noqa: BLE001 - whatever the script raises is the script's to show
        print_traceback(error)
        return 1


def summary(stats: Mapping[str, Any]) -> list[str]:
    """Return the lines that tell a person how the run went."""
    stalled = f"stalled {format_seconds(stats['stall_s'])} in all"
    if stats["steps"]:
        steps = f"{stats['steps']} step{'s' * (stats['steps'] != 1)} at {format_seconds(stats['step_s'])}, {stalled}"
    else:
        steps = "no optimizer step was seen: nothing was planned, tensors moved only when memory ran short"
        steps += f"; {stalled}" if stats["stall_s"] else ""
    peak = f"peak {format_bytes(stats['peak_bytes'])} of {format_bytes(stats['budget_bytes'])}"
    if not stats.get("budget_exact", True):
        peak += f" ({ADVISORY})"
        if stats.get("over_budget_bytes"):
            peak += f", {format_bytes(stats['over_budget_bytes'])} over the budget"
    moved = f"swapped out {format_bytes(stats['swapped_out_bytes'])}, in {format_bytes(stats['swapped_in_bytes'])}"
    if "disk_written_bytes" in stats:  # a codec, or pinned memory in between: the disk sees less
        moved += f"; written to disk {format_bytes(stats['disk_written_bytes'])}"
    lines = [steps, f"{peak}; {moved}"]
    for name, one in stats.get("devices", {}).items():
        there = f"{name}: peak {format_bytes(one['peak_bytes'])} of {format_bytes(one['budget_bytes'])}"
        went, came = format_bytes(one["swapped_out_bytes"]), format_bytes(one["swapped_in_bytes"])
        lines.append(f"{there}; swapped out {went}, in {came}")
    if stats.get("unmanaged"):
        lines.append(f"not managed: {', '.join(f'{what} ({count})' for what, count in stats['unmanaged'].items())}")
    return lines
