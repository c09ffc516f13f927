"""The pages that are generated, and the check of the built site. `make docs` builds it."""

from __future__ import annotations

from pathlib import Path

import click
import pytest

from lowtide import registry
from lowtide.cli import VERBS, group
from tests.docs.site_modules import load

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"


pages = load("pages")
build = load("build")
conf = load("conf")


@pytest.fixture(scope="module")
def generated(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder: Path = tmp_path_factory.mktemp("generated")
    pages.write(folder)
    return folder


def test_every_published_policy_has_a_page_with_its_paper_and_what_was_filled_in(generated: Path) -> None:
    text = (DOCS / "systems.md").read_text()
    found = {name: system for system in pages.systems(text) for name in system.policies}
    for name in registry.policy_names():
        about = registry.policy(name).about
        if not about.paper or name == "belady":
            continue
        page = (generated / "systems" / f"{found[name].page}.md").read_text()
        assert about.paper in page
        assert f"`{name}`" in page
        assert registry.policy(name).summary in page


def test_a_published_policy_without_a_paragraph_ends_the_build() -> None:
    text = (DOCS / "systems.md").read_text()
    without = text.replace("`capuchin`: Capuchin", "Capuchin")
    with pytest.raises(ValueError, match="says nothing of: capuchin"):
        pages.systems(without)


def test_a_page_has_the_published_shapes_of_its_own_system_only() -> None:
    text = (DOCS / "systems.md").read_text()
    found = {system.page: "\n".join(pages.system_page(system, text)) for system in pages.systems(text)}
    assert "SuperNeurons reaches its four analytic peaks" in found["superneurons"]
    assert "SuperNeurons reaches its four analytic peaks" not in found["capuchin"]
    assert "Published behaviour" not in found["infinite_memory"]


def test_the_page_of_systems_leads_to_the_pages(generated: Path) -> None:
    linked = pages.with_links_to_systems((DOCS / "systems.md").read_text())
    assert "[`capuchin`](generated/systems/capuchin.md)" in linked
    for system in pages.systems((DOCS / "systems.md").read_text()):
        assert f"](generated/systems/{system.page}.md)" in linked


def test_every_command_is_in_the_reference_with_its_options(generated: Path) -> None:
    text = (generated / "reference" / "commands.md").read_text()
    for verb in VERBS:
        assert f"## lowtide {verb}\n" in text
        command = group.get_command(click.Context(group), verb)
        assert command is not None
        for parameter in command.params:
            if isinstance(parameter, click.Option) and not parameter.hidden:
                assert parameter.opts[0] in text


def test_the_sidebar_has_every_page() -> None:
    sidebar = conf.with_sidebar((DOCS / "index.md").read_text())
    for page in DOCS.glob("*.md"):
        assert page.stem == "index" or f"<{page.stem}>" in sidebar, f"docs/index.md lists no {page.name}"
    assert "<generated/reference/api>" in sidebar
    assert "<generated/systems/index>" in sidebar


def test_every_public_name_is_in_the_reference(generated: Path) -> None:
    import lowtide

    text = (generated / "reference" / "api.md").read_text()
    for name in lowtide.__all__:
        if not (isinstance(getattr(lowtide, name), type) and issubclass(getattr(lowtide, name), Exception)):
            assert f":: lowtide.{name}\n" in text, name


def test_links_out_of_the_docs_become_copies_or_text() -> None:
    assert conf.with_copies("[a](../README.md#try-it)") == "[a](path:../README.md)"
    assert conf.with_copies("[b](../benchmarks/results) [c](x.md)") == "b [c](x.md)"


def test_a_docstring_becomes_restructured_text() -> None:
    assert pages.restructured(["Has `code` in it."]) == ["Has ``code`` in it."]
    assert pages.restructured(["`a`: one.", "`b`: two. `c`: three."]) == [
        "- ``a``: one.",
        "- ``b``: two.",
        "- ``c``: three.",
    ]


def test_dead_links_of_a_site_are_found(tmp_path: Path) -> None:
    (tmp_path / "a.html").write_text(
        '<p id="here"></p><a href="#here"></a><a href="b.html#there"></a><a href="b.html#nowhere"></a>'
        '<img src="gone.png"><a href="https://x.y/z"></a>'
    )
    (tmp_path / "b.html").write_text('<p id="there"></p>')
    assert list(build.dead_links(tmp_path)) == [
        "a.html: b.html#nowhere has no such place",
        "a.html: gone.png is not there",
    ]


def test_pictures_are_small() -> None:
    for picture in (DOCS / "images").iterdir():
        assert picture.stat().st_size < 150_000, picture.name
