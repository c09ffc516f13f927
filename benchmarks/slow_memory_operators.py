"""Times operators with operands in imitated slow memory against the model: python -m benchmarks.slow_memory_operators

Each operator runs with all operands in fast memory and with some of them in slow memory, in turn. The model is the one
that plans are made with (plan/costs/operator_times.py), from the constants that the imitation was opened with. Medians.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional

from lowtide.core.machine import Machine
from lowtide.core.plan import Problem
from lowtide.core.trace import Kind, Op, Phase, Reach, Storage, Trace
from lowtide.core.units import format_rate
from lowtide.execute.tide.opening import open_ranges
from lowtide.memory.budget import Budgets
from lowtide.plan.costs.operator_times import OperatorTimes

MIB = 2**20


@dataclass(frozen=True, slots=True)
class Case:
    """An operator: what it reads, what it writes, and which of these (by number, reads first) are in slow memory."""

    title: str
    name: str
    run: Callable[[], object]
    reads: tuple[Tensor, ...]
    writes: tuple[Tensor, ...]
    slow: tuple[int, ...]


def cases() -> list[Case]:
    """Return operators that stream, that compute, and that gather."""
    x, y, out = (torch.ones(8 * MIB) for _ in range(3))
    a, b, product = torch.ones(1024, 1024), torch.ones(1024, 1024), torch.empty(1024, 1024)
    table, rows = torch.ones(64 * 1024, 256), torch.arange(0, 64 * 1024, 8)
    return [
        Case("sum, read", "aten::sum", lambda: torch.sum(x), (x,), (), (0,)),
        Case("add, one operand read", "aten::add", lambda: torch.add(x, y, out=out), (x, y, out), (out,), (0,)),
        Case("add, both read", "aten::add", lambda: torch.add(x, y, out=out), (x, y, out), (out,), (0, 1)),
        Case("fill, written", "aten::fill_", lambda: out.fill_(1), (out,), (out,), (0, 1)),
        Case(
            "matrix product, both read",
            "aten::mm",
            lambda: torch.mm(a, b, out=product),
            (a, b, product),
            (product,),
            (0, 1),
        ),
        Case(
            "matrix product, one read",
            "aten::mm",
            lambda: torch.mm(a, b, out=product),
            (a, b, product),
            (product,),
            (0,),
        ),
        Case(
            "embedding of an eighth", "aten::embedding", lambda: functional.embedding(rows, table), (table,), (), (0,)
        ),
    ]


def modelled(case: Case, machine: Machine, duration_s: float) -> float:
    """Return what plans take the operator for."""
    tensors = list({id(one): one for one in (*case.reads, *case.writes)}.values())
    number = {id(one): index for index, one in enumerate(tensors)}
    storages = [Storage(nbytes=one.nbytes, kind=Kind.INPUT, first_op=-1, last_op=1) for one in tensors]
    writes = [number[id(one)] for one in case.writes]
    if case.name == "aten::embedding":  # what it makes
        storages.append(Storage(nbytes=8192 * 256 * 4, kind=Kind.SCRATCH, first_op=0, last_op=0, producer=0))
        writes.append(len(storages) - 1)
    op = Op(
        name=case.name,
        phase=Phase.FORWARD,
        start_s=0.0,
        duration_s=duration_s,
        peak_bytes=0,
        reads=tuple(number[id(one)] for one in case.reads),
        writes=tuple(writes),
    )
    trace = Trace(ops=(op,), storages=tuple(storages), saves=(), static_bytes=0, reach=Reach.TOUCHED)
    problem = Problem(trace=trace, machine=machine, budget_bytes=1, tier="slow", tiers=("slow",), can_place=True)
    operands = (*case.reads, *case.writes)
    slow = {number[id(operands[index])]: ("slow", operands[index].nbytes) for index in case.slow}
    return OperatorTimes(problem).of(0, slow)


def median_s(run: Callable[[], object], times: int, other: Tensor) -> float:
    """Return the median time of several calls, each after a pass over other memory: nothing is left in a cache."""
    run()
    taken = []
    for _ in range(times):
        other.add_(1)
        begun_s = time.perf_counter()
        run()
        taken.append(time.perf_counter() - begun_s)
    return statistics.median(taken)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--slow", default="cxl:?emulate=optane")
    parser.add_argument("--times", type=int, default=15)
    options = parser.parse_args()
    lines = ["| operator | in fast memory | in slow memory | the model | off by |", "|---|---:|---:|---:|---:|"]
    with tempfile.TemporaryDirectory() as spill:
        opened = open_ranges(Budgets(fast_bytes=1 << 30), spill=Path(spill), slow=options.slow)
        memory = opened.memory
        memory.open(1 << 30)
        memory.announce(True)
        other = torch.zeros(32 * MIB)
        try:
            for case in cases():
                fast_s = median_s(case.run, options.times, other)
                operands = (*case.reads, *case.writes)
                for index in set(case.slow):
                    memory.native.place_in(operands[index]._cdata, memory.first_tier)
                memory.native.settle()
                slow_s = median_s(case.run, options.times, other)
                for index in set(case.slow):
                    memory.native.fetch(operands[index]._cdata)
                memory.native.settle()
                expected_s = modelled(case, opened.machine, fast_s)
                lines.append(
                    f"| {case.title} | {fast_s * 1e3:.2f} ms | {slow_s * 1e3:.2f} ms | {expected_s * 1e3:.2f} ms | "
                    f"{slow_s / expected_s - 1:+.1%} |"
                )
        finally:
            memory.close()
    access, fast = opened.machine.links["slow"].access, opened.machine.memory_bytes_per_s
    assert access is not None
    assert fast is not None
    print(f"fast memory {format_rate(fast)}, slow memory read {format_rate(access.read_bytes_per_s)}, written ", end="")
    print(f"{format_rate(access.write_bytes_per_s)}\n\n" + "\n".join(lines))
    return 0


if __name__ == "__main__":
    sys.exit(main())
