"""How the verbs speak: tables for people, JSON for scripts, files that are whole or absent."""

from __future__ import annotations

import json
import os
import sys
import tempfile
import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.table import Table

_PACKAGE = Path(__file__).resolve().parent.parent


def console() -> Console:
    """Return a console on stdout; made late so that a redirected stdout is honoured.

    Without markup: messages of other programs have brackets of their own.
    """
    return Console(highlight=False, markup=False)


def echo_json(value: object) -> None:
    """Print `value` as JSON on stdout."""
    click.echo(json.dumps(value, indent=2, sort_keys=True, default=str))


def write_json(path: Path, value: Mapping[str, Any]) -> None:
    """Write `value` to `path` so that a reader sees the old file or the new one, never half of it."""
    text = json.dumps(value, indent=2, sort_keys=True, default=str) + "\n"
    handle, temporary = tempfile.mkstemp(dir=path.absolute().parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
            # mkstemp makes it private; a result file is as readable as any other the user creates.
            os.fchmod(file.fileno(), 0o666 & ~_umask())
        Path(temporary).replace(path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


def facts(title: str, rows: list[tuple[str, str]]) -> Table:
    """Return a two-column table of names and values."""
    table = Table(title=title, title_justify="left", show_header=False, box=None, pad_edge=False)
    table.add_column(style="bold")
    table.add_column()
    for name, value in rows:
        table.add_row(name, value)
    return table


def print_traceback(error: BaseException) -> None:
    """Print the script's traceback as Python would, without the frames of Lowtide that led into the script."""
    report = traceback.TracebackException.from_exception(error)
    first = next((i for i, frame in enumerate(report.stack) if not _is_ours(frame.filename)), 0)
    del report.stack[:first]
    print("".join(report.format()), end="", file=sys.stderr)


def _is_ours(filename: str) -> bool:
    return filename == "<frozen runpy>" or Path(filename).is_relative_to(_PACKAGE)


def _umask() -> int:
    mask = os.umask(0o077)
    os.umask(mask)
    return mask
