"""The survey's equations notice what breaks them, and the simulator asks them after every event."""

from __future__ import annotations

import pytest

from lowtide.core.machine import Link
from lowtide.core.plan import Plan, Problem, Swap
from lowtide.core.trace import Gap
from lowtide.plan.policies.lru import Lru
from lowtide.simulate import simulate
from lowtide.simulate.equations import Equations
from lowtide.simulate.state import State
from lowtide.simulate.traffic import Traffic
from lowtide.testing.traces import chain_trace, machine_of

TRACE = chain_trace(4, nbytes=100, duration_s=1.0)
PROBLEM = Problem(
    trace=TRACE, machine=machine_of(Link(write_bytes_per_s=200.0, read_bytes_per_s=200.0)), budget_bytes=300
)
PLAN = Plan(policy="one", budget_bytes=300, swaps=(Swap(gap=Gap(storage=0, after_op=2, before_op=7), fetch_op=6),))


def equations() -> Equations:
    return Equations(TRACE, 300, dict.fromkeys((0, 1, 2), 100))


def test_1_what_swaps_out_was_on_the_device() -> None:
    account = equations()
    account.out(0)
    with pytest.raises(AssertionError, match=r"\(1\) storage 0"):
        account.out(0)
    with pytest.raises(AssertionError, match=r"\(1\) storage 3"):
        account.out(3)


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
