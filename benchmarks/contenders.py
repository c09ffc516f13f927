"""The ways of training that are compared. Only the one that is Lowtide, and the counting pass, import it."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from benchmarks.jobs import Job
from benchmarks.models import Benchmark, set_checkpointing

LOWTIDE = ("lowtide", "swaps", "before")
_UNREACHED_BYTES = 1 << 40
_NAIVE_LEAST_BYTES = 1 << 20


def train_step(benchmark: Benchmark, module: nn.Module, optimizer: Optimizer, batch: tuple[Tensor, Tensor]) -> Tensor:
    """Run one ordinary training step."""
    inputs, targets = batch
    if benchmark.zero_first:
        optimizer.zero_grad()
    loss = benchmark.loss(module(inputs), targets)
    loss.backward()  # type: ignore[no-untyped-call]
    optimizer.step()
    if not benchmark.zero_first:
        optimizer.zero_grad()
    return loss.detach()


@dataclass(slots=True, kw_only=True)
class Session:
    """A training under way: how a step is done, its context, and what it has moved or counted so far."""

    step: Callable[[], AbstractContextManager[object]]
    train_step: Callable[[Benchmark, nn.Module, Optimizer, tuple[Tensor, Tensor]], Tensor] = field(default=train_step)
    moved_bytes: Callable[[], tuple[int, int]] = field(default=lambda: (0, 0))
    facts: Callable[[], dict[str, Any]] = field(default=dict)


def creation(job: Job) -> AbstractContextManager[object]:
    """Return the context in which the job's model is built."""
    if not job.created_inside:
        return nullcontext()
    import lowtide

    assert job.budget_bytes is not None, "Lowtide needs a budget"
    return lowtide.init(budget=job.budget_bytes, spill=job.spill)


@contextmanager
def open_session(job: Job, module: nn.Module, optimizer: Optimizer) -> Iterator[Session]:
    """Yield the job's way of training."""
    with ExitStack() as stack:
        match job.contender:
            case "stock" | "tcmalloc":
                session = Session(step=nullcontext)
            case "checkpoint":
                segments = set_checkpointing(module)
                session = Session(step=nullcontext, facts=lambda: {"segments": segments})
            case "naive":
                naive = stack.enter_context(NaiveSpill(Path(job.spill), module))
                session = Session(step=naive.step, moved_bytes=lambda: (naive.written_bytes, naive.read_bytes))
            case "lowtide" | "swaps" | "before":
                session = _lowtide(job, module, optimizer, stack)
            case other:
                raise ValueError(f"unknown contender {other!r}")
        if job.count_live and job.contender not in LOWTIDE:
            session = _counted(job, session, module, optimizer, stack)
        yield session


def _lowtide(job: Job, module: nn.Module, optimizer: Optimizer, stack: ExitStack) -> Session:
    import lowtide

    assert job.budget_bytes is not None, "Lowtide needs a budget"
    spill: Any = job.spill
    if job.disk_bytes_per_s is not None:
        from benchmarks.slow_disk import SlowDisk

        spill = SlowDisk(Path(job.spill), bytes_per_s=job.disk_bytes_per_s)
    settings: dict[str, Any] = {} if job.contender == "before" else {"policy": job.policy}
    if job.contender == "swaps":
        settings |= {"recompute": False, "codecs": []}
    tide = stack.enter_context(lowtide.fit(module, optimizer, budget=job.budget_bytes, spill=spill, **settings))

    def moved_bytes() -> tuple[int, int]:
        stats: dict[str, Any] = tide.stats()
        return stats["swapped_out_bytes"], stats["swapped_in_bytes"]

    def facts() -> dict[str, Any]:
        return {**_tide_facts(tide), **({} if job.contender == "before" else _plan_facts(tide))}

    return Session(step=tide.step, moved_bytes=moved_bytes, facts=facts)


def _counted(job: Job, session: Session, module: nn.Module, optimizer: Optimizer, stack: ExitStack) -> Session:
    import lowtide

    tide = stack.enter_context(lowtide.fit(module, optimizer, budget=_UNREACHED_BYTES, spill=job.spill))

    @contextmanager
    def step() -> Iterator[None]:
        with tide.step(), session.step():
            yield

    def facts() -> dict[str, Any]:
        # Only stock's trace says something about the model: the others save other things, or hide what they save.
        floor = _floor_facts(tide) if job.contender == "stock" else {}
        return {**session.facts(), **_tide_facts(tide), **floor}

    return Session(step=step, moved_bytes=session.moved_bytes, facts=facts)


def _tide_facts(tide: Any) -> dict[str, Any]:
    """Return what Lowtide counted."""
    stats = tide.stats()
    kept = ("budget_bytes", "budget_exact", "peak_bytes", "peak_reserved_bytes", "static_bytes", "stall_s", "steps")
    unmanaged = {str(what): count for what, count in dict(stats["unmanaged"]).items()}
    return {**{name: stats[name] for name in kept if name in stats}, "unmanaged": unmanaged}


def _plan_facts(tide: Any) -> dict[str, Any]:
    """Return what the plan of the last step does, and how much any plan has to move in the step, both ways together."""
    from lowtide.plan.costs.minimum import least_total_bytes

    stats = tide.stats()
    least_bytes = least_total_bytes(tide.trace(), budget_bytes=stats["budget_bytes"])
    counts = {name: stats[name] for name in ("planned_swaps", "planned_recomputes", "recompute_s", "last_step_stall_s")}
    plan = tide.plan()
    encoded = 0 if plan is None else sum(swap.codec != "identity" for swap in plan.swaps)
    return {
        "least_traffic_bytes": least_bytes,
        "planned_encoded": encoded,
        "recorded_s": tide.trace().duration_s,
        **counts,
    }


def _floor_facts(tide: Any) -> dict[str, Any]:
    """Return the smallest budget that the recorded step implies, and the operator that sets it."""
    trace = tide.trace()
    operator = trace.floor_op()
    return {"floor_bytes": trace.floor_bytes(), "floor_op": operator.name if operator is not None else ""}


@dataclass(frozen=True, slots=True, kw_only=True)
class _Slot:
    """Where a saved tensor lies in the file."""

    offset: int
    shape: tuple[int, ...]
    dtype: torch.dtype


class NaiveSpill:
    """What one writes in an afternoon: every large saved tensor goes to a file at once and comes back when asked for.

    Buffered and synchronous, without reuse of storages that several operators save. Parameters are left alone, because
    swapping them would be a mistake rather than naivety.
    """

    def __init__(self, directory: Path, module: nn.Module) -> None:
        self._path = directory / f"naive-{os.getpid()}"
        self._parameters = {parameter.untyped_storage().data_ptr() for parameter in module.parameters()}
        self._end = 0
        self.written_bytes = 0
        self.read_bytes = 0

    def __enter__(self) -> NaiveSpill:
        self._file = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        self._path.unlink()
        return self

    def __exit__(self, *_exception: object) -> None:
        os.close(self._file)

    def step(self) -> AbstractContextManager[object]:
        self._end = 0
        return torch.autograd.graph.saved_tensors_hooks(self._pack, self._unpack)

    def _pack(self, tensor: Tensor) -> Tensor | _Slot:
        if tensor.nbytes < _NAIVE_LEAST_BYTES or tensor.untyped_storage().data_ptr() in self._parameters:
            return tensor
        slot = _Slot(offset=self._end, shape=tuple(tensor.shape), dtype=tensor.dtype)
        data = _raw(tensor.detach().contiguous())
        done = 0
        while done < len(data):
            done += os.pwrite(self._file, data[done:], slot.offset + done)
        self._end += len(data)
        self.written_bytes += len(data)
        return slot

    def _unpack(self, packed: Tensor | _Slot) -> Tensor:
        if isinstance(packed, Tensor):
            return packed
        tensor = torch.empty(packed.shape, dtype=packed.dtype)
        data = _raw(tensor)
        done = 0
        while done < len(data):
            count = os.preadv(self._file, [data[done:]], packed.offset + done)
            if count == 0:
                raise OSError("the spill file ended early")
            done += count
        self.read_bytes += len(data)
        return tensor


def _raw(tensor: Tensor) -> memoryview:
    """Return the bytes of a contiguous tensor, without copying them."""
    data: memoryview = tensor.view(-1).view(torch.uint8).numpy().data
    return data
