"""The documentation and the messages stay in plain English.

The phrases are those that crept in before: nouns replaced by pronouns, and negated nouns. The list is short on
purpose; add a phrase when a reader stumbles over it.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
STIFF = {
    r"\b[Ww]hoever\b": "say which code, operator or person does it",
    r"\banew\b": "say 'again'",
    r"\ball the same\b": "say 'still' or 'anyway'",
    r"\bcame out (otherwise|as others)\b": "say what differed",
    r"\bis no (number|text|trace|Lowtide file|[A-Z]\w+:)": "say 'is not a'",
    r"\b(trains|records|names|scales|bounds) (nothing|no \w+):": "say what is wrong with the value",
    r"\bwho (uses|holds|made|pays|waits|goes first|is told)\b": "name the code, operator or budget",
    r"\b[Ss]omebody\b": "name the code, the program or the user",
    r"\bto nobody\b|\b[Tt]ell nobody\b|\bthat nobody (holds|touches|needs|reads|wants)\b": "say which code does not",
    r"\b(that|which|it) (is|are) no (?!longer|more|less|better|faster|larger|smaller|later)[a-z]": "say 'not a'",
}


def stiff_in(text: str) -> list[str]:
    return [f"'{found[0]}': {advice}" for phrase, advice in STIFF.items() for found in re.finditer(phrase, text)]


def messages_of(path: Path) -> Iterator[tuple[int, str]]:
    """Yield the texts in a module that users may see: all but docstrings."""
    tree = ast.parse(path.read_text())
    plain = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in plain:
            yield node.lineno, node.value


def test_the_list_finds_what_it_is_for() -> None:
    assert stiff_in("'x' is no number of bytes") == ["'is no number': say 'is not a'"]
    assert stiff_in("batch 0 trains nothing: pass 1") != []
    assert stiff_in("state who uses it next, whoever that is") != []
    assert stiff_in("memory that is no tensor's, which nobody else has") != []
    assert stiff_in("a plan of somebody else's") != []
    assert stiff_in("there is no room, and nobody waits") == []
    assert stiff_in("a plan that is no faster, and no longer kept") == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_a_page_is_in_plain_english(page: Path) -> None:
    found = {
        number: stiff
        for number, line in enumerate(page.read_text().splitlines(), 1)
        if not line.startswith("|") and (stiff := stiff_in(line))  # tables may quote papers and results
    }
    assert found == {}


def test_docstrings_and_comments_are_in_plain_english() -> None:
    found = {
        f"{path.relative_to(ROOT)}:{number}": stiff
        for path in sorted((ROOT / "src").rglob("*.py"))
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if (stiff := stiff_in(line))
    }
    assert found == {}


def test_messages_are_in_plain_english() -> None:
    found = {
        f"{path.relative_to(ROOT)}:{number}": stiff
        for path in sorted((ROOT / "src").rglob("*.py"))
        for number, text in messages_of(path)
        if (stiff := stiff_in(text))
    }
    assert found == {}
