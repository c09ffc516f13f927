"""`lowtide codecs`: how bytes can be encoded, and whether that pays on this machine."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from lowtide.cli.output import console, echo_json
from lowtide.core.units import format_rate
from lowtide.errors import BadArgument

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
    """List the codecs, the bytes they leave, and the speed of one thread here; takes about two seconds.

    A round trip through a codec is faster on disks slower than its last column: 2 s / B > 1 / Ce + 1 / Cd, with s the
    share it saves. Only exact ones may stand before a tier; several in a row are written with a plus, as bf16+zvc2.

    \b
    Examples:
      lowtide codecs --density 0.3
      lowtide run --budget 2GiB --spill file+zvc:///fast/disk train.py
    """
    from lowtide.codecs import Stats, codec, codec_names

    stats = Stats(density=density)
    rows, missing = [], []
    for name in codec_names():
        try:
            rows.append(_row(codec(name), stats))
        except BadArgument as error:  # a library is not installed
            missing.append(f"{name}: {error}")
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
        exact = {"bits": "yes", "sign": "sign only", "bound": "rounds"}[row["exactness"]]
        table.add_row(row["name"], exact, f"{row['ratio']:.1%}", *map(format_rate, rates))
    console().print(table)
    for line in missing:
        console().print(line, highlight=False, markup=False)
    return 0


def _row(codec: Codec, stats: Stats) -> dict[str, Any]:
    from lowtide.codecs import measure

    rates = measure(codec, stats)
    return {
        "name": codec.name,
        "exactness": codec.exactness.value,
        "lossless": codec.exactness.lossless,
        "density": stats.density,
        "ratio": rates.ratio,
        "encode_bytes_per_s": rates.encode_bytes_per_s,
        "decode_bytes_per_s": rates.decode_bytes_per_s,
        "pays_below_bytes_per_s": rates.pays_below_bytes_per_s(rates.ratio),
    }
