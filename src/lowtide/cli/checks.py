"""Arguments checked before anything slow begins; each failure is one line that says what to do."""

from __future__ import annotations

import re
import tempfile
from collections.abc import Sequence
from pathlib import Path

from lowtide.errors import BadArgument
from lowtide.memory.budget import BudgetLike


def check_script(path: Path) -> Path:
    """Return `path` if it is a file that can be read."""
    if path.is_dir():
        raise BadArgument(f"{path} is a directory: name the Python script in it")
    try:
        with path.open("rb"):
            return path
    except FileNotFoundError:
        raise BadArgument(
            f"script {path} does not exist: check the path (it comes after lowtide's own options)"
        ) from None
    except OSError as error:
        raise BadArgument(f"script {path} cannot be read ({error.strerror}): change its permissions") from None


def check_spill(locations: Sequence[str]) -> None:
    """Refuse a spill directory that is missing or cannot be written; other tiers' URLs check themselves later."""
    for location in locations:
        if re.match(r"[a-z][a-z0-9+.-]+:", location) and not location.startswith("file:"):
            continue
        path = Path(location.removeprefix("file:").removeprefix("//"))
        if not path.exists():
            raise BadArgument(f"spill directory {path} does not exist: create it, or pass another with --spill")
        if not path.is_dir():
            raise BadArgument(f"spill location {path} is not a directory: pass a directory with --spill")
        try:
            # Asking for permissions is not enough: root passes every check, also on a read-only filesystem.
            with tempfile.TemporaryFile(dir=path, prefix=".lowtide-"):
                pass
        except OSError as error:
            raise BadArgument(
                f"spill directory {path} cannot be written ({error.strerror}): "
                "make it writable, or pass another with --spill"
            ) from None


def check_output(path: Path | None) -> None:
    """Refuse an output file that could not be written at the end, before the work begins."""
    if path is None:
        return
    if path.is_dir():
        raise BadArgument(f"output {path} is a directory: name a file in it")
    try:
        with tempfile.TemporaryFile(dir=path.absolute().parent, prefix=".lowtide-"):
            pass
    except OSError as error:
        raise BadArgument(
            f"output {path} cannot be written ({error.strerror}): create its directory, or name another"
        ) from None


def read_budget(text: str) -> BudgetLike:
    """Return the budget that `text` states: "2GiB", "auto", or per tier as "cpu=2GiB,disk=40GiB"."""
    if "=" not in text:
        return text
    tiers: dict[str, int | str] = {}
    for part in text.split(","):
        name, equals, value = part.partition("=")
        if not equals:
            raise BadArgument(f"cannot read {part!r} in the budget: write tiers as cpu=2GiB,disk=40GiB")
        if name.strip() in tiers:
            raise BadArgument(f"the budget names {name.strip()!r} twice: keep one of the two")
        tiers[name.strip()] = value.strip()
    return tiers


def check_policy(name: str) -> None:
    """Refuse a policy that cannot be found or loaded."""
    from lowtide import registry

    registry.policy(name)
