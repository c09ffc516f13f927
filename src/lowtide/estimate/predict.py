"""How long an operator takes on a machine, from its floating-point operations and the bytes it touches.

By proportion, after Paleo (Qi et al., ICLR 2017): an operator reaches a share of the machine's peak, found once for a
platform. Compute and memory traffic overlap (a roofline), where Paleo adds them: `Shares(overlap=False)`. Symbols: F
and B are the machine's peaks, c and m the shares it reaches, f and n an operator's operations and bytes:

    t = max(f / (c F), n / (m B), launch)          Paleo: max(f / (c F) + n / (m B), launch)

A trace that was measured on one machine is scaled to another by the ratio of the two predictions, as Habitat does (Yu
et al., ATC 2021): what the model gets wrong on both cancels.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from lowtide.core.machine import Machine
from lowtide.core.trace import Op, Trace
from lowtide.errors import BadArgument


@dataclass(frozen=True, slots=True, kw_only=True)
class Shares:
    """The parts of a machine's peaks that operators reach, and the least time one takes.

    The defaults are assumptions of ours, of the order that tuned libraries reach on large operators; `fit_shares`
    replaces them where a measured trace is at hand.
    """

    compute: float = 0.6
    memory: float = 0.75
    launch_s: float = 5e-6
    overlap: bool = True
    """Whether an operator computes while it moves bytes; Paleo (ICLR 2017) has it do one after the other."""


# They return room, or a part of a table whose other rows they never touch.
_ALLOCATE = frozenset({"aten::empty_like", "aten::empty_strided", "aten::new_empty", "aten::new_empty_strided"})
_GATHER = frozenset({"aten::embedding", "aten::index_select", "aten::gather", "aten::index"})


def moved_bytes(name: str, *, read: Sequence[int], written: Sequence[int]) -> int:
    """Return the bytes an operator moves, from the sizes of what it reads and writes."""
    if name in _ALLOCATE:
        return 0
    if name in _GATHER:
        return 2 * sum(written)
    return sum(read) + sum(written)


def operator_s(flops: float, nbytes: int, machine: Machine, shares: Shares | None = None) -> float:
    """Return the time of an operator of so many operations that moves so many bytes."""
    shares = shares or Shares()
    peak_flops, peak_bytes = _peaks(machine)
    compute_s, memory_s = flops / (shares.compute * peak_flops), nbytes / (shares.memory * peak_bytes)
    return max(max(compute_s, memory_s) if shares.overlap else compute_s + memory_s, shares.launch_s)


def retime(
    trace: Trace, machine: Machine, *, measured_on: Machine | None = None, shares: Shares | None = None
) -> Trace:
    """Return the trace with the operator times of another machine.

    Without `measured_on`, times come from the model alone; the trace must know its operations then. With it, the
    trace's own times are scaled by what the model predicts for the two machines.
    """
    if measured_on is None and trace.ops and not any(op.flops for op in trace.ops):
        raise BadArgument(
            "the trace does not know its floating-point operations, so its times on another machine cannot be "
            "predicted: capture it again with 'lowtide capture', or name the machine it was measured on"
        )
    sizes = _op_bytes(trace)

    def modelled(index: int, op: Op) -> float:
        return operator_s(op.flops, sizes[index], machine, shares)

    def scaled(index: int, op: Op) -> float:
        assert measured_on is not None
        return op.duration_s * modelled(index, op) / operator_s(op.flops, sizes[index], measured_on, shares)

    return replace(with_durations(trace, modelled if measured_on is None else scaled), timed_for=machine.name)


def with_durations(trace: Trace, duration_s: Callable[[int, Op], float]) -> Trace:
    """Return the trace with other operator times; starts follow from them."""
    ops, start_s = [], 0.0
    for index, op in enumerate(trace.ops):
        taken_s = duration_s(index, op)
        ops.append(replace(op, start_s=start_s, duration_s=taken_s))
        start_s += taken_s
    return replace(trace, ops=tuple(ops))


def fit_shares(trace: Trace, machine: Machine, *, launch_s: float = 5e-6) -> Shares:
    """Return the shares of the machine's peaks that a trace measured on it reached.

    Operators that compute tell the share of compute, all others that of memory. A share above 1 means that the machine
    states less than it can do, or that operands were in its caches; it is kept, since it predicts what was seen.
    """
    peak_flops, peak_bytes = _peaks(machine)
    sizes = _op_bytes(trace)
    ideal_s, taken_s = [0.0, 0.0], [0.0, 0.0]
    for index, op in enumerate(trace.ops):
        if op.duration_s <= launch_s:
            continue
        computes = op.flops / peak_flops > sizes[index] / peak_bytes
        which = 0 if computes else 1
        ideal_s[which] += op.flops / peak_flops if computes else sizes[index] / peak_bytes
        taken_s[which] += op.duration_s
    default = Shares()
    compute = ideal_s[0] / taken_s[0] if ideal_s[0] and taken_s[0] else default.compute
    memory = ideal_s[1] / taken_s[1] if ideal_s[1] and taken_s[1] else default.memory
    return Shares(compute=compute, memory=memory, launch_s=launch_s)


def _op_bytes(trace: Trace) -> list[int]:
    """Return the bytes each operator moves; a view counts as its whole storage, for a trace knows storages only."""
    nbytes = [storage.nbytes for storage in trace.storages]
    return [
        moved_bytes(op.name, read=[nbytes[s] for s in op.reads], written=[nbytes[s] for s in op.writes])
        for op in trace.ops
    ]


def _peaks(machine: Machine) -> tuple[float, float]:
    if machine.flops_per_s is None or machine.memory_bytes_per_s is None:
        raise BadArgument(
            f"machine {machine.name!r} does not state how fast it computes: choose a preset, or run 'lowtide probe'"
        )
    return machine.flops_per_s, machine.memory_bytes_per_s
