"""Who goes first when memory runs out under `dtr`: by what it costs to make it again, and not by age alone."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

import lowtide
from lowtide.core.plan import Plan, Problem
from lowtide.errors import BadArgument
from lowtide.memory.native.bindings import Place
from lowtide.plan.policies.dtr import Dtr
from lowtide.plan.policy import About, Family, Runs, View

MIB = 2**20
WIDTH = 512
STEPS = 8


class OfItsOwn:
    """A policy with an order that has no name."""

    name = "of_its_own"
    summary = "chooses victims itself"
    about = About(family=Family.BASELINE, runs=(Runs.SIMULATED,))

    def plan(self, problem: Problem) -> Plan:
        """Return a plan without decisions."""
        return Plan(policy=self.name, budget_bytes=problem.budget_bytes)

    def victims(self, view: View, need_bytes: int) -> Iterator[int]:
        """Give up everything."""
        return iter(view.evictable())


def test_an_order_that_has_no_name_is_refused_before_anything_is_opened(tmp_path: Path) -> None:
    with pytest.raises(BadArgument, match="'of_its_own' chooses victims itself"):
        lowtide.fit(budget=64 * MIB, spill=tmp_path, policy=OfItsOwn())
    with lowtide.fit(budget=64 * MIB, spill=tmp_path):
        pass


def places(heuristic: str, spill: Path) -> tuple[list[tuple[Place | None, Place | None]], int]:
    """Return where the results of a product and of a sum are in each step, once it ran out of memory.

    The product is older, costs a thousand times as much, and is of the same size.
    """
    found = []
    weight = torch.randn(WIDTH, WIDTH, requires_grad=True)
    with lowtide.fit(budget=9 * MIB, spill=spill, policy=Dtr(heuristic=heuristic)) as tide:
        for _ in range(STEPS):
            with tide.step():
                dear: Tensor = weight
                for _ in range(4):
                    dear = dear @ weight
                cheap = weight + 1.0
                more = [torch.zeros(WIDTH, WIDTH) for _ in range(6)]
                found.append((tide.memory.place(dear), tide.memory.place(cheap)))  # type: ignore[attr-defined]
                (dear.sum() + cheap.sum()).backward()  # type: ignore[no-untyped-call]
                weight.grad = None
                del dear, cheap, more
        return found[1:], int(str(tide.stats()["discarded_bytes"]))  # the first time, all that is given up is on trial


def test_what_is_cheap_to_make_goes_before_what_is_older(tmp_path: Path) -> None:
    found, discarded_bytes = places("msps", tmp_path)
    # Not in every step: on a busy machine a sum may be interrupted, and then it has taken longer than the product.
    assert (Place.HERE, Place.AWAY) in found
    assert discarded_bytes > 0


def test_by_age_the_older_goes_first(tmp_path: Path) -> None:
    found, discarded_bytes = places("lru", tmp_path)
    assert all(dear is Place.AWAY for dear, _ in found)
    assert discarded_bytes > 0
