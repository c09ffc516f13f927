"""Take the pictures of the documentation: `make screenshots`, or `python -m docs.site.screenshots demo report`.

Commands run in a terminal of 80 columns that exists in memory (pyte); Chromium turns what it shows, and the report,
into pictures. Debian: apt-get install chromium fonts-dejavu-core
"""

from __future__ import annotations

import html
import os
import pty
import re
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import pyte
from PIL import Image

from tests.report.browser import browser_path, open_browser

ROOT = Path(__file__).parents[2]
IMAGES = ROOT / "docs" / "images"
COLUMNS = 80
COLOURS = {
    "default": "#d5dbe0",
    "black": "#5b6670",
    "red": "#f07178",
    "green": "#8fd18f",
    "brown": "#e0c074",
    "blue": "#7fb2f0",
    "magenta": "#d49be8",
    "cyan": "#6fd0dd",
    "white": "#ffffff",
}
PAGE = """<!doctype html><meta charset="utf-8"><style>
body {{ margin: 0; background: #14191e; color: #d5dbe0; display: inline-block; }}
pre {{ margin: 0; padding: 14px 18px; font: 14px/1.35 "DejaVu Sans Mono", monospace; }}
.typed {{ color: #8fd18f; }}
</style><pre>{lines}</pre>"""

Lines = list[str]


def shown(screen: pyte.Screen) -> Lines:
    """Return a terminal's rows as HTML, without the empty ones at its end."""
    rows = []
    for number in range(screen.lines):
        row = screen.buffer[number]
        parts = []
        for column in range(screen.columns):
            cell = row[column]
            style = f"color:{COLOURS.get(cell.fg, COLOURS['default'])}" + (";font-weight:bold" if cell.bold else "")
            if cell.reverse:
                style = f"color:#14191e;background:{COLOURS['default']}"
            parts.append(f'<span style="{style}">{html.escape(cell.data)}</span>')
        rows.append("".join(parts) if screen.display[number].strip() else "")
    while rows and not rows[-1]:
        rows.pop()
    return rows


def in_a_terminal(
    command: str, folder: Path, *, rows: int = 44, until: Callable[[list[str]], bool] | None = None
) -> Lines:
    """Run a command, and return what the terminal shows at its end, or when `until` says so for the first time."""
    screen = pyte.Screen(COLUMNS, rows)
    stream = pyte.ByteStream(screen)
    words = [sys.executable, "-m", "lowtide", *shlex.split(command)[1:]]
    kept = None
    ours, theirs = pty.openpty()
    environment = {**os.environ, "COLUMNS": str(COLUMNS), "LINES": str(rows), "TERM": "xterm-256color"}
    environment.pop("NO_COLOR", None)
    subprocess.run(["stty", "cols", str(COLUMNS), "rows", str(rows)], stdin=theirs, check=True)
    process = subprocess.Popen(words, stdin=theirs, stdout=theirs, stderr=theirs, cwd=folder, env=environment)
    os.close(theirs)
    while True:
        try:
            told = os.read(ours, 65536)
        except OSError:
            break
        if not told:
            break
        stream.feed(told)
        if kept is None and until is not None and until(screen.display):
            kept = shown(screen)
    process.wait()
    os.close(ours)
    return [f'<span class="typed">$ {html.escape(command)}</span>', *(kept or shown(screen))]


def picture(
    source: Path, name: str, *, width: int, height: int | None, dark: bool = False, drawn: bool = False
) -> None:
    """Write a page as a picture, as high as the page unless told, in few colours so that it stays small.

    The colours are chosen to cover all that occur: those of small areas, as in a legend, stay apart.
    """
    target = IMAGES / f"{name}.png"
    with open_browser() as browser:
        (browser.open if drawn else browser.load)(source, width=width, height=height or 100, dark=dark)
        if height is None:
            box = browser.run("[document.body.scrollWidth, document.body.scrollHeight]")
            browser.call(
                "Emulation.setDeviceMetricsOverride", width=box[0], height=box[1], deviceScaleFactor=1, mobile=False
            )
        browser.run("document.documentElement.style.overflow = 'hidden'")
        browser.settle()
        browser.screenshot(target)
    with Image.open(target) as image:
        few = image.convert("RGB").quantize(128, method=Image.Quantize.MAXCOVERAGE, dither=Image.Dither.NONE)
    few.save(target, optimize=True)
    print(f"{target.relative_to(ROOT)}: {target.stat().st_size / 1024:.0f} KiB")


def terminal(
    name: str, command: str, folder: Path, *, rows: int = 44, until: Callable[[list[str]], bool] | None = None
) -> None:
    """Write what a command shows as a picture."""
    page = folder / f"{name}.html"
    page.write_text(PAGE.format(lines="\n".join(in_a_terminal(command, folder, rows=rows, until=until))))
    picture(page, name, width=760, height=None)


def tutorial_script() -> str:
    """Return the script of the tutorial."""
    found = re.search(r"```python\n(# train\.py\n.*?)```", (ROOT / "docs" / "tutorial.md").read_text(), re.DOTALL)
    assert found is not None
    return found[1]


def at_step_eight(rows: list[str]) -> bool:
    """Tell whether the live row shows a step that follows a plan."""
    return any(re.match(r"step +8 .*moved", row) for row in rows)


def main(wanted: list[str]) -> int:
    """Take the pictures that are named, or all."""
    if browser_path() is None:
        print("no Chromium here: apt-get install chromium fonts-dejavu-core", file=sys.stderr)
        return 1
    IMAGES.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "train.py").write_text(tutorial_script())
        in_a_terminal("lowtide capture -o step.trace train.py", folder)
        takes: dict[str, Callable[[], None]] = {
            "demo": lambda: terminal("demo", "lowtide demo", folder),
            "pareto": lambda: terminal("pareto", "lowtide plan --pareto step.trace", folder),
            "run": lambda: terminal("run", "lowtide run --budget 60MiB train.py", folder, rows=8, until=at_step_eight),
            "report": lambda: _report(folder),
        }
        for take in wanted or takes:
            takes[take]()
    return 0


def _report(folder: Path) -> None:
    in_a_terminal("lowtide report step.trace --budget 60MiB --out report.html", folder)
    picture(folder / "report.html", "report", width=1400, height=900, drawn=True)


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
