"""The ways of training on a device that are compared. Only one of them is Lowtide."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

from torch import nn
from torch.autograd.graph import save_on_cpu
from torch.optim import Optimizer

from benchmarks.accelerator_jobs import DeviceJob
from benchmarks.accelerator_offload import OneBlockAhead
from benchmarks.models import set_checkpointing


@dataclass(slots=True, kw_only=True)
class Session:
    """A training under way: the context of each step, bytes asked to move so far (None: not told), other facts."""

    step: Callable[[], AbstractContextManager[object]]
    moved_bytes: Callable[[], tuple[int, int] | None] = field(default=lambda: None)
    facts: Callable[[], dict[str, Any]] = field(default=dict)


@contextmanager
def open_session(job: DeviceJob, module: nn.Module, optimizer: Optimizer) -> Iterator[Session]:
    """Yield the job's way of training."""
    with ExitStack() as stack:
        match job.contender:
            case "unmanaged":
                yield Session(step=nullcontext, moved_bytes=lambda: (0, 0))
            case "checkpoint":
                segments = set_checkpointing(module)
                yield Session(step=nullcontext, moved_bytes=lambda: (0, 0), facts=lambda: {"segments": segments})
            case "save_on_cpu":
                # Without the device's name it asks CUDA whether memory can be pinned, and then pins none.
                yield Session(step=lambda: save_on_cpu(pin_memory=True, device_type="sim"))
            case "one_block_ahead":
                ahead = stack.enter_context(OneBlockAhead(module))
                yield Session(
                    step=ahead.step,
                    moved_bytes=lambda: (ahead.out_bytes, ahead.back_bytes),
                    facts=lambda: {"blocks": ahead.blocks, "pinned_bytes": ahead.pinned_bytes},
                )
            case "lowtide":
                yield _lowtide(job, module, optimizer, stack)
            case other:
                raise ValueError(f"unknown contender {other!r}")


def _lowtide(job: DeviceJob, module: nn.Module, optimizer: Optimizer, stack: ExitStack) -> Session:
    import lowtide

    assert job.budget_bytes is not None, "Lowtide needs a budget"
    budget: dict[str, int | str] = {"device": job.budget_bytes, "cpu": job.host_bytes}
    tide = stack.enter_context(
        lowtide.fit(
            module, optimizer, budget=budget, spill=job.spill, policy=job.policy, recompute=job.recompute or None
        )
    )

    def moved_bytes() -> tuple[int, int]:
        stats: dict[str, Any] = tide.stats()
        return stats["swapped_out_bytes"], stats["swapped_in_bytes"]

    return Session(step=tide.step, moved_bytes=moved_bytes, facts=lambda: _facts(tide))


def _facts(tide: Any) -> dict[str, Any]:
    """Return what Lowtide counted, and what its plan expected."""
    stats = tide.stats()
    kept = ("budget_bytes", "budget_exact", "peak_bytes", "peak_reserved_bytes", "stall_s")
    device = ("host_peak_bytes", "disk_written_bytes", "planned_recomputes", "recomputed_ops", "recompute_s")
    unmanaged = {str(what): count for what, count in dict(stats["unmanaged"]).items()}
    prediction = tide.plan().prediction
    trace = tide.trace()
    return {
        **{name: stats[name] for name in (*kept, *device) if name in stats},
        "unmanaged": unmanaged,
        "floor_bytes": trace.floor_bytes(),
        "recorded_s": sum(op.duration_s for op in trace.ops),
        "predicted_step_s": prediction.step_s,
        "predicted_stall_s": prediction.stall_s,
        "planned_out_bytes": prediction.moved_out_bytes,
        "planned_in_bytes": prediction.moved_in_bytes,
    }
