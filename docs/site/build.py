"""Build the site, and fail at a warning or at a link that leads nowhere: `python docs/site/build.py`.

Sphinx checks links between pages. This also looks at the HTML itself: every address below the site that a page names,
in links, images, scripts and styles, exists, and has the place that is named after `#`.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

HERE = Path(__file__).parent
DOCS = HERE.parent
OUT = DOCS.parent / "build" / "site"


class Links(HTMLParser):
    """What a page of HTML names: addresses, and places of its own."""

    def __init__(self, page: Path) -> None:
        super().__init__()
        self.addresses: list[str] = []
        self.places: set[str] = {"", "top"}
        self.feed(page.read_text())

    def handle_starttag(self, _tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Note what a tag names."""
        for name, value in attrs:
            if name in ("href", "src") and value:
                self.addresses.append(value)
            elif name == "id" and value:
                self.places.add(value)


def dead_links(folder: Path) -> Iterator[str]:
    """Yield each address in the pages of a folder that leads to nothing there."""
    pages = {page: Links(page) for page in sorted(folder.rglob("*.html"))}
    for page, links in pages.items():
        for address in links.addresses:
            parts = urlsplit(address)
            if parts.scheme or parts.netloc or not (parts.path or parts.fragment):
                continue
            target = (page.parent / unquote(parts.path)).resolve() if parts.path else page
            if not target.is_file():
                yield f"{page.relative_to(folder)}: {address} is not there"
            elif target in pages and unquote(parts.fragment) not in pages[target].places:
                yield f"{page.relative_to(folder)}: {address} has no such place"


def main() -> int:
    """Build; 0 if there is nothing to complain about."""
    from sphinx.cmd.build import build_main

    arguments = ["-b", "html", "-q", "-W", "--keep-going", "-c", str(HERE), "-d", str(OUT / "doctrees")]
    code = build_main([*arguments, str(DOCS), str(OUT / "html")])
    if code != 0:
        return code
    dead = list(dead_links((OUT / "html").resolve()))
    for line in dead:
        print(line, file=sys.stderr)
    if not dead:
        print(f"{OUT / 'html' / 'index.html'}")
    return 1 if dead else 0


if __name__ == "__main__":
    raise SystemExit(main())
