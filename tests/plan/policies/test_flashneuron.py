"""FlashNeuron: both phases of the selection, the forward pass it leaves alone, and its pool (Bae et al., FAST 2021)."""

from __future__ import annotations

from itertools import combinations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lowtide.core.machine import Link
from lowtide.core.trace import Gap, Phase, Trace
from lowtide.plan.policies.flashneuron import FlashNeuron, Tensor, TwoEndedPool, last_landing_s, select, tensors_of
from lowtide.plan.sweep import Sweep
from lowtide.plan.verify import check
from lowtide.testing.policies import PolicyTests
from tests.plan.policies.shapes import densenet, inception, problem_of, resnet, vgg

NETS = (vgg(), resnet(), inception(), densenet())


class TestFlashNeuron(PolicyTests):
    def make_policy(self) -> FlashNeuron:
        return FlashNeuron()

    def least_budget_bytes(self, trace: Trace) -> int:
        return trace.peak_bytes  # what does not wait for the backward pass stays


def toy(*tensors: tuple[int, str]) -> list[Tensor]:
    """One tensor a second, of so many bytes, compressible as told: "csr", "fp16" or not."""
    return [
        Tensor(
            gap=Gap(storage=k, after_op=k, before_op=100 - k),
            nbytes=nbytes,
            start_s=float(k),
            csr="csr" in how,
            fp16="fp16" in how,
        )
        for k, (nbytes, how) in enumerate(tensors)
    ]


def chosen(tensors: list[Tensor], *, need_bytes: int, forward_end_s: float) -> tuple[list[int], bool]:
    found = select(tensors, need_bytes=need_bytes, write_bytes_per_s=100.0, forward_end_s=forward_end_s)
    return [tensor.gap.storage for tensor in found.tensors], found.timed_out


def test_phase_1_takes_tensors_in_forward_order_until_the_need_is_covered() -> None:
    tensors = toy((100, ""), (100, ""), (100, ""), (100, ""))
    # Each takes a second: the last of three lands at 3.
    assert chosen(tensors, need_bytes=250, forward_end_s=3.0) == ([0, 1, 2], False)
    assert chosen(tensors, need_bytes=200, forward_end_s=3.0) == ([0, 1], False)
    assert chosen(tensors, need_bytes=0, forward_end_s=3.0) == ([], False)
    assert chosen(tensors, need_bytes=10**6, forward_end_s=4.0) == ([0, 1, 2, 3], False)


def test_delays_add_up_along_the_chain() -> None:
    tensors = toy((150, ""), (150, ""), (50, ""))
    # 0 to 1.5, then 1.5 to 3, then 3 to 3.5.
    assert last_landing_s(tensors, write_bytes_per_s=100.0) == 3.5
    assert last_landing_s(tensors[1:], write_bytes_per_s=100.0) == 3.0
    assert tensors[0].transfer_s(100.0) == 1.5
    both = toy((400, "csr fp16"))
    assert both[0].transfer_s(100.0) == 1.0


def test_phase_2_trades_the_latest_plain_tensor_for_later_compressible_ones() -> None:
    # Phase 1 takes 0, 1 and 2, of which the last lands at 6: too late for 4.6. Without 2, whose place 3 takes at half
    # the time: 0 to 2, 2 to 4, then 4 to 5: still too late. Without 1: 4 takes its place: 0-2, 3-4, 4-5.
    tensors = toy((200, ""), (200, ""), (200, ""), (200, "csr"), (200, "csr"), (200, "fp16"))
    assert chosen(tensors, need_bytes=600, forward_end_s=6.0) == ([0, 1, 2], False)
    assert chosen(tensors, need_bytes=600, forward_end_s=5.0) == ([0, 1, 3], False)
    # At 4.6: without 0, with 5: 3-4, 4-5, 5-6. Without 5, too: 3-4, 4-5; then 5 is needed after all.
    assert chosen(tensors, need_bytes=600, forward_end_s=4.6) == ([3, 4, 5], True)


def test_phase_2_gives_up_half_precision_next() -> None:
    tensors = toy((200, ""), (300, "fp16"), (200, "csr"), (200, "csr"))
    # Phase 1: 0 and 1, at 0-2 and 2-3.5. At 3.4: without 0, with 2 (200 for 200): 1-2.5, 2.5-3.5. Then without 1, with
    # 3: 2-3, 3-4. That does not cover the need, so 1 comes back.
    assert chosen(tensors, need_bytes=450, forward_end_s=3.5) == ([0, 1], False)
    assert chosen(tensors, need_bytes=450, forward_end_s=3.4) == ([1, 2, 3], True)
    assert chosen(tensors, need_bytes=400, forward_end_s=3.4) == ([2, 3], True)
    assert chosen(tensors, need_bytes=400, forward_end_s=4.0) == ([0, 1], False)


def test_without_compression_memory_comes_before_time() -> None:
    assert chosen(toy((200, ""), (200, ""), (200, "")), need_bytes=400, forward_end_s=1.0) == ([0, 1], True)


def _lands(tensors: tuple[Tensor, ...], forward_end_s: float) -> bool:
    return last_landing_s(tensors, write_bytes_per_s=100.0) <= forward_end_s


@given(
    sizes=st.lists(st.tuples(st.integers(1, 300), st.sampled_from(("", "csr", "fp16"))), min_size=1, max_size=7),
    need_bytes=st.integers(1, 900),
    forward_end_s=st.integers(1, 12),
)
@settings(max_examples=300, deadline=None)
def test_it_times_out_only_if_no_compressible_tensors_cover_the_need_in_time(
    sizes: list[tuple[int, str]], need_bytes: int, forward_end_s: int
) -> None:
    tensors = toy(*sizes)
    found = select(tensors, need_bytes=need_bytes, write_bytes_per_s=100.0, forward_end_s=forward_end_s)
    assert sum(tensor.nbytes for tensor in found.tensors) >= min(need_bytes, sum(nbytes for nbytes, _ in sizes))
    prefix: list[Tensor] = []
    for tensor in tensors:
        if sum(one.nbytes for one in prefix) < need_bytes:
            prefix.append(tensor)
    if _lands(tuple(prefix), forward_end_s):
        assert list(found.tensors) == prefix
        assert not found.timed_out
    if found.timed_out:
        csr = [tensor for tensor in tensors if tensor.csr]
        feasible = [
            subset
            for count in range(len(csr) + 1)
            for subset in combinations(csr, count)
            if sum(one.nbytes for one in subset) >= need_bytes and _lands(subset, forward_end_s)
        ]
        assert not feasible


@pytest.mark.parametrize("trace", NETS, ids=lambda trace: trace.model)
def test_the_forward_pass_takes_its_own_time_if_nothing_timed_out(trace: Trace) -> None:
    link = Link(write_bytes_per_s=2e10, read_bytes_per_s=2e10, duplex=True)
    problem = problem_of(trace, (trace.floor_bytes() + trace.peak_bytes) // 2, link)
    plan = FlashNeuron().plan(problem)
    check(plan, problem)
    assert plan.swaps
    assert not any("after the forward pass" in note for note in plan.notes)
    facts = Sweep(problem)
    first = next(index for index, op in enumerate(trace.ops) if op.phase is Phase.BACKWARD)
    assert facts.run(plan.swaps).begin_s[first] == pytest.approx(facts.start_s[first], rel=1e-12)


def test_late_transfers_are_reported() -> None:
    problem = problem_of(vgg(), vgg().floor_bytes(), Link(write_bytes_per_s=1e9, read_bytes_per_s=1e9))
    assert any("after the forward pass" in note for note in FlashNeuron().plan(problem).notes)


def test_the_backward_pass_asks_for_everything_at_once() -> None:
    trace = resnet()
    first = next(index for index, op in enumerate(trace.ops) if op.phase is Phase.BACKWARD)
    for swap in FlashNeuron().plan(problem_of(trace, trace.floor_bytes())).swaps:
        assert swap.fetch_op == min(max(first, swap.gap.after_op + 1), swap.gap.before_op)


def test_relu_results_are_the_ones_with_zeros() -> None:
    trace = resnet()
    relus = {storage for op in trace.ops if "relu" in op.name for storage in op.writes}
    tensors = tensors_of(trace, csr=True, fp16=False)
    assert {tensor.gap.storage for tensor in tensors if tensor.csr} == relus & {one.gap.storage for one in tensors}
    assert any(tensor.csr for tensor in tensors)
    assert not any(tensor.csr for tensor in tensors_of(trace, csr=False, fp16=False))


def fragmentation(*, two_ended: bool) -> float:
    """The same stream: tensors that stay and tensors that leave come in turn, then the latter leave."""
    pool = TwoEndedPool(1000)
    for k in range(10):
        assert pool.allocate(2 * k, 40) is not None
        assert pool.allocate(2 * k + 1, 30 + k, high=two_ended) is not None
    for k in range(10):
        pool.free(2 * k + 1)
    return pool.fragmentation()


def test_two_ends_leave_the_free_space_in_one_piece() -> None:
    assert fragmentation(two_ended=True) == 0.0
    assert fragmentation(two_ended=False) > 0.4


def test_the_pool_places_by_first_fit_from_either_end() -> None:
    pool = TwoEndedPool(100)
    assert pool.allocate(0, 30) == 0
    assert pool.allocate(1, 20, high=True) == 80
    assert pool.allocate(2, 40) == 30
    assert pool.allocate(3, 20) is None
    pool.free(0)
    assert pool.allocate(4, 20, high=True) == 10
    assert pool.allocate(5, 10) == 0
    assert pool.fragmentation() == 0.0
