"""The page about the systems has one section for each, in one form, and leaves none out."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from lowtide import registry

PAGE = (Path(__file__).parents[2] / "docs" / "systems.md").read_text()
SECTIONS = dict(re.findall(r"^### (.+?)\n(.*?)(?=^##|\Z)", PAGE, re.MULTILINE | re.DOTALL))
# Baselines and our own, which docs/policies.md is about.
ELSEWHERE = ("auto", "belady", "keep_all", "lru", "swap_all")
POLICIES = [name for name in registry.policy_names() if name not in ELSEWHERE]


def names_of(section: str) -> list[str]:
    """Return the policies that a section is about: those named before the colon of its paragraphs."""
    told = re.findall(r"^((?:`\w+`(?:, | to )?)+): ", section, re.MULTILINE)
    found = [name for line in told for name in re.findall(r"`(\w+)`", line)]
    return [f"survey{k}" for k in range(1, 5)] if found[:1] == ["survey1"] else found


@pytest.mark.parametrize("name", POLICIES)
def test_every_policy_of_a_system_is_in_one_section(name: str) -> None:
    assert [title for title, section in SECTIONS.items() if name in names_of(section)], name
    assert sum(names_of(section).count(name) for section in SECTIONS.values()) == 1


@pytest.mark.parametrize("title", SECTIONS)
def test_every_section_says_what_is_decided_and_how_it_runs(title: str) -> None:
    section = SECTIONS[title]
    paragraphs = len(re.findall(r"^(?:`\w+`(?:, | to )?)+: ", section, re.MULTILINE))
    assert paragraphs >= 1
    assert section.count("- **Decides**: ") == section.count("- **Runs**: ") == paragraphs
    assert set(names_of(section)) <= set(registry.policy_names())


@pytest.mark.parametrize("name", registry.policy_names())
def test_every_policy_says_where_the_survey_would_put_it(name: str) -> None:
    assert registry.policy(name).about.classified is not None
