"""`auto` swaps through a codec where that makes the step faster, by what was sampled of the values."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from lowtide.core.machine import Link
from lowtide.core.plan import IDENTITY, CodecCost, Problem, SampledRatio
from lowtide.core.trace import Trace
from lowtide.plan.auto.encode import best_codecs
from lowtide.plan.costs.options import Choice, Options
from lowtide.plan.policies.auto import Auto
from lowtide.plan.verify import replay
from lowtide.simulate import simulate
from lowtide.testing.shapes import resnet_trace, transformer_trace, unet_trace
from lowtide.testing.traces import chain_trace, machine_of, problems, touched_traces, traces
from tests.plan.policies.recomputing import problem_of

FAST = CodecCost(name="fast", encode_bytes_per_s=20e9, decode_bytes_per_s=20e9, ratio=0.5)
SLOW = CodecCost(name="slow", encode_bytes_per_s=0.2e9, decode_bytes_per_s=0.6e9, ratio=0.25)
LOSSY = CodecCost(name="lossy", encode_bytes_per_s=20e9, decode_bytes_per_s=20e9, ratio=0.1, error_bound=2**-8)


def on(trace: Trace, bytes_per_s: float, share: float = 0.5, *, codecs: tuple[CodecCost, ...] = ()) -> Problem:
    link = Link(write_bytes_per_s=bytes_per_s, read_bytes_per_s=bytes_per_s)
    problem = replace(problem_of(trace, share), machine=machine_of(link))
    return replace(problem, codecs=(IDENTITY, *codecs))


def names(problem: Problem) -> set[str]:
    return set(best_codecs(problem, Options(problem)).values())


def test_a_codec_has_to_save_more_than_it_takes() -> None:
    # 2 s / B > 1 / Ce + 1 / Cd: with s = 3/4, 200 and 600 MB/s that is B < 225 MB/s.
    trace = chain_trace(6)
    assert names(on(trace, 220e6, codecs=(SLOW,))) == {"slow"}
    assert names(on(trace, 230e6, codecs=(SLOW,))) == set()
    assert names(on(trace, 50e6, codecs=(SLOW, FAST))) == {"slow"}, "on a slow link it saves more"
    assert names(on(trace, 200e6, codecs=(SLOW, FAST))) == {"fast"}


def test_rounding_is_for_those_who_ask_for_it() -> None:
    problem = on(chain_trace(6), 1e8, codecs=(FAST, LOSSY))
    assert names(problem) == {"fast"}
    assert names(replace(problem, max_error=2**-9)) == {"fast"}
    assert names(replace(problem, max_error=2**-8)) == {"lossy"}


def test_what_was_sampled_decides_for_a_storage() -> None:
    problem = on(chain_trace(6), 1e8, codecs=(replace(FAST, ratio=1.0), SLOW))
    storages = sorted({gap.storage for gap in problem.trace.gaps()})
    first, second = storages[:2]
    sampled = (
        SampledRatio(storage=first, codec="fast", ratio=0.1),
        SampledRatio(storage=second, codec="slow", ratio=1.0),
    )
    chosen = best_codecs(replace(problem, sampled=sampled), Options(replace(problem, sampled=sampled)))
    assert chosen[first] == "fast"
    assert second not in chosen
    assert {chosen[storage] for storage in storages[2:]} == {"slow"}
    gap = next(gap for gap in problem.trace.gaps() if gap.storage == first)
    nbytes = problem.trace.storages[first].nbytes
    rows = Options(replace(problem, sampled=sampled)).of(gap)
    left = {row.codec: row.link_bytes for row in rows if row.choice is Choice.SWAP}
    assert left == {"identity": nbytes, "fast": round(nbytes * 0.1), "slow": round(nbytes * 0.25)}


@pytest.mark.parametrize("trace", [chain_trace(12), resnet_trace(3), unet_trace(3), transformer_trace(2)])
def test_a_slow_link_makes_auto_encode_and_the_step_faster(trace: Trace) -> None:
    plain = on(trace, 2e8)
    coded = replace(plain, codecs=(IDENTITY, FAST))
    before, after = Auto().plan(plain), Auto().plan(coded)
    assert {swap.codec for swap in after.swaps} == {"fast"}
    assert "through fast" in after.notes[0]
    assert replay(after, coded).step_s < replay(before, plain).step_s
    assert simulate(coded, after).step_s < simulate(plain, before).step_s


def test_a_fast_link_is_left_alone() -> None:
    trace = chain_trace(12)
    plan = Auto().plan(on(trace, 1e13, codecs=(FAST, SLOW)))
    assert plan.swaps
    assert {swap.codec for swap in plan.swaps} == {"identity"}


@st.composite
def with_codecs(draw: st.DrawFn) -> Problem:
    source = touched_traces(max_ops=14, max_storages=8) if draw(st.booleans()) else traces()
    problem = draw(problems(source, can_recompute=draw(st.booleans())))
    sampled = tuple(
        SampledRatio(storage=storage, codec=codec, ratio=draw(st.floats(0.0, 1.5)))
        for storage in sorted({gap.storage for gap in problem.trace.gaps()})
        for codec in ("fast", "slow")
        if draw(st.booleans())
    )
    return replace(problem, codecs=(IDENTITY, FAST, SLOW, LOSSY), sampled=sampled)


@given(problem=with_codecs())
@settings(max_examples=80, deadline=None, phases=[Phase.generate])
def test_codecs_never_make_a_step_slower(problem: Problem) -> None:
    plain = replace(problem, codecs=(IDENTITY,), sampled=())
    before, after = Auto().plan(plain), Auto().plan(problem)
    assert replay(after, problem).step_s <= replay(before, plain).step_s * (1 + 1e-9)
    slower = simulate(problem, after).step_s / max(simulate(plain, before).step_s, 1e-12)
    assert slower <= 1 + 1e-9
    assert not {swap.codec for swap in after.swaps} & {"lossy"}
