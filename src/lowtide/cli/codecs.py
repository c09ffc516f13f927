"""`lowtide codecs`: how bytes can be encoded, and whether that pays on this machine."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from lowtide.cli.output import console, echo_json
from lowtide.core.units import format_rate

if TYPE_CHECKING:
    from lowtide.codecs import Codec, Stats


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option(
    "--density",
    type=float,
    default=0.5,
    show_default=True,
    metavar="D",
    help="The share of values that are not zero; a ReLU leaves about half.",
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of a table.")
def command(*, density: float, as_json: bool) -> int:
    """List the codecs with what they leave and how fast one thread is here, in about a second.

    A codec pays on disks slower than its last column, and where wear counts. Only exact ones may stand before a tier.

    \b
    Examples:
      lowtide codecs --density 0.3
      lowtide run --budget 2GiB --spill file+zvc:///fast/disk train.py
    """
    from lowtide.codecs import Stats, codec, codec_names

    stats = Stats(density=density)
    rows = [_row(codec(name), stats) for name in codec_names()]
    if as_json:
        echo_json(rows)
        return 0
    from rich.table import Table

    table = Table(box=None, pad_edge=False)
    table.add_column("codec", style="bold", no_wrap=True)
    table.add_column("exact", no_wrap=True)
    for name in ("left", "encode", "decode", "pays below"):
        table.add_column(name, justify="right", no_wrap=True)
    for row in rows:
        rates = (row["encode_bytes_per_s"], row["decode_bytes_per_s"], row["pays_below_bytes_per_s"])
        exact = "yes" if row["lossless"] else "no: models only"
        table.add_row(row["name"], exact, f"{row['ratio']:.1%}", *map(format_rate, rates))
    console().print(table)
    return 0


def _row(codec: Codec, stats: Stats) -> dict[str, Any]:
    from lowtide.codecs import measure

    rates, ratio = measure(codec, stats), codec.ratio_model(stats)
    return {
        "name": codec.name,
        "lossless": codec.lossless,
        "density": stats.density,
        "ratio": ratio,
        "encode_bytes_per_s": rates.encode_bytes_per_s,
        "decode_bytes_per_s": rates.decode_bytes_per_s,
        "pays_below_bytes_per_s": rates.pays_below_bytes_per_s(ratio),
    }
