"""Echo: what is cheap and large is made again, what GEMMs make never is."""

from __future__ import annotations

import pytest

from lowtide.plan.policies.echo import Echo
from lowtide.plan.views.layers import LayerKind, kind_of
from lowtide.plan.views.values import Values
from lowtide.testing.networks import Layer, network_trace
from tests.plan.policies.recomputing import peak_of, problem_of


def attention(*, steps: int = 4, joined: int = 1000, scores: int = 1000) -> list[Layer]:
    """Additive attention at each time step: a small query, scores of all pairs, a small result."""
    layers: list[Layer] = []
    for _ in range(steps):
        last = len(layers) - 1
        layers += [
            Layer(kind="linear", inputs=(last,), nbytes=100, duration_s=1.0),
            Layer(kind="gelu", inputs=(last + 1,), nbytes=joined, duration_s=0.01),
            Layer(kind="relu", inputs=(last + 2,), nbytes=scores, duration_s=0.01),
            Layer(kind="linear", inputs=(last + 3,), nbytes=100, duration_s=1.0),
        ]
    return layers


def test_scores_are_made_again_from_small_inputs_that_are_kept() -> None:
    trace = network_trace(attention(), input_bytes=100)
    problem = problem_of(trace, 0.9)
    plan = Echo().plan(problem)
    assert peak_of(plan, problem) <= problem.budget_bytes
    for one in plan.recomputes:
        assert trace.storages[one.gap.storage].nbytes == 1000
        assert all(kind_of(trace.ops[op]) is LayerKind.ACTIVATION for op in one.ops), "no GEMM runs again"
    assert plan.prediction is not None
    assert plan.prediction.recompute_s < 0.05 * trace.duration_s


def test_no_time_no_cones() -> None:
    problem = problem_of(network_trace(attention(), input_bytes=100), 0.9)
    assert not Echo(epsilon=0.0).accepted(problem, Values(problem))
    few, many = (len(Echo(epsilon=share).accepted(problem, Values(problem))) for share in (0.002, 0.05))
    assert 0 < few < many


@pytest.mark.parametrize(("joined", "accepted"), [(500, True), (1500, False)])
def test_a_cone_that_takes_more_than_it_frees_is_rejected(joined: int, accepted: bool) -> None:
    """What is joined is not stashed, so whoever is made from it has it made again as well."""
    layers = attention(steps=1, joined=joined)
    problem = problem_of(network_trace(layers, input_bytes=100), 0.9)
    values = Values(problem)
    scores = [k for k in values.waiting() if values.all[k].nbytes == 1000]
    assert (set(scores) <= Echo(epsilon=10.0).accepted(problem, values)) == accepted
