"""How the verbs speak: tables for people, JSON for scripts, files that are whole or absent."""

from __future__ import annotations

import json
import sys
import traceback
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TextIO

import click
from rich.console import Console, Group
from rich.table import Table
from rich.text import Text

from lowtide.core.files import write_whole

_PACKAGE = Path(__file__).resolve().parent.parent
_RUNPY = "<frozen runpy>"
# Saved-tensor hooks raise what autograd leaves to them, in autograd's words: nothing there is news to the user.
_SPEAK_FOR_AUTOGRAD = (str(Path("autograd", "kept.py")), str(Path("execute", "step", "saved.py")))
# What PyTorch calls a mode through, and what the mode calls to go on.
_BEFORE_A_MODE = ("torch/_compile.py", "torch/_dynamo/eval_frame.py")
_AFTER_A_MODE = ("torch/_ops.py",)
_OUR_WARNING = "lowtide: "

ADVISORY = "advisory: accounted in Python, not enforced"
"""What is said beside a peak that no allocator bounded."""


def console() -> Console:
    """Return a console on stdout; made late so that a redirected stdout is honoured.

    Without markup: messages of other programs have brackets of their own.
    """
    return Console(highlight=False, markup=False)


def echo_json(value: object) -> None:
    """Print `value` as JSON on stdout."""
    click.echo(json.dumps(value, indent=2, sort_keys=True, default=str))


def write_json(path: Path, value: Mapping[str, Any]) -> None:
    """Write `value` to `path` as JSON, as `write_text` does."""
    write_text(path, json.dumps(value, indent=2, sort_keys=True, default=str) + "\n")


def write_text(path: Path, text: str) -> None:
    """Write `text` to `path` so that a reader sees the old file or the new one, never half of it."""
    write_whole(path, text.encode())


def facts(title: str, rows: list[tuple[str, str]]) -> Group:
    """Return a two-column table of names and values under a title, which may be wider than the table."""
    table = Table(show_header=False, box=None, pad_edge=False)
    table.add_column(style="bold")
    table.add_column(overflow="fold")  # a path is shown whole
    for name, value in rows:
        table.add_row(name, value)
    return Group(Text(title, style="italic"), table)


def say(text: str) -> None:
    """Print a line on stderr, where it does not mix with what a script prints."""
    print(f"lowtide: {' '.join(text.split())}", file=sys.stderr, flush=True)


def warn(text: str) -> None:
    """Print a warning of one line on stderr."""
    say(f"warning: {text}")


@contextmanager
def warnings_as_lines() -> Iterator[None]:
    """Show Lowtide's own warnings as one line each; those of others look as they always do."""
    before = warnings.showwarning

    def show(
        message: Warning | str,
        category: type[Warning],
        filename: str,
        lineno: int,
        file: TextIO | None = None,
        line: str | None = None,
    ) -> None:
        text = str(message)
        if text.startswith(_OUR_WARNING):
            warn(text.removeprefix(_OUR_WARNING))
        else:
            before(message, category, filename, lineno, file, line)

    warnings.showwarning = show
    try:
        yield
    finally:
        warnings.showwarning = before


def print_traceback(error: BaseException) -> None:
    """Print the script's traceback as Python would, without the frames of Lowtide.

    An error that arose inside Lowtide keeps its last frames: they help to find its cause.
    """
    report = traceback.TracebackException.from_exception(error)
    for part in _chain(report):
        part.stack[:] = _of_the_script(part.stack)
    # A script that cannot even be compiled has no frames: Python shows the place alone.
    lines = report.format() if report.stack else report.format_exception_only()
    print("".join(lines), end="", file=sys.stderr)


def _chain(report: traceback.TracebackException) -> Iterator[traceback.TracebackException]:
    """Yield an exception's report with those of what caused it, or is grouped in it."""
    waiting, seen = [report], set()
    while waiting:
        part = waiting.pop()
        if id(part) not in seen:
            seen.add(id(part))
            yield part
            waiting += [each for each in (part.__cause__, part.__context__) if each is not None]
            waiting += part.exceptions or []


def _of_the_script(frames: list[traceback.FrameSummary]) -> list[traceback.FrameSummary]:
    # The script begins where runpy starts it; it may lie in Lowtide's own directory, as the demo's does.
    begin = 0
    while begin < len(frames) and (frames[begin].filename == _RUNPY or _is_ours(frames[begin])):
        begin += 1
        if frames[begin - 1].filename == _RUNPY and begin < len(frames) and frames[begin].filename != _RUNPY:
            break
    script = _without_modes(frames[begin:])
    if not script:
        return [] if frames and frames[-1].filename == _RUNPY else frames
    own = script[0].filename
    shown = [frame.filename == own or not _is_ours(frame) for frame in script]
    end = len(script)
    if not script[-1].filename.endswith(_SPEAK_FOR_AUTOGRAD):
        while end > 0 and not shown[end - 1]:
            end -= 1
    return [frame for index, frame in enumerate(script) if shown[index] or index >= end]


def _without_modes(frames: list[traceback.FrameSummary]) -> list[traceback.FrameSummary]:
    """Return the frames without those that an operator has only because a mode of ours watches it."""
    hidden: set[int] = set()
    for at, frame in enumerate(frames):
        if frame.name == "__torch_dispatch__" and _is_ours(frame):
            hidden.add(at)
            for way, around in ((-1, _BEFORE_A_MODE), (1, _AFTER_A_MODE)):
                beside = at + way
                while 0 <= beside < len(frames) and frames[beside].filename.endswith(around):
                    hidden.add(beside)
                    beside += way
    return [frame for at, frame in enumerate(frames) if at not in hidden]


def _is_ours(frame: traceback.FrameSummary) -> bool:
    return Path(frame.filename).is_relative_to(_PACKAGE)
