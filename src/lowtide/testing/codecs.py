"""What every codec has to do, as a pytest class to subclass.

class TestMyCodec(CodecTests):
    def make_codec(self): ...

Pytest collects the subclass if its name starts with `Test`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from concurrent.futures import ThreadPoolExecutor
from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from lowtide.codecs.contract import Codec, Exactness, NoRoom, Stats, Unencodable
from lowtide.errors import BadArgument

Floats = NDArray[np.float32]

SIZES = (0, 1, 7, 8, 9, 63, 64, 65, 3_071, 3_073, 65_535, 65_536, 65_537, 200_003)

SPECIAL_BITS = (
    *(0x00000000, 0x80000000, 0x00000001, 0x807FFFFF, 0x00800000),  # zeros, subnormal numbers, the least normal one
    *(0x7F7FFFFF, 0x7F800000, 0xFF800000),  # the largest number, infinities
    *(0x7FC00000, 0xFFC00001, 0x7F800001, 0x7FFFFFFF),  # NaN, quiet and signalling, with payloads
)


def some_values(count: int, *, density: float = 0.5, seed: int = 0) -> Floats:
    """Return as many values, of which about this share is not zero."""
    draw = np.random.default_rng(seed)
    values = draw.standard_normal(count, dtype=np.float32)
    values[draw.random(count) >= density] = 0
    return values


def round_trip(codec: Codec, values: Floats) -> Floats:
    """Return what comes back; the memory it comes back to holds something else before."""
    back = np.full_like(values, 7)
    codec.decode(codec.encode(values), out=back)
    return back


class CodecTests(ABC):
    """The contract of `Codec`, on single precision.

    `zeros_stay` and `signs_of_zeros_stay`: what a codec that rounds promises of zeros besides. `models_ratio`: the
    density alone says what is left.
    """

    zeros_stay = True
    signs_of_zeros_stay = True
    models_ratio = True

    @abstractmethod
    def make_codec(self) -> Codec:
        """Return the codec."""

    def check(self, codec: Codec, values: Floats) -> None:
        """Check that what comes back is what the codec's exactness says."""
        back = round_trip(codec, values)
        if codec.exactness is Exactness.BITS:
            assert (back.view(np.uint32) == values.view(np.uint32)).all()
            assert not codec.bound(values).any()
            return
        if codec.exactness is Exactness.SIGN:
            assert np.array_equal(back, (values > 0).astype(np.float32))
            return
        finite = np.isfinite(values)
        off = np.abs(back[finite].astype(np.float64) - values[finite].astype(np.float64))
        assert (off <= codec.bound(values)[finite]).all()
        assert np.array_equal(back[~finite], values[~finite], equal_nan=True)
        zeros = values == 0
        if self.zeros_stay:
            assert not back[zeros].any()
        if self.signs_of_zeros_stay:
            assert np.array_equal(np.signbit(back[zeros]), np.signbit(values[zeros]))

    def test_it_is_a_codec(self) -> None:
        """It has every member of the protocol."""
        codec = self.make_codec()
        assert isinstance(codec, Codec)
        assert codec.name

    def test_values_come_back(self) -> None:
        """Any number of them, in one row or more."""
        codec = self.make_codec()
        for count in SIZES:
            self.check(codec, some_values(count))
            self.check(codec, some_values(count * 2)[::2])
        self.check(codec, some_values(60_006).reshape(10_001, 2, 3))

    def test_special_values_come_back_among_others_or_are_refused(self) -> None:
        """One of them in 300, at any place in a group of values that a kernel takes at once."""
        codec = self.make_codec()
        for bits, at in product(SPECIAL_BITS, (0, 63, 64, 150, 255, 299)):
            values = some_values(300, density=0.7, seed=at)
            values.view(np.uint32)[at] = bits
            try:
                codec.encode(values)
            except Unencodable:
                assert not codec.exactness.lossless
            else:
                self.check(codec, values)

    def test_every_pattern_of_bits_comes_back_or_is_refused(self) -> None:
        """Signed zeros, subnormals, infinities and NaN too; a lossless codec refuses nothing."""
        codec = self.make_codec()

        @given(bits=st.lists(st.one_of(st.sampled_from(SPECIAL_BITS), st.integers(0, 2**32 - 1)), max_size=150))
        @settings(max_examples=60, deadline=None)
        def claim(bits: list[int]) -> None:
            values = np.array(bits, np.uint32).view(np.float32)
            try:
                codec.encode(values)
            except Unencodable:
                assert not codec.exactness.lossless
            else:
                self.check(codec, values)

        claim()

    @pytest.mark.parametrize("density", [0.0, 0.3, 1.0])
    def test_a_blob_is_no_longer_than_promised_and_lies_where_it_is_told_to(self, density: float) -> None:
        """Its bound is known before it is made."""
        codec = self.make_codec()
        draw = np.random.default_rng(1)
        wild = draw.integers(0, 2**32, max(SIZES), dtype=np.uint32).view(np.float32)
        for values in (each for count in SIZES for each in (some_values(count, density=density), wild[:count])):
            try:
                blob = codec.encode(values)
            except Unencodable:
                continue
            nbytes = blob.nbytes
            assert nbytes <= codec.max_encoded_nbytes(values.nbytes)
            memory = np.full(nbytes + 3, 0xEE, np.uint8)
            again = codec.encode(values, out=memory[:nbytes])
            assert np.shares_memory(again, memory) or not nbytes
            assert np.array_equal(memory[:nbytes], blob)
            assert (memory[nbytes:] == 0xEE).all()
            if nbytes:
                with pytest.raises(NoRoom, match="cannot encode into"):
                    codec.encode(values, out=memory[: nbytes - 1])

    def test_the_ratio_is_what_the_model_says(self) -> None:
        """To a part in a thousand, where the density is known and the values are of a few powers of two."""
        codec = self.make_codec()
        if not self.models_ratio:
            pytest.skip("what it leaves depends on more than the density")
        values = np.zeros(65_536 * 3, np.float32)
        for kept in (0, 1, 50_000, values.size - 1, values.size):
            values[:kept] = 1
            share = codec.ratio_model(Stats(density=kept / values.size))
            assert codec.encode(values).nbytes == pytest.approx(share * values.nbytes, rel=1e-3, abs=8)

    def test_a_blob_of_another_length_is_refused(self) -> None:
        """Neither made up nor cut."""
        codec = self.make_codec()
        blob = codec.encode(some_values(100))
        for wrong in (blob[:-1], blob[:0], np.append(blob, blob)):
            with pytest.raises(ValueError, match=r"bytes|words"):
                codec.decode(wrong, out=np.empty(100, np.float32))

    def test_memory_with_gaps_is_not_decoded_into(self) -> None:
        """A copy would be filled, and thrown away."""
        codec = self.make_codec()
        with pytest.raises(BadArgument, match="gaps"):
            codec.decode(codec.encode(some_values(10)), out=np.empty(20, np.float32)[::2])

    def test_threads_share_a_codec(self) -> None:
        """It keeps nothing between calls."""
        codec = self.make_codec()

        def one(seed: int) -> bool:
            values = some_values(50_000, seed=seed)
            return np.array_equal(round_trip(codec, values), alone[seed])

        alone = [round_trip(codec, some_values(50_000, seed=seed)) for seed in range(8)]
        with ThreadPoolExecutor(4) as pool:
            assert all(pool.map(one, range(8)))
