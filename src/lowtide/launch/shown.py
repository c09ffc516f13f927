"""A run in its terminal and its log, as `lowtide run` was told to show it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TextIO

from lowtide.core.step_record import StepRecord
from lowtide.errors import BadArgument
from lowtide.launch.settings import Settings
from lowtide.live.jsonl import to_jsonl
from lowtide.live.status import LiveLine
from lowtide.live.terminal import LastRow
from lowtide.live.terminal import is_terminal as _is_terminal


@contextmanager
def shown(settings: Settings, *, rank: int | None) -> Iterator[Callable[[StepRecord], None]]:
    """Yield a listener that shows steps until the end of the context. Of several processes one has the terminal."""
    with ExitStack() as stack:
        listeners: list[Callable[[StepRecord], None]] = []
        if settings.log is not None:
            log = to_jsonl(settings.log, rank=rank)
            stack.callback(log.close)
            listeners.append(log)
        if settings.live:
            line = LiveLine(LastRow(2), may_show=lambda: rank in (None, 0) and _is_first(settings.notes))
            stack.callback(line.close)
            listeners.append(line)

        def tell(record: StepRecord) -> None:
            for listener in listeners:
                listener(record)

        yield tell


def is_terminal(stream: TextIO) -> bool:
    """Tell whether a stream is a terminal with a last row to show things in."""
    try:
        return _is_terminal(stream.fileno())
    except (OSError, ValueError, AttributeError):
        return False


def start_log(path: Path | None) -> None:
    """Begin a run's log, if it has one, without the lines of an earlier run."""
    if path is None:
        return
    try:
        path.open("w").close()
    except OSError as error:
        raise BadArgument(f"cannot write the log {path}: {error.strerror}") from error


def _is_first(directory: str) -> bool:
    """Tell whether no process of the run has taken the terminal before this one."""
    try:
        (Path(directory) / "live").touch(exist_ok=False)
    except OSError:
        return False
    return True
