"""Plans as JSON documents, their decisions in columns."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from lowtide.core.columns import columns, later_column, plain
from lowtide.core.fields import Fields, check_same_length, integer, integers, optional_integer, real, text
from lowtide.core.plan import Address, Place, Plan, Prediction, Recompute, Swap
from lowtide.core.trace import Gap

_PREDICTED = ("peak_bytes", "moved_out_bytes", "moved_in_bytes", "step_s", "stall_s", "recompute_s", "slow_s")
_LAID_OUT = ("block", "from_op", "offset_bytes")
_PLACED = ("storage", "tier", "from_op", "until_op", "fetch_op", "landed_op", "nbytes", "run")


def encode_plan(plan: Plan) -> dict[str, Any]:
    """Return the document of a plan."""
    predicted = plan.prediction
    return {
        "policy": plan.policy,
        "budget_bytes": plan.budget_bytes,
        "notes": list(plan.notes),
        "trials": plan.trials,
        "prediction": None if predicted is None else {name: plain(getattr(predicted, name)) for name in _PREDICTED},
        "swaps": {
            **_encode_gaps([swap.gap for swap in plan.swaps]),
            **columns(plan.swaps, ("fetch_op", "tier", "codec", "landed_op", "arrived_op")),
        },
        "recomputes": {
            **_encode_gaps([recompute.gap for recompute in plan.recomputes]),
            **columns(plan.recomputes, ("ops",)),
        },
        "places": columns(plan.places, _PLACED),
        "layout": columns(plan.layout, _LAID_OUT),
    }


def decode_plan(fields: Fields, version: int) -> Plan:
    """Return the plan that a document of this version holds."""
    return Plan(
        policy=fields.get("policy", text),
        budget_bytes=fields.get("budget_bytes", integer),
        swaps=_decode_swaps(fields.object("swaps"), version),
        recomputes=_decode_recomputes(fields.object("recomputes")) if version >= 2 else (),
        places=_decode_places(fields.object("places")) if version >= 3 else (),
        layout=_decode_layout(fields.object("layout")) if version >= 4 else (),
        prediction=fields.get(
            "prediction", lambda value: None if value is None else _decode_prediction(value, version)
        ),
        notes=tuple(fields.column("notes", text)),
        trials=fields.get("trials", integer) if version >= 2 else 0,
    )


def _encode_gaps(gaps: Sequence[Gap]) -> dict[str, list[Any]]:
    return columns(gaps, ("storage", "after_op", "before_op"))


def _decode_gaps(fields: Fields) -> list[Gap]:
    rows = [fields.column(name, integer) for name in ("storage", "after_op", "before_op")]
    check_same_length("gaps", *rows)
    return [
        Gap(storage=storage, after_op=after, before_op=before) for storage, after, before in zip(*rows, strict=True)
    ]


def _decode_swaps(fields: Fields, version: int) -> tuple[Swap, ...]:
    gaps = _decode_gaps(fields)
    barriers = [
        later_column(fields, name, optional_integer, known=version >= 2, default=None, count=len(gaps))
        for name in ("landed_op", "arrived_op")
    ]
    rows: tuple[list[Any], ...] = (
        gaps,
        fields.column("fetch_op", integer),
        fields.column("tier", text),
        fields.column("codec", text),
        *barriers,
    )
    check_same_length("swaps", *rows)
    return tuple(
        Swap(gap=gap, fetch_op=fetch_op, tier=tier, codec=codec, landed_op=landed_op, arrived_op=arrived_op)
        for gap, fetch_op, tier, codec, landed_op, arrived_op in zip(*rows, strict=True)
    )


def _decode_recomputes(fields: Fields) -> tuple[Recompute, ...]:
    gaps, ops = _decode_gaps(fields), fields.column("ops", integers)
    check_same_length("recomputes", gaps, ops)
    return tuple(Recompute(gap=gap, ops=again) for gap, again in zip(gaps, ops, strict=True))


def _decode_places(fields: Fields) -> tuple[Place, ...]:
    rows: tuple[list[Any], ...] = (
        fields.column("storage", integer),
        fields.column("tier", text),
        fields.column("from_op", integer),
        fields.column("until_op", integer),
        *(fields.column(name, optional_integer) for name in _PLACED[4:]),
    )
    check_same_length("places", *rows)
    return tuple(Place(**dict(zip(_PLACED, row, strict=True))) for row in zip(*rows, strict=True))


def _decode_layout(fields: Fields) -> tuple[Address, ...]:
    rows = [fields.column(name, integer) for name in _LAID_OUT]
    check_same_length("layout", *rows)
    return tuple(Address(**dict(zip(_LAID_OUT, row, strict=True))) for row in zip(*rows, strict=True))


def _decode_prediction(value: object, version: int) -> Prediction:
    fields = Fields(value, "prediction")
    return Prediction(
        peak_bytes=fields.get("peak_bytes", integer),
        step_s=fields.get("step_s", real),
        stall_s=fields.get("stall_s", real),
        moved_out_bytes=fields.get("moved_out_bytes", integer),
        moved_in_bytes=fields.get("moved_in_bytes", integer),
        recompute_s=fields.get("recompute_s", real) if version >= 2 else 0.0,
        slow_s=fields.get("slow_s", real) if version >= 3 else 0.0,
    )
