"""What a Python was told to run, read from its command line."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import PurePath

_WITH_VALUE = ("-W", "-X", "--check-hash-based-pycs")
_PYTHON = re.compile(r"python(w|\d+(\.\d+)?t?)?(\.exe)?")

_LAUNCHER_SCRIPTS = frozenset(
    ("torchrun", "accelerate", "accelerate-launch", "deepspeed", "ds", "horovodrun", "composer", "fabric", "lowtide")
)
# Modules that start others, or that help and never train: torch's compiler has worker processes that import torch.
_LAUNCHER_MODULES = (
    "torch.distributed.run",
    "torch.distributed.launch",
    "torch.distributed.elastic",
    "torch._inductor",
    "accelerate.commands",
    "deepspeed.launcher",
    "horovod.runner",
    "lowtide",
)


class Main(Enum):
    """Where the program comes from."""

    SCRIPT = "script"
    MODULE = "module"
    CODE = "code"
    INPUT = "standard input"


@dataclass(frozen=True, slots=True, kw_only=True)
class PythonCommand:
    """The interpreter's own `options`, the kind of program and its name (or text), and the program's arguments."""

    options: tuple[str, ...]
    main: Main
    name: str
    arguments: tuple[str, ...]

    @property
    def is_launcher(self) -> bool:
        """Whether the program is known to start others and to train nothing itself."""
        return is_launcher(self.name, is_module=self.main is Main.MODULE) and self.main in (Main.SCRIPT, Main.MODULE)

    @property
    def is_multiprocessing(self) -> bool:
        """Whether it is a child, or a helper, of Python's multiprocessing."""
        return self.main is Main.CODE and self.name.startswith("from multiprocessing")

    @property
    def only_loads_a_library(self) -> bool:
        """Whether it is torch.compile's way to find out whether the machine can load a library it has built."""
        last = self.name.strip().rpartition("\n")[2]
        return self.main is Main.CODE and last.startswith("cdll.LoadLibrary(")

    @property
    def ignores_environment(self) -> bool:
        """Whether it was told not to look at PYTHONPATH, or not to load any `sitecustomize`."""
        return any(set(option[1:]) & set("IES") for option in self.options if not option.startswith(("--", "-W", "-X")))


def is_python(program: str) -> bool:
    """Tell whether a program is a Python interpreter, by its name."""
    return _PYTHON.fullmatch(PurePath(program).name) is not None


def is_launcher(name: str, *, is_module: bool) -> bool:
    """Tell whether a script or module is known to start others and to train nothing itself."""
    if not is_module:
        return PurePath(name).name in _LAUNCHER_SCRIPTS
    return any(name == known or name.startswith(f"{known}.") for known in _LAUNCHER_MODULES)


def read_command(arguments: Sequence[str]) -> PythonCommand:
    """Return what the arguments of a Python interpreter (without its own name) say."""
    options: list[str] = []
    rest = list(arguments)
    while rest:
        word = rest.pop(0)
        if word == "-" or not word.startswith("-"):
            main = Main.INPUT if word == "-" else Main.SCRIPT
            return PythonCommand(options=tuple(options), main=main, name=word, arguments=tuple(rest))
        if word in _WITH_VALUE:
            options += [word, *rest[:1]]
            rest = rest[1:]
            continue
        letter = "" if word.startswith(("--", "-W", "-X")) else next((each for each in word[1:] if each in "cm"), "")
        if letter:
            before, _, attached = word[1:].partition(letter)
            options += [f"-{before}"] * bool(before)
            name = attached or (rest.pop(0) if rest else "")
            main = Main.CODE if letter == "c" else Main.MODULE
            return PythonCommand(options=tuple(options), main=main, name=name, arguments=tuple(rest))
        options.append(word)
    return PythonCommand(options=tuple(options), main=Main.INPUT, name="-", arguments=())
