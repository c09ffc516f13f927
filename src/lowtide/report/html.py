"""A report as one HTML page that needs nothing else: no network, no fonts, no scripts but its own."""

from __future__ import annotations

import html
import json
import re
from importlib import resources

from lowtide.core.units import format_bytes
from lowtide.report.compare import Comparison
from lowtide.report.page import Focus, page_of

# In the order in which the page needs them.
_SCRIPTS = ("format.js", "timeline.js", "hands.js", "plot.js", "tables.js", "page.js")


def html_report(comparison: Comparison, focus: Focus | None, *, note: str = "") -> str:
    """Return the page; equal arguments give equal pages. Without a focus it has no timelines, and `note` says why."""
    data = json.dumps(page_of(comparison, focus, note=note), separators=(",", ":"), allow_nan=False)
    parts = {
        "title": html.escape(_title(comparison, focus)),
        "style": _asset("report.css"),
        "script": "\n".join(_asset(name) for name in _SCRIPTS),
        # A name in the trace may hold anything, "</script>" included; JSON lets every "<" be written as an escape.
        "data": data.replace("<", "\\u003c"),
    }
    # All marks at once, so that a name in the trace that looks like one is left alone.
    return re.sub(r"\{\{(\w+)\}\}", lambda mark: parts[mark.group(1)], _asset("report.html"))


def _title(comparison: Comparison, focus: Focus | None) -> str:
    model = comparison.model or "training step"
    return f"{model} in {format_bytes(focus.problem.budget_bytes)}" if focus is not None else f"{model}, compared"


def _asset(name: str) -> str:
    return (resources.files("lowtide.report") / "assets" / name).read_text(encoding="utf-8")
