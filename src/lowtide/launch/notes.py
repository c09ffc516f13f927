"""What the processes of a run write down for it: a file for each, in a directory of the run's own."""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from lowtide.core.files import write_whole
from lowtide.core.units import format_bytes
from lowtide.errors import BadArgument


@dataclass(frozen=True, slots=True, kw_only=True)
class Note:
    """One process inside its budget: `stats` are `Tide.stats()` at its end (empty: it did not get there)."""

    pid: int
    rank: int | None
    command: str
    budget_bytes: int
    stats: Mapping[str, Any] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """What to call it."""
        return f"process {self.pid}" if self.rank is None else f"rank {self.rank}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Escape:
    """One process that runs, or may run, outside the budget, and why."""

    pid: int
    reason: str


def enter(directory: Path, note: Note, *, capacity_bytes: int | None) -> None:
    """Write down that a process begins; refuse it where the budgets of those alive exceed `capacity_bytes`."""
    with _alone(directory):
        alive = [other for other in _notes(directory) if not other.stats and _is_alive(other.pid)]
        total_bytes = note.budget_bytes + sum(other.budget_bytes for other in alive)
        if capacity_bytes is not None and alive and total_bytes > capacity_bytes:
            raise BadArgument(
                f"{len(alive) + 1} processes of this run would have budgets of {format_bytes(total_bytes)} together, "
                f"more than the {format_bytes(capacity_bytes)} that there are: the budget is for each of them, "
                "state less"
            )
        _write(directory, note)


def leave(directory: Path, note: Note, stats: Mapping[str, Any]) -> None:
    """Write down how a process fared."""
    _write(directory, replace(note, stats=stats))


def escaped(directory: Path, reason: str) -> None:
    """Write down that this process, or one that it starts, is outside the budget."""
    with _alone(directory), (directory / "escapes").open("a", encoding="utf-8") as lines:
        lines.write(json.dumps({"pid": os.getpid(), "reason": reason}) + "\n")


def read(directory: Path) -> tuple[list[Note], list[Escape]]:
    """Return what was written down, by rank and by the order in which it was."""
    notes = sorted(_notes(directory), key=lambda note: (note.rank is None, note.rank or 0, note.pid))
    try:
        lines = (directory / "escapes").read_text(encoding="utf-8").splitlines()
    except FileNotFoundError:
        lines = []
    return notes, [Escape(**json.loads(line)) for line in lines]


def _notes(directory: Path) -> Iterator[Note]:
    for path in directory.glob("*.json"):
        yield Note(**json.loads(path.read_text(encoding="utf-8")))


def _write(directory: Path, note: Note) -> None:
    write_whole(directory / f"{note.pid}.json", json.dumps(asdict(note), default=str).encode())


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


@contextmanager
def _alone(directory: Path) -> Iterator[None]:
    with (directory / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
