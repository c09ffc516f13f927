"""How Sphinx builds the site: `make docs`, which fails at any warning.

Pages are plain Markdown that also reads well on a code host. What only a site needs is added while it is built: the
pages of `pages.py`, the sidebar from the lists of `index.md`, and copies of files of the repository that pages link to.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sphinx.application import Sphinx

HERE = Path(__file__).parent
DOCS = HERE.parent
sys.path.insert(0, str(HERE))

import pages  # noqa: E402  # beside this file

import lowtide  # noqa: E402

project = "Lowtide"
author = "the Lowtide authors"
release = version = lowtide.__version__
html_title = f"Lowtide {release}"
html_theme = "furo"
html_static_path = [str(HERE / "static")]
html_css_files = ["lowtide.css"]
html_copy_source = False
html_show_copyright = False
html_show_sphinx = False
html_theme_options = {
    "light_css_variables": {"color-brand-primary": "#0b6e8a", "color-brand-content": "#0b6e8a"},
    "dark_css_variables": {"color-brand-primary": "#5cc4de", "color-brand-content": "#5cc4de"},
}

extensions = ["myst_parser", "sphinx.ext.autodoc"]
exclude_patterns = ["site"]
# Headings are linked to as on GitHub: page.md#the-heading.
myst_heading_anchors = 4
autodoc_member_order = "bysource"
autodoc_preserve_defaults = True
# Docstrings quote Python, not prose.
smartquotes = False
maximum_signature_line_length = 88
python_use_unqualified_type_names = True


def with_sidebar(index: str) -> str:
    """Return the first page with one hidden table of contents for each of its sections that lists pages."""
    parts = []
    for section in re.split(r"(?m)^(?=## )", index):
        listed = re.findall(r"(?m)^- \[([^\]]+)\]\(([\w./-]+)\.md\)", section)
        if section.startswith("## ") and listed:
            title = section.splitlines()[0].removeprefix("## ")
            listed += pages.SIDEBAR.get(title, [])
            entries = "\n".join(f"{name} <{page}>" for name, page in listed)
            section += f"\n```{{toctree}}\n:hidden:\n:caption: {title}\n\n{entries}\n```\n"
        parts.append(section)
    return "".join(parts)


def with_copies(text: str) -> str:
    """Return a page whose links to Markdown outside of docs/ lead to copies; a link to a directory becomes text.

    (Sphinx itself copies other files that are linked to.)
    """
    text = re.sub(r"\]\((\.\./[^)#\s]+\.md)(#[^)\s]*)?\)", r"](path:\1)", text)
    return re.sub(
        r"\[([^\]]*)\]\((\.\./[^)#\s]+)\)", lambda link: link[1] if (DOCS / link[2]).is_dir() else link[0], text
    )


def read(_app: Sphinx, name: str, source: list[str]) -> None:
    """Add to a page what only the site has."""
    if name.startswith("generated/"):
        return
    source[0] = with_copies(source[0])
    if name == "index":
        source[0] = with_sidebar(source[0])
    elif name == "systems":
        source[0] = pages.with_links_to_systems(source[0])


def process_docstring(_app: Sphinx, _what: str, _name: str, _thing: object, _how: object, lines: list[str]) -> None:
    """Have autodoc read a docstring's Markdown."""
    lines[:] = pages.restructured(lines)


def setup(app: Sphinx) -> None:
    """Write the generated pages before Sphinx looks for pages."""
    pages.write(DOCS / "generated")
    app.connect("source-read", read)
    app.connect("autodoc-process-docstring", process_docstring)
