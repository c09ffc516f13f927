from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lowtide.core.units import format_bytes, format_rate, format_seconds, parse_bytes

UNITS = {
    "B": 1,
    "KB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "TB": 10**12,
    "KiB": 2**10,
    "MiB": 2**20,
    "GiB": 2**30,
    "TiB": 2**40,
}
sizes = st.integers(min_value=0, max_value=2**62)


@given(sizes)
def test_a_plain_number_is_bytes_exactly(nbytes: int) -> None:
    assert parse_bytes(str(nbytes)) == nbytes
    assert parse_bytes(nbytes) == nbytes


@given(st.integers(min_value=0, max_value=10**15), st.sampled_from(sorted(UNITS)), st.sampled_from(["", " ", "  "]))
def test_whole_numbers_of_units_are_exact_in_any_case_and_spacing(count: int, unit: str, space: str) -> None:
    expected = count * UNITS[unit]
    assert parse_bytes(f"{count}{space}{unit}") == expected
    assert parse_bytes(f" {count}{space}{unit.lower()} ") == expected
    assert parse_bytes(f"{count}{space}{unit.upper()}") == expected


@given(sizes)
def test_formatted_bytes_read_back_within_half_a_percent(nbytes: int) -> None:
    read_back = parse_bytes(format_bytes(nbytes))
    # Three digits are off by half a percent either way; the part of a byte that is cut off makes it less, never more.
    assert 0.9949 * nbytes - 1 < read_back <= 1.0051 * nbytes + 0.5


@given(st.integers(min_value=0, max_value=2**49))
def test_formatted_bytes_never_show_1024_of_a_unit(nbytes: int) -> None:
    assert float(format_bytes(nbytes).split()[0]) < 1024


@given(sizes)
def test_negative_sizes_are_the_positive_ones_with_a_sign(nbytes: int) -> None:
    if nbytes:
        assert format_bytes(-nbytes) == "-" + format_bytes(nbytes)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("1.5GiB", 3 * 2**29),
        ("0.1KB", 100),
        ("1.0005KB", 1000),
        ("9007199254740993", 9007199254740993),
        ("-1MiB", -(2**20)),
    ],
)
def test_fractions_are_exact_and_part_of_a_byte_is_cut_off(text: str, expected: int) -> None:
    assert parse_bytes(text) == expected


@pytest.mark.parametrize(
    ("bad", "hint"),
    [
        ("", "a number and a unit"),
        ("GiB", "a number and a unit"),
        ("2 GiB GiB", "a number and a unit"),
        ("1e9", "a number and a unit"),
        ("9" * 5000, "a number and a unit"),
        ("2XB", "unknown unit 'XB'"),
        ("2G", "GiB (binary) or GB (decimal)"),
        (True, "as an int"),
        (2.5, "as an int"),
        (None, "as an int"),
    ],
)
def test_what_is_no_size_is_refused_in_one_line_with_a_hint(bad: object, hint: str) -> None:
    with pytest.raises(ValueError, match=re.escape(hint)) as caught:
        parse_bytes(bad)  # type: ignore[arg-type]
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0 us"),
        (999.4e-6, "999 us"),
        (999.6e-6, "1.0 ms"),
        (0.0123, "12.3 ms"),
        (0.99996, "1.00 s"),
        (59.999, "1.0 min"),
        (3600, "1.0 h"),
        (-0.5, "-500.0 ms"),
    ],
)
def test_seconds_get_the_unit_a_reader_would_choose(seconds: float, text: str) -> None:
    assert format_seconds(seconds) == text


def test_bandwidths_are_decimal() -> None:
    assert [format_rate(r) for r in (2.5e9, 99.96e6, 1500)] == ["2.50 GB/s", "100 MB/s", "1.50 KB/s"]
