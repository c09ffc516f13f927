"""`lowtide doctor`: what this machine offers, what is missing, and what to do about it."""

from __future__ import annotations

import platform
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from enum import StrEnum
from pathlib import Path

import click

from lowtide.cli.checks import check_directory, explain_auto, is_server, spill_directory, spill_locations
from lowtide.cli.output import console, echo_json
from lowtide.core.units import format_bytes, format_rate
from lowtide.errors import BadArgument, LowtideError
from lowtide.memory.budget import memory_limits, parse_budget


class Verdict(StrEnum):
    """OK needs nothing; WARN works, but slower or less strictly; FAIL does not work until it is fixed."""

    OK = "ok"
    WARN = "warn"
    FAIL = "fail"


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One thing that was looked at, and what to do if it is not well."""

    what: str
    verdict: Verdict
    detail: str
    fix: str = ""


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option(
    "--spill", metavar="DIR", help="The spill directory or server to look at (default: where Lowtide would spill)."
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of a table.")
def command(*, spill: str | None, as_json: bool) -> int:
    """Check this machine, and say how to fix each problem.

    The exit code is 1 if something has to be fixed before Lowtide can work.

    \b
    Examples:
      lowtide doctor
      lowtide doctor --spill /fast/disk --json
      lowtide doctor --spill redis://memory-server
    """
    (where,) = spill_locations(() if spill is None else (spill,))
    if is_server(where):
        findings = list(examine(where))
    else:
        directory = spill_directory(where)
        if directory.exists():
            check_directory(directory)
        findings = list(examine(directory))
    if as_json:
        echo_json([asdict(finding) for finding in findings])
    else:
        _print(findings)
    return int(any(finding.verdict is Verdict.FAIL for finding in findings))


def examine(spill: Path | str, *, root: Path = Path("/")) -> Iterator[Finding]:
    """Yield everything worth knowing about spilling to `spill`; `root` is where /proc and /sys are looked for.

    `spill` is a directory, or the URL of a server.
    """
    yield _python()
    yield _torch()
    yield from _native()
    if isinstance(spill, str):
        yield _server(spill)
    else:
        yield from _spill(spill)
    yield _limits(root)
    yield _auto(root)
    yield _huge_pages(root)
    if isinstance(spill, Path):  # a server is measured when a training opens it
        yield _probed(spill)


def _python() -> Finding:
    return Finding(what="python", verdict=Verdict.OK, detail=f"{platform.python_version()} on {platform.platform()}")


def _torch() -> Finding:
    try:
        import torch
    except (ImportError, OSError) as error:
        return Finding(
            what="torch", verdict=Verdict.FAIL, detail=str(error).splitlines()[0], fix="install torch 2.6 or later"
        )
    threads = torch.get_num_threads()
    detail = f"{torch.__version__}, {threads} thread{'s' * (threads != 1)}"
    if tuple(int(part) for part in torch.__version__.split(".")[:2]) < (2, 6):
        return Finding(what="torch", verdict=Verdict.FAIL, detail=detail, fix="install torch 2.6 or later")
    return Finding(what="torch", verdict=Verdict.OK, detail=detail)


def _native() -> Iterator[Finding]:
    from lowtide.memory import native

    status = native.status()
    found = status["compiler"]
    usable = bool(status["usable"])
    yield Finding(
        what="compiler",
        # A library that is shipped, or was built before, needs no compiler any more.
        verdict=Verdict.OK if found or usable else Verdict.WARN,
        detail=str(found or "none found"),
        fix="" if found or usable else "install g++, or name a compiler in $CXX",
    )
    yield Finding(
        what="native part",
        verdict=Verdict.OK if usable else Verdict.WARN,
        detail=str(status["origin"] if usable else status["reason"]),
        fix="" if usable else "until then the budget is only advisory: it is counted, not enforced",
    )


def _spill(directory: Path) -> Iterator[Finding]:
    from lowtide.tiers.file import FileMedium
    from lowtide.tiers.filesystem import filesystem_type, is_memory

    try:
        medium = FileMedium([directory])
    except (LowtideError, OSError) as error:
        yield Finding(
            what="spill", verdict=Verdict.FAIL, detail=str(error), fix="pass a directory you can write to with --spill"
        )
        return
    direct, free = medium.direct, medium.free_bytes()
    medium.close()
    where = f"{directory} ({filesystem_type(directory) or 'unknown filesystem'})"
    if is_memory(directory):
        yield Finding(
            what="spill",
            verdict=Verdict.WARN,
            detail=f"{where} is itself memory: spilling there frees no memory",
            fix="pass a directory on a disk with --spill",
        )
    else:
        yield Finding(
            what="spill",
            verdict=Verdict.OK if direct else Verdict.WARN,
            detail=f"{where}, {'O_DIRECT' if direct else 'no O_DIRECT: goes through the page cache, slower'}",
            fix="" if direct else "pass a directory on another filesystem, such as ext4 or xfs, with --spill",
        )
    low = free < 4 * 2**30
    yield Finding(
        what="spill room",
        verdict=Verdict.WARN if low else Verdict.OK,
        detail=f"{format_bytes(free)} free",
        fix="free some space, or pass another directory with --spill" if low else "",
    )


def _server(url: str) -> Finding:
    from lowtide.tiers.open import open_medium
    from lowtide.tiers.server_url import hide_password

    try:
        medium = open_medium(url)
    except (LowtideError, OSError) as error:
        return Finding(what="spill", verdict=Verdict.FAIL, detail=str(error), fix="start or change the server")
    notes = getattr(medium, "notes", ())
    native = medium.engine is not None
    medium.close()
    way = "moved natively" if native else "moved through Python: encrypted, encoded, or no compiler"
    return Finding(
        what="spill",
        verdict=Verdict.WARN if notes else Verdict.OK,
        detail="; ".join((f"{hide_password(url)} answers, {way}", *notes)),
        fix="give the server more memory, or state fewer disk bytes" if notes else "",
    )


def _limits(root: Path) -> Finding:
    limits = [limit for limit in memory_limits(root=root) if limit.source != "host memory"]
    if not limits:
        return Finding(what="limits", verdict=Verdict.OK, detail="no cgroup or process limit below the host's memory")
    tightest = min(limits, key=lambda limit: limit.left_bytes)
    detail = f"{format_bytes(tightest.limit_bytes)} ({tightest.source}), {format_bytes(tightest.left_bytes)} left"
    return Finding(what="limits", verdict=Verdict.OK, detail=detail)


def _auto(root: Path) -> Finding:
    try:
        budget = parse_budget("auto", root=root)
    except BadArgument as error:
        return Finding(
            what="budget 'auto'", verdict=Verdict.WARN, detail=str(error), fix="state the budget, such as --budget 2GiB"
        )
    tightest = min(memory_limits(root=root), key=lambda limit: limit.left_bytes)
    detail = f"{format_bytes(budget.fast_bytes)} now: {explain_auto(tightest.source)}"
    return Finding(what="budget 'auto'", verdict=Verdict.OK, detail=detail)


def _huge_pages(root: Path) -> Finding:
    try:
        text = (root / "sys/kernel/mm/transparent_hugepage/enabled").read_text(encoding="utf-8")
    except OSError:
        return Finding(what="huge pages", verdict=Verdict.OK, detail=f"not known on {sys.platform}")
    setting = text.partition("[")[2].partition("]")[0]
    if setting != "never":
        return Finding(what="huge pages", verdict=Verdict.OK, detail=setting)
    return Finding(
        what="huge pages",
        verdict=Verdict.WARN,
        detail="never: large blocks fault page by page, slower",
        fix="echo madvise > /sys/kernel/mm/transparent_hugepage/enabled (as root)",
    )


def _probed(spill: Path) -> Finding:
    from lowtide.estimate.calibrate import load_machine, machine_path, measured_directories

    probe = f"run 'lowtide probe --spill {spill}'" if spill.is_dir() else "run 'lowtide probe'"
    machine, measured = load_machine(), measured_directories()
    if machine is None or not machine.links:
        state = "damaged or of another version" if machine_path().exists() else "not measured yet"
        return Finding(what="probe", verdict=Verdict.WARN, detail=state, fix=probe)
    rates = ", ".join(
        f"{format_rate(link.write_bytes_per_s)} write, {format_rate(link.read_bytes_per_s)} read"
        for link in machine.links.values()
    )
    detail = f"{rates}, measured on {', '.join(map(str, measured)) or 'an unknown disk'}"
    if spill.is_dir() and load_machine(directories=[spill]) is None:
        return Finding(what="probe", verdict=Verdict.WARN, detail=f"{detail}, not on the disk of {spill}", fix=probe)
    return Finding(what="probe", verdict=Verdict.OK, detail=detail)


def _print(findings: list[Finding]) -> None:
    from rich.table import Table
    from rich.text import Text

    colours = {Verdict.OK: "green", Verdict.WARN: "yellow", Verdict.FAIL: "bold red"}
    table = Table(box=None, pad_edge=False, show_header=False)
    for _ in ("verdict", "what"):
        table.add_column(no_wrap=True)
    table.add_column(overflow="fold")  # a path is shown whole
    for finding in findings:
        detail = Text(finding.detail)
        if finding.fix:
            detail.append(f"\n-> {finding.fix}")
        table.add_row(Text(finding.verdict, style=colours[finding.verdict]), finding.what, detail)
    console().print(table)
