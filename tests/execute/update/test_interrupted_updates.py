"""Faults in the middle of an update: no parameter and no moment is lost or half written."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lowtide
from lowtide.tiers import Direction, Fault, FaultKind, Faulty, FileMedium

WIDTH, LAYERS = 256, 8
BUDGET = 5 * 2**18  # the update of one parameter takes four times 256 KiB, all of them 8 MiB


class Interrupted(torch.optim.AdamW):
    """AdamW, which calls somebody before it updates its fifth parameter of a chosen step."""

    def __init__(self, parameters: Any, *, form: dict[str, bool], at: int, call: Callable[[], None]) -> None:
        super().__init__([{"params": [one]} for one in parameters], lr=1e-2, **form)
        self.steps, self.at, self.call = 0, at, call

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.steps += 1
        groups, self.param_groups = self.param_groups, []
        try:
            for index, group in enumerate(groups):
                if self.steps == self.at and index == 4:
                    self.at = 0
                    self.call()
                self.param_groups = [group]
                super().step()
        finally:
            self.param_groups = groups


def training(form: dict[str, bool], *, at: int, call: Callable[[], None]) -> tuple[nn.Module, Interrupted]:
    torch.manual_seed(3)
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)))
    return model, Interrupted(model.parameters(), form=form, at=at, call=call)


def one_step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model(torch.ones(8, WIDTH)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def state(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[Tensor]:
    moments = (value for one in optimizer.state.values() for value in one.values() if isinstance(value, Tensor))
    return [tensor.detach().clone() for tensor in (*model.parameters(), *moments)]


forms = pytest.mark.parametrize("form", [{"foreach": False}, {"foreach": True}, {"fused": True}], ids=str)


@forms
def test_ctrl_c_in_an_update_leaves_what_it_leaves_without_lowtide(form: dict[str, bool], tmp_path: Path) -> None:
    def press() -> None:
        signal.raise_signal(signal.SIGINT)

    def interrupted(step: Callable[[], Any] | None, model: nn.Module, optimizer: Interrupted) -> None:
        for _ in range(6):
            try:
                if step is None:
                    one_step(model, optimizer)
                else:
                    with step():
                        one_step(model, optimizer)
            except KeyboardInterrupt:
                optimizer.zero_grad()

    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a job in the background ignores it
    try:
        stock = training(form, at=4, call=press)
        interrupted(None, *stock)
        managed = training(form, at=4, call=press)
        with lowtide.fit(*managed, budget=BUDGET, spill=tmp_path) as tide:
            interrupted(tide.step, *managed)
            stats: dict[str, Any] = dict(tide.stats())
    finally:
        signal.signal(signal.SIGINT, before)
    assert stock[1].at == managed[1].at == 0, "nobody pressed"
    assert stats["swapped_out_bytes"] > 0
    assert all(torch.equal(a, b) for a, b in zip(state(*stock), state(*managed), strict=True))


def by_parameter(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[list[Tensor]]:
    return [
        [tensor.detach().clone() for tensor in (parameter, *optimizer.state[parameter].values())]
        for parameter in model.parameters()
    ]


@forms
@pytest.mark.parametrize(
    ("direction", "kind"),
    [(Direction.WRITE, FaultKind.ENOSPC), (Direction.WRITE, FaultKind.EIO), (Direction.READ, FaultKind.EIO)],
    ids=lambda one: one.name.lower(),
)
@pytest.mark.filterwarnings("ignore:lowtide. writing")
def test_a_disk_that_fails_in_an_update_loses_nothing(
    form: dict[str, bool], direction: Direction, kind: FaultKind, tmp_path: Path
) -> None:
    """From the fifth parameter of the fourth update on nothing goes through, until the error was told."""
    disk = Faulty(FileMedium([tmp_path]), script=())

    def fail() -> None:
        disk.script = (Fault(direction=direction, nth=1, kind=kind, lasting=True),)

    managed, done = training(form, at=4, call=fail), 0
    with lowtide.fit(*managed, budget=BUDGET, spill=disk, policy="lru") as tide:
        with pytest.raises((lowtide.BudgetTooSmall, lowtide.SpillError), match=os.strerror(getattr(errno, kind.name))):
            for _ in range(6):
                with tide.step():
                    one_step(*managed)
                done += 1
        assert disk.fired
        disk.script = ()
    assert done == 3, "it failed in another update than the fourth"
    stock = training(form, at=0, call=lambda: None)
    for _ in range(3):
        one_step(*stock)
    old = by_parameter(*stock)
    one_step(*stock)
    new, found = by_parameter(*stock), by_parameter(*managed)

    def same(some: list[Tensor], others: list[Tensor]) -> bool:
        return all(torch.equal(a, b) for a, b in zip(some, others, strict=True))

    # One parameter may be half updated, as it may be where stock PyTorch runs out of memory in an update.
    updated = next(index for index in range(LAYERS) if not same(found[index], new[index]))
    assert updated >= 4
    assert all(same(found[index], old[index]) for index in range(updated + 1, LAYERS))


KILLED = f"""
    import os, signal, sys
    import torch
    import lowtide
    sys.path.insert(0, {str(Path(__file__).parents[3])!r})
    from tests.execute.update.test_interrupted_updates import one_step, training

    def die():
        print(tide.stats()["swapped_out_bytes"], sorted(os.listdir(sys.argv[1])), flush=True)
        os.kill(os.getpid(), signal.SIGKILL)

    managed = training({{"foreach": True}}, at=4, call=die)
    with lowtide.fit(*managed, budget={BUDGET}, spill=sys.argv[1]) as tide:
        for _ in range(6):
            with tide.step():
                one_step(*managed)
"""


def test_a_process_killed_in_an_update_leaves_nothing_behind(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(KILLED), str(tmp_path)], capture_output=True, text=True, check=False
    )
    assert done.returncode == -signal.SIGKILL, done.stderr
    assert int(done.stdout.split()[0]) > 0, "nothing was away when it was killed"
    assert list(tmp_path.iterdir()) == []
