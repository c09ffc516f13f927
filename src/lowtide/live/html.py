"""The last steps as a small table and bars, for notebooks; in the notebook's own colours, light or dark."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from lowtide.core.step_record import StepRecord, typical_slowdown
from lowtide.core.units import format_bytes, format_seconds
from lowtide.live.line import used

_MOST_BARS = 60
_WIDTH, _HEIGHT = 480, 64
_LEFT = "text-align:left"


def steps_html(records: Sequence[StepRecord], *, title: str = "Lowtide") -> str:
    """Return a fragment of HTML with the last step's figures, and a bar for each of the last steps."""
    if not records:
        return f"<div><b>{escape(title)}</b>: no step has ended yet</div>"
    last = records[-1]
    slowdown, predicted = typical_slowdown(records), last.predicted_slowdown
    rows = [
        ("step", f"{last.step}, {format_seconds(last.step_s)}"),
        ("memory", f"{used(last.peak_bytes, last.budget_bytes)} at most"),
        ("moved", f"{format_bytes(last.moved_out_bytes)} out, {format_bytes(last.moved_in_bytes)} in"),
        ("waited", format_seconds(last.stall_s)),
        ("run again", format_seconds(last.recompute_s) if last.recompute_s else ""),
        ("slowdown", f"{slowdown:.2f}x of the step predicted without a budget" if slowdown is not None else ""),
        ("planned", f"{predicted:.2f}x of the same" if predicted is not None else ""),
    ]
    cells = "".join(
        f'<tr><th style="{_LEFT};padding-right:1em">{name}</th><td style="{_LEFT}">{escape(text)}</td></tr>'
        for name, text in rows
        if text
    )
    return f"<div><b>{escape(title)}</b><table>{cells}</table>{_bars(records[-_MOST_BARS:])}</div>"


def _bars(records: Sequence[StepRecord]) -> str:
    """Return a bar for each step, as high as it was long; the part that it waited for is darker."""
    longest_s = max(record.step_s for record in records) or 1.0
    width = _WIDTH / max(len(records), 12)
    bars = []
    for number, record in enumerate(records):
        for seconds, opacity in ((record.step_s, 0.3), (min(record.stall_s, record.step_s), 0.9)):
            height = _HEIGHT * seconds / longest_s
            bars.append(
                f'<rect x="{number * width:.1f}" y="{_HEIGHT - height:.1f}" width="{width * 0.8:.1f}" '
                f'height="{height:.1f}" opacity="{opacity}"/>'
            )
    label = f"seconds of each of the last {len(records)} steps, waiting in dark"
    return (
        f'<svg width="{_WIDTH}" height="{_HEIGHT}" fill="currentColor" role="img" aria-label="{label}">'
        f"<title>{label}</title>{''.join(bars)}</svg>"
    )
