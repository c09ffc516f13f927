"""Comparisons as files: plain JSON, versioned, checked field by field when read."""

from __future__ import annotations

import json
import os
from dataclasses import asdict
from pathlib import Path
from typing import Any

from lowtide.core.columns import plain
from lowtide.core.encode_machine import decode_machine, encode_machine
from lowtide.core.fields import Damaged, Fields, integer, items, optional_integer, real, text, truth
from lowtide.core.machine import MACHINE_VERSION
from lowtide.errors import TraceError
from lowtide.report.compare import Comparison, Outcome, Refusal, Result

COMPARISON_FORMAT = "lowtide.comparison"
COMPARISON_VERSION = 1

_TEXTS = ("model", "trace_path", "digest", "floor_op")
_INTEGERS = ("operators", "static_bytes", "peak_bytes", "floor_bytes")
_SECONDS = ("step_s", "infinite_s", "compute_s", "recompute_s", "stall_s")
_BYTES = ("peak_bytes", "reserved_peak_bytes", "moved_out_bytes", "moved_in_bytes", "unplanned_bytes")


def encode_comparison(comparison: Comparison) -> dict[str, Any]:
    """Return the document of a comparison."""
    return {
        "format": COMPARISON_FORMAT,
        "version": COMPARISON_VERSION,
        **{name: getattr(comparison, name) for name in (*_TEXTS, *_INTEGERS)},
        "keep_times": comparison.keep_times,
        "can_recompute": comparison.can_recompute,
        "allocator": comparison.allocator,
        "machine_version": MACHINE_VERSION,
        "machines": [encode_machine(machine) for machine in comparison.machines],
        "results": [_encode_result(result) for result in comparison.results],
    }


def looks_like_comparison(content: bytes) -> bool:
    """Tell whether a file's content is JSON that says it is a comparison; its fields are not checked."""
    if not content.lstrip().startswith(b"{"):
        return False
    try:
        document = json.loads(content)
    except (ValueError, RecursionError):
        return False
    return isinstance(document, dict) and document.get("format") == COMPARISON_FORMAT


def load_comparison(path: str | os.PathLike[str]) -> Comparison:
    """Return the comparison a file holds; raise `TraceError` in one line where it is damaged or newer."""
    try:
        document = json.loads(Path(path).read_bytes())
    except (ValueError, RecursionError) as error:
        raise TraceError(f"{path} is damaged or no comparison ({error}): make it again") from error
    found = document.get("version") if isinstance(document, dict) else None
    if not isinstance(document, dict) or document.get("format") != COMPARISON_FORMAT:
        raise TraceError(f"{path} is not a comparison: make one with 'lowtide compare --json FILE'")
    if type(found) is int and found > COMPARISON_VERSION:
        raise TraceError(
            f"{path} is a comparison of version {found}, this Lowtide reads up to version {COMPARISON_VERSION}: "
            "upgrade Lowtide"
        )
    try:
        return _decode(Fields(document, "the file"))
    except Damaged as error:
        raise TraceError(f"{path} is damaged ({error}): make it again") from error


def _encode_result(result: Result) -> dict[str, Any]:
    fields = {name: plain(value) for name, value in asdict(result).items()}
    if isinstance(result, Outcome):
        return {"ran": True, **fields, "slowdown": plain(result.slowdown)}
    return {"ran": False, **fields}


def _decode(fields: Fields) -> Comparison:
    version = fields.get("machine_version", integer)
    machines = fields.column("machines", lambda value: decode_machine(Fields(value, "a machine"), version))
    plain_fields: dict[str, Any] = {
        **{name: fields.get(name, text) for name in _TEXTS},
        **{name: fields.get(name, integer) for name in _INTEGERS},
    }
    return Comparison(
        **plain_fields,
        machines=tuple(machines),
        results=tuple(fields.column("results", _decode_result)),
        keep_times=fields.get("keep_times", truth),
        can_recompute=fields.get("can_recompute", truth),
        allocator=fields.get("allocator", lambda value: None if value is None else text(value)),
    )


def _decode_result(value: object) -> Result:
    fields = Fields(value, "a result")
    common: dict[str, Any] = {
        "policy": fields.get("policy", text),
        "machine": fields.get("machine", text),
        "budget_bytes": fields.get("budget_bytes", integer),
    }
    if not fields.get("ran", truth):
        return Refusal(
            **common,
            reason=fields.get("reason", text),
            op=fields.get("op", text),
            needed_bytes=fields.get("needed_bytes", optional_integer),
            crashed=fields.get("crashed", truth),
        )
    common |= {name: fields.get(name, real) for name in _SECONDS}
    common |= {name: fields.get(name, integer) for name in _BYTES}
    return Outcome(
        **common,
        trials=fields.get("trials", integer),
        over_budget=fields.get("over_budget", truth),
        notes=tuple(text(note) for note in fields.get("notes", items)),
    )
