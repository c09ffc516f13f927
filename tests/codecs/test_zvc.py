"""Zero-value compression: every bit comes back, and the ratio is the published formula."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lowtide.codecs import ZeroValue
from lowtide.codecs.contract import Stats
from lowtide.errors import BadArgument
from lowtide.testing.codecs import CodecTests, some_values


class TestZeroValue(CodecTests):
    def make_codec(self) -> ZeroValue:
        return ZeroValue()


class TestHalfWords(CodecTests):
    """Words of another size than the values': as exact, and another ratio."""

    def make_codec(self) -> ZeroValue:
        return ZeroValue(2)

    def test_the_ratio_is_what_the_model_says(self) -> None:
        values = some_values(8_000).astype(np.float16)
        density = np.count_nonzero(values) / values.size
        assert ZeroValue(2).encoded_bytes(values) == round(ZeroValue(2).ratio_model(Stats(density=density)) * 16_000)


def test_negative_zeros_and_every_nan_are_kept_as_they_are() -> None:
    bits = np.array([0x80000000, 0x7FC00000, 0xFFC00001, 0x7F800001, 0x00000001, 0x7F800000, 0, 0], np.uint32)
    values = bits.view(np.float32)
    blob = ZeroValue().encode(values)
    assert blob.nbytes == 6 * 4 + 1, "only +0.0 is left out"
    back = np.ones_like(values)
    ZeroValue().decode(blob, out=back)
    assert back.view(np.uint32).tolist() == bits.tolist()


@pytest.mark.parametrize(("word_bytes", "dtype"), [(1, np.uint8), (2, np.uint16), (4, np.uint32), (8, np.uint64)])
def test_the_ratio_follows_the_density_to_the_byte(word_bytes: int, dtype: Any) -> None:
    count = 32 * 1024
    for kept in range(0, count + 1, 4096):
        values = np.zeros(count, dtype)
        values[np.random.default_rng(kept).permutation(count)[:kept]] = 1
        # cDMA's ratio, 1 / (1/32 + density) for words of 4 bytes, upside down.
        share = 1 / (8 * word_bytes) + kept / count
        assert ZeroValue(word_bytes).encoded_bytes(values) == share * values.nbytes
        assert ZeroValue(word_bytes).ratio_model(Stats(density=kept / count)) == share


def test_at_worst_one_part_in_32_is_added() -> None:
    values = np.ones(1 << 16, np.float32)
    assert ZeroValue().encode(values).nbytes == values.nbytes + values.nbytes // 32


@given(raw=st.binary(max_size=70), word_bytes=st.sampled_from((1, 2, 4, 8)))
@settings(max_examples=200, deadline=None)
def test_bytes_of_any_number_come_back(raw: bytes, word_bytes: int) -> None:
    values = np.frombuffer(raw, np.uint8)
    back = np.full(len(raw), 0xEE, np.uint8)
    ZeroValue(word_bytes).decode(ZeroValue(word_bytes).encode(values), out=back)
    assert back.tobytes() == raw


@given(seed=st.integers(0, 50), where=st.integers(0, 10_000), bit=st.integers(0, 7))
@settings(max_examples=200, deadline=None)
def test_a_changed_mask_is_noticed(seed: int, where: int, bit: int) -> None:
    values = some_values(1_001, seed=seed)
    blob = ZeroValue().encode(values)
    mask_begins = np.count_nonzero(values) * 4
    blob[mask_begins + where % (blob.nbytes - mask_begins)] ^= 1 << bit
    # The last byte of the mask has bits of no word: they must be zero too.
    with pytest.raises(ValueError, match="the mask names"):
        ZeroValue().decode(blob, out=np.empty_like(values))


def test_unaligned_memory_is_as_good() -> None:
    raw = np.frombuffer(bytearray(b"\x01" + some_values(1_000).tobytes()), np.uint8)[1:]
    into = np.zeros(4_001, np.uint8)[1:]
    ZeroValue().decode(ZeroValue().encode(raw), out=into)
    assert np.array_equal(into, raw)


def test_other_words_and_densities_are_refused() -> None:
    with pytest.raises(BadArgument, match="words of 3 bytes"):
        ZeroValue(3)
    with pytest.raises(BadArgument, match=r"density of 1.5"):
        Stats(density=1.5)
