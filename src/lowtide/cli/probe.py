"""`lowtide probe`: measure this machine, and keep the result for planning."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from lowtide.cli.checks import check_spill, is_server, spill_directory, spill_locations, warn_of_memory
from lowtide.cli.output import console, echo_json, facts
from lowtide.core.units import format_bytes, format_rate, format_seconds
from lowtide.errors import BadArgument

if TYPE_CHECKING:
    from lowtide.core.machine import Link, Machine

_CUT_BYTES = 64 << 20


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option(
    "--spill",
    multiple=True,
    metavar="DIR",
    help="The directory or server to spill to; repeat directories to stripe over several.",
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of a table.")
def command(*, spill: tuple[str, ...], as_json: bool) -> int:
    """Measure this machine's compute and its spill disk, in a few seconds.

    The result is kept in $LOWTIDE_CACHE, $XDG_CACHE_HOME/lowtide or ~/.cache/lowtide, and used to plan.

    \b
    Examples:
      lowtide probe --spill /fast/disk
      lowtide probe --spill /disk1 --spill /disk2 --json
      lowtide probe --spill redis://memory-server
    """
    where = spill_locations(spill)
    if len(where) == 1 and is_server(where[0]):
        _probe_server(where[0], as_json=as_json)
        return 0
    directories = [spill_directory(location) for location in where]
    check_spill(where)
    warn_of_memory(where)
    from lowtide.estimate import calibrate
    from lowtide.tiers.file import FileMedium

    compute = calibrate.measure_compute()
    medium = FileMedium(directories)
    try:
        direct = medium.direct
        machine = calibrate.measure_machine(medium, compute=compute)
    finally:
        medium.close()
    try:
        path = calibrate.save_machine(machine, directories=directories, compute=compute)
    except OSError as error:
        cache = calibrate.machine_path().parent
        raise BadArgument(f"cannot keep the result in {cache}: {error.strerror}; set LOWTIDE_CACHE") from error
    cut = _cut(machine)
    if as_json:
        echo_json(
            {
                **calibrate.machine_to_dict(machine),
                "read_and_copy": cut,
                "matmul_flop_per_s": compute.matmul_flop_per_s,
                "direct": direct,
                "directories": [str(directory) for directory in directories],
                "file": str(path),
            }
        )
        return 0
    link = machine.links[calibrate.SPILL]
    rows = [
        ("matrix product", f"{compute.matmul_flop_per_s / 1e9:.0f} GFLOP/s"),
        ("memory", f"{format_rate(machine.memory_bytes_per_s or 0.0)}; a copy reads and writes, so half of that"),
        ("spill", f"{', '.join(map(str, directories))} ({'O_DIRECT' if direct else 'through the page cache'})"),
        *_link_rows(link),
        (f"{format_bytes(cut['nbytes'])} read, copied", _sentence(cut)),
        ("kept in", str(path)),
    ]
    console().print(facts("This machine, measured", rows))
    return 0


def _probe_server(url: str, *, as_json: bool) -> None:
    """Measure a server and tell; a training measures it again when it opens it, so nothing is kept."""
    from lowtide.estimate import calibrate
    from lowtide.tiers.open import open_medium
    from lowtide.tiers.server_url import hide_password

    compute = calibrate.measure_compute()
    medium = open_medium(url)
    try:
        machine = calibrate.measure_machine(medium, compute=compute)
    finally:
        medium.close()
    shown = hide_password(url)
    if as_json:
        found = {"matmul_flop_per_s": compute.matmul_flop_per_s, "directories": [], "spill": shown, "file": None}
        echo_json({**calibrate.machine_to_dict(machine), **found})
        return
    link = machine.links[calibrate.SPILL]
    rows = [
        ("matrix product", f"{compute.matmul_flop_per_s / 1e9:.0f} GFLOP/s"),
        ("memory", f"{format_rate(machine.memory_bytes_per_s or 0.0)}; a copy reads and writes, so half of that"),
        ("spill", shown),
        *_link_rows(link),
        ("kept in", "no file: a server is measured whenever a training opens it"),
    ]
    console().print(facts("This machine, measured", rows))


def _link_rows(link: Link) -> list[tuple[str, str]]:
    return [
        ("write", f"{format_rate(link.write_bytes_per_s)} after {format_seconds(link.write_latency_s)}"),
        ("read", f"{format_rate(link.read_bytes_per_s)} after {format_seconds(link.read_latency_s)}"),
        ("while nothing computes", f"{link.idle_speedup:.2f} times as fast"),
    ]


def _cut(machine: Machine) -> dict[str, Any]:
    """Return what reading from the spill and copying on what was read takes, by the size of the chunks."""
    from lowtide.estimate.calibrate import SPILL
    from lowtide.estimate.predictors.overlap import Stage, best_chunks, pipeline_s
    from lowtide.tiers.store import CHUNK_BYTES

    link = machine.links[SPILL]
    stages = (
        Stage(latency_s=link.read_latency_s, bytes_per_s=link.read_bytes_per_s),
        Stage(latency_s=0.0, bytes_per_s=machine.copy_bytes_per_s),
    )
    best = best_chunks(_CUT_BYTES, stages)
    return {
        "nbytes": _CUT_BYTES,
        "whole_s": pipeline_s(_CUT_BYTES, stages, chunks=1),
        "tier_chunk_bytes": CHUNK_BYTES,
        "tier_s": pipeline_s(_CUT_BYTES, stages, chunks=_CUT_BYTES // CHUNK_BYTES),
        "best_chunk_bytes": _CUT_BYTES // best,
        "best_s": pipeline_s(_CUT_BYTES, stages, chunks=best),
    }


def _sentence(cut: dict[str, Any]) -> str:
    tier, best = (
        f"{format_seconds(cut[f'{one}_s'])} in {format_bytes(cut[f'{one}_chunk_bytes'])}" for one in ("tier", "best")
    )
    return f"{format_seconds(cut['whole_s'])} one after the other, {tier} chunks, at best {best}"
