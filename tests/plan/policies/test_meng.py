"""TensorFlow's swapping pass: fitness, triggers, passes and attention (Meng et al., NIPS ML Systems 2017)."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings

from lowtide.core.plan import Problem
from lowtide.core.trace import Gap, Kind, Phase, Save, Storage, Trace
from lowtide.errors import BadArgument
from lowtide.plan.costs.sweep import Sweep
from lowtide.plan.policies.meng import Meng, Rewriting, additive_attention, in_trigger
from lowtide.plan.verify import check
from lowtide.testing.networks import networks
from lowtide.testing.policies import PolicyTests
from lowtide.testing.traces import Step, make_trace, problems
from tests.plan.policies.shapes import DISK, densenet, inception, problem_of, resnet, vgg

NETS = (vgg(), resnet(), inception(), densenet())


class TestMeng(PolicyTests):
    def make_policy(self) -> Meng:
        return Meng()

    def least_budget_bytes(self, trace: Trace) -> int:
        return trace.peak_bytes  # small tensors, and a second gap of a tensor, are never swapped


def rewriting(problem: Problem) -> Rewriting:
    return Rewriting(problem, Sweep(problem))


def descendants(trace: Trace, op: int) -> set[int]:
    made = set(trace.ops[op].writes)
    found = set()
    for index in range(op + 1, len(trace.ops)):
        if made.intersection(trace.ops[index].reads):
            found.add(index)
            made.update(trace.ops[index].writes)
    return found


@given(problem=problems(networks()))
@settings(max_examples=60, deadline=None)
def test_a_trigger_is_an_ancestor_of_the_consumer_and_never_a_descendant(problem: Problem) -> None:
    trace, facts = problem.trace, Sweep(problem)
    for gap in trace.gaps():
        trigger = in_trigger(trace, gap, swap_s=1e-3, facts=facts)
        if trigger is not None:
            assert gap.after_op <= trigger < gap.before_op
            assert gap.before_op in descendants(trace, trigger)
            assert trigger not in descendants(trace, gap.before_op)


def test_the_trigger_leaves_the_transfer_its_time() -> None:
    # A chain of gradients, a second each: 4 -> 5 -> 6 -> 7; storage 0 is wanted by 7.
    steps = [Step(name="aten::make", phase=Phase.FORWARD, duration_s=1.0, writes=(0,))]
    steps += [Step(name="aten::other", phase=Phase.FORWARD, duration_s=1.0) for _ in range(3)]
    steps += [
        Step(name="aten::grad", phase=Phase.BACKWARD, duration_s=1.0, reads=(k,) if k else (), writes=(k + 1,))
        for k in range(3)
    ]
    steps.append(Step(name="aten::last", phase=Phase.BACKWARD, duration_s=1.0, reads=(0, 3)))
    storages = [Storage(nbytes=1 << 20, kind=Kind.ACTIVATION, first_op=0, last_op=7, producer=0)]
    storages += [Storage(nbytes=4096, kind=Kind.OTHER, first_op=4 + k, last_op=5 + k, producer=4 + k) for k in range(3)]
    saves = [Save(storage=0, packed_op=0, free_op=1, uses=(7,), released_op=7)]
    trace = make_trace(steps, storages, saves)
    facts = Sweep(problem_of(trace, 1 << 30))
    gap = Gap(storage=0, after_op=1, before_op=7)
    # The last other input is there at 7 s, made by operator 6.
    assert in_trigger(trace, gap, swap_s=0.0, facts=facts) == 6
    assert in_trigger(trace, gap, swap_s=1.0, facts=facts) == 5
    assert in_trigger(trace, gap, swap_s=1.5, facts=facts) == 4
    assert in_trigger(trace, gap, swap_s=3.0, facts=facts) is None


@pytest.mark.parametrize("trace", NETS, ids=lambda trace: trace.model)
def test_a_pass_swaps_what_its_peak_requires(trace: Trace) -> None:
    problem = problem_of(trace, (trace.floor_bytes() + trace.peak_bytes) // 2)
    graph = rewriting(problem)
    peak_op, peak_bytes = graph.peak()
    assert graph.one_pass()
    swapped = [swap for swap in graph.swaps() if swap.gap.after_op <= peak_op < swap.gap.before_op]
    assert len(swapped) == len(graph.swaps())
    bytes_out = sum(trace.storages[swap.gap.storage].nbytes for swap in swapped)
    assert bytes_out >= peak_bytes - problem.budget_bytes
    # Fittest first: without the last one it would not have been enough.
    assert bytes_out - max(trace.storages[swap.gap.storage].nbytes for swap in swapped) < (
        peak_bytes - problem.budget_bytes
    )


@pytest.mark.parametrize("trace", NETS, ids=lambda trace: trace.model)
def test_passes_end_in_a_graph_that_another_pass_leaves_alone(trace: Trace) -> None:
    problem = problem_of(trace, (trace.floor_bytes() + trace.peak_bytes) // 2)
    graph = rewriting(problem)
    graph.run(25)
    before = graph.swaps()
    assert not graph.one_pass()
    assert graph.swaps() == before
    skipped = rewriting(problem)
    skipped.skip.update(range(len(trace.storages)))
    assert not skipped.one_pass()


def two_peaks() -> Trace:
    """Two storages, each alive around a peak of its own."""
    steps = [
        Step(
            name=f"aten::op{k}",
            phase=Phase.FORWARD if k < 8 else Phase.BACKWARD,
            duration_s=1.0,
            writes={0: (0,), 8: (1,)}.get(k, ()),
            reads={7: (0,), 15: (1,)}.get(k, ()),
            scratch_bytes={4: 30 << 20, 12: 20 << 20}.get(k, 0),
        )
        for k in range(16)
    ]
    storages = [
        Storage(nbytes=16 << 20, kind=Kind.ACTIVATION, first_op=8 * k, last_op=8 * k + 7, producer=8 * k)
        for k in range(2)
    ]
    saves = [
        Save(storage=k, packed_op=8 * k, free_op=8 * k + 1, uses=(8 * k + 7,), released_op=8 * k + 7) for k in range(2)
    ]
    return make_trace(steps, storages, saves, model="two peaks")


def test_one_pass_treats_one_peak_only() -> None:
    """The known weakness: a second peak needs a second pass."""
    trace = two_peaks()
    problem = problem_of(trace, 32 << 20)
    once, twice = Meng(passes=1).plan(problem), Meng(passes=2).plan(problem)
    assert [swap.gap.storage for swap in once.swaps] == [0]
    assert "best effort" in once.notes[-1]
    assert [swap.gap.storage for swap in twice.swaps] == [0, 1]
    check(twice, problem)


def test_fitness_prefers_what_is_used_far_from_the_peak_by_few() -> None:
    # Both cross the peak at operator 4; one is used right after it, the other at the end.
    steps = [
        Step(
            name=f"aten::op{k}",
            phase=Phase.FORWARD if k < 5 else Phase.BACKWARD,
            duration_s=1.0,
            writes={0: (0, 1)}.get(k, ()),
            reads={6: (0,), 9: (1,)}.get(k, ()),
            scratch_bytes=1 << 20 if k == 4 else 0,
        )
        for k in range(10)
    ]
    storages = [Storage(nbytes=1 << 20, kind=Kind.ACTIVATION, first_op=0, last_op=use, producer=0) for use in (6, 9)]
    saves = [Save(storage=k, packed_op=0, free_op=1, uses=(use,), released_op=use) for k, use in enumerate((6, 9))]
    trace = make_trace(steps, storages, saves)
    (swap,) = Meng().plan(problem_of(trace, 2 << 20)).swaps
    assert swap.gap.storage == 1
    assert swap.landed_op == swap.gap.after_op + 1


def attention() -> Trace:
    """Additive attention: keys (0) and a query (1) are added (2), tanh (3), scores (4), softmax (5), then backward."""
    names = ("mm", "mm", "add", "tanh", "mm", "_softmax", "_softmax_backward_data", "mm", "tanh_backward", "mm")
    reads = ((), (), (0, 1), (2,), (3,), (4,), (5,), (3,), (3, 0, 1), (0,))
    sizes = (1, 1, 64, 64, 1, 1)
    lasts = (9, 9, 3, 8, 5, 6)
    steps = [
        Step(
            name=f"aten::{name}",
            phase=Phase.FORWARD if k < 6 else Phase.BACKWARD,
            duration_s=1e-2,
            reads=reads[k],
            writes=(k,) if k < 6 else (),
        )
        for k, name in enumerate(names)
    ]
    storages = [
        Storage(nbytes=size << 20, kind=Kind.ACTIVATION, first_op=k, last_op=last, producer=k)
        for k, (size, last) in enumerate(zip(sizes, lasts, strict=True))
    ]
    saves = [Save(storage=3, packed_op=3, free_op=5, uses=(7, 8), released_op=8)]
    return make_trace(steps, storages, saves, model="attention")


def test_attention_is_found_by_its_operators() -> None:
    trace = attention()
    assert additive_attention(trace) == (3,)
    ops = tuple(replace(op, name=op.name.replace("_softmax", "_log_softmax")) for op in trace.ops)
    assert additive_attention(replace(trace, ops=ops)) == (), "the softmax of a classifier is no attention"
    assert all(additive_attention(net) == () for net in NETS)


def test_where_attention_cannot_be_made_again_it_says_so() -> None:
    trace = attention()
    # The peak is where tanh first runs, so making it again takes as much.
    fitting = Meng().plan(problem_of(trace, trace.peak_bytes - 1, can_recompute=True))
    assert not fitting.recomputes
    assert "making attention again does not fit: only swaps" in fitting.notes
    plain = Meng().plan(problem_of(trace, trace.peak_bytes - 1))
    assert not plain.recomputes
    assert any("attention is swapped" in note for note in plain.notes)


def test_attention_is_discarded_where_that_saves_memory() -> None:
    trace = attention()
    # A large operator between the passes is the peak; the keys and the query are alive all along.
    middle = Step(name="aten::large", phase=Phase.FORWARD, duration_s=1e-2, scratch_bytes=100 << 20)
    ops = list(trace.ops)
    steps = [
        Step(name=op.name, phase=op.phase, duration_s=op.duration_s, reads=op.reads, writes=op.writes) for op in ops
    ]
    steps.insert(6, middle)

    def later(op: int) -> int:
        return op + (op >= 6)

    storages = [
        Storage(
            nbytes=one.nbytes, kind=one.kind, first_op=one.first_op, last_op=later(one.last_op), producer=one.producer
        )
        for one in trace.storages
    ]
    saves = [Save(storage=3, packed_op=3, free_op=5, uses=(8, 9), released_op=9)]
    long = make_trace(steps, storages, saves)
    problem = problem_of(long, 150 << 20, DISK, can_recompute=True)
    plan = Meng().plan(problem)
    check(plan, problem)
    assert [(one.gap.storage, one.ops) for one in plan.recomputes] == [(3, (2, 3))]
    assert not plan.swaps
    assert not Meng(attention=False).plan(problem).recomputes


def test_no_passes_are_refused() -> None:
    with pytest.raises(BadArgument, match="0 passes"):
        Meng(passes=0)


def rivals(*, made: tuple[int, int], uses: tuple[tuple[int, ...], tuple[int, ...]], peak_op: int = 8) -> Trace:
    """Two tensors of one size, made and used at these operators of a second each; one operator passes the budget."""
    steps = [
        Step(
            name=f"aten::op{k}",
            phase=Phase.FORWARD if k < 10 else Phase.BACKWARD,
            duration_s=1.0,
            writes=tuple(one for one in range(2) if made[one] == k),
            reads=tuple(one for one in range(2) if k in uses[one]),
            scratch_bytes=8 << 20 if k == peak_op else 0,
        )
        for k in range(20)
    ]
    storages = [
        Storage(nbytes=16 << 20, kind=Kind.ACTIVATION, first_op=made[k], last_op=uses[k][-1], producer=made[k])
        for k in range(2)
    ]
    saves = [
        Save(storage=k, packed_op=made[k], free_op=made[k] + 1, uses=uses[k], released_op=uses[k][-1]) for k in range(2)
    ]
    return make_trace(steps, storages, saves, model="rivals")


@pytest.mark.parametrize(
    ("trace", "why"),
    [
        (rivals(made=(4, 4), uses=((12,), (18,))), "its next use is further from the peak"),
        (rivals(made=(4, 0), uses=((14,), (14,))), "it was allocated further from the peak"),
        (rivals(made=(4, 4), uses=((14, 15, 16, 17), (14,))), "it has fewer uses left"),
    ],
    ids=("next-use", "allocation", "uses-left"),
)
def test_the_second_of_two_tensors_is_fitter(trace: Trace, why: str) -> None:
    plan = Meng(passes=1).plan(problem_of(trace, 32 << 20))
    assert [swap.gap.storage for swap in plan.swaps] == [1], why


def test_what_lives_for_a_millisecond_or_less_is_not_swapped() -> None:
    trace = rivals(made=(4, 4), uses=((12,), (18,)))

    def swapped(op_s: float) -> set[int]:
        quick = make_trace(
            [
                Step(
                    name=op.name,
                    phase=op.phase,
                    duration_s=op_s,
                    reads=op.reads,
                    writes=op.writes,
                    scratch_bytes=8 << 20 if index == 8 else 0,
                )
                for index, op in enumerate(trace.ops)
            ],
            trace.storages,
            trace.saves,
        )
        return {swap.gap.storage for swap in Meng(passes=1).plan(problem_of(quick, 32 << 20)).swaps}

    # The first lives for 9 operators, the second for 15.
    assert swapped(1.2e-4) == {1}
    assert swapped(1e-5) == set()


def test_the_copy_back_is_triggered_as_if_the_link_had_16_gb_a_second() -> None:
    steps = [Step(name="aten::make", phase=Phase.FORWARD, duration_s=1.0, writes=(0,))]
    steps += [
        Step(name="aten::other", phase=Phase.FORWARD, duration_s=1.0, scratch_bytes=1 << 30 if k == 1 else 0)
        for k in range(3)
    ]
    steps += [
        Step(name="aten::grad", phase=Phase.BACKWARD, duration_s=1.0, reads=(k,) if k else (), writes=(k + 1,))
        for k in range(3)
    ]
    steps.append(Step(name="aten::last", phase=Phase.BACKWARD, duration_s=1.0, reads=(0, 3)))
    storages = [Storage(nbytes=int(16e9), kind=Kind.ACTIVATION, first_op=0, last_op=7, producer=0)]
    storages += [Storage(nbytes=4096, kind=Kind.OTHER, first_op=4 + k, last_op=5 + k, producer=4 + k) for k in range(3)]
    saves = [Save(storage=0, packed_op=0, free_op=1, uses=(7,), released_op=7)]
    trace = make_trace(steps, storages, saves)
    # 16 GB take a second: operator 5 ends that much before the last other input is there, at 7 s.
    (swap,) = Meng().plan(problem_of(trace, int(16e9) + 8192)).swaps
    assert swap.fetch_op == 6
