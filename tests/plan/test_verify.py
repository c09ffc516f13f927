from __future__ import annotations

import re
from dataclasses import replace

import pytest

from lowtide.core.machine import Link, Machine
from lowtide.core.plan import IDENTITY, CodecCost, Plan, Prediction, Problem, Recompute, Swap
from lowtide.core.trace import Gap, Kind, Phase, Reach, Storage, Trace
from lowtide.errors import PlanError
from lowtide.plan import verify
from lowtide.plan.verify import clock, pages, places, recipes, shape, spans
from lowtide.testing.traces import Step, chain_trace, machine_of, make_trace, training_trace

# Four layers of 100 bytes, a second forward and two back; 100 bytes take 0.5 s on the link. The gaps are those of
# storage 0 in [2, 7), 1 in [3, 6) and 2 in [4, 5).
TRACE = chain_trace(4, nbytes=100, duration_s=1.0)
LINK = Link(write_bytes_per_s=200.0, read_bytes_per_s=200.0)
PROBLEM = Problem(trace=TRACE, machine=machine_of(LINK), budget_bytes=300)


def swap(storage: int, after_op: int, before_op: int, fetch_op: int | None = None) -> Swap:
    gap = Gap(storage=storage, after_op=after_op, before_op=before_op)
    return Swap(gap=gap, fetch_op=before_op if fetch_op is None else fetch_op)


def plan_of(*swaps: Swap, prediction: Prediction | None = None) -> Plan:
    return Plan(policy="test", budget_bytes=300, swaps=swaps, prediction=prediction)


GOOD = plan_of(swap(0, 2, 7, 6))


def test_a_sound_plan_passes_and_is_replayed_as_worked_out_by_hand() -> None:
    verify.check(GOOD, PROBLEM)
    seen = verify.replay(GOOD, PROBLEM)
    assert seen == verify.Replay(peak_bytes=300, step_s=12.0, stall_s=0.0, moved_out_bytes=100, moved_in_bytes=100)


def test_a_swap_on_demand_waits_for_its_read() -> None:
    assert verify.replay(plan_of(swap(0, 2, 7)), PROBLEM).stall_s == pytest.approx(0.5)


def test_an_operator_waits_for_writes_that_hold_its_memory() -> None:
    assert verify.replay(plan_of(swap(0, 3, 7, 6)), PROBLEM).stall_s == pytest.approx(0.5)


def test_writes_share_the_link_in_the_order_of_their_operators() -> None:
    # Both are asked for when operator 3 begins, where 400 bytes are alive: one has landed after 0.5 s, both after 1 s.
    both = plan_of(swap(0, 3, 7, 6), swap(1, 3, 6, 5))
    early = tuple(replace(op, peak_bytes=min(200, op.peak_bytes)) for op in TRACE.ops[:3])
    trace = replace(TRACE, ops=early + TRACE.ops[3:])
    for budget_bytes, stall_s in ((300, 0.5), (200, 1.0)):
        problem = replace(PROBLEM, trace=trace, budget_bytes=budget_bytes)
        assert verify.replay(both, problem).stall_s == pytest.approx(stall_s)


def test_a_prefetch_that_finds_no_room_is_put_off_and_takes_nothing_from_operators() -> None:
    # Asked for at operator 3, where 300 of 300 bytes are alive, and at 4; it fits beside operator 5 and is in time.
    seen = verify.replay(plan_of(swap(0, 2, 7, 3)), PROBLEM)
    assert seen.peak_bytes == 300
    assert seen.stall_s == 0


def test_a_link_that_is_not_duplex_makes_reads_wait_for_writes() -> None:
    # The read of storage 0 and the write of storage 1 are both asked for at 3 s; operator 4 wants storage 0 at 4 s.
    link = Link(write_bytes_per_s=100.0, read_bytes_per_s=200.0)
    both = plan_of(swap(0, 2, 4, 3), swap(1, 3, 6, 5))
    roomy = replace(PROBLEM, budget_bytes=400)
    shared = verify.replay(both, replace(roomy, machine=machine_of(link)))
    duplex = verify.replay(both, replace(roomy, machine=machine_of(replace(link, duplex=True))))
    assert (shared.stall_s, duplex.stall_s) == (pytest.approx(0.5), 0.0)


def test_v1_a_storage_that_does_not_exist() -> None:
    with pytest.raises(PlanError, match=r"V1: storage 9 does not exist: the trace has 4 storages"):
        verify.check(plan_of(swap(9, 2, 7)), PROBLEM)


@pytest.mark.parametrize("bad", [(0, 1, 7), (0, 2, 8), (1, 2, 6), (3, 4, 5), (2, 3, 4), (0, 7, 7)])
def test_v1_a_span_that_is_in_no_gap(bad: tuple[int, int, int]) -> None:
    with pytest.raises(PlanError, match=r"V1: .* is in no gap of its storage"):
        verify.check(plan_of(swap(*bad)), PROBLEM)


def test_v1_a_tier_that_the_machine_does_not_have() -> None:
    with pytest.raises(PlanError, match=r"V1: .* tier 'tape'"):
        verify.check(plan_of(replace(swap(0, 2, 7), tier="tape")), PROBLEM)
    with pytest.raises(PlanError, match=r"the machine has \[\]"):
        verify.check(GOOD, replace(PROBLEM, machine=replace(PROBLEM.machine, links={})))


def test_v1_a_codec_without_known_cost() -> None:
    with pytest.raises(PlanError, match=r"V1: .* codec 'zstd'"):
        verify.check(plan_of(replace(swap(0, 2, 7), codec="zstd")), PROBLEM)


@pytest.mark.parametrize("fetch_op", [-1, 2, 8])
def test_v2_a_read_outside_of_its_gap(fetch_op: int) -> None:
    with pytest.raises(PlanError, match=rf"V2: .* fetched at operator {fetch_op}: .* after 2 and not after 7"):
        verify.check(plan_of(swap(0, 2, 7, fetch_op)), PROBLEM)


@pytest.mark.parametrize("second", [(0, 2, 7), (0, 3, 5), (0, 4, 7), (0, 5, 7)])
def test_v3_two_swaps_of_one_storage_that_overlap_or_touch(second: tuple[int, int, int]) -> None:
    with pytest.raises(PlanError, match=r"V3: .* overlap"):
        verify.check(plan_of(swap(0, 2, 5), swap(*second)), PROBLEM)


def test_v3_two_swaps_of_one_storage_with_an_operator_between_are_sound() -> None:
    verify.check(plan_of(swap(0, 2, 5), swap(0, 6, 7)), replace(PROBLEM, budget_bytes=400))


def test_v4_an_operator_that_does_not_fit_is_named_with_numbers() -> None:
    expected = r"V4: operator 3 'layer3' needs 400 bytes .* 100 more than the budget of 300"
    with pytest.raises(PlanError, match=expected):
        verify.check(plan_of(), PROBLEM)


def test_v4_a_swap_that_ends_too_soon_does_not_help_what_follows() -> None:
    with pytest.raises(PlanError, match=r"V4: operator 4 "):
        verify.check(plan_of(swap(0, 2, 4)), PROBLEM)


def test_v4_a_swap_that_starts_too_late_does_not_help_what_came_before() -> None:
    with pytest.raises(PlanError, match=r"V4: operator 3 "):
        verify.check(plan_of(swap(0, 4, 7)), PROBLEM)


class WrongTrace(Trace):
    """A trace that claims a gap in which the storage is needed."""

    def gaps(self) -> tuple[Gap, ...]:
        return (Gap(storage=0, after_op=1, before_op=7), Gap(storage=1, after_op=3, before_op=7))


@pytest.mark.parametrize(("bad", "op"), [(swap(0, 1, 7), 1), (swap(1, 3, 7), 6)], ids=("operand", "unpacked"))
def test_v5_an_operand_that_is_away_when_its_operator_begins(bad: Swap, op: int) -> None:
    ops = tuple(replace(one, reads=()) if one.name == "layer1.backward" else one for one in TRACE.ops)
    wrong = WrongTrace(ops=ops, storages=TRACE.storages, saves=TRACE.saves, static_bytes=0)
    with pytest.raises(PlanError, match=rf"V5: operator {op} .* needs storage {bad.gap.storage}"):
        verify.check(plan_of(bad), replace(PROBLEM, trace=wrong, budget_bytes=400))


@pytest.mark.parametrize(("out", "back"), [(100, 0), (0, 100), (200, 200)])
def test_v6_a_prediction_that_does_not_conserve_bytes(out: int, back: int) -> None:
    claim = Prediction(peak_bytes=300, step_s=12.0, stall_s=0.0, moved_out_bytes=out, moved_in_bytes=back)
    with pytest.raises(PlanError, match=rf"V6: the plan predicts {out} bytes out and {back} in"):
        verify.check(replace(GOOD, prediction=claim), PROBLEM)


def test_v6_a_link_that_reads_before_the_write_has_landed() -> None:
    replaying = clock._Replay(GOOD, PROBLEM, {})
    trip = replaying.trips[0]
    trip.landed_s = 3.0
    with pytest.raises(PlanError, match=r"V6: .* is read 1.000000 s before its write lands"):
        replaying._begin_read(trip, begin_s=2.0)


def test_v6_a_storage_that_never_comes_back_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    def forget(self: clock._Replay, trip: clock._Trip) -> float:
        self.away_bytes -= trip.nbytes
        return self.clock_s

    monkeypatch.setattr(clock._Replay, "_return", forget)
    with pytest.raises(PlanError, match=r"V6: 100 bytes have to come back and 0 do"):
        verify.check(plan_of(swap(0, 2, 7)), PROBLEM)


@pytest.mark.parametrize("landed_op", [2, 8])
def test_v2_a_barrier_for_the_write_outside_of_its_gap(landed_op: int) -> None:
    with pytest.raises(PlanError, match=rf"V2: .* operator {landed_op} wait for its write: .* after 2 and not after 7"):
        verify.check(plan_of(replace(swap(0, 2, 7), landed_op=landed_op)), PROBLEM)


@pytest.mark.parametrize("arrived_op", [4, 8])
def test_v2_a_barrier_for_the_read_before_its_request_or_after_its_use(arrived_op: int) -> None:
    with pytest.raises(PlanError, match=rf"V2: .* operator {arrived_op} wait for its read: .* from 5, .* to 7"):
        verify.check(plan_of(replace(swap(0, 2, 7, 5), arrived_op=arrived_op)), PROBLEM)


AGAIN = replace(PROBLEM, can_recompute=True)


def again(storage: int, after_op: int, before_op: int, *ops: int) -> Plan:
    gap = Gap(storage=storage, after_op=after_op, before_op=before_op)
    return replace(plan_of(), recomputes=(Recompute(gap=gap, ops=ops),))


def test_v7_a_sound_recomputation_passes() -> None:
    seen = verify.replay(again(0, 2, 7, 0), AGAIN)
    assert seen == verify.Replay(
        peak_bytes=300, step_s=13.0, stall_s=0.0, moved_out_bytes=0, moved_in_bytes=0, recompute_s=1.0
    )


def test_v7_recomputation_where_nobody_can_run_operators_again() -> None:
    with pytest.raises(PlanError, match=r"V7: .* and 0 more ask .* \(can_recompute is false\)"):
        verify.check(again(0, 2, 7, 0), PROBLEM)


def test_v1_and_v3_hold_for_recomputations_too() -> None:
    with pytest.raises(PlanError, match=r"V1: the recomputation of storage 0 in operators 1 to 7 is in no gap"):
        verify.check(again(0, 1, 7, 0), AGAIN)
    both = replace(again(0, 4, 7, 0), swaps=(swap(0, 2, 4),))
    with pytest.raises(PlanError, match=r"V3: the swap .* and the recomputation .* overlap"):
        verify.check(both, AGAIN)


@pytest.mark.parametrize(
    ("ops", "complaint"),
    [
        ((), "none of which makes it"),
        ((1,), "none of which makes it"),
        ((7,), "operator 7, which has not run before 7"),
        ((-1, 0), "operator -1, which has not run"),
        ((1, 0), "not in ascending order"),
        ((0, 0), "not in ascending order"),
    ],
)
def test_v7_a_list_of_operators_that_cannot_be_a_recipe(ops: tuple[int, ...], complaint: str) -> None:
    with pytest.raises(PlanError, match=f"V7: .* {complaint}"):
        verify.check(again(0, 2, 7, *ops), AGAIN)


def test_v7_an_operand_that_is_not_in_memory() -> None:
    # Storage 1 is made from storage 0, which is away until operator 7.
    away = replace(again(1, 3, 6, 1), swaps=(swap(0, 2, 7),))
    with pytest.raises(
        PlanError, match=r"V7: .* operator 1 'layer1' again before 6, which reads storage 0, .* neither"
    ):
        verify.check(away, AGAIN)
    verify.check(replace(again(1, 3, 6, 0, 1), swaps=(swap(0, 2, 7),)), AGAIN)
    verify.check(replace(again(1, 3, 6, 1), swaps=(swap(0, 2, 6),)), AGAIN)


def test_v7_an_operand_that_is_only_discarded_together_has_to_be_made() -> None:
    # Storage 0 is never asked for again and is discarded until operator 6, for which storage 1 is made from it.
    trace = replace(
        TRACE,
        saves=(replace(TRACE.saves[0], uses=(), released_op=6), *TRACE.saves[1:]),
        ops=tuple(replace(op, reads=()) if index == 7 else op for index, op in enumerate(TRACE.ops)),
    )
    first, second = again(0, 2, 6), again(1, 3, 6, 1)
    with pytest.raises(PlanError, match=r"V7: .* reads storage 0, which is neither in memory nor made before it"):
        verify.check(replace(first, recomputes=(*first.recomputes, *second.recomputes)), replace(AGAIN, trace=trace))


def changed(index: int, **changes: object) -> Problem:
    ops = tuple(replace(op, **changes) if k == index else op for k, op in enumerate(TRACE.ops))
    return replace(AGAIN, trace=replace(TRACE, ops=ops))


def test_v7_an_operator_that_draws_random_numbers() -> None:
    with pytest.raises(PlanError, match=r"V7: .* 'aten::native_dropout' again before 6, which draws random numbers"):
        verify.check(again(1, 3, 6, 1), changed(1, name="aten::native_dropout"))


def test_v7_an_operator_that_leaves_bytes_unset() -> None:
    with pytest.raises(PlanError, match=r"V7: .* 'aten::empty_like' again before 6, which leaves part of"):
        verify.check(again(1, 3, 6, 1), changed(1, name="aten::empty_like"))


def test_v7_an_operator_that_writes_what_was_there_before() -> None:
    with pytest.raises(PlanError, match=r"V7: .* which writes storage 0, which existed before it"):
        verify.check(again(1, 3, 6, 1), changed(1, writes=(0, 1)))


def test_v7_an_operand_that_has_changed_since() -> None:
    # Operator 2 changes storage 0, from which operator 1 made storage 1.
    problem = changed(2, reads=(0, 1), writes=(0, 2))
    with pytest.raises(PlanError, match=r"V7: .* reads storage 0, which operator 2 has changed since"):
        verify.check(again(1, 3, 6, 1), problem)


def test_v7_a_storage_that_was_changed_in_place_needs_all_its_writers() -> None:
    # Operator 2 changes storage 1 in place: what operator 1 makes is not yet what was there.
    problem = changed(2, reads=(1,), writes=(1, 2))
    with pytest.raises(PlanError, match=r"V7: .* needs storage 1 as it was before operator 6, .* run operator 2 again"):
        verify.check(again(1, 3, 6, 1), problem)
    verify.check(again(1, 3, 6, 1, 2), problem)


def test_v4_recomputation_that_does_not_fit_is_named() -> None:
    # Operator 0 takes 200 bytes of scratch. There is room for that when it first runs and before operator 7, where 100
    # bytes are alive, and not before operator 5.
    problem = changed(0, peak_bytes=300)
    verify.check(again(0, 2, 7, 0), problem)
    with pytest.raises(PlanError, match=r"V4: operator 5 .*, with what runs again before it, needs 500 bytes"):
        verify.check(again(0, 2, 5, 0), problem)


def test_v5_a_discarded_operand_is_noticed() -> None:
    wrong = WrongTrace(ops=TRACE.ops, storages=TRACE.storages, saves=TRACE.saves, static_bytes=0)
    with pytest.raises(
        PlanError, match=r"V5: operator 1 .* needs storage 0, which is not in memory \(it was discarded\)"
    ):
        verify.check(again(0, 1, 7, 0), replace(AGAIN, trace=wrong, budget_bytes=400))


def test_a_storage_that_autograd_never_asks_for_is_written_and_not_read() -> None:
    unused = replace(TRACE.saves[0], uses=())
    ops = tuple(replace(op, reads=()) if op.name == "layer0.backward" else op for op in TRACE.ops)
    trace = replace(TRACE, saves=(unused, *TRACE.saves[1:]), ops=ops)
    seen = verify.replay(plan_of(swap(0, 2, 7)), replace(PROBLEM, trace=trace))
    assert (seen.moved_out_bytes, seen.moved_in_bytes, seen.stall_s) == (100, 0, 0.0)


def test_the_verifier_shares_no_code_with_the_policies() -> None:
    # What an option costs by itself is said once, in the table that all clocks price from.
    shared = ("lowtide.plan.verify", "lowtide.plan.costs.options", "lowtide.plan.costs.operator_times")
    for module in (verify, clock, pages, places, recipes, shape, spans):
        source = module.__spec__.loader.get_source(module.__name__)  # type: ignore[union-attr]
        imported = re.findall(r"^(?:from|import) (lowtide\.plan\S*)", source, flags=re.MULTILINE)
        assert all(name.startswith(shared) for name in imported), module.__name__


# ---- steps whose pages move ----

PAGES = training_trace(2, nbytes=100, activation_bytes=50, duration_s=1.0, update_s=1.0)
PAGED = Problem(trace=PAGES, machine=machine_of(LINK), budget_bytes=PAGES.peak_bytes, can_recompute=True)
PARAMETER_GAPS = [gap for gap in PAGES.gaps() if gap.storage == 0]


def test_v1_tiers_and_codecs_are_those_of_the_executor() -> None:
    machine = Machine(name="two", links={"spill": LINK, "host": LINK})
    both = replace(PAGED, machine=machine, tiers=("spill", "host"))
    gap = PARAMETER_GAPS[1]
    to_host = plan_of(Swap(gap=gap, fetch_op=gap.before_op, tier="host"))
    verify.check(to_host, both)
    with pytest.raises(PlanError, match=r"V1: .* goes to tier 'host'; the problem's tier is 'spill' and the machine"):
        verify.check(to_host, replace(both, tiers=()))
    with pytest.raises(PlanError, match=r"V1: .* goes to tier 'tape'; the problem's 2 tiers are \['host', 'spill'\]"):
        verify.check(plan_of(Swap(gap=gap, fetch_op=gap.before_op, tier="tape")), both)
    coded = plan_of(Swap(gap=gap, fetch_op=gap.before_op, codec="zvc"))
    verify.check(coded, replace(PAGED, codecs=(IDENTITY, CodecCost(name="zvc", ratio=0.5))))
    with pytest.raises(PlanError, match=r"V1: .* uses codec 'zvc', .* executor has 1, \['identity'\]"):
        verify.check(coded, PAGED)


def test_v3_what_nobody_needs_is_away_for_good() -> None:
    steps = [Step(name=f"op{k}", phase=Phase.FORWARD, duration_s=1.0) for k in range(6)]
    storages = [Storage(nbytes=100, kind=Kind.BUFFER, first_op=-1, last_op=6)]
    trace = make_trace(steps, storages, (), reach=Reach.TOUCHED)
    problem = Problem(trace=trace, machine=machine_of(LINK), budget_bytes=1000)
    verify.check(plan_of(swap(0, 4, 6)), problem)
    with pytest.raises(PlanError, match=r"V3: .* which no operator needs, is away for good"):
        verify.check(plan_of(swap(0, 1, 2), swap(0, 4, 6)), problem)


def test_v7_nothing_is_given_up_without_a_copy_over_the_end_of_a_step() -> None:
    plan = Plan(policy="test", budget_bytes=1, recomputes=(Recompute(gap=PARAMETER_GAPS[1], ops=(4,)),))
    with pytest.raises(PlanError, match=r"V7: .* ends with the step or after it, and the step has 6 operators"):
        verify.check(plan, PAGED)


def test_v7_nothing_is_given_up_for_good_where_its_holder_may_look() -> None:
    steps = [Step(name=f"op{k}", phase=Phase.FORWARD, duration_s=1.0) for k in range(6)]
    steps[0] = replace(steps[0], writes=(0,))
    storages = [Storage(nbytes=100, kind=Kind.ACTIVATION, first_op=0, last_op=3)]
    trace = make_trace(steps, storages, (), reach=Reach.TOUCHED)
    problem = Problem(trace=trace, machine=machine_of(LINK), budget_bytes=1000, can_recompute=True)
    gap = Gap(storage=0, after_op=1, before_op=4)
    assert gap in trace.gaps()
    unmade = Plan(policy="test", budget_bytes=1000, recomputes=(Recompute(gap=gap, ops=()),))
    with pytest.raises(PlanError, match=r"V7: .* lists operators \(\), none of which makes it"):
        verify.check(unmade, problem)
    made = replace(unmade, recomputes=(Recompute(gap=gap, ops=(0,)),))
    verify.check(made, problem)


def test_an_executor_refuses_what_it_cannot_follow_and_not_a_budget_that_cannot_be_met() -> None:
    tight = replace(PAGED, budget_bytes=1)
    whole = plan_of(Swap(gap=PARAMETER_GAPS[1], fetch_op=PARAMETER_GAPS[1].before_op))
    with pytest.raises(PlanError, match="V4"):
        verify.check(whole, tight)
    verify.check_executable(whole, tight)
    for broken in (
        plan_of(replace(whole.swaps[0], tier="tape")),
        plan_of(replace(whole.swaps[0], fetch_op=1)),
        plan_of(swap(0, 1, 5)),
    ):
        with pytest.raises(PlanError, match=r"V[12]"):
            verify.check_executable(broken, tight)
