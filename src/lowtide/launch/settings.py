"""What `lowtide run` was told, as the processes that it starts find it in their environment."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, MutableMapping
from dataclasses import asdict, dataclass
from pathlib import Path

from lowtide.memory.budget import BudgetLike

VARIABLE = "LOWTIDE_RUN"
SITE = Path(__file__).parent / "site"
"""The directory whose `sitecustomize` a child's Python finds before any other."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """The options of a run. `notes` is the directory in which its processes say how they fare.

    `strict`: everything that would weaken the budget is an error. `log`: the file that steps are appended to.
    `live`: show a line of status in the terminal.
    """

    budget: BudgetLike
    spill: tuple[str, ...] = ()
    slow: str | None = None
    policy: str = "auto"
    verify: bool = False
    recompute: bool | None = None
    codecs: tuple[str, ...] | None = None
    max_error: float = 0.0
    put_off: bool = False
    serve: bool = False
    strict: bool = False
    quiet: bool = False
    emulate: str | None = None
    capacity: str | None = None
    notes: str = ""
    log: str | None = None
    live: bool = False

    @property
    def location(self) -> str | list[str] | None:
        """Where to spill, as `fit` takes it."""
        return self.spill[0] if len(self.spill) == 1 else list(self.spill) or None


def settings_of(environment: Mapping[str, str]) -> Settings | None:
    """Return what a run left in the environment of this process (None: no run started it)."""
    text = environment.get(VARIABLE)
    if not text:
        return None
    try:
        values = json.loads(text)
        codecs = None if values["codecs"] is None else tuple(values["codecs"])
        return Settings(**{**values, "spill": tuple(values["spill"]), "codecs": codecs})
    except (ValueError, TypeError, KeyError):
        return None  # another version's, or not ours: nothing is known then


def leave(settings: Settings, environment: MutableMapping[str, str]) -> None:
    """Let the processes that are started with `environment` find `settings`."""
    environment[VARIABLE] = json.dumps(asdict(settings))
    before = [part for part in environment.get("PYTHONPATH", "").split(os.pathsep) if part and part != str(SITE)]
    environment["PYTHONPATH"] = os.pathsep.join((str(SITE), *before))


def reaches(environment: Mapping[str, str]) -> bool:
    """Tell whether a Python that is started with `environment` would find the settings."""
    return VARIABLE in environment and str(SITE) in environment.get("PYTHONPATH", "").split(os.pathsep)
