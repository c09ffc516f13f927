"""Arguments checked before anything slow begins; each failure is one line that says what to do."""

from __future__ import annotations

import os
import re
import sys
import tempfile
from collections.abc import Mapping, Sequence
from importlib.machinery import PathFinder
from pathlib import Path
from urllib.parse import unquote, urlsplit

from lowtide.cli.output import warn
from lowtide.core.spelling import did_you_mean, is_close
from lowtide.core.units import format_bytes
from lowtide.errors import BadArgument
from lowtide.memory.budget import (
    MARGIN_MIN_BYTES,
    MARGIN_SHARE,
    BudgetLike,
    local_ranks,
    memory_limits,
    names_accelerator,
    parse_budget,
    parse_device_budget,
)

_FILE_URL = re.compile(r"file(\+\w+)?:")  # with or without a codec
_TIERS_EXAMPLE = "cpu=2GiB,disk=40GiB"
# What a device has free is known once torch is loaded; only the wording is checked before, so any large figure does.
_SOME_BYTES = 2**40


def check_script(path: Path) -> Path:
    """Return `path` if it is a file that can be read."""
    if path.is_dir():
        raise BadArgument(f"{path} is a directory: name the Python script in it")
    try:
        with path.open("rb"):
            return path
    except FileNotFoundError:
        meant = similar_file(path) or ": check the path (it comes after lowtide's own options)"
        raise BadArgument(f"script {path} does not exist{meant}") from None
    except OSError as error:
        raise BadArgument(f"script {path} cannot be read ({error.strerror}): change its permissions") from None


def similar_file(path: Path) -> str:
    """Return ": did you mean 'train.py'?" for files beside a missing one that have its suffix and a similar name."""
    try:
        beside = [each for each in path.parent.iterdir() if each.suffix == path.suffix]
    except OSError:
        return ""
    # By its own name: the paths of all files in a folder are alike.
    return did_you_mean(str(path), [str(each) for each in beside if is_close(path.stem, each.stem)])


def check_module(name: str) -> None:
    """Refuse a module whose package is nowhere to be found; nothing of it is imported yet."""
    top = name.partition(".")[0]
    if top not in sys.modules and PathFinder.find_spec(top, [str(Path.cwd()), *sys.path]) is None:
        raise BadArgument(f"module {name} does not exist: check its name, and run from the directory that holds {top}")


def check_spill(locations: Sequence[str]) -> None:
    """Refuse an unknown tier, and a spill directory that is missing or cannot be written; plug-ins check their own."""
    from lowtide.tiers.open import check_url

    for location in locations:
        check_url(location)
    for path in _directories(locations):
        check_directory(path)
        try:
            # Asking for permissions is not enough: root passes every check, also on a read-only filesystem.
            with tempfile.TemporaryFile(dir=path, prefix=".lowtide-"):
                pass
        except OSError as error:
            raise BadArgument(
                f"spill directory {path} cannot be written ({error.strerror}): "
                "make it writable, or pass another with --spill"
            ) from None


def check_directory(path: Path) -> None:
    """Refuse a spill location that is not a directory."""
    if not path.exists():
        raise BadArgument(f"spill directory {path} does not exist: create it, or pass another with --spill")
    if not path.is_dir():
        raise BadArgument(f"spill location {path} is not a directory: pass a directory with --spill")


def warn_of_memory(locations: Sequence[str]) -> None:
    """Warn of a spill directory that is itself memory."""
    from lowtide.tiers.filesystem import filesystem_type, is_memory

    for path in _directories(locations):
        if is_memory(path):
            warn(
                f"spill directory {path} is memory ({filesystem_type(path)}), not a disk: spilling there frees no "
                "memory; pass a directory on a disk with --spill"
            )


def spill_locations(stated: Sequence[str]) -> list[str]:
    """Return where a run will spill: what was stated, else what $LOWTIDE_SPILL says, else the default directory."""
    from lowtide.tiers.open import SPILL_VARIABLE, default_directory

    if stated:
        return list(stated)
    if named := os.environ.get(SPILL_VARIABLE):
        return [named]
    return [str(default_directory()[0])]


def is_server(location: str) -> bool:
    """Return whether a spill location is a server that has to be asked, and no directory."""
    from lowtide.tiers.server_url import SCHEMES

    return location.partition(":")[0].partition("+")[0].lower() in SCHEMES and "://" in location


def spill_directory(location: str) -> Path:
    """Return the directory that a path or file: URL names, for the verbs that look at a disk itself."""
    from lowtide.tiers.server_url import hide_password

    directories = _directories([location])
    if not directories:
        raise BadArgument(
            f"{hide_password(location)} is not a directory, so it has no disk to measure: pass a directory with --spill"
        )
    return directories[0]


def _directories(locations: Sequence[str]) -> list[Path]:
    """Return the directories among spill locations, without the URLs of other tiers."""
    return [
        Path(unquote(urlsplit(location).path) if _FILE_URL.match(location) else location).expanduser()
        for location in locations
        if _FILE_URL.match(location) or not re.match(r"[a-zA-Z][a-zA-Z0-9+.-]+:", location)
    ]


def check_output(path: Path | None, *, others: Sequence[Path | None] = ()) -> None:
    """Refuse, before the work, an output that could not be written at its end or is another file of the command."""
    if path is None:
        return
    if path.is_dir():
        raise BadArgument(f"output {path} is a directory: name a file in it")
    target = Path(os.path.realpath(path))
    if any(other is not None and Path(os.path.realpath(other)) == target for other in others):
        raise BadArgument(f"output {path} would overwrite another file of this command: choose another name")
    if path.exists() and not path.is_file():
        return  # a device or a pipe is written into
    try:
        with tempfile.TemporaryFile(dir=target.parent, prefix=".lowtide-"):
            pass
    except OSError as error:
        raise BadArgument(
            f"output {path} cannot be written ({error.strerror}): create its directory, or name another"
        ) from None


def read_budget(text: str) -> BudgetLike:
    """Return the budget that `text` states: "2GiB", "auto", or per tier as "cpu=2GiB,disk=40GiB".

    What makes no sense is refused here, before torch is imported.
    """
    if "=" not in text:
        parse_budget(text)
        return text
    tiers: dict[str, int | str] = {}
    for part in text.split(","):
        name, equals, value = (word.strip() for word in part.partition("="))
        if not equals:
            raise BadArgument(f"cannot read {part!r} in the budget: write tiers as {_TIERS_EXAMPLE}")
        if name in tiers:
            raise BadArgument(f"the budget names {name!r} twice: keep one of the two")
        if name not in ("cpu", "disk", "slow") and not names_accelerator({name: value}):
            raise BadArgument(
                f"unknown tier {name!r} in the budget: the tiers are cpu (memory), disk (the spill) and, for a model "
                f"on an accelerator, device or its name such as cuda:0; write {_TIERS_EXAMPLE}"
            )
        tiers[name] = value
    if names_accelerator(tiers):
        parse_device_budget(tiers, free_bytes=lambda: _SOME_BYTES)
    elif "cpu" not in tiers:
        raise BadArgument(f"the budget names no 'cpu' bytes: add them, as in {_TIERS_EXAMPLE}")
    else:
        parse_budget(tiers)
    return tiers


def read_codecs(text: str | None) -> tuple[str, ...] | None:
    """Return the codecs of an option, by name (None: it was not given); refuse one that does not exist."""
    if text is None:
        return None
    from lowtide.codecs import codec

    names = () if text == "none" else tuple(name.strip() for name in text.split(","))
    for name in names:
        codec(name)
    return names


def settle_auto(budget: BudgetLike) -> tuple[BudgetLike, str]:
    """Return `budget` with "auto" as the bytes it means from here on, and how to tell a person what it is."""
    if isinstance(budget, Mapping) and names_accelerator(budget):
        return budget, ", ".join(f"{tier} {stated}" for tier, stated in budget.items())
    stated = budget.get("cpu") if isinstance(budget, Mapping) else budget
    text = str(stated).strip().lower()
    if text != "auto" and not text.endswith("%"):
        return budget, format_bytes(parse_budget(budget).fast_bytes)
    import lowtide.execute.tide.script  # noqa: F401 - torch takes memory of its own, which "auto" must not promise

    limits, ranks = memory_limits(), local_ranks()
    nbytes = parse_budget(budget).fast_bytes
    tightest = min(limits, key=lambda limit: limit.left_for(ranks))
    shared = f"an equal part for each of {ranks} ranks of " if ranks > 1 and tightest.shared else ""
    share = text if text == "auto" else f"{text} of auto"
    told = f"{format_bytes(nbytes)} ({share}: {shared}{explain_auto(tightest.source)})"
    return ({**budget, "cpu": nbytes} if isinstance(budget, Mapping) else nbytes), told


def explain_auto(source: str) -> str:
    """Return in words what the budget "auto" is, given the limit that is the tightest."""
    return f"what {source} leaves, less a margin of {MARGIN_SHARE:.0%}, {format_bytes(MARGIN_MIN_BYTES)} at least"


def check_policy(name: str) -> str:
    """Return the policy's name as it is registered; refuse one that cannot be found or loaded."""
    from lowtide import registry

    registry.policy(name)
    return registry.registered_name(name)
