"""One contender's training on the simulated accelerator: a job on stdin, its measurements as JSON on stdout."""

from __future__ import annotations

import json
import sys
import time
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

import lowtide.emulator
from benchmarks.accelerator_contenders import Session, open_session
from benchmarks.accelerator_jobs import DeviceJob
from benchmarks.accelerator_models import MODELS
from benchmarks.models import Benchmark, Sizes
from lowtide.emulator import Emulator, Stats

_SEED = 1
PHASES = ("forward", "backward", "update")


def main() -> int:
    """Do the job and print the answer; a failure is an answer too."""
    job = DeviceJob(**json.load(sys.stdin))
    if job.threads is not None:
        torch.set_num_threads(job.threads)
    try:
        answer = probe(job) if job.contender == "probe" else measure(job)
    except (MemoryError, RuntimeError, OSError, ValueError) as error:  # includes BudgetTooSmall and OutOfMemoryError
        answer = {"failure": f"{type(error).__name__}: {str(error).splitlines()[0]}"}
    print(json.dumps(answer))
    return 0


def probe(job: DeviceJob) -> dict[str, Any]:
    """Return the link that a preset means on this machine."""
    settings = lowtide.emulator.enable("64MiB", preset=job.policy).settings
    return {
        "d2h_bytes_per_s": settings.d2h_bytes_per_s,
        "h2d_bytes_per_s": settings.h2d_bytes_per_s,
        "latency_s": settings.latency_s,
    }


def measure(job: DeviceJob) -> dict[str, Any]:
    """Train and return times, losses, peaks, bytes moved and how much of that was hidden."""
    emulator = lowtide.emulator.enable(
        job.capacity_bytes,
        d2h_bytes_per_s=job.d2h_bytes_per_s,
        h2d_bytes_per_s=job.h2d_bytes_per_s,
        latency_s=job.latency_s,
    )
    benchmark = MODELS[job.model](Sizes(vocabulary=job.vocabulary, classes=job.classes, scale=job.scale))
    torch.manual_seed(_SEED)
    module = benchmark.build().to("sim")
    module.train()
    optimizer = benchmark.optimizer(module)
    steps: list[dict[str, Any]] = []
    losses: list[str] = []
    with open_session(job, module, optimizer) as session:
        for index in range(job.warmup_steps + job.steps):
            if index == job.warmup_steps:
                emulator.configure(trace=job.trace)
            inputs, targets = benchmark.batch(torch.Generator().manual_seed(_SEED + index))
            batch = inputs.to("sim"), targets.to("sim")
            steps.append(_step(emulator, session, benchmark, module, optimizer, batch, losses))
            del batch
        facts = session.facts()
    return {
        "warmup": steps[: job.warmup_steps],
        "steps": steps[job.warmup_steps :],
        "losses": losses,
        "parameters": sum(parameter.numel() for parameter in module.parameters()),
        "title": benchmark.title,
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        **facts,
    }


def _step(
    emulator: Emulator,
    session: Session,
    benchmark: Benchmark,
    module: nn.Module,
    optimizer: Optimizer,
    batch: tuple[Tensor, Tensor],
    losses: list[str],
) -> dict[str, Any]:
    """Train one step; phases are timed by events on the device, which nothing waits for."""
    torch.accelerator.synchronize()
    static_bytes = emulator.stats().live_bytes
    emulator.reset_stats()
    before = session.moved_bytes()
    marks = [torch.Event(device="sim", enable_timing=True) for _ in range(len(PHASES) + 1)]
    started_s = time.perf_counter()
    with session.step():
        marks[0].record()
        loss = benchmark.loss(module(batch[0]), batch[1])
        marks[1].record()
        between = session.moved_bytes()
        loss.backward()  # type: ignore[no-untyped-call]
        marks[2].record()
        optimizer.step()
        optimizer.zero_grad()
        marks[3].record()
    torch.accelerator.synchronize()
    step_s = time.perf_counter() - started_s
    stats, after = emulator.stats(), session.moved_bytes()
    phases_s = {
        phase: begin.elapsed_time(end) / 1e3 for phase, begin, end in zip(PHASES, marks, marks[1:], strict=False)
    }
    losses.append(float(loss.detach()).hex())
    return {
        "step_s": step_s,
        "phases_s": phases_s,
        "static_bytes": static_bytes,
        "asked_bytes": _asked(before, between, after, stats),
        **_counted(stats),
    }


def _asked(
    before: tuple[int, int] | None, between: tuple[int, int] | None, after: tuple[int, int] | None, stats: Stats
) -> dict[str, dict[str, int]]:
    """Return the bytes that were asked to move in each phase; where nobody tells, out is forward and in is backward."""
    if before is None or between is None or after is None:
        forward, backward = (stats.d2h.nbytes, 0), (0, stats.h2d.nbytes)
    else:
        forward = (between[0] - before[0], between[1] - before[1])
        backward = (after[0] - between[0], after[1] - between[1])
    return {phase: {"out": out, "in": back} for phase, (out, back) in (("forward", forward), ("backward", backward))}


def _counted(stats: Stats) -> dict[str, Any]:
    return {
        "peak_bytes": stats.peak_bytes,
        "peak_active_bytes": stats.peak_active_bytes,
        "compute_s": stats.compute_s,
        "kernels": stats.kernels,
        "copy_s": stats.copy_s,
        "hidden_copy_s": stats.hidden_copy_s,
        "d2h_bytes": stats.d2h.nbytes,
        "h2d_bytes": stats.h2d.nbytes,
        "d2h_busy_s": stats.d2h.busy_s,
        "h2d_busy_s": stats.h2d.busy_s,
    }


if __name__ == "__main__":
    sys.exit(main())
