from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lowtide.core.plan import Plan, Problem
from lowtide.core.trace import Kind, Phase, Storage, Trace
from lowtide.plan.verify import check
from lowtide.plan.views.lineage import Lineage, alive_when, replayable
from lowtide.testing.networks import INPUT, Layer, network_trace, networks
from lowtide.testing.plans import plans
from lowtide.testing.traces import Step, chain_trace, make_trace, problems

CHAIN = chain_trace(6)


def steps_of(*steps: tuple[str, tuple[int, ...], tuple[int, ...]], last: int = 9) -> Trace:
    """Operators with reads and writes; a storage is made by its first writer and stays."""
    made = [
        Step(name=name, phase=Phase.FORWARD, duration_s=1.0, reads=reads, writes=writes)
        for name, reads, writes in steps
    ]
    count = 1 + max(storage for _, reads, writes in steps for storage in (*reads, *writes))
    first = [
        next((index for index, (_, _, writes) in enumerate(steps) if storage in writes), -1) for storage in range(count)
    ]
    storages = [
        Storage(
            nbytes=10,
            kind=Kind.ACTIVATION if first[storage] >= 0 else Kind.INPUT,
            first_op=first[storage],
            last_op=last,
            producer=first[storage] if first[storage] >= 0 else None,
        )
        for storage in range(count)
    ]
    return make_trace(made, storages, ())


def everything(storage: int) -> bool:
    return True


def nothing(storage: int) -> bool:
    return False


def test_a_recipe_goes_back_to_what_is_in_memory() -> None:
    lineage = Lineage(CHAIN)
    assert lineage.recipe([4], available=everything) == (4,)
    assert lineage.recipe([4], available=lambda storage: storage == 1) == (2, 3, 4)
    assert lineage.recipe([2, 4], available=lambda storage: storage != 3) == (2, 3, 4)


def test_a_recipe_that_is_too_long_is_none() -> None:
    lineage = Lineage(CHAIN)
    assert lineage.recipe([5], available=nothing, most_ops=5) is None
    assert lineage.recipe([5], available=nothing, most_ops=6) == (0, 1, 2, 3, 4, 5)


def test_what_the_step_was_given_cannot_be_made() -> None:
    trace = steps_of(("aten::mul", (0,), (1,)), ("aten::mul", (1,), (2,)))
    lineage = Lineage(trace)
    assert lineage.producer(0) is None
    assert lineage.recipe([2], available=nothing) is None
    assert lineage.recipe([2], available=lambda storage: storage == 0) == (0, 1)


@pytest.mark.parametrize("name", ["aten::native_dropout", "aten::bernoulli_", "aten::rand_like", "aten::normal_"])
def test_random_operators_cannot_run_again(name: str) -> None:
    trace = steps_of((name, (0,), (1,)))
    assert not replayable(trace.ops[0])
    assert Lineage(trace).recipe([1], available=everything) is None


def test_an_operator_in_place_runs_again_on_what_its_recipe_made() -> None:
    trace = steps_of(("aten::native_batch_norm", (0,), (1,)), ("aten::relu_", (1,), (1,)), ("aten::mul", (1,), (2,)))
    lineage = Lineage(trace)
    assert lineage.producer(1) is None, "no single operator makes it"
    assert lineage.makers(1) == (0, 1)
    assert lineage.recipe([1], available=lambda storage: storage == 0) == (0, 1)
    assert lineage.recipe([2], available=lambda storage: storage == 0) == (0, 1, 2)


def test_a_storage_is_made_as_its_reader_saw_it() -> None:
    # Storage 2 was made from 1 before 1 changed: the change is no part of its recipe.
    trace = steps_of(("aten::mul", (0,), (1,)), ("aten::mul", (1,), (2,)), ("aten::relu_", (1,), (1,)))
    assert Lineage(trace).recipe([2], available=lambda storage: storage == 0) == (0, 1)


def test_an_operand_in_memory_that_has_changed_since_is_no_operand() -> None:
    trace = steps_of(("aten::mul", (0,), (1,)), ("aten::add_", (0,), (0,)), ("aten::mul", (1,), (2,)))
    lineage = Lineage(trace)
    assert lineage.recipe([1], available=everything) is None
    assert lineage.recipe([1], available=everything, before_op=1) == (0,), "the change is still to come"


def test_an_operator_that_changes_somebody_elses_storage_cannot_run_again() -> None:
    trace = steps_of(("aten::mul", (0,), (1,)), ("aten::mul", (0, 1), (1, 2)))
    assert Lineage(trace).recipe([2], available=everything) is None


def test_parameters_are_as_they_were_until_the_update() -> None:
    layers = [
        Layer(kind="linear", inputs=(INPUT,), param_bytes=100),
        Layer(kind="gelu", inputs=(0,)),
        Layer(kind="linear", inputs=(1,), param_bytes=100),
    ]
    trace = network_trace(layers)
    made = trace.ops[0].writes[0]
    assert Lineage(trace).recipe([made], available=everything) == (0,)
    assert Lineage(trace).recipe([made], available=everything, before_op=len(trace.ops)) is None


@given(problem=problems(can_recompute=True) | problems(networks(), can_recompute=True), data=st.data())
@settings(max_examples=100, deadline=None)
def test_every_recipe_passes_the_verifier(problem: Problem, data: st.DataObject) -> None:
    plan: Plan = data.draw(plans(problem))
    check(replace(plan, budget_bytes=1 << 50), replace(problem, budget_bytes=1 << 50))


def test_a_storage_is_alive_from_the_operator_after_its_first_to_its_last() -> None:
    assert [op for op in range(8) if alive_when(chain_trace(4), 1, op)] == [2, 3, 4, 5, 6]
