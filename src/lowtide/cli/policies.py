"""`lowtide policies`: what can decide."""

from __future__ import annotations

import click

from lowtide.cli.output import console, echo_json


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of a table.")
def command(*, as_json: bool) -> int:
    """List the policies that --policy takes.

    \b
    Examples:
      lowtide policies
      lowtide run --budget 2GiB --policy belady train.py
    """
    from lowtide import registry

    rows = [(name, registry.policy(name).summary) for name in registry.policy_names()]
    if as_json:
        echo_json([{"name": name, "summary": summary} for name, summary in rows])
        return 0
    from rich.table import Table

    table = Table(box=None, pad_edge=False)
    table.add_column("policy", style="bold")
    table.add_column("what it does")
    for name, summary in rows:
        table.add_row(name, summary)
    console().print(table)
    return 0
