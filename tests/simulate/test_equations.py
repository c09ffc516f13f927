"""The survey's equations notice what breaks them, and the simulator asks them after every event."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from lowtide.core.machine import Link
from lowtide.core.plan import Plan, Problem, Recompute, Swap
from lowtide.core.trace import Gap
from lowtide.plan.policies.lru import Lru
from lowtide.simulate import simulate
from lowtide.simulate.equations import Equations
from lowtide.simulate.remake import Recipe, Remaker
from lowtide.simulate.state import State
from lowtide.simulate.traffic import Traffic
from lowtide.testing.traces import chain_trace, machine_of, training_trace

TRACE = chain_trace(4, nbytes=100, duration_s=1.0)
PROBLEM = Problem(
    trace=TRACE, machine=machine_of(Link(write_bytes_per_s=200.0, read_bytes_per_s=200.0)), budget_bytes=300
)
PLAN = Plan(policy="one", budget_bytes=300, swaps=(Swap(gap=Gap(storage=0, after_op=2, before_op=7), fetch_op=6),))


def equations(op: int = 2) -> Equations:
    """Return the account at an operator: layers up to it have made their outputs, 100 bytes each."""
    account = Equations(TRACE, 300, dict.fromkeys((0, 1, 2), 100))
    account.reach(op)
    return account


def test_1_what_swaps_out_was_on_the_device() -> None:
    account = equations()
    account.out(0)
    with pytest.raises(AssertionError, match=r"\(1\) storage 0"):
        account.out(0)
    with pytest.raises(AssertionError, match=r"\(1\) storage 3"):
        account.out(3)


def test_1_what_is_allocated_enters_the_device_and_what_is_freed_leaves_it() -> None:
    account = equations(0)
    assert account.device == {0}
    with pytest.raises(AssertionError, match=r"\(1\) storage 1"):
        account.out(1)
    account.reach(3)
    assert account.device == {0, 1, 2, 3}
    account.out(0)
    assert account.device == {1, 2, 3}
    # Operators 4 and 5 are the last to touch the outputs of layers 3 and 2, and free them.
    account.reach(6)
    assert account.device == {1}
    account.fits(6, 200, 100)
    with pytest.raises(AssertionError, match=r"\(5\) operator 3 needs \{2, 3\}"):
        account.begins(3, ())


def test_1_what_was_freed_is_not_in_storage() -> None:
    account = equations(3)
    account.out(2)
    account.fits(3, 400, 300)
    account.reach(6)
    with pytest.raises(AssertionError, match=r"\(1\), \(2\) \{2\} were freed and are in storage"):
        account.fits(6, 200, 200)
    account.released(2)
    account.fits(6, 200, 200)


def test_1_another_step_finds_what_the_first_one_found() -> None:
    trace = training_trace(2, nbytes=100, activation_bytes=100)
    account = Equations(trace, 10_000, dict.fromkeys(range(len(trace.storages)), 100))
    found = account.device
    account.reach(len(trace.ops) - 1)
    made = account.device
    assert made > found
    account.out(0)
    account.reach(0)
    assert account.device == (found - {0}) | {s for s, block in enumerate(trace.storages) if block.first_op == 0}


def test_2_what_swaps_in_was_in_storage() -> None:
    account = equations()
    with pytest.raises(AssertionError, match=r"\(2\) storage 0"):
        account.begins_to_come(0)
    with pytest.raises(AssertionError, match=r"\(2\) storage 0"):
        account.back(0)
    account.out(0)
    account.begins_to_come(0)
    with pytest.raises(AssertionError, match="twice"):
        account.begins_to_come(0)
    account.back(0)
    assert (account.device, account.storage) == ({0, 1, 2}, set())


def test_3_what_is_on_the_device_is_counted_and_fits() -> None:
    account = equations()
    account.fits(2, 300, 300)
    with pytest.raises(AssertionError, match=r"\(3\) operator 2: 300 bytes are counted alive and 301 are"):
        account.fits(2, 301, 300)
    account.reach(3)
    with pytest.raises(AssertionError, match=r"\(3\) operator 3: 400 bytes are alive, 300 may be"):
        account.fits(3, 400, 400)
    account.out(0)
    account.fits(3, 400, 300)
    account.begins_to_come(0)
    with pytest.raises(AssertionError, match=r"\(3\)"):
        account.fits(3, 400, 300)


def test_4_and_5_what_an_operator_needs_is_on_the_device() -> None:
    account = equations()
    account.out(0)
    account.begins(2, ())
    with pytest.raises(AssertionError, match=r"\(4\) operator 7"):
        account.begins(7, ())
    account.begins_to_come(0)
    with pytest.raises(AssertionError, match=r"\(4\) operator 6"):
        account.begins(6, (0,))


def test_5_what_makes_something_again_finds_its_predecessors_on_the_device_or_makes_them() -> None:
    account = equations(3)
    account.out(1)
    account.out(2)
    account.run_again([1, 2])  # layer 1 reads layer 0's output, which is there, and layer 2 what layer 1 has made
    with pytest.raises(AssertionError, match=r"\(5\) operator 2 runs again and needs \{1\}"):
        account.run_again([2])
    account.out(0)
    with pytest.raises(AssertionError, match=r"\(5\) operator 1 runs again and needs \{0\}"):
        account.run_again([1, 2])
    account.run_again([0, 1, 2])


def test_a_simulator_that_runs_too_little_again_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """The plan makes the output of layer 2 from that of layer 0; its recipe loses the operator between them."""
    discarded = tuple(
        Recompute(gap=Gap(storage=k, after_op=after, before_op=5), ops=ops)
        for k, after, ops in ((1, 3, (1, 2)), (2, 4, (1, 2)))
    )
    plan = Plan(policy="again", budget_bytes=400, recomputes=discarded)
    problem = replace(PROBLEM, budget_bytes=400, can_recompute=True)
    assert simulate(problem, plan, strict=True).recompute_s == 2.0
    recipe = Remaker.recipe

    def short(self: Remaker, *arguments: Any, **options: Any) -> Recipe:
        return replace(recipe(self, *arguments, **options), ops=(2,))

    monkeypatch.setattr(Remaker, "recipe", short)
    with pytest.raises(AssertionError, match=r"\(5\) operator 2 runs again"):
        simulate(problem, plan, strict=True)


def test_a_simulator_that_forgets_to_wait_for_a_read_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Traffic, "read_now", lambda self, record, clock_s, cause: clock_s)
    with pytest.raises(AssertionError, match=r"\(4\) operator 7"):
        simulate(PROBLEM, None, policy=Lru(), strict=True)


def test_a_simulator_that_frees_memory_before_the_write_has_landed_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    ask = Traffic.ask_write

    def early(self: Traffic, record: object, asked_s: float, *, cause: str) -> None:
        ask(self, record, asked_s, cause=cause)  # type: ignore[arg-type]
        self._state.gone(record, asked_s)  # type: ignore[arg-type]

    monkeypatch.setattr(Traffic, "ask_write", early)
    with pytest.raises(AssertionError, match=r"\(1\) storage 0"):
        simulate(PROBLEM, PLAN, strict=True)


def test_a_simulator_that_loses_count_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    claim = State.claim

    def forgetful(self: State, record: object) -> None:
        claim(self, record)  # type: ignore[arg-type]
        self.away_bytes += 100

    monkeypatch.setattr(State, "claim", forgetful)
    with pytest.raises(AssertionError, match=r"\(3\)"):
        simulate(PROBLEM, PLAN, strict=True)
