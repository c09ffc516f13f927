"""A report as one HTML page that needs nothing else: no network, no fonts, no scripts but its own."""

from __future__ import annotations

import base64
import gzip
import html
import json
import re
from importlib import resources
from typing import Any

from lowtide.core.units import format_bytes
from lowtide.errors import BadArgument
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
        # Compressed: a page is mailed and kept. So no name in the trace can break out of it either.
        "data": base64.b64encode(gzip.compress(data.encode(), compresslevel=9, mtime=0)).decode(),
    }
    # All marks at once, so that a name in the trace that looks like one is left alone.
    return re.sub(r"\{\{(\w+)\}\}", lambda mark: parts[mark.group(1)], _asset("report.html"))


def data_of(page: str) -> dict[str, Any]:
    """Return the data that a page shows."""
    found = re.search(r'<script type="application/gzip" id="data">([^<]*)</script>', page)
    if found is None:
        raise BadArgument("this page is not a report of Lowtide: it holds no data")
    data: dict[str, Any] = json.loads(gzip.decompress(base64.b64decode(found.group(1))))
    return data


def _title(comparison: Comparison, focus: Focus | None) -> str:
    model = comparison.model or "training step"
    shown = f"{model} in {format_bytes(focus.problem.budget_bytes)}" if focus is not None else f"{model}, compared"
    return f"Simulated: {shown}"


def _asset(name: str) -> str:
    return (resources.files("lowtide.report") / "assets" / name).read_text(encoding="utf-8")
