"""Timelines as JSON documents, their spans and moments in columns.

Few moments of a step are not shared by several spans: one begins where another ended, and memory changes there too. So
the document holds a table of moments, and spans name positions in it.
"""

from __future__ import annotations

from typing import Any

from lowtide.core.columns import columns, entry_of, plain, table
from lowtide.core.fields import Fields, check_same_length, integer, member_of, optional_integer, real, text
from lowtide.core.timeline import Lane, Span, Timeline

_TEXTS = ("policy", "machine", "model")
_BYTES = ("budget_bytes", "peak_bytes", "reserved_peak_bytes", "moved_out_bytes", "moved_in_bytes")
_SECONDS = ("step_s", "compute_s", "recompute_s", "stall_s")


def encode_timeline(timeline: Timeline) -> dict[str, Any]:
    """Return the document of a timeline."""
    moments = sorted(
        {
            *(span.start_s for span in timeline.spans),
            *(span.end_s for span in timeline.spans),
            *(at_s for at_s, _ in timeline.memory),
            *(at_s for curve in timeline.tiers.values() for at_s, _ in curve),
        }
    )
    place = {at_s: position for position, at_s in enumerate(moments)}
    tiers, tier = table(span.tier for span in timeline.spans)
    causes, cause = table(span.cause for span in timeline.spans)
    return {
        **{name: plain(getattr(timeline, name)) for name in (*_TEXTS, *_BYTES, *_SECONDS, "slow_s")},
        "trials": timeline.trials,
        "notes": list(timeline.notes),
        "moments": [plain(at_s) for at_s in moments],
        "tiers": tiers,
        "causes": causes,
        "spans": {
            "start": [place[span.start_s] for span in timeline.spans],
            "end": [place[span.end_s] for span in timeline.spans],
            "tier": tier,
            "cause": cause,
            **columns(timeline.spans, ("lane", "op", "storage", "nbytes")),
        },
        "memory": {
            "at": [place[at_s] for at_s, _ in timeline.memory],
            "live_bytes": [live_bytes for _, live_bytes in timeline.memory],
        },
        "tier_bytes": {
            tier: {"at": [place[at_s] for at_s, _ in curve], "nbytes": [nbytes for _, nbytes in curve]}
            for tier, curve in timeline.tiers.items()
        },
    }


def decode_timeline(fields: Fields, version: int) -> Timeline:
    """Return the timeline that a document of this version holds."""
    moment = entry_of(fields.column("moments", real))
    memory = fields.object("memory")
    at_s, live_bytes = memory.column("at", moment), memory.column("live_bytes", integer)
    check_same_length("memory", at_s, live_bytes)
    figures: dict[str, Any] = {name: fields.get(name, text) for name in _TEXTS}
    figures.update((name, fields.get(name, integer)) for name in _BYTES)
    figures.update((name, fields.get(name, real)) for name in _SECONDS)
    tiers = {}
    if version >= 2:
        figures["slow_s"] = fields.get("slow_s", real)
        curves = fields.object("tier_bytes")
        for tier in curves.names():
            at, nbytes = curves.object(tier).column("at", moment), curves.object(tier).column("nbytes", integer)
            check_same_length("tier_bytes", at, nbytes)
            tiers[tier] = tuple(zip(at, nbytes, strict=True))
    return Timeline(
        **figures,
        tiers=tiers,
        trials=fields.get("trials", integer),
        spans=_decode_spans(fields),
        memory=tuple(zip(at_s, live_bytes, strict=True)),
        notes=tuple(fields.column("notes", text)),
    )


def _decode_spans(fields: Fields) -> tuple[Span, ...]:
    spans = fields.object("spans")
    moment = entry_of(fields.column("moments", real))
    rows = (
        spans.column("lane", member_of(Lane)),
        spans.column("start", moment),
        spans.column("end", moment),
        spans.column("op", integer),
        spans.column("storage", optional_integer),
        spans.column("nbytes", integer),
        spans.column("tier", entry_of(fields.column("tiers", text))),
        spans.column("cause", entry_of(fields.column("causes", text))),
    )
    check_same_length("spans", *rows)
    return tuple(
        Span(lane=lane, start_s=start_s, end_s=end_s, op=op, storage=storage, nbytes=nbytes, tier=tier, cause=cause)
        for lane, start_s, end_s, op, storage, nbytes, tier, cause in zip(*rows, strict=True)
    )
