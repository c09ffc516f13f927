"""Sees which processes are started, and names those that the budget cannot follow into."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from lowtide.launch.python_command import is_launcher, is_python, read_command
from lowtide.launch.settings import reaches

_installed = False
_listeners: list[Callable[[str], None]] = []


def watch(found: Callable[[str], None]) -> Callable[[], None]:
    """Call `found` with the reason when a process is started that cannot be budgeted; return what ends that.

    What `found` raises keeps the process from starting.
    """
    global _installed
    _listeners.append(found)
    if not _installed:
        _installed = True
        sys.addaudithook(_audit)  # for good: Python has no way to remove one
    return lambda: _listeners.remove(found)


def _audit(event: str, arguments: tuple[Any, ...]) -> None:
    if not _listeners or event not in ("subprocess.Popen", "os.posix_spawn", "os.exec"):
        return
    program, words, environment = arguments[0], arguments[1], arguments[-1]
    reason = why_not(program, words, environment)
    if reason:
        for found in tuple(_listeners):
            found(reason)


def why_not(program: object, words: object, environment: Mapping[Any, Any] | None) -> str:
    """Return why a process cannot be given the budget; an empty text where it can, or where it is not a Python."""
    command = _texts(words)
    first = os.fsdecode(program) if isinstance(program, str | bytes | os.PathLike) else ""
    first = first or (command[0] if command else "")
    python = is_python(first) or os.path.realpath(first) == os.path.realpath(sys.executable)
    if not python and not is_launcher(first, is_module=False):
        return ""
    if python and read_command(command[1:]).only_loads_a_library:
        return ""
    told = " ".join(command)[:80]
    known = os.environ if environment is None else {os.fsdecode(k): os.fsdecode(v) for k, v in environment.items()}
    if not reaches(known):
        return f"'{told}' was started with an environment without LOWTIDE_RUN or PYTHONPATH"
    if python and read_command(command[1:]).ignores_environment:
        return f"'{told}' was started with -I, -E or -S, so it ignores PYTHONPATH"
    return ""


def _texts(words: object) -> list[str]:
    if isinstance(words, str | bytes):
        return os.fsdecode(words).split()
    return [os.fsdecode(word) for word in words] if isinstance(words, Sequence) else []
