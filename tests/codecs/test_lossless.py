"""Codecs that give every bit back, and the lengths that their formats say."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lowtide.codecs import Bits, Codec, Packed, SparseRows, Stats, ZeroValue
from lowtide.codecs.contract import NoRoom
from lowtide.codecs.kernels import use_portable
from lowtide.errors import BadArgument
from lowtide.testing.codecs import CodecTests, round_trip, some_values

LOSSLESS: tuple[Codec, ...] = (
    ZeroValue(1), ZeroValue(2), ZeroValue(4), ZeroValue(8), Packed(2), Packed(4), Bits(), SparseRows(),
)  # fmt: skip


@pytest.fixture
def portable() -> Iterator[None]:
    if not use_portable(True):
        use_portable(False)
        pytest.skip("this processor runs the portable kernels anyway")
    yield
    use_portable(False)


class TestZeroValue(CodecTests):
    def make_codec(self) -> Codec:
        return ZeroValue()


class TestHalfWords(CodecTests):
    """Words of another size than the values': as exact, and another ratio."""

    def make_codec(self) -> Codec:
        return ZeroValue(2)

    def test_the_ratio_is_what_the_model_says(self) -> None:
        values = some_values(8_000).astype(np.float16)
        density = np.count_nonzero(values) / values.size
        assert ZeroValue(2).encode(values).nbytes == round(ZeroValue(2).ratio_model(Stats(density=density)) * 16_000)


class TestPacked(CodecTests):
    def make_codec(self) -> Codec:
        return Packed()


class TestPackedHalves(CodecTests):
    """Of single precision its halves are no floats; bfloat16's ratio is below."""

    def make_codec(self) -> Codec:
        return Packed(2)

    def test_the_ratio_is_what_the_model_says(self) -> None:
        values = some_values(65_536 * 3).view(np.uint16)[1::2].copy()
        assert Packed(2).encode(values).nbytes == pytest.approx(0.75 * values.nbytes, rel=1e-3)
        assert Packed(2).ratio_model(Stats()) == 0.75


class TestBits(CodecTests):
    def make_codec(self) -> Codec:
        return Bits()

    def test_the_ratio_is_what_the_model_says(self) -> None:
        mask = some_values(80_000) != 0
        assert Bits().encode(mask).nbytes == 10_000 + 20
        zeros = np.zeros(1 << 16, np.float32)
        assert Bits().encode(zeros).nbytes == Bits().ratio_model(Stats(density=0.0)) * zeros.nbytes


class TestSparseRows(CodecTests):
    def make_codec(self) -> Codec:
        return SparseRows()


class TestPortableZeroValue(CodecTests):
    pytestmark = pytest.mark.usefixtures("portable")

    def make_codec(self) -> Codec:
        return ZeroValue()


class TestPortablePacked(CodecTests):
    pytestmark = pytest.mark.usefixtures("portable")

    def make_codec(self) -> Codec:
        return Packed()


@pytest.mark.parametrize("codec", LOSSLESS, ids=lambda one: one.name)
def test_wide_and_portable_kernels_make_the_same_blobs_and_read_each_others(codec: Codec, portable: None) -> None:
    draw = np.random.default_rng(0)
    wild = draw.integers(0, 256, 5_000, dtype=np.uint8)
    masks = draw.integers(0, 2, 50_003, dtype=np.uint8)
    masks[41_000] = 2
    inputs = [some_values(n, density=d).view(np.uint8) for n in (0, 3, 1_001, 70_001) for d in (0.0, 0.4, 1.0)]
    for values in (*inputs, wild, wild[:-1], masks):
        blobs = []
        for on in (True, False):
            use_portable(on)
            blobs.append(codec.encode(values))
        assert np.array_equal(*blobs)
        for on in (True, False):
            use_portable(on)
            back = np.full_like(values, 0xEE)
            codec.decode(blobs[0], out=back)
            assert np.array_equal(back, values)


@given(raw=st.binary(max_size=300), which=st.integers(0, len(LOSSLESS) - 1))
@settings(max_examples=400, deadline=None)
def test_bytes_of_any_number_come_back(raw: bytes, which: int) -> None:
    values, codec = np.frombuffer(raw, np.uint8), LOSSLESS[which]
    back = np.full(len(raw), 0xEE, np.uint8)
    codec.decode(codec.encode(values), out=back)
    assert back.tobytes() == raw


@pytest.mark.parametrize("codec", LOSSLESS, ids=lambda one: one.name)
def test_unaligned_memory_is_as_good(codec: Codec) -> None:
    raw = np.frombuffer(bytearray(b"\x01" + some_values(1_000).tobytes()), np.uint8)[1:]
    into = np.zeros(4_001, np.uint8)[1:]
    codec.decode(codec.encode(raw), out=into)
    assert np.array_equal(into, raw)


@given(data=st.data(), which=st.integers(0, len(LOSSLESS) - 1))
@settings(max_examples=300, deadline=None)
def test_a_changed_blob_is_refused_or_decoded_to_something_and_touches_nothing_else(
    data: st.DataObject, which: int
) -> None:
    codec = LOSSLESS[which]
    values = some_values(data.draw(st.integers(1, 1_001)), seed=which)
    blob = codec.encode(values).copy()
    for _ in range(data.draw(st.integers(1, 4))):
        blob[data.draw(st.integers(0, blob.nbytes - 1))] = data.draw(st.integers(0, 255))
    memory = np.full(values.nbytes + 128, 0xEE, np.uint8)
    try:
        codec.decode(blob, out=memory[64 : 64 + values.nbytes])
    except ValueError as error:
        assert "blob of" in str(error)
    assert (memory[:64] == 0xEE).all()
    assert (memory[-64:] == 0xEE).all()


def test_negative_zeros_and_every_nan_are_kept_as_they_are() -> None:
    bits = np.array([0x80000000, 0x7FC00000, 0xFFC00001, 0x7F800001, 0x00000001, 0x7F800000, 0, 0], np.uint32)
    values = bits.view(np.float32)
    assert ZeroValue().encode(values).nbytes == 1 + 6 * 4, "only +0.0 is left out"
    assert round_trip(ZeroValue(), values).view(np.uint32).tolist() == bits.tolist()


@pytest.mark.parametrize(("word_bytes", "dtype"), [(1, np.uint8), (2, np.uint16), (4, np.uint32), (8, np.uint64)])
def test_the_ratio_of_zero_values_follows_the_density_to_the_byte(word_bytes: int, dtype: Any) -> None:
    count = 32 * 1024
    for kept in range(0, count + 1, 4096):
        values = np.zeros(count, dtype)
        values[np.random.default_rng(kept).permutation(count)[:kept]] = 1
        # cDMA's ratio, 1 / (1/32 + density) for words of 4 bytes, upside down.
        share = 1 / (8 * word_bytes) + kept / count
        assert ZeroValue(word_bytes).encode(values).nbytes == share * values.nbytes
        assert ZeroValue(word_bytes).ratio_model(Stats(density=kept / count)) == share


@given(seed=st.integers(0, 50), where=st.integers(0, 10_000), bit=st.integers(0, 7))
@settings(max_examples=200, deadline=None)
def test_a_changed_mask_of_zero_values_is_noticed(seed: int, where: int, bit: int) -> None:
    values = some_values(1_001, seed=seed)
    blob = ZeroValue().encode(values)
    # The last byte of the mask has bits of no word: they must be zero too.
    blob[where % -(-values.size // 8)] ^= 1 << bit
    with pytest.raises(ValueError, match="not a zvc4 blob"):
        ZeroValue().decode(blob, out=np.empty_like(values))


def test_packed_floats_follow_their_format() -> None:
    # 65,536 values with exponents of 15 kinds, and 5 more of others.
    exponents = np.resize(np.arange(100, 115, dtype=np.uint32), 65_536)
    exponents[[7, 900, 901, 40_000, 65_535]] = [1, 2, 3, 254, 255]
    words = exponents << 23 | np.arange(65_536, dtype=np.uint32) * 77 % (1 << 23) | 0x80000000
    blob = Packed().encode(words)
    assert blob.nbytes == 20 + 65_536 // 2 + 3 * 65_536 + 5
    assert sorted(blob[:15]) == list(range(100, 115))
    assert blob[16:20].view(np.uint32)[0] == 5
    assert blob[-5:].tolist() == [1, 2, 3, 254, 255]
    first = blob[20] & 15, blob[20] >> 4
    assert [blob[code] for code in first] == [100, 100 + 32 % 15]
    back = np.zeros_like(words)
    Packed().decode(blob, out=back)
    assert np.array_equal(back, words)


def test_a_block_of_packed_floats_that_would_grow_stays_as_it_is() -> None:
    wild = np.random.default_rng(0).integers(0, 2**32, 70_000, dtype=np.uint32)
    assert Packed().encode(wild).nbytes == wild.nbytes + 2 * 20 == Packed().max_encoded_nbytes(wild.nbytes)


def test_one_page_of_other_bytes_costs_a_mask_no_more_than_itself() -> None:
    mask = (np.arange(1 << 20) % 3 == 0).view(np.uint8).copy()
    mask[-100:] = 0xAB
    assert Bits().encode(mask).nbytes == 256 + 255 * 512 + 4096


def test_sparse_rows_pay_below_a_density_of_eight_tenths() -> None:
    for density, smaller in ((0.75, True), (0.85, False)):
        values = some_values(1 << 18, density=density)
        assert (SparseRows().encode(values).nbytes < values.nbytes) == smaller


def test_what_does_not_fit_is_refused_before_the_memory_behind_is_touched() -> None:
    values = some_values(10_000, density=1.0)
    for codec in LOSSLESS:
        memory = np.full(30_000, 0xEE, np.uint8)
        with pytest.raises(NoRoom):
            codec.encode(values, out=memory[:20_000])
        assert (memory[20_000:] == 0xEE).all(), codec.name


def test_other_words_and_densities_are_refused() -> None:
    with pytest.raises(BadArgument, match="words of 3 bytes"):
        ZeroValue(3)
    with pytest.raises(BadArgument, match="floats of 8 bytes"):
        Packed(8)
    with pytest.raises(BadArgument, match=r"density of 1.5"):
        Stats(density=1.5)
