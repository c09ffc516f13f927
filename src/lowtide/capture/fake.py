"""A trace of a step that never runs: shapes flow through it, bytes do not.

The step runs on fake tensors, which have sizes and devices but no memory, under a dispatch mode (`watch.py`) that
writes the same log as the native observer (`ledger.py`). So the same builder makes the trace, and a model far larger
than this machine is captured in seconds. What the log cannot have: an operator's time, which `estimate.predict` puts in
from its floating-point operations and bytes; and scratch memory inside an operator, which no fake tensor shows.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace

import torch
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode
from torch.autograd.graph import saved_tensors_hooks

from lowtide.capture.builder import build_trace
from lowtide.capture.ledger import Ledger
from lowtide.capture.schema import is_operator
from lowtide.capture.training import Training
from lowtide.capture.watch import Watch
from lowtide.core.machine import Machine
from lowtide.core.trace import Kind, Reach, Trace
from lowtide.errors import BadArgument
from lowtide.estimate.predict import Shares, operator_s, with_durations
from lowtide.estimate.presets import machine as preset_machine

# As in an unmanaged capture: what is smaller is not worth moving, and autograd's save of it is not recorded.
LEAST_BYTES = 256 << 10


def capture_fake(
    make: Callable[[], Training],
    *,
    machine: Machine | None = None,
    shares: Shares | None = None,
    steps: int = 2,
    least_bytes: int = LEAST_BYTES,
    reach: Reach = Reach.SAVED,
) -> Trace:
    """Return the trace of a training step without executing it.

    `make` builds the model, its batch and its optimizer, and returns them as a `Training`; it is called on fake
    tensors, so neither it nor the step may look at values. Operator times are those predicted for `machine` (default:
    the preset "cpu"). The last of `steps` steps is kept. `reach`: what its executor could move, either what autograd
    saves (saves of fewer than `least_bytes` are not recorded) or every storage of `least_bytes` or more.
    """
    machine = machine or preset_machine("cpu")
    if steps < 1:
        raise BadArgument(f"{steps} steps are too few to record: pass 1 or more")
    ledger = Ledger(least_bytes=least_bytes)
    try:
        with FakeTensorMode():
            training = make()
            watch = Watch(ledger)
            for _, tensor in _tensors_of(training):
                ledger.serial_of(tensor)
            with watch, _following(ledger, training, reach), watch.scopes(training.model):
                for _ in range(steps - 1):
                    training.step()
                gc.collect()  # a cycle that an earlier step left behind is not part of this one
                ledger.start(reach=reach)
                training.step()
                watch.follow_backward()
                ledger.recording = False
            trace = _build(ledger, training, reach=reach, least_bytes=least_bytes)
    except DataDependentOutputException as error:
        raise BadArgument(
            f"the step looks at a tensor's values ({error}), which a capture without executing does not have: "
            "capture it by running it"
        ) from error
    ops = tuple(replace(op, flops=flops) for op, flops in zip(trace.ops, watch.flops, strict=True))
    return with_durations(
        replace(trace, ops=ops, timed_for=machine.name),
        lambda index, op: operator_s(op.flops, watch.moved_bytes[index], machine, shares),
    )


@contextmanager
def _following(ledger: Ledger, training: Training, reach: Reach) -> Iterator[None]:
    """Let the ledger see which tensors are gradients, and what autograd saves where the executor takes that."""
    parameters = [tensor for kind, tensor in _tensors_of(training) if kind is Kind.PARAM and tensor.requires_grad]
    with ExitStack() as stack:
        if reach is Reach.SAVED:
            stack.enter_context(saved_tensors_hooks(ledger.pack, ledger.unpack))
        for parameter in parameters:
            handle = parameter.register_post_accumulate_grad_hook(  # type: ignore[no-untyped-call]  # torch's
                lambda tensor: ledger.note_gradient(tensor.grad)
            )
            stack.callback(handle.remove)
        yield


def _build(ledger: Ledger, training: Training, *, reach: Reach, least_bytes: int) -> Trace:
    kinds = dict.fromkeys(ledger.gradient_serials, Kind.GRAD)
    for kind, tensor in _tensors_of(training):
        kinds.setdefault(ledger.serial_of(tensor), kind)
    recorded = build_trace(
        ledger.entries,
        list(ledger.names),
        static_bytes=ledger.static_bytes,
        end_ns=0,
        is_operator=is_operator,
        kinds=kinds,
        model="" if training.model is None else type(training.model).__name__,
        torch_version=torch.__version__,
        reach=reach,
        least_bytes=least_bytes if reach is Reach.TOUCHED else 0,
    )
    return recorded.trace


def _tensors_of(training: Training) -> Iterator[tuple[Kind, torch.Tensor]]:
    """Yield what a training holds between steps, with its kind."""
    if training.model is not None:
        yield from ((Kind.PARAM, parameter) for parameter in training.model.parameters())
        yield from ((Kind.BUFFER, buffer) for buffer in training.model.buffers())
        yield from ((Kind.GRAD, p.grad) for p in training.model.parameters() if p.grad is not None)
    if training.optimizer is not None:
        for group in training.optimizer.param_groups:
            yield from ((Kind.PARAM, parameter) for parameter in group["params"])
            yield from ((Kind.GRAD, parameter.grad) for parameter in group["params"] if parameter.grad is not None)
        for state in training.optimizer.state.values():
            yield from ((Kind.OPTIMIZER, value) for value in state.values() if isinstance(value, torch.Tensor))
