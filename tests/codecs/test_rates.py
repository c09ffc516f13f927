"""What codecs cost: measured by a clock, and what follows for a link."""

from __future__ import annotations

from itertools import accumulate, chain, repeat

import pytest

from lowtide.codecs import Rates, Stats, ZeroValue, codec, measure

MIB = 2**20


def test_rates_are_the_medians_of_what_the_clock_says() -> None:
    # Encoding takes 2 s and decoding 4 s, but for an outlier and the first round. A round reads the clock three times.
    rounds = chain([(50.0, 60.0), (2.0, 4.0), (30.0, 4.0)], repeat((2.0, 4.0)))
    ticks = accumulate(chain.from_iterable((0.0, encode_s, decode_s) for encode_s, decode_s in rounds))
    rates = measure(ZeroValue(), Stats(density=0.5), clock=lambda: next(ticks))
    assert rates.encode_bytes_per_s == 8 * MIB / 2
    assert rates.decode_bytes_per_s == 8 * MIB / 4
    assert rates.ratio == pytest.approx(0.5 + 1 / 32, rel=0.01)
    assert rates.encode_s(16 * MIB) == 4.0
    assert rates.decode_s(16 * MIB) == 8.0


@pytest.mark.parametrize("link_bytes_per_s", [120.0, 150.0])
def test_a_codec_pays_on_links_slower_than_it_saves(link_bytes_per_s: float) -> None:
    rates, ratio, nbytes = Rates(encode_bytes_per_s=200.0, decode_bytes_per_s=400.0), 0.5, 1000
    plain_s = 2 * nbytes / link_bytes_per_s
    encoded_s = rates.encode_s(nbytes) + rates.decode_s(nbytes) + ratio * plain_s
    assert rates.pays_below_bytes_per_s(ratio) == pytest.approx(2 * 0.5 / (1 / 200 + 1 / 400))
    assert (encoded_s < plain_s) == (link_bytes_per_s < 133.4)
    assert rates.pays_below_bytes_per_s(1.03) == 0.0


@pytest.mark.slow
@pytest.mark.parametrize("name", ["zvc", "binarize", "fp16", "bf16", "fp8_e4m3", "bits", "pack32", "pack16"])
def test_native_codecs_are_faster_than_a_fast_disk(name: str) -> None:
    """On an idle core of a current server 6 to 40 GB/s each way; the best of several leaves room for neighbours."""
    best = [measure(codec(name), Stats(density=0.5)) for _ in range(9)]
    assert max(rates.encode_bytes_per_s for rates in best) > 2e9
    assert max(rates.decode_bytes_per_s for rates in best) > 2e9
