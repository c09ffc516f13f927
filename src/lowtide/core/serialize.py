"""Files for traces, machines and plans: gzip'ed JSON in columns, versioned, exact, written whole or not at all.

docs/formats.md describes every field. A reader accepts its own version and older ones; anything newer, damaged or of
another kind is refused with a `TraceError` of one line.
"""

from __future__ import annotations

import gzip
import json
import os
import tempfile
import zlib
from collections.abc import Callable, Iterable, Sequence
from math import isfinite
from pathlib import Path
from typing import Any, TypeVar

from lowtide.core.fields import (
    Damaged,
    Fields,
    check_between,
    check_same_length,
    integer,
    integers,
    member_of,
    optional_integer,
    real,
    text,
    truth,
)
from lowtide.core.machine import MACHINE_VERSION, Link, Machine
from lowtide.core.plan import PLAN_VERSION, Plan, Prediction, Swap
from lowtide.core.trace import TRACE_VERSION, Gap, Kind, Op, Phase, Save, Storage, Trace
from lowtide.errors import TraceError

_PREFIX = "lowtide."
_Value = TypeVar("_Value", Trace, Machine, Plan)


def dumps(value: Trace | Machine | Plan) -> bytes:
    """Return the file content for a value; equal values give equal bytes."""
    kind, version, body = _encode(value)
    document = {"format": _PREFIX + kind, "version": version, **body}
    content = json.dumps(document, separators=(",", ":"), allow_nan=False)
    return gzip.compress(content.encode(), compresslevel=6, mtime=0)


def loads(content: bytes, *, source: str = "the data") -> Trace | Machine | Plan:
    """Return the value that `content` holds; `source` names it in errors."""
    try:
        document = json.loads(gzip.decompress(content))
    except (OSError, EOFError, zlib.error, ValueError, RecursionError) as error:
        raise TraceError(f"{source} is damaged or no Lowtide file ({_one_line(error)}): make it again") from error
    kind = _kind_of(document, source=source)
    version, decode = _READERS[kind]
    found = document.get("version")
    if isinstance(found, int) and found > version:
        raise TraceError(
            f"{source} is a {kind} of version {found}, this Lowtide reads up to version {version}: upgrade Lowtide"
        )
    if type(found) is not int or found < 1:
        raise TraceError(f"{source} is damaged (version {found!r}): make it again")
    try:
        return decode(Fields(document, "the file"))
    except Damaged as error:
        raise TraceError(f"{source} is damaged ({_one_line(error)}): make it again") from error


def save(value: Trace | Machine | Plan, path: str | os.PathLike[str]) -> None:
    """Write a value to a file, which either holds all of it afterwards or what it held before."""
    target = Path(path)
    content = dumps(value)
    handle, name = tempfile.mkstemp(prefix=f".{target.name}.", suffix=".tmp", dir=target.parent)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        Path(name).replace(target)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise


def load(path: str | os.PathLike[str]) -> Trace | Machine | Plan:
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


def _load_as(wanted: type[_Value], path: str | os.PathLike[str]) -> _Value:
    value = load(path)
    if not isinstance(value, wanted):
        raise TraceError(f"{path} holds a {type(value).__name__.lower()}, not a {wanted.__name__.lower()}")
    return value


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split()) or type(error).__name__


def _kind_of(document: object, *, source: str) -> str:
    name = document.get("format") if isinstance(document, dict) else None
    if not isinstance(name, str) or name.removeprefix(_PREFIX) not in _READERS or not name.startswith(_PREFIX):
        raise TraceError(f"{source} is no Lowtide trace, machine or plan (format {name!r})")
    return name.removeprefix(_PREFIX)


# --- writing -----------------------------------------------------------------------------------------------------


def _encode(value: Trace | Machine | Plan) -> tuple[str, int, dict[str, Any]]:
    if isinstance(value, Trace):
        return "trace", TRACE_VERSION, _encode_trace(value)
    if isinstance(value, Machine):
        return "machine", MACHINE_VERSION, _encode_machine(value)
    return "plan", PLAN_VERSION, _encode_plan(value)


def _real(number: float) -> float | str:
    """Return a float as JSON can hold it: a link may be infinitely fast."""
    return number if isfinite(number) else str(number)


def _table(words: Iterable[str]) -> tuple[list[str], list[int]]:
    """Return the distinct words and the position of each: operators repeat their names thousands of times."""
    places: dict[str, int] = {}
    positions = [places.setdefault(word, len(places)) for word in words]
    return list(places), positions


def _columns(rows: Sequence[object], names: Sequence[str]) -> dict[str, list[Any]]:
    return {name: [_plain(getattr(row, name)) for row in rows] for name in names}


def _plain(value: object) -> object:
    return _real(value) if isinstance(value, float) else value


def _encode_trace(trace: Trace) -> dict[str, Any]:
    names, name = _table(op.name for op in trace.ops)
    modules, module = _table(op.module for op in trace.ops)
    ops = _columns(trace.ops, ("phase", "start_s", "duration_s", "peak_bytes", "reads", "writes"))
    return {
        "model": trace.model,
        "device": trace.device,
        "torch_version": trace.torch_version,
        "static_bytes": trace.static_bytes,
        "names": names,
        "modules": modules,
        "ops": {"name": name, "module": module, **ops},
        "storages": _columns(trace.storages, ("nbytes", "kind", "first_op", "last_op", "producer", "versions")),
        "saves": _columns(trace.saves, ("storage", "packed_op", "free_op", "uses", "released_op", "packs")),
    }


_LINK_REALS = ("write_bytes_per_s", "read_bytes_per_s", "write_latency_s", "read_latency_s")


def _encode_machine(machine: Machine) -> dict[str, Any]:
    return {
        "name": machine.name,
        "copy_bytes_per_s": _real(machine.copy_bytes_per_s),
        "source": machine.source,
        "links": {
            tier: {**{name: _real(getattr(link, name)) for name in _LINK_REALS}, "duplex": link.duplex}
            for tier, link in machine.links.items()
        },
    }


_PREDICTED_BYTES = ("peak_bytes", "moved_out_bytes", "moved_in_bytes")
_PREDICTED_REALS = ("step_s", "stall_s")


def _encode_plan(plan: Plan) -> dict[str, Any]:
    predicted = plan.prediction
    return {
        "policy": plan.policy,
        "budget_bytes": plan.budget_bytes,
        "notes": list(plan.notes),
        "prediction": None
        if predicted is None
        else {name: _plain(getattr(predicted, name)) for name in (*_PREDICTED_BYTES, *_PREDICTED_REALS)},
        "swaps": {
            **_columns([swap.gap for swap in plan.swaps], ("storage", "after_op", "before_op")),
            **_columns(plan.swaps, ("fetch_op", "tier", "codec")),
        },
    }


# --- reading -----------------------------------------------------------------------------------------------------


def _word(table: list[str]) -> Callable[[object], str]:
    def read(value: object) -> str:
        check_between("text", integer(value), 0, len(table) - 1)
        return table[integer(value)]

    return read


def _decode_trace(fields: Fields) -> Trace:
    ops, storages, saves = fields.object("ops"), fields.object("storages"), fields.object("saves")
    op_columns = (
        ops.column("name", _word(fields.column("names", text))),
        ops.column("phase", member_of(Phase)),
        ops.column("start_s", real),
        ops.column("duration_s", real),
        ops.column("peak_bytes", integer),
        ops.column("reads", integers),
        ops.column("writes", integers),
        ops.column("module", _word(fields.column("modules", text))),
    )
    storage_columns = (
        storages.column("nbytes", integer),
        storages.column("kind", member_of(Kind)),
        storages.column("first_op", integer),
        storages.column("last_op", integer),
        storages.column("producer", optional_integer),
        storages.column("versions", integer),
    )
    save_columns = (
        saves.column("storage", integer),
        saves.column("packed_op", integer),
        saves.column("free_op", optional_integer),
        saves.column("uses", integers),
        saves.column("released_op", integer),
        saves.column("packs", integer),
    )
    for where, columns in (("ops", op_columns), ("storages", storage_columns), ("saves", save_columns)):
        check_same_length(where, *columns)
    trace = Trace(
        ops=tuple(
            Op(
                name=name,
                phase=phase,
                start_s=start_s,
                duration_s=duration_s,
                peak_bytes=peak_bytes,
                reads=reads,
                writes=writes,
                module=module,
            )
            for name, phase, start_s, duration_s, peak_bytes, reads, writes, module in zip(*op_columns, strict=True)
        ),
        storages=tuple(
            Storage(nbytes=nbytes, kind=kind, first_op=first, last_op=last, producer=producer, versions=versions)
            for nbytes, kind, first, last, producer, versions in zip(*storage_columns, strict=True)
        ),
        saves=tuple(
            Save(storage=storage, packed_op=packed, free_op=free, uses=uses, released_op=released, packs=packs)
            for storage, packed, free, uses, released, packs in zip(*save_columns, strict=True)
        ),
        static_bytes=fields.get("static_bytes", integer),
        model=fields.get("model", text),
        device=fields.get("device", text),
        torch_version=fields.get("torch_version", text),
    )
    _check_references(trace)
    return trace


def _check_references(trace: Trace) -> None:
    """Check that indices name something, so that whoever plans from the trace need not."""
    last_storage, end = len(trace.storages) - 1, len(trace.ops)
    for op in trace.ops:
        for storage in (*op.reads, *op.writes):
            check_between("storage", storage, 0, last_storage)
    for block in trace.storages:
        check_between("bytes", block.nbytes, 0, 2**63 - 1)
        check_between("operator", block.first_op, -1, end)
        check_between("operator", block.last_op, -1, end)
        if block.producer is not None:
            check_between("operator", block.producer, 0, end - 1)
    for saved in trace.saves:
        check_between("storage", saved.storage, 0, last_storage)
        for index in (saved.packed_op, saved.released_op, *(() if saved.free_op is None else (saved.free_op,))):
            check_between("operator", index, -1, end)
        for use in saved.uses:
            check_between("operator", use, 0, end - 1)


def _decode_machine(fields: Fields) -> Machine:
    links = fields.object("links")
    return Machine(
        name=fields.get("name", text),
        copy_bytes_per_s=fields.get("copy_bytes_per_s", real),
        source=fields.get("source", text),
        links={tier: _decode_link(links.object(tier)) for tier in links.names()},
    )


def _decode_link(fields: Fields) -> Link:
    return Link(**{name: fields.get(name, real) for name in _LINK_REALS}, duplex=fields.get("duplex", truth))


def _decode_plan(fields: Fields) -> Plan:
    swaps = fields.object("swaps")
    columns = (
        swaps.column("storage", integer),
        swaps.column("after_op", integer),
        swaps.column("before_op", integer),
        swaps.column("fetch_op", integer),
        swaps.column("tier", text),
        swaps.column("codec", text),
    )
    check_same_length("swaps", *columns)
    return Plan(
        policy=fields.get("policy", text),
        budget_bytes=fields.get("budget_bytes", integer),
        swaps=tuple(
            Swap(
                gap=Gap(storage=storage, after_op=after_op, before_op=before_op),
                fetch_op=fetch_op,
                tier=tier,
                codec=codec,
            )
            for storage, after_op, before_op, fetch_op, tier, codec in zip(*columns, strict=True)
        ),
        prediction=fields.get("prediction", lambda value: None if value is None else _decode_prediction(value)),
        notes=tuple(fields.column("notes", text)),
    )


def _decode_prediction(value: object) -> Prediction:
    fields = Fields(value, "prediction")
    return Prediction(
        peak_bytes=fields.get("peak_bytes", integer),
        step_s=fields.get("step_s", real),
        stall_s=fields.get("stall_s", real),
        moved_out_bytes=fields.get("moved_out_bytes", integer),
        moved_in_bytes=fields.get("moved_in_bytes", integer),
    )


_READERS: dict[str, tuple[int, Callable[[Fields], Trace | Machine | Plan]]] = {
    "trace": (TRACE_VERSION, _decode_trace),
    "machine": (MACHINE_VERSION, _decode_machine),
    "plan": (PLAN_VERSION, _decode_plan),
}
