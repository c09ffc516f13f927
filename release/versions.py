"""Which versions of torch and Python the wheel was tried with: fills `versions.json` and the table in docs/install.md.

python release/versions.py run WHEEL PYTHON [--root DIR] [--site DIR]
    install the wheel beside a Python that has torch, where no compiler is found, and train with it
      --root   the Python is in that root, and sees nothing outside of it (needs the right to mount and to chroot)
      --site   torch is in that directory, which the Python does not search by itself
python release/versions.py table
    write the table
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import pip

HERE = Path(__file__).parent
ROWS = HERE / "versions.json"
PAGE = HERE.parent / "docs" / "install.md"
BEGIN, END = "<!-- versions: begin -->\n", "<!-- versions: end -->\n"
GOOD = "exact, enforced"


def into(root: Path) -> list[str]:
    """Return how a command in a root begins. The mount, which tells the demo its memory, goes with the process."""
    (root / "proc").mkdir(exist_ok=True)
    path = os.pathsep.join([os.environ["PATH"], "/usr/sbin", "/sbin"])
    unshare, mount, chroot = (shutil.which(name, path=path) or name for name in ("unshare", "mount", "chroot"))
    script = f'{mount} -t proc proc "$0/proc" && exec {chroot} "$0" "$@"'
    return [unshare, "--mount", "/bin/sh", "-c", script, str(root)]


def demo_said(text: str) -> str:
    rows = {line.split("  ")[0].strip(): line.split() for line in text.splitlines()}
    finished, same = rows["finished"][1:], rows["losses identical"][-1] == "yes"
    good = same and finished == ["yes", "no", "yes"] and "*" not in rows["peak of tensors"]
    return GOOD if good else "NOT exact and enforced"


def fits_said(plainly: dict[str, Any], put_off: dict[str, Any]) -> str:
    """Say whether both trainings were the plain one to the bit, in less memory; the second puts updates off."""
    for fit in (plainly, put_off):
        if not fit["exact"] or not fit["enforced"] or fit["peak_bytes"] > fit["budget_bytes"]:
            return "NOT exact and enforced"
        if not fit["swapped_in_bytes"]:
            return "NOT tried: nothing had to move"
    return GOOD if put_off["operators_put_off"] else f"{GOOD}; NO update was put off"


def native_said(doctor: list[dict[str, str]], cache: Path) -> str:
    findings = {finding["what"]: finding for finding in doctor}
    if findings["compiler"]["detail"] != "none found":
        raise SystemExit(f"this is no trial without a compiler: {findings['compiler']['detail']} is there")
    if (cache / "native").exists():
        raise SystemExit(f"something was built into {cache}")
    return findings["native part"]["detail"].partition(" (")[0]


def run(wheel: Path, python: str, root: Path | None, site: str) -> dict[str, str]:
    top = root or Path("/")
    with tempfile.TemporaryDirectory(dir=top / "tmp") as scratch:
        outside, inside = Path(scratch), Path("/") / Path(scratch).relative_to(top)
        for file in (wheel, HERE / "trial.py"):
            shutil.copy(file, outside)
        shutil.copytree(Path(pip.__file__).parent, outside / "tools" / "pip")
        paths = [str(inside / "site"), *([site] if site else [])]
        variables = {
            "PATH": str(inside / "none"),  # no program is found, so no compiler
            "HOME": str(inside),
            "PYTHONPATH": os.pathsep.join(paths),
            "PYTHONDONTWRITEBYTECODE": "1",
            "LOWTIDE_CACHE": str(inside / "cache"),
        }
        enter = into(root) if root else []

        def said(*arguments: str) -> str:
            command = [*enter, python, *arguments]
            done = subprocess.run(command, env=variables, cwd="/", capture_output=True, text=True, check=False)
            if done.returncode != 0:
                raise SystemExit(f"{command} failed:\n{done.stdout}{done.stderr}")
            return done.stdout

        install = ["install", "--no-index", "--no-deps", "--target", str(inside / "site"), str(inside / wheel.name)]
        said(str(inside / "tools" / "pip"), *install)
        trial = json.loads(said(str(inside / "trial.py"), str(inside)))
        demo = said("-m", "lowtide.cli", "demo", "--steps", "3", "--spill", str(inside))
        doctor = json.loads(said("-m", "lowtide.cli", "doctor", "--json", "--spill", str(inside)))
        return {
            **{name: trial[name] for name in ("torch", "python", "libc")},
            "native": native_said(doctor, outside / "cache"),
            "fit": fits_said(*trial["fits"]),
            "demo": demo_said(demo),
        }


def rows() -> list[dict[str, str]]:
    return json.loads(ROWS.read_text()) if ROWS.exists() else []  # type: ignore[no-any-return]  # our own file


def order(row: dict[str, str]) -> tuple[tuple[int, ...], ...]:
    versions = (row["torch"].partition("+")[0], row["python"])
    return tuple(tuple(map(int, version.split("."))) for version in versions)


def with_row(others: list[dict[str, str]], row: dict[str, str]) -> list[dict[str, str]]:
    """Return them in order, with what was found of the same versions before replaced."""
    kept = [other for other in others if (other["torch"], other["python"]) != (row["torch"], row["python"])]
    return sorted([*kept, row], key=order)


def table(found: list[dict[str, str]]) -> str:
    lines = [
        "| torch | Python | C library | native part | `lowtide.fit` | `lowtide demo` |",
        "|---|---|---|---|---|---|",
    ]
    for row in found:
        cells = (row["torch"], row["python"], row["libc"], row["native"], row["fit"], row["demo"])
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def page_with(found: list[dict[str, str]]) -> str:
    before, _, rest = PAGE.read_text().partition(BEGIN)
    return before + BEGIN + table(found) + END + rest.partition(END)[2]


def main() -> None:
    parser = argparse.ArgumentParser()
    verbs = parser.add_subparsers(dest="verb", required=True)
    running = verbs.add_parser("run")
    verbs.add_parser("table")
    running.add_argument("wheel", type=Path)
    running.add_argument("python")
    running.add_argument("--root", type=Path)
    running.add_argument("--site", default="")
    stated = parser.parse_args()
    if stated.verb == "run":
        row = run(stated.wheel, stated.python, stated.root, stated.site)
        print(row)
        ROWS.write_text(json.dumps(with_row(rows(), row), indent=1) + "\n")
    else:
        PAGE.write_text(page_with(rows()))


if __name__ == "__main__":
    main()
