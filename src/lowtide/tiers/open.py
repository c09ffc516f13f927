"""From what a user writes as `spill=` to a medium."""

from __future__ import annotations

import os
import re
import tempfile
from collections.abc import Sequence
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from urllib.parse import unquote, urlsplit

from lowtide.codecs import codec
from lowtide.errors import BadArgument
from lowtide.tiers import failures, filesystem
from lowtide.tiers.dram import open_dram
from lowtide.tiers.encoded import ZERO_VALUE, Encoded, check_lossless
from lowtide.tiers.file import FileMedium
from lowtide.tiers.medium import Medium, missing_of_medium
from lowtide.tiers.null import NullMedium
from lowtide.tiers.server_url import SCHEMES, hide_password, read_server_url

ENTRY_POINTS = "lowtide.tiers"
"""The group of further tiers: the name is a URL scheme, the object `(url, *, capacity_bytes) -> Medium`."""

SPILL_VARIABLE = "LOWTIDE_SPILL"

Directory = str | os.PathLike[str]
Spill = Directory | Sequence[Directory] | Medium | None

_BUILT_IN = ("dram", "file", "null", *SCHEMES)
# Two letters or more before the colon, so that a drive letter is not a scheme.
_URL = re.compile(r"([a-zA-Z][a-zA-Z0-9+.-]+):")


def open_medium(spill: Spill, *, capacity_bytes: int | None = None) -> Medium:
    """Return the medium that `spill` names.

    A directory, several (striped), servers with a directory behind them (slabs.py), a tier URL (`file:///fast/disk`,
    `dram+zvc:512MiB`, `redis://host`, `null:`, the scheme of an installed plug-in, or any of these with a lossless
    codec: `file+zvc:///fast/disk`), a medium, which is returned as it is, or None: what $LOWTIDE_SPILL names, else a
    temporary directory on a disk.
    """
    failures.checked_capacity(capacity_bytes)
    if spill is None:
        spill = os.environ.get(SPILL_VARIABLE) or None
    if spill is None:
        directory, notes = default_directory()
        return FileMedium([directory], capacity_bytes=capacity_bytes, notes=notes)
    if isinstance(spill, str):
        match = _URL.match(spill)
        if match is not None:
            return _open_url(spill, scheme=match[1].lower(), capacity_bytes=capacity_bytes)
    if isinstance(spill, str | os.PathLike):
        return FileMedium([_directory(spill)], capacity_bytes=capacity_bytes)
    if isinstance(spill, Medium):
        if capacity_bytes is not None and capacity_bytes != spill.capacity_bytes:
            raise BadArgument(
                f"tier '{spill.name}' was opened with a capacity of {spill.capacity_bytes} bytes, "
                f"not {capacity_bytes}: state it where the tier is opened"
            )
        return spill
    if hasattr(spill, "write_at"):
        raise BadArgument(
            f"{type(spill).__name__} is not a Medium: it lacks {', '.join(missing_of_medium(spill))}; "
            "lowtide.tiers.PlainMedium has defaults to inherit"
        )
    servers = _servers(spill)
    if servers:
        return _open_slabs(servers, [each for each in spill if each not in servers], capacity_bytes=capacity_bytes)
    return FileMedium(_directories(spill), capacity_bytes=capacity_bytes)


def _servers(spill: object) -> list[str]:
    """Return the servers of a list; callers without a type checker may pass anything."""
    texts = [each for each in spill if isinstance(each, str)] if isinstance(spill, Sequence) else []
    return [text for text in texts if (match := _URL.match(text)) is not None and match[1].lower() in SCHEMES]


def _open_slabs(servers: Sequence[str], rest: Sequence[object], *, capacity_bytes: int | None) -> Medium:
    from lowtide.tiers.slabs import Slabs  # Late, as the servers' own parts are.

    if not rest:
        raise BadArgument(
            "data on several servers is lost if one dies: also name a directory, as in ['redis://a', '/disk']"
        )
    backup = FileMedium(_directories(rest), capacity_bytes=capacity_bytes)
    opened: list[Medium] = [backup]
    try:
        opened += [open_medium(url) for url in servers]
    except BaseException:
        for medium in opened:
            medium.close()
        raise
    return Slabs(opened[1:], backup=backup)


def default_directory() -> tuple[Path, tuple[str, ...]]:
    """Return the default spill directory, and the reason if it is not the usual temporary directory."""
    usual = Path(tempfile.gettempdir())
    if not filesystem.is_memory(usual):
        return usual, ()
    other = Path("/var/tmp")
    if other.is_dir() and os.access(other, os.W_OK | os.X_OK) and not filesystem.is_memory(other):
        return other, (f"spilling to {other}, because {usual} is on a filesystem in memory",)
    return usual, ()


def known_schemes() -> tuple[str, ...]:
    """Return the schemes that `open_medium` takes, without loading a plug-in."""
    return tuple(sorted({*_BUILT_IN, *(point.name for point in entry_points(group=ENTRY_POINTS))}))


def check_url(location: str) -> None:
    """Refuse a URL of an unknown tier, or with a codec that no tier takes, without opening it; directories pass."""
    match = _URL.match(location)
    tier = match[1].lower() if match is not None else "file"
    while tier not in known_schemes():
        tier, _, name = tier.rpartition("+")
        if not tier:
            raise BadArgument(
                f"unknown tier '{name}' in {hide_password(location)!r}: known are {', '.join(known_schemes())}; "
                "write a directory that has a colon in its name with ./ before it"
            )
        check_lossless(codec(name))
    if tier in SCHEMES:
        read_server_url(location)


def _open_url(url: str, *, scheme: str, capacity_bytes: int | None) -> Medium:
    check_url(url)
    if scheme == "file":
        return FileMedium([_directory(url)], capacity_bytes=capacity_bytes)
    if scheme == "dram":
        return open_dram(url)
    if scheme == "null":
        if url.partition(":")[2] not in ("", "//"):
            raise BadArgument(f"the null tier has no place, so {url!r} means nothing: write 'null:'")
        return NullMedium(capacity_bytes=capacity_bytes)
    if scheme in SCHEMES:
        from lowtide.tiers.redis import RedisMedium  # Late: it takes sockets, TLS and a native library.

        return RedisMedium(read_server_url(url), capacity_bytes=capacity_bytes)
    for point in entry_points(group=ENTRY_POINTS):
        if point.name == scheme:
            return _open_plugin(point, url, capacity_bytes=capacity_bytes)
    tier, _, name = scheme.rpartition("+")
    return _open_encoded(f"{tier}:{url.partition(':')[2]}", name, capacity_bytes=capacity_bytes)


def _open_encoded(url: str, name: str, *, capacity_bytes: int | None) -> Medium:
    codecs = ZERO_VALUE if name == "zvc" else [codec(name)]
    medium = open_medium(url, capacity_bytes=capacity_bytes)
    try:
        return Encoded(medium, codecs=codecs)
    except BadArgument:
        medium.close()
        raise


def _open_plugin(point: EntryPoint, url: str, *, capacity_bytes: int | None) -> Medium:
    package = point.dist.name if point.dist is not None else point.value
    try:
        factory = point.load()
    except (ImportError, AttributeError) as error:
        raise BadArgument(
            f"tier '{point.name}' of {package} cannot be loaded: {error}: install its dependencies"
        ) from error
    medium = factory(url, capacity_bytes=capacity_bytes)
    if not isinstance(medium, Medium):
        raise BadArgument(
            f"tier '{point.name}' of {package} made a {type(medium).__name__}, which is not a Medium: it lacks "
            f"{', '.join(missing_of_medium(medium))}; lowtide.tiers.PlainMedium has defaults to inherit"
        )
    return medium


def _directories(spill: object) -> list[Path]:
    """Return the directories of a list; callers without a type checker may pass anything."""
    if not isinstance(spill, Sequence) or isinstance(spill, bytes | bytearray | memoryview):
        raise BadArgument(f"cannot spill to {spill!r}: pass a directory, a list of them, a tier URL or a medium")
    return [_directory(each) for each in spill]


def _directory(spill: object) -> Path:
    """Return the directory that a path or file URL names."""
    if not isinstance(spill, str | os.PathLike):
        raise BadArgument(f"cannot spill to {spill!r}: a list holds directories, over which the spill is striped")
    text = os.fspath(spill)
    match = _URL.match(text) if isinstance(spill, str) else None
    if match is not None:
        parts = urlsplit(text)
        if parts.scheme != "file":
            raise BadArgument(
                f"cannot stripe over {hide_password(text)!r}: a list holds directories or file:/// URLs only"
            )
        if parts.netloc not in ("", "localhost") or parts.query or parts.fragment or not parts.path.startswith("/"):
            raise BadArgument(f"cannot read {text!r} as a place on this machine: write file:///path/of/directory")
        text = unquote(parts.path)
    if not text:
        raise BadArgument("the spill directory is an empty text: pass a directory")
    return Path(text).expanduser()
