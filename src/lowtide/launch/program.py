"""What a user named after `lowtide run`: a script, a module, or a program that starts others."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from lowtide.errors import BadArgument
from lowtide.launch.python_command import Main, is_launcher, is_python, read_command

# Options of Python's that change nothing for a program that runs in this process already.
_HARMLESS = frozenset("uB")


@dataclass(frozen=True, slots=True, kw_only=True)
class Here:
    """A script (its path) or module (its name) that runs in this process."""

    program: Path | str
    arguments: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Beside:
    """A command that runs in a process of its own, and whose Python processes get the budget."""

    command: tuple[str, ...]


def find_program(name: str, arguments: Sequence[str], *, is_module: bool) -> Here | Beside:
    """Return how to run what the user named; a name that leads nowhere is refused."""
    if is_module:
        if is_launcher(name, is_module=True):
            return Beside(command=(sys.executable, "-m", name, *arguments))
        return Here(program=name, arguments=tuple(arguments))
    path = Path(name)
    if path.is_file() and not is_python(name):
        return _file(path, arguments)
    found = shutil.which(name)
    if is_python(name):
        return _python(found or sys.executable, arguments)
    if found is None or path.is_dir():
        return Here(program=path, arguments=tuple(arguments))  # opening a missing script gives the error
    return Beside(command=(found, *arguments))


def _file(path: Path, arguments: Sequence[str]) -> Here | Beside:
    try:
        with path.open("rb") as file:
            first = file.readline(200)
    except OSError:
        return Here(program=path, arguments=tuple(arguments))
    is_script = path.suffix == ".py" or not os.access(path, os.X_OK) or (first[:2] == b"#!" and b"python" in first)
    if is_script and not is_launcher(path.name, is_module=False):
        return Here(program=path, arguments=tuple(arguments))
    return Beside(command=(str(path.resolve()), *arguments))


def _python(interpreter: str, arguments: Sequence[str]) -> Here | Beside:
    """Return how to run `python ...`: in this process where that is the same Python, told nothing special."""
    command = read_command(arguments)
    if command.main is Main.INPUT and command.name == "-" and not arguments:
        raise BadArgument("'python' needs a script: name the script after it, or leave out 'python'")
    same = Path(interpreter).absolute().parent == Path(sys.executable).absolute().parent
    plain = all(set(option[1:]) <= _HARMLESS for option in command.options)
    if same and plain and command.main in (Main.SCRIPT, Main.MODULE) and not command.is_launcher:
        program = command.name if command.main is Main.MODULE else Path(command.name)
        return Here(program=program, arguments=command.arguments)
    return Beside(command=(interpreter, *arguments))
