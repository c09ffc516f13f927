"""A transfer in chunks through several stages: the formula against the pipeline it stands for, the best against all."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from lowtide.errors import BadArgument
from lowtide.estimate.predictors.overlap import PAGE_BYTES, Stage, best_chunks, pipeline_s

stages = st.builds(
    Stage,
    latency_s=st.sampled_from((0.0, 1e-6, 1e-5)) | st.floats(1e-7, 1e-2),
    bytes_per_s=st.sampled_from((1e9, 2e9)) | st.floats(1e6, 1e11),
)
pipelines = st.lists(stages, min_size=1, max_size=4)
sizes = st.integers(1, 300 * PAGE_BYTES)


def executed_s(nbytes: int, pipeline: Sequence[Stage], chunks: int) -> float:
    """Each stage takes a chunk as soon as it is done with the last one and the stage before is done with this one."""
    free_s = [0.0] * len(pipeline)
    for _ in range(chunks):
        at_s = 0.0
        for place, stage in enumerate(pipeline):
            at_s = free_s[place] = max(at_s, free_s[place]) + stage.seconds(nbytes / chunks)
    return free_s[-1]


@given(nbytes=sizes, pipeline=pipelines, chunks=st.integers(1, 40))
def test_the_formula_is_the_time_of_the_pipeline(nbytes: int, pipeline: list[Stage], chunks: int) -> None:
    assert pipeline_s(nbytes, pipeline, chunks=chunks) == pytest.approx(executed_s(nbytes, pipeline, chunks))


@given(nbytes=sizes, pipeline=pipelines, together=st.none() | st.lists(stages, min_size=1, max_size=3))
@settings(max_examples=300, deadline=None)
def test_no_number_of_chunks_is_better_than_the_best(
    nbytes: int, pipeline: list[Stage], together: list[Stage] | None
) -> None:
    every = [
        pipeline_s(nbytes, pipeline, chunks=chunks, together=together)
        for chunks in range(1, max(1, nbytes // PAGE_BYTES) + 1)
    ]
    best = best_chunks(nbytes, pipeline, together=together)
    assert every[best - 1] == pytest.approx(min(every), rel=1e-9)


@given(nbytes=st.integers(PAGE_BYTES, 10**10), slow=stages, others=st.lists(stages, max_size=3))
def test_where_one_stage_is_the_slowest_the_best_is_the_papers_square_root(
    nbytes: int, slow: Stage, others: list[Stage]
) -> None:
    assume(slow.latency_s > 0)
    assume(all(one.latency_s <= slow.latency_s and one.bytes_per_s >= slow.bytes_per_s for one in others))
    rule = math.sqrt(sum(nbytes / one.bytes_per_s for one in others) / slow.latency_s)
    assert abs(best_chunks(nbytes, [slow, *others], least_bytes=1) - min(max(rule, 1), nbytes)) <= 1


@given(nbytes=sizes, pipeline=pipelines, chunks=st.integers(1, 40))
def test_stages_that_share_everything_gain_nothing_by_chunks(nbytes: int, pipeline: list[Stage], chunks: int) -> None:
    one_engine = Stage(
        latency_s=sum(stage.latency_s for stage in pipeline),
        bytes_per_s=1 / sum(1 / stage.bytes_per_s for stage in pipeline),
    )
    whole_s = pipeline_s(nbytes, pipeline, chunks=1)
    assert pipeline_s(nbytes, pipeline, chunks=chunks, together=[one_engine]) >= whole_s * (1 - 1e-9)
    best = best_chunks(nbytes, pipeline, together=[one_engine])
    assert pipeline_s(nbytes, pipeline, chunks=best, together=[one_engine]) == pytest.approx(whole_s)


def test_chunks_that_cost_nothing_are_as_small_as_is_allowed() -> None:
    free = Stage(latency_s=0.0, bytes_per_s=1e9)
    assert best_chunks(1 << 20, [free, free], least_bytes=1 << 12) == 256
    assert best_chunks(100, [free, free]) == 1
    assert best_chunks(0, [free, free]) == 1
    # One stage has nothing to overlap with.
    assert best_chunks(1 << 20, [free]) == 1


def test_what_passes_nothing_on_is_refused() -> None:
    stage = Stage(latency_s=1e-5, bytes_per_s=1e9)
    with pytest.raises(BadArgument, match="0 chunks through 1 stages"):
        pipeline_s(1, [stage], chunks=0)
    with pytest.raises(BadArgument, match="1 chunks through 0 stages"):
        best_chunks(1, [])
    with pytest.raises(BadArgument, match="passes nothing on"):
        Stage(latency_s=0.0, bytes_per_s=0.0)
    with pytest.raises(BadArgument, match="passes nothing on"):
        Stage(latency_s=-1.0, bytes_per_s=1.0)
