"""`lowtide run`: an unmodified training script inside a budget."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click

from lowtide.cli.checks import check_output, check_policy, check_script, check_spill, read_budget
from lowtide.cli.output import print_traceback, write_json
from lowtide.core.units import format_bytes, format_seconds
from lowtide.errors import LowtideError
from lowtide.memory.budget import BudgetLike, parse_budget


@click.command(context_settings={"allow_interspersed_args": False, "help_option_names": ["-h", "--help"]})
@click.option("--budget", required=True, metavar="B", help="Tensor memory: 2GiB, auto, or cpu=2GiB,disk=40GiB.")
@click.option("--spill", multiple=True, metavar="DIR", help="Where to spill; repeat it to stripe over several disks.")
@click.option("--policy", default="auto", show_default=True, metavar="P", help="What decides; see 'lowtide policies'.")
@click.option(
    "--verify", is_flag=True, help="Keep a checksum of everything that leaves and compare it when it comes back."
)
@click.option(
    "--json", "json_path", type=click.Path(path_type=Path), metavar="FILE", help="Write the statistics to FILE."
)
@click.option("--quiet", is_flag=True, help="Say nothing unless something is wrong.")
@click.argument("script", type=click.Path(path_type=Path))
@click.argument("args", nargs=-1, type=click.UNPROCESSED)
def command(
    *,
    budget: str,
    spill: tuple[str, ...],
    policy: str,
    verify: bool,
    json_path: Path | None,
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
      lowtide run --budget cpu=2GiB,disk=40GiB --spill /disk1 --spill /disk2 train.py
    """
    wanted = read_budget(budget)
    # run_script reads "auto" again when the script's own imports have taken their memory; here it must only be sane.
    checked = parse_budget(wanted)
    check_script(script)
    check_spill(spill)
    check_policy(policy)
    check_output(json_path)
    if not quiet:
        where = ", ".join(spill) or "the default directory"
        size = "auto, now " if "auto" in budget else ""
        _say(f"budget {size}{format_bytes(checked.fast_bytes)}, spill to {where}, policy {policy}{', verify' * verify}")
    stats = _run(
        script,
        list(args),
        budget=wanted,
        spill=spill[0] if len(spill) == 1 else list(spill) or None,
        policy=policy,
        verify=verify,
    )
    if isinstance(stats, int):
        return stats
    if json_path is not None:
        write_json(json_path, stats)
    if not quiet:
        for line in summary(stats):
            _say(line)
    code = stats.get("exit_code", 0)
    assert isinstance(code, int)
    return code


def _run(
    script: Path, args: list[str], *, budget: BudgetLike, spill: str | list[str] | None, policy: str, verify: bool
) -> dict[str, Any] | int:
    """Return the statistics of the script's run, or the exit code of one that failed."""
    from lowtide.execute.script import run_script

    try:
        return run_script(script, args, budget=budget, spill=spill, policy=policy, verify=verify)
    except LowtideError:
        raise
    except Exception as error:  # noqa: BLE001 - whatever the script raises is the script's to show
        print_traceback(error)
        return 1


def summary(stats: Mapping[str, Any]) -> list[str]:
    """Return the lines that tell a person how the run went."""
    stalled = f"stalled {format_seconds(stats['stall_s'])} in all"
    times = f"{stats['steps']} steps at {format_seconds(stats['step_s'])}, {stalled}"
    peak = f"peak {format_bytes(stats['peak_bytes'])} of {format_bytes(stats['budget_bytes'])}"
    moved = f"swapped out {format_bytes(stats['swapped_out_bytes'])}, in {format_bytes(stats['swapped_in_bytes'])}"
    lines = [f"{times}; {peak}; {moved}"]
    if stats.get("unmanaged"):
        lines.append(f"not managed: {stats['unmanaged']}")
    return lines


def _say(text: str) -> None:
    print(f"lowtide: {text}", file=sys.stderr, flush=True)
