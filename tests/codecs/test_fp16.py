"""Half precision: within half a unit in the last place, and what it cannot hold is refused."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lowtide.codecs import Fp16
from lowtide.codecs.fp16 import OVERFLOW
from lowtide.errors import BadArgument
from lowtide.testing.codecs import CodecTests, round_trip


class TestFp16(CodecTests):
    def make_codec(self) -> Fp16:
        return Fp16()


in_range = st.floats(-65519.0, 65519.0, width=32)


@given(value=in_range)
@settings(max_examples=500, deadline=None)
def test_the_error_is_at_most_half_a_unit_in_the_last_place(value: float) -> None:
    values = np.array([value], np.float32)
    back = round_trip(Fp16(), values)
    off = abs(float(back[0]) - float(values[0]))
    # Ten bits after the leading one; numbers below 2**-14 share the unit of that one.
    exponent = math.frexp(value)[1] - 1 if value else -14
    unit = 2.0 ** (max(exponent, -14) - 10)
    assert off <= unit / 2
    assert Fp16().bound(values)[0] == unit / 2
    assert off <= max(2**-11 * abs(value), 2**-25)


def test_the_bound_is_reached() -> None:
    # Half way between 1 and the next number, and between 0 and the least: ties go to even.
    values = np.array([1 + 2**-11, 2**-25], np.float32)
    back = round_trip(Fp16(), values)
    assert back.tolist() == [1.0, 0.0]
    assert (np.abs(back - values) == Fp16().bound(values)).all()


def test_everything_that_half_precision_has_comes_back_exactly() -> None:
    values = np.arange(1 << 16, dtype=np.uint16).view(np.float16).astype(np.float32)
    back = round_trip(Fp16(), values)
    numbers = ~np.isnan(values)
    assert (back[numbers].view(np.uint32) == values[numbers].view(np.uint32)).all()
    assert np.isnan(back[~numbers]).all()
    assert np.count_nonzero(~numbers) == 2 * 1023


def test_numbers_below_its_range_become_zeros_of_their_sign() -> None:
    values = np.array([2**-25, -(2**-26), 1e-45, -1e-45, -0.0], np.float32)
    back = round_trip(Fp16(), values)
    assert (back == 0).all()
    assert np.signbit(back).tolist() == [False, True, False, True, True]
    assert (np.abs(values) <= Fp16().bound(values)).all()
    assert Fp16().bound(values).max() == 2**-25


@pytest.mark.parametrize("value", [OVERFLOW, -OVERFLOW, 1e38])
def test_a_number_beyond_its_range_is_refused_and_not_clipped(value: float) -> None:
    values = np.array([1.0, value, np.inf], np.float32)
    with pytest.raises(BadArgument, match=r"fp16 cannot hold .* range ends at 65520"):
        Fp16().encode(values)
    largest = np.nextafter(np.float32(OVERFLOW), np.float32(0))
    assert round_trip(Fp16(), np.array([largest], np.float32)).tolist() == [65504.0]


def test_what_is_not_finite_stays_so() -> None:
    values = np.array([np.inf, -np.inf, np.nan], np.float32)
    back = round_trip(Fp16(), values)
    assert back[:2].tolist() == [np.inf, -np.inf]
    assert np.isnan(back[2])
    assert Fp16().bound(values).tolist() == [0, 0, 0]


def test_other_types_are_refused() -> None:
    for dtype in (np.float64, np.int32, np.float16):
        with pytest.raises(BadArgument, match="takes single precision"):
            Fp16().encode(np.ones(3, dtype))
    with pytest.raises(BadArgument, match="takes single precision"):
        Fp16().decode(np.zeros(6, np.uint8), out=np.ones(3, np.float64))
