"""One contender's training in a process of its own: a job on stdin, its measurements as JSON on stdout."""

from __future__ import annotations

import json
import resource
import sys
import time
from pathlib import Path
from typing import Any

import torch

from benchmarks.contenders import LOWTIDE, creation, open_session
from benchmarks.jobs import Job
from benchmarks.models import MODELS, Sizes

_SEED = 1


def main() -> int:
    """Do the job and print the answer; a failure is an answer too."""
    job = Job(**json.load(sys.stdin))
    if job.threads is not None:
        torch.set_num_threads(job.threads)
    try:
        answer = measure(job)
    except (MemoryError, RuntimeError, OSError, ValueError) as error:  # includes BudgetTooSmall and OutOfMemoryError
        answer = {"failure": f"{type(error).__name__}: {str(error).splitlines()[0]}"}
    print(json.dumps(answer))
    return 0


def measure(job: Job) -> dict[str, Any]:
    """Train and return times, losses, peaks and bytes moved."""
    benchmark = MODELS[job.model](
        Sizes(vocabulary=job.vocabulary, classes=job.classes, scale=job.scale, batch=job.batch)
    )
    torch.manual_seed(_SEED)
    with creation(job):
        module = benchmark.build()
    module.train()
    parameters = sum(parameter.numel() for parameter in module.parameters())
    optimizer = benchmark.optimizer(module)
    base_rss_bytes = _peak_rss_bytes()
    step_s: list[float] = []
    losses: list[str] = []
    with open_session(job, module, optimizer) as session:
        moved_before = (0, 0)
        for index in range(job.warmup_steps + job.steps):
            if index == job.warmup_steps:
                moved_before = session.moved_bytes()
            batch = benchmark.batch(torch.Generator().manual_seed(_SEED + index))
            started = time.perf_counter()
            with session.step():
                loss = session.train_step(benchmark, module, optimizer, batch)
            step_s.append(time.perf_counter() - started)
            losses.append(float(loss).hex())
            del batch, loss
        moved = session.moved_bytes()
        facts = session.facts()
    imported = "lowtide" in sys.modules
    assert imported == (job.count_live or job.contender in LOWTIDE), (
        "stock must be stock: Lowtide is not imported there"
    )
    return {
        "step_s": step_s[job.warmup_steps :],
        "warmup_step_s": step_s[: job.warmup_steps],
        "losses": losses,
        "rss_peak_bytes": _peak_rss_bytes(),
        "rss_before_training_bytes": base_rss_bytes,
        "moved_out_bytes_per_step": (moved[0] - moved_before[0]) / job.steps,
        "moved_in_bytes_per_step": (moved[1] - moved_before[1]) / job.steps,
        "moved_out_bytes_total": moved[0],
        "moved_in_bytes_total": moved[1],
        "parameters": parameters,
        "title": benchmark.title,
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        **facts,
    }


def _peak_rss_bytes() -> int:
    """Return this process's highest resident set: Linux keeps it since `exec`, unlike `getrusage`."""
    status = Path("/proc/self/status")
    if status.exists():
        for line in status.read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


if __name__ == "__main__":
    sys.exit(main())
