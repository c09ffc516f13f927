"""What a worker is asked to do and what it answers, and how one is started."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from ctypes.util import find_library
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, ClassVar, Protocol

ROOT = Path(__file__).resolve().parent.parent
# A preloaded or tuned allocator would make "stock" something else than what pip installs.
_ALLOCATOR_SETTINGS = ("LD_PRELOAD", "GLIBC_TUNABLES")


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One training in a process of its own.

    `contender`: stock, tcmalloc (stock with that allocator preloaded), checkpoint, naive, lowtide, swaps (Lowtide that
    neither recomputes nor encodes), or before (Lowtide from another checkout: `source` is its src directory).
    `created_inside`: Lowtide's budget holds while the model is built, too. `policy`: Lowtide's. `batch`: of the deep
    models. `disk_bytes_per_s`: the rate of Lowtide's disk, each way (None: as fast as it is). `count_live`: run under
    Lowtide's allocator with a budget that is never reached, only to count live bytes; such a run is not timed.
    """

    model: str
    contender: str
    spill: str
    budget_bytes: int | None = None
    created_inside: bool = False
    warmup_steps: int = 2
    steps: int = 3
    count_live: bool = False
    threads: int | None = None
    vocabulary: int = 8192
    classes: int = 1000
    scale: int = 1
    source: str = ""
    policy: str = "auto"
    batch: int = 4
    disk_bytes_per_s: float | None = None


class Launched(Protocol):
    """A job of any kind: a frozen dataclass that its worker reads from standard input."""

    __dataclass_fields__: ClassVar[dict[str, Any]]

    @property
    def contender(self) -> str:
        """See `Job`."""
        ...

    @property
    def spill(self) -> str:
        """The directory to spill to."""
        ...

    @property
    def source(self) -> str:
        """See `Job`."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What a worker measured, or why it failed."""

    facts: dict[str, Any]
    failure: str | None = None


def launch(
    job: Launched, *, prefix: Sequence[str] = (), worker: str = "benchmarks.worker", timeout_s: float = 3600.0
) -> Answer:
    """Run `job` in a fresh interpreter that runs the module `worker`, behind the command `prefix` if there is one."""
    environment = {
        name: value
        for name, value in os.environ.items()
        if name not in _ALLOCATOR_SETTINGS and not name.startswith("MALLOC_")
    }
    if job.contender == "tcmalloc":
        library = find_library("tcmalloc_minimal") or find_library("tcmalloc")
        if library is None:
            return Answer(facts={}, failure="tcmalloc is not installed (Debian: libtcmalloc-minimal4)")
        environment["LD_PRELOAD"] = library
    paths = [job.source, str(ROOT), str(ROOT / "src"), environment.get("PYTHONPATH", "")]
    environment["PYTHONPATH"] = os.pathsep.join(path for path in paths if path)
    try:
        done = subprocess.run(
            [*prefix, sys.executable, "-m", worker],
            input=json.dumps(asdict(job)),
            capture_output=True,
            text=True,
            cwd=ROOT,
            env=environment,
            timeout=timeout_s,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return Answer(facts={}, failure=f"took longer than {timeout_s:.0f} s")
    if done.returncode < 0:
        return Answer(facts={}, failure=f"killed by signal {-done.returncode}")
    lines = done.stdout.strip().splitlines()
    if done.returncode != 0 or not lines:
        last = done.stderr.strip().splitlines()[-1:] or ["no output"]
        return Answer(facts={}, failure=f"exit code {done.returncode}: {without_paths(last[0], job.spill)}")
    answer = json.loads(lines[-1])
    if "failure" in answer:
        return Answer(facts={}, failure=without_paths(answer["failure"], job.spill))
    return Answer(facts=answer)


def without_paths(text: str, spill: str) -> str:
    """Return `text` without the names of this machine's directories: results are published."""
    return text.replace(spill, "<spill>").replace(str(ROOT), "<repository>").replace(str(Path.home()), "~")
