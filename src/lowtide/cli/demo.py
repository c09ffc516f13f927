"""`lowtide demo`: a training that fails in plain PyTorch and finishes, with the same losses, under Lowtide.

The kernel is the judge: both runs get the same RLIMIT_DATA, which refuses memory beyond what an idle process with torch
takes, plus the budget, plus a little for what is not tensors.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from lowtide.cli.checks import check_spill, spill_locations, warn_of_memory
from lowtide.cli.output import ADVISORY, console
from lowtide.core.units import format_bytes, format_seconds
from lowtide.errors import BadArgument
from lowtide.memory.budget import parse_budget

_SCRIPT = Path(__file__).with_name("demo_train.py")
_LOWTIDE_RUN = ("-m", "lowtide.cli", "run", "--quiet")
# Threads' stacks, Python objects and the scratch of math libraries: memory of the process that is not tensors.
_NOT_TENSORS_BYTES = 96 * 2**20

# What an idle process takes once torch runs on all its threads, optimizer included, with the native part loaded. In a
# process of its own: this one stays small, because the kernel lets a child's peak begin at its parent's size.
_IDLE = """
import json, re, torch
from lowtide.memory import native
status = native.status()
x = torch.ones(256, 256, requires_grad=True)
(x @ x).sum().backward()
torch.optim.SGD([x], lr=0.1).step()
data = re.search(r"VmData:\\s+(\\d+) kB", open("/proc/self/status").read())
print(json.dumps({"data_bytes": int(data[1]) * 1024, "usable": status["usable"], "reason": status["reason"]}))
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """What the training script says of a step; the loss is text so that it compares to the last bit."""

    loss_hex: str
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """How a run of the training script went."""

    exit_code: int
    steps: tuple[Step, ...]
    peak_bytes: int
    last_words: str = ""

    @property
    def losses(self) -> tuple[str, ...]:
        """The losses of all steps, exactly."""
        return tuple(step.loss_hex for step in self.steps)

    @property
    def step_s(self) -> float:
        """The usual time of a step; the first one, which warms up, is left out."""
        return statistics.median([step.seconds for step in self.steps[1:] or self.steps])


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option(
    "--budget", default="320MiB", show_default=True, metavar="B", help="Tensor memory that the training gets."
)
@click.option("--steps", default=8, show_default=True, help="Training steps.")
@click.option("--spill", metavar="DIR", help="Where to spill.")
def command(*, budget: str, steps: int, spill: str | None) -> int:
    """Train a small GPT in a budget in which plain PyTorch fails, and compare.

    \b
    Examples:
      lowtide demo
      lowtide demo --budget 400MiB --spill /fast/disk
    """
    budget_bytes = parse_budget(budget).fast_bytes
    if steps < 2:
        raise BadArgument(f"{steps} steps are too few: pass --steps 2 or more")
    where = spill_locations([spill] if spill else [])
    check_spill(where)
    warn_of_memory(where)
    if sys.platform != "linux":
        raise BadArgument(f"the demo needs Linux, whose kernel can refuse memory to a process; this is {sys.platform}")
    out = console()
    with out.status("starting torch"):
        idle = _idle(on_line=out.print)
    if not idle["usable"]:
        raise BadArgument(f"the native part is missing, so the budget cannot hold: {idle['reason']}")
    limit_bytes = idle["data_bytes"] + budget_bytes + _NOT_TENSORS_BYTES
    arguments = ["--steps", str(steps)]
    options = ["--budget", str(budget_bytes), *(["--spill", spill] if spill else [])]

    plain = _watched("1/3 plain PyTorch, all the memory it wants", [str(_SCRIPT), *arguments], steps=steps)
    if plain.exit_code != 0:
        out.print(f"plain PyTorch failed: {plain.last_words}")
        return 1
    refused = _watched(
        f"2/3 plain PyTorch, {format_bytes(limit_bytes)} of data at most",
        [str(_SCRIPT), *arguments],
        steps=steps,
        limit_bytes=limit_bytes,
    )
    out.print(
        f"    failed, as expected: {_one_line(refused.last_words, width=out.width - 26)}"
        if refused.exit_code
        else "    finished: the budget is generous, or this kernel does not enforce RLIMIT_DATA"
    )
    with tempfile.TemporaryDirectory(prefix="lowtide-demo-") as scratch:
        stats_path = Path(scratch) / "stats.json"
        managed = _watched(
            f"3/3 lowtide run --budget {budget}, {format_bytes(limit_bytes)} of data at most",
            [*_LOWTIDE_RUN, *options, "--json", str(stats_path), str(_SCRIPT), *arguments],
            steps=steps,
            limit_bytes=limit_bytes,
        )
        if managed.exit_code != 0:
            out.print(f"lowtide run failed: {managed.last_words}")
            return 1
        stats = json.loads(stats_path.read_text(encoding="utf-8"))
    return _compare(plain, refused, managed, stats=stats)


def parse_step(line: str) -> Step | None:
    """Return the step that a line of the training script reports, if it does."""
    words = line.split()
    if len(words) != 4 or words[0] != "step":
        return None
    return Step(loss_hex=words[2], seconds=float(words[3]))


def run_limited(
    arguments: Sequence[str], *, limit_bytes: int | None, on_step: Callable[[], None] = lambda: None
) -> Outcome:
    """Run Python with `arguments`, at most `limit_bytes` of data, and return how it went."""

    def limit() -> None:
        import resource

        if limit_bytes is not None:
            resource.setrlimit(resource.RLIMIT_DATA, (limit_bytes, limit_bytes))

    steps = []
    with tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as errors:
        child = subprocess.Popen(
            [sys.executable, *arguments], stdout=subprocess.PIPE, stderr=errors, text=True, preexec_fn=limit
        )
        try:
            assert child.stdout is not None
            for line in child.stdout:
                if step := parse_step(line):
                    steps.append(step)
                    on_step()
            child.stdout.close()
            # wait4, because only it tells the child's own peak; Popen then must not wait a second time.
            _, status, usage = os.wait4(child.pid, 0)
            child.returncode = os.waitstatus_to_exitcode(status)
        finally:
            if child.returncode is None:
                child.kill()
                child.wait()
        errors.seek(0)
        words = [line.strip() for line in errors if line.strip()]
    return Outcome(
        exit_code=child.returncode,
        steps=tuple(steps),
        peak_bytes=usage.ru_maxrss * 1024,
        last_words=words[-1] if words else f"exit code {child.returncode}",
    )


def _one_line(text: str, *, width: int) -> str:
    line = " ".join(text.split())
    return line if len(line) <= width else f"{line[: width - 3]}..."


def _watched(title: str, arguments: Sequence[str], *, steps: int, limit_bytes: int | None = None) -> Outcome:
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console()) as progress:
        task = progress.add_task(title, total=steps)
        return run_limited(arguments, limit_bytes=limit_bytes, on_step=lambda: progress.advance(task))


def _idle(*, on_line: Callable[[str], None]) -> dict[str, Any]:
    """Return what the idle process says of itself; `on_line` gets what Lowtide says there meanwhile."""
    last = ""
    with tempfile.TemporaryFile("w+", encoding="utf-8") as answer:
        command = [sys.executable, "-c", _IDLE]
        with subprocess.Popen(command, stdout=answer, stderr=subprocess.PIPE, text=True) as child:
            assert child.stderr is not None
            for line in filter(None, map(str.strip, child.stderr)):
                last = line
                if line.startswith("lowtide: "):
                    on_line(line)
        if child.returncode != 0:
            raise BadArgument(
                f"torch does not run here ({last or f'exit code {child.returncode}'}): see 'lowtide doctor'"
            )
        answer.seek(0)
        found: dict[str, Any] = json.load(answer)
    return found


def _compare(plain: Outcome, refused: Outcome, managed: Outcome, *, stats: dict[str, Any]) -> int:
    from rich.table import Table

    same = managed.losses == plain.losses
    table = Table(box=None, pad_edge=False)
    for heading in ("", "plain PyTorch", "plain, limited", "Lowtide, limited"):
        table.add_column(heading, justify="right" if heading else "left")
    table.add_row("finished", "yes", "no" if refused.exit_code else "yes", "yes")
    table.add_row("peak of the process", *(format_bytes(run.peak_bytes) for run in (plain, refused, managed)))
    exact = stats.get("budget_exact", True)
    table.add_row("peak of tensors", "-", "-", f"{format_bytes(stats['peak_bytes'])}{'' if exact else ' *'}")
    table.add_row(
        "time a step",
        format_seconds(plain.step_s),
        "-" if refused.exit_code else format_seconds(refused.step_s),
        format_seconds(managed.step_s),
    )
    moved = f"{format_bytes(stats['swapped_out_bytes'])} out, {format_bytes(stats['swapped_in_bytes'])} in"
    table.add_row("moved", "-", "-", moved)
    table.add_row("losses identical", "-", "-", "yes" if same else "NO")
    out = console()
    out.print()
    out.print(table)
    if not exact:
        out.print(f"* {ADVISORY}")
    if not same:
        out.print("the losses differ: this is a bug, please report it with the output of 'lowtide doctor --json'")
    return 0 if same else 1
