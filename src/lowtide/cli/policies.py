"""`lowtide policies`: what can decide."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import click

from lowtide.cli.output import console, echo_json

if TYPE_CHECKING:
    from lowtide.plan.policy import Policy


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

    rows = [_row(registry.policy(name)) for name in registry.policy_names()]
    if as_json:
        echo_json(rows)
        return 0
    from rich.markup import escape
    from rich.table import Table

    table = Table(box=None, pad_edge=False)
    table.add_column("policy", style="bold", no_wrap=True)
    table.add_column("runs", no_wrap=True)
    table.add_column("what it does")
    for row in rows:
        origin = f" ({row['paper']})" if row["paper"] else ""
        table.add_row(str(row["name"]), ", ".join(row["runs"][:1]), escape(f"{row['summary']}{origin}"))
    console().print(table)
    return 0


def _row(policy: Policy) -> dict[str, Any]:
    about = policy.about
    return {
        "name": policy.name,
        "summary": policy.summary,
        "family": about.family,
        "runs": [str(how) for how in about.runs],
        "paper": about.paper,
        "reconstructed": about.reconstructed,
        "adapts": about.adapts,
        "classified": None if about.classified is None else asdict(about.classified),
    }
