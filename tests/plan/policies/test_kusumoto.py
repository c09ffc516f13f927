"""Kusumoto et al.: the programme over lower sets, exact and approximate."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lowtide.plan.compose import compose
from lowtide.plan.policies.chen import ChenGreedy
from lowtide.plan.policies.kusumoto import Graph, Kusumoto, Programme, graph_of, lower_sets, moments_of
from lowtide.plan.views.values import Values
from lowtide.testing.shapes import unet_trace
from lowtide.testing.traces import chain_trace
from tests.plan.policies.recomputing import peak_of, problem_of


@st.composite
def graphs(draw: st.DrawFn) -> Graph:
    count = draw(st.integers(2, 6))
    sources = [draw(st.sets(st.integers(0, k - 1), min_size=1, max_size=3)) if k else set() for k in range(count)]
    return Graph(
        sources=tuple(tuple(sorted(one)) for one in sources),
        steps=tuple(draw(st.lists(st.integers(1, 4), min_size=count, max_size=count))),
        nbytes=tuple(draw(st.lists(st.integers(1, 9), min_size=count, max_size=count))),
    )


def chain(count: int) -> Graph:
    sources = tuple((k - 1,) if k else () for k in range(count))
    return Graph(sources=sources, steps=(1,) * count, nbytes=(10,) * count)


def all_sequences(programme: Programme, last: int = 0) -> Iterator[tuple[int, ...]]:
    """Yield every way from a set to the whole."""
    if last == len(programme.sets) - 1:
        yield ()
    for j in range(last + 1, len(programme.sets)):
        if not programme.sets[last] & ~programme.sets[j]:
            for rest in all_sequences(programme, j):
                yield (j, *rest)


@settings(max_examples=40, deadline=None, database=None)
@given(graph=graphs(), share=st.floats(0.5, 1.0))
def test_the_programme_finds_the_least_overhead_of_all_sequences(graph: Graph, share: float) -> None:
    programme = Programme(graph, lower_sets(graph, exact=True))
    limit = int(share * (4 * sum(graph.nbytes)))
    best = None
    for path in all_sequences(programme):
        overhead = sum(int(programme.overhead[i, j]) for i, j in zip((0, *path), path, strict=False))
        if programme.memory_bytes(path) <= limit:
            best = overhead if best is None else min(best, overhead)
    found = programme.solve(limit)
    assert (None if found is None else found.overhead) == best
    assert found is None or found.memory_bytes <= limit


@settings(max_examples=40, deadline=None, database=None)
@given(graph=graphs(), share=st.floats(0.4, 1.0))
def test_fewer_lower_sets_are_never_better(graph: Graph, share: float) -> None:
    limit = int(share * (4 * sum(graph.nbytes)))
    exact, fewer = (Programme(graph, lower_sets(graph, exact=one)).solve(limit) for one in (True, False))
    if fewer is not None:
        assert exact is not None
        assert exact.overhead <= fewer.overhead


@pytest.mark.parametrize("limit", [90, 110, 150, 200])
def test_on_chains_both_are_the_same(limit: int) -> None:
    exact, fewer = (Programme(chain(9), lower_sets(chain(9), exact=one)).solve(limit) for one in (True, False))
    assert (exact is None) == (fewer is None)
    assert exact is None or fewer is None or exact.overhead == fewer.overhead


def test_the_least_limit_has_a_sequence_and_less_has_none() -> None:
    programme = Programme(chain(12), lower_sets(chain(12), exact=False))
    least = programme.least_bytes()
    assert programme.solve(least) is not None
    assert programme.solve(int(0.97 * least)) is None


def test_it_beats_chen_where_there_are_no_articulation_points() -> None:
    problem = problem_of(unet_trace(3), 0.5)
    assert not ChenGreedy().plan(problem).recomputes
    plan, linearised = Kusumoto().plan(problem), ChenGreedy(linearised=True).plan(problem)
    peak_of(plan, problem)
    assert plan.prediction is not None
    assert linearised.prediction is not None
    assert plan.prediction.step_s < linearised.prediction.step_s


@pytest.mark.parametrize("exact", [True, False])
def test_the_replayed_peak_is_within_the_models(exact: bool) -> None:
    """The model counts what backward works on; what the trace has before any value waits is beside it."""
    trace = chain_trace(12, nbytes=100, duration_s=1.0)
    problem = problem_of(trace, 1.0)
    values = Values(problem)
    graph = graph_of(values)
    programme = Programme(graph, lower_sets(graph, exact=exact))
    for limit in (programme.least_bytes(), int(1.3 * programme.least_bytes())):
        found = programme.solve(limit)
        assert found is not None
        plan = compose("kusumoto", problem, (), values.discards(moments_of(values, found.sets)))
        assert peak_of(plan, problem) <= trace.static_bytes + found.memory_bytes <= trace.static_bytes + limit
