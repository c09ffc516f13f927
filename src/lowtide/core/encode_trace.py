"""Traces as JSON documents, in columns."""

from __future__ import annotations

from itertools import accumulate
from typing import Any

from lowtide.core.columns import columns, entry_of, later_column, table
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
)
from lowtide.core.trace import Kind, Op, Phase, Reach, Save, Storage, Trace


def encode_trace(trace: Trace) -> dict[str, Any]:
    """Return the document of a trace."""
    names, name = table(op.name for op in trace.ops)
    modules, module = table(op.module for op in trace.ops)
    ops = columns(trace.ops, ("phase", "duration_s", "peak_bytes", "reads", "writes", "flops"))
    return {
        "model": trace.model,
        "device": trace.device,
        "torch_version": trace.torch_version,
        "timed_for": trace.timed_for,
        "static_bytes": trace.static_bytes,
        "reach": trace.reach,
        "least_bytes": trace.least_bytes,
        "names": names,
        "modules": modules,
        "ops": {"name": name, "module": module, "start_s": _starts(trace), **ops},
        "storages": columns(trace.storages, ("nbytes", "kind", "first_op", "last_op", "producer", "versions")),
        "saves": columns(trace.saves, ("storage", "packed_op", "free_op", "uses", "released_op", "packs")),
    }


def _starts(trace: Trace) -> list[Any] | None:
    """Return the column of starts, or None where they are the sums of the durations to the last bit.

    They nearly always are, and sums of measured times are what compresses worst.
    """
    sums = accumulate((op.duration_s for op in trace.ops), initial=0.0)
    if all(op.start_s == start_s for op, start_s in zip(trace.ops, sums, strict=False)):
        return None
    return columns(trace.ops, ("start_s",))["start_s"]


def decode_trace(fields: Fields, version: int) -> Trace:
    """Return the trace that a document of this version holds."""
    trace = Trace(
        ops=_decode_ops(fields, version),
        storages=_decode_storages(fields.object("storages")),
        saves=_decode_saves(fields.object("saves")),
        static_bytes=fields.get("static_bytes", integer),
        model=fields.get("model", text),
        device=fields.get("device", text),
        torch_version=fields.get("torch_version", text),
        # Before version 3 only what autograd saved was moved.
        reach=fields.get("reach", member_of(Reach)) if version >= 3 else Reach.SAVED,
        least_bytes=fields.get("least_bytes", integer) if version >= 3 else 0,
        timed_for=fields.get("timed_for", text) if "timed_for" in fields.names() else "",
    )
    _check_references(trace)
    return trace


def _decode_ops(fields: Fields, version: int) -> tuple[Op, ...]:
    ops = fields.object("ops")
    duration_s = ops.column("duration_s", real)
    summed = version >= 2 and ops.get("start_s", lambda value: value is None)
    starts = list(accumulate(duration_s, initial=0.0))[: len(duration_s)] if summed else ops.column("start_s", real)
    rows = (
        ops.column("name", entry_of(fields.column("names", text))),
        ops.column("phase", member_of(Phase)),
        starts,
        duration_s,
        ops.column("peak_bytes", integer),
        ops.column("reads", integers),
        ops.column("writes", integers),
        ops.column("module", entry_of(fields.column("modules", text))),
        later_column(ops, "flops", real, known=version >= 2, default=0.0, count=len(duration_s)),
    )
    check_same_length("ops", *rows)
    return tuple(
        Op(
            name=name,
            phase=phase,
            start_s=start_s,
            duration_s=length_s,
            peak_bytes=peak_bytes,
            reads=reads,
            writes=writes,
            module=module,
            flops=flops,
        )
        for name, phase, start_s, length_s, peak_bytes, reads, writes, module, flops in zip(*rows, strict=True)
    )


def _decode_storages(storages: Fields) -> tuple[Storage, ...]:
    rows = (
        storages.column("nbytes", integer),
        storages.column("kind", member_of(Kind)),
        storages.column("first_op", integer),
        storages.column("last_op", integer),
        storages.column("producer", optional_integer),
        storages.column("versions", integer),
    )
    check_same_length("storages", *rows)
    return tuple(
        Storage(nbytes=nbytes, kind=kind, first_op=first, last_op=last, producer=producer, versions=versions)
        for nbytes, kind, first, last, producer, versions in zip(*rows, strict=True)
    )


def _decode_saves(saves: Fields) -> tuple[Save, ...]:
    rows = (
        saves.column("storage", integer),
        saves.column("packed_op", integer),
        saves.column("free_op", optional_integer),
        saves.column("uses", integers),
        saves.column("released_op", integer),
        saves.column("packs", integer),
    )
    check_same_length("saves", *rows)
    return tuple(
        Save(storage=storage, packed_op=packed, free_op=free, uses=uses, released_op=released, packs=packs)
        for storage, packed, free, uses, released, packs in zip(*rows, strict=True)
    )


def _check_references(trace: Trace) -> None:
    """Check that indices name something and times are times, so that planners need not."""
    last_storage, end = len(trace.storages) - 1, len(trace.ops)
    check_between("least bytes", trace.least_bytes, 0, 2**63 - 1)
    for op in trace.ops:
        if not 0 <= op.duration_s < float("inf"):
            raise Damaged(f"duration {op.duration_s} of an operator is not valid")
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
