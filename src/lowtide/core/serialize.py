"""Files for traces, machines, plans and timelines: gzip'ed JSON, versioned, exact, written whole or not at all.

docs/formats.md describes every field; `encode_*.py` beside this write and read them. A reader accepts its own version
and older ones; anything newer, damaged or of another kind is refused with a `TraceError` of one line.
"""

from __future__ import annotations

import gzip
import json
import os
import zlib
from collections.abc import Callable
from io import BytesIO
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from lowtide.core.encode_machine import decode_machine, encode_machine
from lowtide.core.encode_plan import decode_plan, encode_plan
from lowtide.core.encode_timeline import decode_timeline, encode_timeline
from lowtide.core.encode_trace import decode_trace, encode_trace
from lowtide.core.fields import Damaged, Fields
from lowtide.core.files import write_whole
from lowtide.core.machine import MACHINE_VERSION, Machine
from lowtide.core.plan import PLAN_VERSION, Plan
from lowtide.core.timeline import TIMELINE_VERSION, Timeline
from lowtide.core.trace import TRACE_VERSION, Trace
from lowtide.core.units import format_bytes
from lowtide.errors import TraceError

Saveable = Trace | Machine | Plan | Timeline

_PREFIX = "lowtide."
# A step of GPT-3 takes some 10 MB.
_MOST_BYTES = 512 << 20
_Value = TypeVar("_Value", Trace, Machine, Plan, Timeline)


class _Format(NamedTuple):
    """How one kind of value is written and read."""

    holds: type
    version: int
    encode: Callable[[Any], dict[str, Any]]
    decode: Callable[[Fields, int], Saveable]


_FORMATS = {
    "trace": _Format(Trace, TRACE_VERSION, encode_trace, decode_trace),
    "machine": _Format(Machine, MACHINE_VERSION, encode_machine, decode_machine),
    "plan": _Format(Plan, PLAN_VERSION, encode_plan, decode_plan),
    "timeline": _Format(Timeline, TIMELINE_VERSION, encode_timeline, decode_timeline),
}

# The first bytes of everything that `dumps` returns.
_GZIP = b"\x1f\x8b"


def dumps(value: Saveable) -> bytes:
    """Return the file content for a value; equal values give equal bytes."""
    kind, form = next((kind, form) for kind, form in _FORMATS.items() if isinstance(value, form.holds))
    document = {"format": _PREFIX + kind, "version": form.version, **form.encode(value)}
    content = json.dumps(document, separators=(",", ":"), allow_nan=False)
    return gzip.compress(content.encode(), compresslevel=6, mtime=0)


def loads(content: bytes, *, source: str = "the data") -> Saveable:
    """Return the value that `content` holds; `source` names it in errors."""
    if content[:2] != _GZIP:
        raise TraceError(f"{source} is not a Lowtide file: check the path, or create it again")
    try:
        document = json.loads(_decompressed(content))
    except (OSError, EOFError, zlib.error, ValueError, RecursionError) as error:
        raise TraceError(f"{source} is damaged ({_one_line(error)}): make it again") from error
    kind = _kind_of(document, source=source)
    form = _FORMATS[kind]
    found = document.get("version")
    if isinstance(found, int) and found > form.version:
        raise TraceError(
            f"{source} is a {kind} of version {found}, this Lowtide reads up to version {form.version}: upgrade Lowtide"
        )
    if type(found) is not int or found < 1:
        raise TraceError(f"{source} is damaged (version {found!r}): make it again")
    try:
        return form.decode(Fields(document, "the file"), found)
    except Damaged as error:
        raise TraceError(f"{source} is damaged ({_one_line(error)}): make it again") from error


def _decompressed(content: bytes) -> bytes:
    """Return what gzip'ed bytes hold; a few kilobytes could hold more than there is memory."""
    with gzip.GzipFile(fileobj=BytesIO(content)) as file:
        found = file.read(_MOST_BYTES + 1)
    if len(found) > _MOST_BYTES:
        raise ValueError(f"it holds more than {format_bytes(_MOST_BYTES)}")
    return found


def save(value: Saveable, path: str | os.PathLike[str]) -> None:
    """Write a value to a file, which either holds all of it afterwards or what it held before."""
    write_whole(path, dumps(value))


def load(path: str | os.PathLike[str]) -> Saveable:
    """Return the value a file holds."""
    return loads(Path(path).read_bytes(), source=str(path))


def load_trace(path: str | os.PathLike[str]) -> Trace:
    """Return the trace a file holds."""
    return _load_as(Trace, path)


def load_machine(path: str | os.PathLike[str]) -> Machine:
    """Return the machine a file holds."""
    return _load_as(Machine, path)


def load_plan(path: str | os.PathLike[str]) -> Plan:
    """Return the plan a file holds."""
    return _load_as(Plan, path)


def load_timeline(path: str | os.PathLike[str]) -> Timeline:
    """Return the timeline a file holds."""
    return _load_as(Timeline, path)


def _load_as(wanted: type[_Value], path: str | os.PathLike[str]) -> _Value:
    value = load(path)
    if not isinstance(value, wanted):
        raise TraceError(f"{path} holds a {type(value).__name__.lower()}, not a {wanted.__name__.lower()}")
    return value


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split()) or type(error).__name__


def _kind_of(document: object, *, source: str) -> str:
    name = document.get("format") if isinstance(document, dict) else None
    if not isinstance(name, str) or not name.startswith(_PREFIX) or name.removeprefix(_PREFIX) not in _FORMATS:
        raise TraceError(f"{source} is not a Lowtide trace, machine, plan or timeline (format {name!r})")
    return name.removeprefix(_PREFIX)
