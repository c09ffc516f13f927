"""Tables in Markdown, and where they belong in a page of the docs."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

END = "<!-- end of results -->"


def begin_of(script: str) -> str:
    """Return the mark that begins the tables that a script makes."""
    return f"<!-- results: made by benchmarks/{script} -->"


def table(headings: Sequence[str], rows: Iterable[Sequence[str]], *, texts: int = 1) -> str:
    """Return a table whose first `texts` columns are text and the others numbers."""
    ruler = ["---"] * texts + ["---:"] * (len(headings) - texts)
    return "".join(f"| {' | '.join(row)} |\n" for row in (headings, ruler, *rows))


def write_page(tables: str, page: Path, *, script: str) -> None:
    """Put tables between the page's two marks; what is around them stays."""
    begin = begin_of(script)
    before, found, rest = page.read_text().partition(begin)
    _, end, after = rest.partition(END)
    if not found or not end:
        raise SystemExit(f"{page.name} lacks the marks {begin!r} and {END!r}: put them where the tables belong")
    page.write_text(f"{before}{begin}\n\n{tables}\n{END}{after}")
