"""`auto` swaps through a codec where that makes the step faster, by what was sampled of the values."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import Phase as HypothesisPhase
from hypothesis import given, settings
from hypothesis import strategies as st

from lowtide.core.machine import Link
from lowtide.core.plan import IDENTITY, CodecCost, Plan, Problem, Recompute, SampledRatio, Swap
from lowtide.core.trace import Gap, Kind, Phase, Trace
from lowtide.errors import PlanError
from lowtide.plan.auto.encode import ChosenCodecs
from lowtide.plan.costs.options import Choice, Options
from lowtide.plan.policies.auto import Auto
from lowtide.plan.verify import check_executable, replay
from lowtide.plan.verify.rounding import check_rounding
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


def chosen_codecs(problem: Problem) -> dict[Gap, str]:
    codecs = ChosenCodecs(problem, Options(problem))
    return {gap: codecs.of_gap(gap) for gap in problem.trace.gaps()}


def names(problem: Problem) -> set[str]:
    return set(chosen_codecs(problem).values()) - {"identity"}


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


def rounded(problem: Problem) -> list[Gap]:
    return [gap for gap, name in chosen_codecs(problem).items() if name == "lossy"]


def test_only_what_backward_alone_reads_again_is_rounded() -> None:
    problem = replace(on(resnet_trace(3), 1e8, codecs=(FAST, LOSSY)), max_error=2**-8)
    trace, touches = problem.trace, problem.trace.touches()
    gaps = rounded(problem)
    assert gaps
    for gap in gaps:
        later = [trace.ops[op].phase for op in touches[gap.storage] if op >= gap.before_op]
        assert later
        assert set(later) == {Phase.BACKWARD}
        assert trace.storages[gap.storage].kind is Kind.ACTIVATION


def test_plans_that_round_are_executable_and_others_are_refused() -> None:
    problem = replace(on(resnet_trace(3), 1e8, codecs=(FAST, LOSSY)), max_error=2**-8)
    plan = Auto().plan(problem)
    assert "lossy" in {swap.codec for swap in plan.swaps}
    check_executable(plan, problem)
    with pytest.raises(PlanError, match=r"V9: .* off by up to 0\.00391"):
        check_executable(plan, replace(problem, max_error=2**-9))
    gap = next(swap.gap for swap in plan.swaps if swap.codec == "lossy")
    ops = list(problem.trace.ops)
    last = problem.trace.touches()[gap.storage][-1]
    ops[last] = replace(ops[last], phase=Phase.FORWARD)
    with pytest.raises(PlanError, match=r"V9: .*only backward may"):
        check_executable(plan, replace(problem, trace=replace(problem.trace, ops=tuple(ops))))
    storages = list(problem.trace.storages)
    storages[gap.storage] = replace(storages[gap.storage], kind=Kind.GRAD)
    with pytest.raises(PlanError, match=r"V9: .*not an activation"):
        check_executable(plan, replace(problem, trace=replace(problem.trace, storages=tuple(storages))))


def test_what_runs_again_reads_every_bit() -> None:
    problem = replace(on(chain_trace(12), 2e8, 0.2, codecs=(LOSSY,)), max_error=2**-8)
    codecs = ChosenCodecs(problem, Options(problem))
    gap = rounded(problem)[0]
    swap = Swap(gap=gap, fetch_op=gap.before_op, codec="lossy")
    reader = next(op for op in problem.trace.touches()[gap.storage])
    again = Recompute(gap=gap, ops=(reader,))
    reads = replace(problem.trace.ops[reader], reads=(gap.storage,))
    trace = replace(problem.trace, ops=(*problem.trace.ops[:reader], reads, *problem.trace.ops[reader + 1 :]))
    assert codecs.without_rounded_recipes([swap], [], trace) == (swap,)
    assert codecs.without_rounded_recipes([swap], [again], trace) == (replace(swap, codec="identity"),)
    plan = Plan(policy="x", budget_bytes=problem.budget_bytes, swaps=(swap,), recomputes=(again,))
    with pytest.raises(PlanError, match=r"V9: .*which runs again, reads it"):
        check_rounding(plan, replace(problem, trace=trace))


def test_what_was_sampled_decides_for_a_storage() -> None:
    problem = on(chain_trace(6), 1e8, codecs=(replace(FAST, ratio=1.0), SLOW))
    storages = sorted({gap.storage for gap in problem.trace.gaps()})
    first, second = storages[:2]
    sampled = (
        SampledRatio(storage=first, codec="fast", ratio=0.1),
        SampledRatio(storage=second, codec="slow", ratio=1.0),
    )
    chosen = {gap.storage: name for gap, name in chosen_codecs(replace(problem, sampled=sampled)).items()}
    assert chosen[first] == "fast"
    assert chosen[second] == "identity"
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


def test_a_codec_without_a_core_of_its_own_has_to_gain_more_than_it_takes_from_operators() -> None:
    free = on(chain_trace(12), 2e8, codecs=(FAST,))
    plan = Auto().plan(free)
    codec_s = sum(
        Options(free).swap(free.trace.storages[swap.gap.storage].nbytes, tier="spill", codec=swap.codec).encode_s * 2
        for swap in plan.swaps
    )
    gained_s = Auto().plan(replace(free, codecs=(IDENTITY,))).prediction.step_s - plan.prediction.step_s
    assert gained_s > 0
    little, much = (replace(free, codec_drag=share * gained_s / codec_s) for share in (0.5, 1.5))
    assert {swap.codec for swap in Auto().plan(little).swaps} == {"fast"}
    assert {swap.codec for swap in Auto().plan(much).swaps} == {"identity"}
    dragged_s = simulate(little, plan).step_s - simulate(free, plan).step_s
    assert dragged_s == pytest.approx(0.5 * gained_s, rel=0.2), "some of it passes while the program waits"


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
@settings(max_examples=80, deadline=None, phases=[HypothesisPhase.generate])
def test_codecs_never_make_a_step_slower(problem: Problem) -> None:
    plain = replace(problem, codecs=(IDENTITY,), sampled=())
    before, after = Auto().plan(plain), Auto().plan(problem)
    assert replay(after, problem).step_s <= replay(before, plain).step_s * (1 + 1e-9)
    slower = simulate(problem, after).step_s / max(simulate(plain, before).step_s, 1e-12)
    assert slower <= 1 + 1e-9
    assert not {swap.codec for swap in after.swaps} & {"lossy"}
