"""A step runs again what its plan says, no less: what is simulated is what happens."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

import lowtide
from lowtide.core.plan import Plan, Problem, Recompute, Swap
from lowtide.core.timeline import Lane
from lowtide.execute.tide.tide import Tide
from lowtide.plan.compose import compose
from lowtide.plan.policy import About, Family, Runs, View, until_covered
from lowtide.plan.views.lineage import Lineage
from lowtide.simulate import simulate

WIDTH = 256
LAYERS = 4


class SwapFirstDiscardSecond:
    """Swaps what one layer makes and discards what the next makes of it: its recipe leads over what is away."""

    name = "swap_first_discard_second"
    summary = "swaps one, discards another that is made from it"
    about = About(family=Family.RECOMPUTE, runs=(Runs.REAL,), recomputes=True)

    def plan(self, problem: Problem) -> Plan:
        """Return the plan."""
        trace = problem.trace
        lineage = Lineage(trace)
        saved = [gap for gap in trace.gaps() if lineage.producer(gap.storage) is not None]
        first, second = sorted(saved, key=lambda gap: gap.after_op)[:2]
        absent = {first.storage, second.storage}
        ops = lineage.recipe(
            [second.storage], available=lambda one: one not in absent and alive(problem, one, second.before_op)
        )
        assert ops is not None
        swaps = [Swap(gap=first, fetch_op=first.before_op)]
        return compose(self.name, problem, swaps, [Recompute(gap=second, ops=ops)])

    def victims(self, view: View, need_bytes: int) -> Iterator[int]:
        """Give up what was used least recently."""
        return until_covered(sorted(view.evictable(), key=view.last_access), view, need_bytes)


def alive(problem: Problem, storage: int, op: int) -> bool:
    found = problem.trace.storages[storage]
    return found.first_op < op <= found.last_op


def wait_for_writes(tide: Tide, written_bytes: int) -> None:
    """Wait until that much has left, however busy the disk is: what has not is kept, and neither read nor made."""
    deadline_s = time.monotonic() + 60
    while int(str(tide.stats()["swapped_out_bytes"])) < written_bytes:
        assert time.monotonic() < deadline_s, "nothing leaves"
        os.sched_yield()


def gradients(weights: list[Tensor], inputs: Tensor, tide: Tide | None, *, leaving_bytes: int = 0) -> list[Tensor]:
    """Run a step; `leaving_bytes` are to be on the disk before its backward pass begins."""
    for weight in weights:
        weight.grad = None
    before = 0 if tide is None else int(str(tide.stats()["swapped_out_bytes"]))

    def step() -> None:
        value = inputs
        for weight in weights:
            value = (value * weight).sigmoid()
        if tide is not None:
            wait_for_writes(tide, before + leaving_bytes)
        value.sum().backward()

    if tide is None:
        step()
    else:
        with tide.step():
            step()
    return [weight.grad for weight in weights if weight.grad is not None]


def test_what_is_away_is_made_again_where_the_plan_says_so_and_not_read(tmp_path: Path) -> None:
    torch.manual_seed(0)
    weights = [torch.randn(WIDTH, requires_grad=True) for _ in range(LAYERS)]
    inputs = torch.randn(1024, WIDTH)
    stock = gradients(weights, inputs, None)
    with lowtide.fit(budget="16MiB", spill=tmp_path, policy=SwapFirstDiscardSecond()) as tide:
        for index in range(4):
            before = tide.stats()
            managed = gradients(weights, inputs, tide, leaving_bytes=1024 * WIDTH * 4 if index == 3 else 0)
            assert all(torch.equal(one, other) for one, other in zip(stock, managed, strict=True))
        after, plan = tide.stats(), tide.plan()
        problem = Problem(trace=tide.trace(), machine=tide.machine, budget_bytes=16 << 20, can_recompute=True)
    assert plan is not None
    ran = int(str(after["recomputed_ops"])) - int(str(before["recomputed_ops"]))
    assert ran == len(plan.recomputes[0].ops) == 4, "the second layer's two operators, and the first layer's"
    timeline = simulate(problem, plan)
    assert ran == sum(span.lane is Lane.RECOMPUTE for span in timeline.spans)
    moved = int(str(after["swapped_in_bytes"])) - int(str(before["swapped_in_bytes"]))
    assert moved == timeline.moved_in_bytes == 1024 * WIDTH * 4


def in_place(tensor: Tensor) -> None:
    tensor.mul_(2.0)


def through_data(tensor: Tensor) -> None:
    tensor.data.mul_(2.0)


def on_another_thread(tensor: Tensor) -> None:
    thread = threading.Thread(target=tensor.mul_, args=(2.0,))
    thread.start()
    thread.join()


@pytest.mark.parametrize("change", [in_place, through_data, on_another_thread])
def test_what_is_away_is_read_where_it_could_not_be_made_again(
    change: Callable[[Tensor], None], tmp_path: Path
) -> None:
    """An operand of the first layer changes between forward and backward: its product is read after all."""
    torch.manual_seed(0)
    weights = [torch.randn(WIDTH, requires_grad=True) for _ in range(LAYERS)]
    other = torch.randn(1024, WIDTH)

    def step(index: int) -> list[Tensor]:
        for weight in weights:
            weight.grad = None
        added = torch.full((1024, WIDTH), 0.5)
        value = added + weights[0]
        for weight in weights:
            value = (value + other * weight).sigmoid()
        if index >= 4:
            change(added)
        value.sum().backward()
        return [weight.grad for weight in weights if weight.grad is not None]

    stock = [step(index) for index in range(6)]
    with lowtide.fit(budget="24MiB", spill=tmp_path, policy=SwapFirstDiscardSecond()) as tide:
        for index in range(6):
            with tide.step():
                managed = step(index)
            for one, found in zip(stock[index], managed, strict=True):
                assert torch.equal(one, found), f"step {index} differs"
        assert int(str(tide.stats()["recomputed_ops"])) > 0
