"""What every codec has to do, as a pytest class to subclass.

class TestMyCodec(CodecTests):
    def make_codec(self): ...

Pytest collects the subclass if its name starts with `Test`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from lowtide.codecs.contract import Codec, Stats
from lowtide.errors import BadArgument

Floats = NDArray[np.float32]

SIZES = (0, 1, 7, 8, 9, 65_535, 65_536, 65_537, 200_003)


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
    """The contract of `Codec`, on single precision."""

    @abstractmethod
    def make_codec(self) -> Codec:
        """Return the codec."""

    def check(self, codec: Codec, values: Floats) -> None:
        """Check what comes back: the same bits, or finite values within the bound and others as they were."""
        back = round_trip(codec, values)
        if codec.lossless:
            assert (back.view(np.uint32) == values.view(np.uint32)).all()
            assert not codec.bound(values).any()
            return
        finite = np.isfinite(values)
        off = np.abs(back[finite].astype(np.float64) - values[finite].astype(np.float64))
        assert (off <= codec.bound(values)[finite]).all()
        assert np.array_equal(back[~finite], values[~finite], equal_nan=True)

    def test_it_is_a_codec(self) -> None:
        """It has every member of the protocol."""
        codec = self.make_codec()
        assert isinstance(codec, Codec)
        assert codec.name

    @pytest.mark.parametrize("count", SIZES)
    def test_values_come_back(self, count: int) -> None:
        """Any number of them, in one row or more."""
        codec = self.make_codec()
        self.check(codec, some_values(count))
        self.check(codec, some_values(count * 6).reshape(count, 2, 3))
        self.check(codec, some_values(count * 2)[::2])

    def test_every_pattern_of_bits_comes_back_or_is_refused(self) -> None:
        """Signed zeros, subnormals, infinities and NaN too; a lossless codec refuses nothing."""
        codec = self.make_codec()

        @given(bits=st.lists(st.one_of(st.sampled_from([0, 1 << 31]), st.integers(0, 2**32 - 1)), max_size=40))
        @settings(max_examples=200, deadline=None)
        def claim(bits: list[int]) -> None:
            values = np.array(bits, np.uint32).view(np.float32)
            try:
                codec.encode(values)
            except BadArgument:
                assert not codec.lossless
            else:
                self.check(codec, values)

        claim()

    @pytest.mark.parametrize("count", SIZES)
    @pytest.mark.parametrize("density", [0.0, 0.3, 1.0])
    def test_a_blob_is_as_long_as_promised(self, count: int, density: float) -> None:
        """The length is known before, and the blob lies where it is told to."""
        codec = self.make_codec()
        values = some_values(count, density=density)
        nbytes = codec.encoded_bytes(values)
        assert codec.encode(values).nbytes == nbytes
        memory = np.full(nbytes + 3, 0xEE, np.uint8)
        blob = codec.encode(values, out=memory)
        assert blob.nbytes == nbytes
        assert np.array_equal(memory[:nbytes], codec.encode(values))
        assert (memory[nbytes:] == 0xEE).all()
        if nbytes:
            with pytest.raises(BadArgument, match="cannot encode into"):
                codec.encode(values, out=memory[: nbytes - 1])

    def test_the_ratio_is_what_the_model_says(self) -> None:
        """To the byte, for a multiple of 8 values whose density is known."""
        codec = self.make_codec()
        values = np.zeros(8_000, np.float32)
        for kept in (0, 1, 2_000, 7_999, 8_000):
            values[:kept] = 1
            share = codec.ratio_model(Stats(density=kept / values.size))
            assert codec.encoded_bytes(values) == pytest.approx(share * values.nbytes, rel=1e-12, abs=1e-9)

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
