"""A codec that is slower than it has to be is no success, whichever way it is slow."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import codec_rates
from lowtide.codecs.rates import Rates


@pytest.mark.parametrize(
    ("encode", "decode", "code"), [(2e9, 2e9, 0), (1.9e9, 8e9, 1), (8e9, 1.9e9, 1)], ids=["fast", "encode", "decode"]
)
def test_two_gigabytes_a_second_are_asked_for_in_each_direction(
    encode: float, decode: float, code: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    rates = Rates(encode_bytes_per_s=encode, decode_bytes_per_s=decode, ratio=0.5)
    monkeypatch.setattr(codec_rates, "measure", lambda *_: rates)
    assert codec_rates.main(["--codecs", "zvc", "--rounds", "1", "--out", str(tmp_path / "rates.json")]) == code


def test_a_rate_is_the_median_of_the_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = iter(Rates(encode_bytes_per_s=rate, decode_bytes_per_s=2 * rate) for rate in (9e9, 1e9, 5e9))
    monkeypatch.setattr(codec_rates, "measure", lambda *_: next(seen))
    (line,) = codec_rates.measured(["zvc"], rounds=3, density=0.5)
    assert (line["encode_bytes_per_s"], line["decode_bytes_per_s"]) == (5e9, 10e9)
    assert line["slowest_bytes_per_s"] == 1e9
