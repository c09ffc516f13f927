"""Ranges that leave through a codec: fewer bytes travel, and the same come back whatever happens meanwhile."""

from __future__ import annotations

import errno
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from lowtide.codecs import Exactness, Stats, codec
from lowtide.errors import SpillCorrupted
from lowtide.memory.native.bindings import Place
from lowtide.testing.codecs import some_values
from lowtide.tiers import FileMedium
from tests.memory.engine import MIB, Engine, HeldMedium, files, in_fork, raw_array
from tests.memory.steps import FETCH, LEAVE, Step

Opened = Callable[..., Engine]
CODECS = ("zvc", "zvc2", "pack32", "bits", "ssdc", "bf16")


def relu(nbytes: int, *, density: float = 0.4, seed: int = 0) -> torch.Tensor:
    """Return what a ReLU may have made, in a range of the engine's."""
    out = torch.empty(nbytes // 4)
    out.copy_(torch.from_numpy(some_values(nbytes // 4, density=density, seed=seed)).abs())
    return out


def engine_of(opened: Opened, *media: object, **settings: object) -> Engine:
    return opened(*media, codecs=[codec(name) for name in CODECS], **settings)


@pytest.mark.parametrize("name", ["zvc", "zvc2", "pack32", "ssdc"])
@pytest.mark.parametrize("nbytes", [64 << 10, MIB, 21 * MIB])
def test_what_leaves_is_encoded_and_comes_back_the_same(opened: Opened, name: str, nbytes: int) -> None:
    engine = engine_of(opened, verify=True, budget=128 * MIB)
    x = relu(nbytes)
    before = raw_array(x).copy()
    engine.send_away(x, codec=name)
    held = engine.tier_used()
    assert held < nbytes, "a slot takes what is left"
    assert engine.counted.written == held
    assert engine.counted.encoded == nbytes
    assert np.array_equal(x.numpy(), before)
    assert engine.counted.read == held
    assert engine.counted.decoded == nbytes


def test_the_bytes_of_a_slot_follow_the_density(opened: Opened) -> None:
    engine = engine_of(opened)
    x = relu(8 * MIB, density=0.25)
    kept = [int(torch.count_nonzero(frame)) for frame in x.chunk(4)]
    engine.send_away(x, codec="zvc")
    blobs = [4 * count + 2 * MIB // 32 for count in kept]
    assert engine.tier_used() == sum(-(-nbytes // 4096) * 4096 for nbytes in blobs), "in frames of 2 MiB"


def test_what_would_not_be_shorter_goes_as_it_is_frame_by_frame(opened: Opened) -> None:
    engine = engine_of(opened)
    x = torch.empty(6 * MIB)
    x.copy_(torch.randn(6 * MIB))
    x[2 * MIB : 4 * MIB] = 0
    before = x.clone()
    engine.send_away(x, codec="zvc")
    assert engine.tier_used() == 16 * MIB + 2 * MIB // 8
    assert (engine.counted.encoded, engine.counted.unencoded) == (8 * MIB, 16 * MIB)
    assert torch.equal(x, before)


def test_what_a_codec_cannot_hold_goes_as_it_is(opened: Opened) -> None:
    engine = engine_of(opened)
    x = torch.full((MIB // 2,), 3.0)  # one frame
    x[5] = 3.4028234e38  # the largest number of single precision: bfloat16 would round it to infinity
    engine.send_away(x, codec="bf16")
    assert engine.counted.unencoded == 2 * MIB
    assert float(x[5]) == pytest.approx(3.4028234e38)


def test_a_lossy_codec_rounds_once_and_the_checksum_lets_it(opened: Opened) -> None:
    engine = engine_of(opened, verify=True)
    x = torch.empty(MIB)
    x.copy_(torch.randn(MIB))
    rounded = x.bfloat16().float()
    engine.send_away(x, codec="bf16")
    assert engine.tier_used() == 2 * MIB
    assert torch.equal(x, rounded)
    engine.send_away(x, codec="bf16")
    assert torch.equal(x, rounded)


def test_what_is_used_as_anything_but_single_precision_is_not_rounded(opened: Opened) -> None:
    engine = engine_of(opened)
    whole = torch.empty(MIB, dtype=torch.int32)
    whole.copy_(torch.arange(MIB))
    both = torch.empty(MIB)
    both.copy_(torch.randn(MIB))
    both.view(torch.int32).add_(1)
    for x in (whole, both):
        before = x.clone()
        engine.send_away(x, codec="bf16")
        assert torch.equal(x, before)
    assert engine.counted.encoded == 0
    assert engine.counted.unencoded == 8 * MIB


def test_unchanged_bytes_are_not_encoded_again(opened: Opened) -> None:
    engine = engine_of(opened)
    x = relu(MIB)
    engine.send_away(x, codec="zvc")
    assert float(x.sum()) > 0
    engine.send_away(x, codec="zvc")
    assert engine.counted.encoded == MIB
    assert engine.counted.released == MIB
    x.add_(1)
    engine.send_away(x, codec="pack32")
    assert engine.counted.encoded == 2 * MIB
    assert engine.tier_used() < MIB, "the old slot was given back"
    x.mul_(2)
    engine.send_away(x)
    assert engine.tier_used() == MIB


def test_tiers_and_codecs_at_once(opened: Opened, tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    engine = engine_of(opened, files(tmp_path), files(tmp_path / "other"))
    tensors = [relu(2 * MIB, seed=seed) for seed in range(6)]
    before = [raw_array(x).copy() for x in tensors]
    ways = [(0, "zvc"), (1, "zvc"), (0, "identity"), (1, "pack32"), (1, "identity"), (0, "zvc2")]
    for x, (tier, name) in zip(tensors, ways, strict=True):
        assert engine.start_leaving(x, tier, name)
    engine.native.settle()
    assert 2 * MIB < engine.tier_used(0) < 6 * MIB
    assert 2 * MIB < engine.tier_used(1) < 6 * MIB
    for x, bits in zip(tensors, before, strict=True):
        assert np.array_equal(x.numpy(), bits)


def test_a_plan_names_the_codec(opened: Opened) -> None:
    engine = engine_of(opened)
    x, small = relu(MIB), torch.zeros(4)
    before = raw_array(x).copy()
    step = Step(engine, ["aten::fill_", "aten::neg_", "aten::fill_"])
    number = step.known(x, 0, 2)
    plan = step.at(1, LEAVE, number, codec="zvc").at(2, FETCH, number).compile()
    engine.native.step_begin(plan)
    small.fill_(1)
    small.neg_()
    engine.native.settle()
    assert engine.place(x) is Place.AWAY
    assert engine.counted.encoded == MIB
    small.fill_(2)
    engine.native.settle()
    assert engine.place(x) is Place.HERE
    assert engine.counted.decoded == MIB
    engine.native.step_end()
    assert np.array_equal(raw_array(x), before)


def test_a_range_in_use_leaves_through_the_plans_codec_once_it_is_free(opened: Opened) -> None:
    engine = engine_of(opened)
    x, small = relu(MIB), torch.zeros(4)
    step = Step(engine, ["aten::neg_", "aten::fill_"])
    number = step.known(x, 0)
    plan = step.at(0, LEAVE, number, codec="zvc").compile()
    engine.native.step_begin(plan)
    lent = engine.native.lend(x._cdata)
    small.neg_()
    assert engine.place(x) is Place.HERE
    engine.native.take_back(lent)
    engine.native.settle()
    assert engine.place(x) is Place.AWAY
    assert engine.counted.encoded == MIB
    engine.native.step_end()


def test_who_wants_it_back_while_it_is_written_gets_it(opened: Opened) -> None:
    medium = HeldMedium()
    engine = engine_of(opened, medium)
    x = relu(20 * MIB)
    before = raw_array(x).copy()
    medium.may_write.clear()
    assert engine.start_leaving(x, codec="zvc")
    assert medium.writing.acquire(timeout=60)
    waits = engine.counted.waits
    medium.may_write.set()
    assert np.array_equal(x.numpy(), before)
    engine.native.settle()
    assert engine.counted.waits >= waits
    if engine.place(x) is Place.HERE and engine.counted.read == 0:
        assert engine.tier_used() == 0, "what was written of it belongs to nobody"


def test_a_range_that_is_freed_on_its_way_leaves_nothing(opened: Opened) -> None:
    medium = HeldMedium()
    engine = engine_of(opened, medium)
    x = relu(20 * MIB)
    medium.may_write.clear()
    assert engine.start_leaving(x, codec="zvc")
    assert medium.writing.acquire(timeout=60)
    del x
    medium.may_write.set()
    engine.native.settle()
    assert engine.tier_used() == 0


def test_a_failed_write_keeps_the_bytes(opened: Opened) -> None:
    medium = HeldMedium()
    engine = engine_of(opened, medium)
    x = relu(MIB)
    before = x.clone()
    medium.write_errno = errno.EIO
    assert engine.start_leaving(x, codec="zvc")
    engine.native.settle()
    assert engine.place(x) is Place.HERE
    assert engine.tier_used() == 0
    assert torch.equal(x, before)
    _, failed = engine.native.take_trouble()
    assert failed is not None
    assert failed.code == errno.EIO


def test_a_full_tier_keeps_the_bytes_until_a_slot_comes_free(opened: Opened, tmp_path: Path) -> None:
    engine = engine_of(opened, FileMedium([tmp_path], capacity_bytes=3 * MIB))
    first, second = relu(4 * MIB, density=0.5), relu(4 * MIB, density=0.5, seed=1)
    before = second.clone()
    engine.send_away(first, codec="zvc")
    assert 2 * MIB < engine.tier_used() < 3 * MIB, "four would not have fitted as they are"
    assert engine.start_leaving(second, codec="zvc")
    engine.native.settle()
    assert engine.place(second) is Place.HERE
    assert not engine.start_leaving(second, codec="zvc"), "it waits for a slot"
    first.add_(1)
    del first
    engine.send_away(second, codec="zvc")
    assert torch.equal(second, before)


def test_a_blob_that_came_back_changed_is_corrupted(opened: Opened) -> None:
    medium = HeldMedium()
    engine = engine_of(opened, medium)
    x = relu(MIB)
    engine.send_away(x, codec="zvc")
    medium.store[0] ^= 0xFF
    with pytest.raises(RuntimeError):
        x.add_(1)
        torch.empty(MIB)
    error, _ = engine.memory.take_errors()
    assert isinstance(error, SpillCorrupted)
    medium.store[0] ^= 0xFF
    assert float(x.sum()) > 0


def test_a_child_decodes_for_itself(opened: Opened) -> None:
    engine = engine_of(opened)
    x = relu(20 * MIB)
    before = raw_array(x).copy()
    engine.send_away(x, codec="zvc")
    result = in_fork(lambda: bool(np.array_equal(raw_array(x), before)))
    x.zero_()
    engine.send_away(x, codec="zvc")
    assert result() is True
    assert float(x.abs().sum()) == 0


class Backwards:
    """A codec in Python: the bytes in reverse, without the zeros at the end."""

    name = "backwards"
    exactness = Exactness.BITS
    kernel = None

    def max_encoded_nbytes(self, nbytes: int) -> int:
        return nbytes

    def encode(self, values: np.ndarray, *, out: np.ndarray) -> np.ndarray:
        kept = int(np.flatnonzero(values)[-1]) + 1 if values.any() else 1
        out[:kept] = values[:kept][::-1]
        return out[:kept]

    def decode(self, blob: np.ndarray, *, out: np.ndarray) -> None:
        out[: blob.nbytes] = blob[::-1]
        out[blob.nbytes :] = 0

    def bound(self, values: np.ndarray) -> np.ndarray:
        return np.zeros(values.shape)

    def ratio_model(self, stats: Stats) -> float:
        return 1.0


def test_a_codec_in_python_runs_on_the_movers(opened: Opened) -> None:
    engine = opened(codecs=[Backwards()])
    x = torch.zeros(MIB // 2)
    x[:1000] = torch.randn(1000)
    before = x.clone()
    engine.send_away(x, codec="backwards")
    assert engine.tier_used() == 4096
    assert torch.equal(x, before)
    engine.send_away(x, codec="backwards")
    assert np.array_equal(raw_array(x), before.numpy()), "a fault needs the GIL as well"


def test_what_leaves_while_a_step_is_logged_is_sampled(opened: Opened) -> None:
    engine = engine_of(opened)
    dense, sparse, mask = relu(4 * MIB, density=1.0), relu(4 * MIB, density=0.3), torch.empty(4 * MIB, dtype=torch.bool)
    mask.copy_(torch.rand(4 * MIB) < 0.5)
    engine.native.log_start()
    engine.send_away(dense, sparse, mask)
    engine.native.log_drop()
    samples = engine.memory.take_samples()
    by_tensor = [samples[engine.memory.serial_of(x)] for x in (dense, sparse, mask)]
    assert [set(each) for each in by_tensor] == [set(CODECS)] * 3
    assert by_tensor[1]["zvc"] == pytest.approx(0.3 + 1 / 32, abs=0.02)
    assert by_tensor[0]["zvc"] == pytest.approx(1.0, abs=0.04)
    assert by_tensor[0]["pack32"] == pytest.approx(7 / 8, abs=0.01)
    assert by_tensor[2]["bits"] == pytest.approx(1 / 8, abs=0.01)
    assert engine.memory.take_samples() == {}
    engine.send_away(relu(MIB))
    assert engine.memory.take_samples() == {}, "only while the log is on"
