"""Fewer bits for single precision: within half a unit in the last place, and what cannot be held is refused."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lowtide.codecs import BF16, FP8_E4M3, FP8_E5M2, FP10, FP16, Cast, Codec, Signs, Unencodable
from lowtide.codecs.casts import CASTS
from lowtide.codecs.kernels import use_portable
from lowtide.errors import BadArgument
from lowtide.testing.codecs import CodecTests, round_trip, some_values

each_cast = pytest.mark.parametrize("cast", CASTS, ids=lambda one: one.name)


class TestFp16(CodecTests):
    def make_codec(self) -> Codec:
        return FP16


class TestBf16(CodecTests):
    def make_codec(self) -> Codec:
        return BF16


class TestFp10(CodecTests):
    def make_codec(self) -> Codec:
        return FP10


class TestFp8E4M3(CodecTests):
    def make_codec(self) -> Codec:
        return FP8_E4M3


class TestFp8E5M2(CodecTests):
    def make_codec(self) -> Codec:
        return FP8_E5M2


class TestSigns(CodecTests):
    def make_codec(self) -> Codec:
        return Signs()


def beyond(cast: Cast) -> float:
    """Return the least number that rounds beyond the largest: half a unit above it, where its last place is odd."""
    exponent = math.frexp(cast.largest)[1] - 1
    half_way = cast.largest + 2.0 ** (exponent - cast.mantissa_bits - 1)
    return float(np.nextafter(np.float32(half_way), np.float32(np.inf))) if cast is FP8_E4M3 else half_way


@each_cast
def test_the_error_is_at_most_half_a_unit_in_the_last_place(cast: Cast) -> None:
    limit = float(np.nextafter(np.float32(min(beyond(cast), 3.4e38)), np.float32(0)))

    @given(value=st.floats(-limit, limit, width=32))
    @settings(max_examples=300, deadline=None)
    def claim(value: float) -> None:
        values = np.array([value], np.float32)
        if abs(value) >= beyond(cast):
            return
        back = round_trip(cast, values)
        least = 2 - 2 ** (cast.exponent_bits - 1)
        exponent = math.frexp(value)[1] - 1 if value else least
        unit = 2.0 ** (max(exponent, least) - cast.mantissa_bits)
        assert abs(float(back[0]) - float(values[0])) <= unit / 2
        assert cast.bound(values)[0] == unit / 2

    claim()


@each_cast
def test_the_bound_is_reached_and_ties_go_to_even(cast: Cast) -> None:
    unit = 2.0**-cast.mantissa_bits
    values = np.array([1 + unit / 2, 1 + 3 * unit / 2], np.float32)
    back = round_trip(cast, values)
    assert back.tolist() == [1.0, 1 + 2 * unit]
    assert (np.abs(back - values) == cast.bound(values)).all()


@pytest.mark.parametrize(("cast", "dtype"), [(FP16, np.float16)])
def test_half_precision_is_numpys(cast: Cast, dtype: type[np.float16]) -> None:
    draw = np.random.default_rng(0)
    bits = draw.integers(0, 2**32, 200_000, dtype=np.uint32)
    values = bits.view(np.float32)
    values = values[np.abs(values) < 65519]
    expected = values.astype(dtype).view(np.uint16)
    assert np.array_equal(cast.encode_array(values), expected)


@each_cast
def test_everything_that_the_format_has_comes_back_exactly(cast: Cast) -> None:
    codes = np.arange(1 << cast.value_bits, dtype=np.uint32)
    sign = np.where(codes >> (cast.value_bits - 1), -1.0, 1.0)
    exponent = (codes >> cast.mantissa_bits & ((1 << cast.exponent_bits) - 1)).astype(np.int64)
    mantissa = (codes & ((1 << cast.mantissa_bits) - 1)) / 2**cast.mantissa_bits
    bias = 2 ** (cast.exponent_bits - 1) - 1
    numbers = sign * np.where(exponent == 0, mantissa * 2.0 ** (1 - bias), (1 + mantissa) * 2.0 ** (exponent - bias))
    numbers = numbers[np.abs(numbers) <= cast.largest]
    assert len(numbers) >= 2 ** (cast.value_bits - 1)
    assert np.abs(numbers).max() == cast.largest
    values = numbers.astype(np.float32)
    assert np.array_equal(values.astype(np.float64), numbers)
    back = round_trip(cast, values)
    assert np.array_equal(back.view(np.uint32), values.view(np.uint32))


@each_cast
def test_a_number_beyond_the_range_is_refused_and_not_clipped(cast: Cast) -> None:
    least = np.float32(beyond(cast))
    for value in (least, -least, np.float32(3.4028235e38)):
        with pytest.raises(Unencodable, match=f"{cast.name} cannot hold"):
            cast.encode(np.array([1.0] * 40 + [value], np.float32))
    largest = np.nextafter(least, np.float32(0))
    assert round_trip(cast, np.array([largest], np.float32)).tolist() == [cast.largest]


def test_infinities_stay_so_where_the_format_has_them() -> None:
    values = np.array([np.inf, -np.inf, np.nan], np.float32)
    for cast in CASTS:
        if cast is FP8_E4M3:
            with pytest.raises(Unencodable):
                cast.encode(values)
            assert np.isnan(round_trip(cast, values[2:])).all()
        else:
            assert np.array_equal(round_trip(cast, values), values, equal_nan=True)
            assert cast.bound(values).tolist() == [0, 0, 0]


@each_cast
def test_wide_and_portable_kernels_round_alike(cast: Cast) -> None:
    draw = np.random.default_rng(1)
    wild = draw.integers(0, 2**32, 300_000, dtype=np.uint32).view(np.float32)
    values = wild[np.abs(wild) <= cast.largest]
    values = np.append(values, some_values(5_001))
    try:
        use_portable(True)
        portable = cast.encode(values)
        back = round_trip(cast, values)
    finally:
        use_portable(False)
    assert np.array_equal(cast.encode(values), portable)
    assert np.array_equal(round_trip(cast, values).view(np.uint32), back.view(np.uint32))


def test_what_relu_makes_of_a_sign_is_what_it_makes_of_the_value() -> None:
    torch = pytest.importorskip("torch")
    values = np.maximum(some_values(10_001, density=1.0), 0)
    grad = torch.from_numpy(some_values(10_001, seed=3))
    exact, coded = (torch.from_numpy(each) for each in (values, round_trip(Signs(), values)))
    threshold = torch.ops.aten.threshold_backward
    assert torch.equal(threshold(grad, exact, 0), threshold(grad, coded, 0))
    assert Signs().encode(values).nbytes == -(-10_001 // 8)


def test_other_types_are_refused() -> None:
    for codec in (*CASTS, Signs()):
        for dtype in (np.float64, np.int32, np.float16):
            with pytest.raises(BadArgument, match="takes single precision"):
                codec.encode(np.ones(3, dtype))
        with pytest.raises(BadArgument, match="takes single precision"):
            codec.decode(np.zeros(6, np.uint8), out=np.ones(3, np.float64))
