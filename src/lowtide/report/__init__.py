"""Steps in words, tables and pictures: from `Timeline` and `Comparison` to text, HTML and Perfetto.

from lowtide.report import compare, html_report
comparison = compare(trace, policies=["auto", "vdnn"], budgets_bytes=[2 << 30], machines=[machine("v100")])
"""

from __future__ import annotations

from lowtide.report.case import Settled, budget_of, problem_of, settle
from lowtide.report.compare import Comparison, Outcome, Refusal, compare
from lowtide.report.comparison_file import encode_comparison, load_comparison
from lowtide.report.explain import Journey, Way, journeys
from lowtide.report.frontier import Point, Wanted, frontier, smallest
from lowtide.report.html import html_report
from lowtide.report.page import Focus
from lowtide.report.perfetto import perfetto_json
from lowtide.report.summary import Summary, summarize

__all__ = [
    "Comparison",
    "Focus",
    "Journey",
    "Outcome",
    "Point",
    "Refusal",
    "Settled",
    "Summary",
    "Wanted",
    "Way",
    "budget_of",
    "compare",
    "encode_comparison",
    "frontier",
    "html_report",
    "journeys",
    "load_comparison",
    "perfetto_json",
    "problem_of",
    "settle",
    "smallest",
    "summarize",
]
