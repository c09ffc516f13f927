"""Which calls can run again, what they write, and how a normalisation runs again."""

from __future__ import annotations

import torch

from lowtide.execute.recompute.recipes import repeats, without_statistics, writes_of

aten = torch.ops.aten


def test_which_calls_repeat() -> None:
    x = torch.ones(2)
    assert repeats(aten.relu.default, (x,), {})
    assert not repeats(aten.bernoulli.default, (x,), {})
    assert not repeats(aten.native_dropout.default, (x, 0.5, True), {})
    attention = aten._scaled_dot_product_flash_attention_for_cpu.default
    assert repeats(attention, (x, x, x), {})
    assert repeats(attention, (x, x, x, 0.0), {})
    assert not repeats(attention, (x, x, x, 0.1), {})


def test_which_arguments_calls_write() -> None:
    x, y = torch.ones(2), torch.ones(2)
    assert writes_of(aten.relu.default) is None
    in_place, listed, out = writes_of(aten.relu_.default), writes_of(aten._foreach_mul_.Scalar), writes_of(aten.add.out)
    assert in_place is not None
    assert listed is not None
    assert out is not None
    assert [one is x for one in in_place.written((x,), {})] == [True]
    assert len(list(listed.written(([x, y], 2.0), {}))) == 2
    assert [one is y for one in out.written((x, x), {"out": y})] == [True]


def test_a_normalisation_runs_again_without_its_running_statistics() -> None:
    x, w, mean, var = torch.randn(2, 3, 4), torch.ones(3), torch.zeros(3), torch.ones(3)
    training = (x, w, w, mean, var, True, 0.1, 1e-5)
    evaluating = (x, w, w, mean, var, False, 0.1, 1e-5)
    norm = aten.native_batch_norm.default
    writes = writes_of(norm)
    assert writes is not None
    assert [one is mean or one is var for one in writes.moved_along(training)] == [True, True]
    assert not writes.moved_along(evaluating)
    pure = without_statistics(writes, training)
    assert pure[3] is pure[4] is None
    assert all(torch.equal(a, b) for a, b in zip(norm(*training), norm(*pure), strict=True))
    assert without_statistics(writes, evaluating) == evaluating


def test_normalisations_of_devices_write_running_statistics_and_do_not_say_so() -> None:
    x, mean = torch.ones(2), torch.zeros(2)
    fused = writes_of(aten.cudnn_batch_norm.default)
    assert fused is not None
    assert [one is mean for one in fused.moved_along((x, x, x, mean, mean, True, 0.1, 1e-5))] == [True, True]
    part = writes_of(aten.batch_norm_update_stats.default)  # the results of a part are not what training makes of it
    assert part is not None
    assert [one is mean for one in part.written((x, mean, mean, 0.1), {})] == [True, True]
    assert writes_of(aten.native_batch_norm_backward.default) is None
