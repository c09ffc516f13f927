"""What codecs cost: measured by a clock, and what follows for a link."""

from __future__ import annotations

from itertools import accumulate, chain, repeat

import pytest

from lowtide.codecs import Fp16, Rates, Stats, ZeroValue, codec, codec_names, measure
from lowtide.errors import BadArgument

MIB = 2**20


def test_rates_are_the_medians_of_what_the_clock_says() -> None:
    # Encoding takes 2 s and decoding 4 s, but for an outlier and the first round. A round reads the clock three times.
    rounds = chain([(50.0, 60.0), (2.0, 4.0), (30.0, 4.0)], repeat((2.0, 4.0)))
    ticks = accumulate(chain.from_iterable((0.0, encode_s, decode_s) for encode_s, decode_s in rounds))
    rates = measure(ZeroValue(), Stats(density=0.5), clock=lambda: next(ticks))
    assert rates == Rates(encode_bytes_per_s=8 * MIB / 2, decode_bytes_per_s=8 * MIB / 4)
    assert rates.encode_s(16 * MIB) == 4.0
    assert rates.decode_s(16 * MIB) == 8.0


@pytest.mark.parametrize("link_bytes_per_s", [90.0, 110.0])
def test_a_codec_pays_on_links_slower_than_it_saves(link_bytes_per_s: float) -> None:
    rates, ratio, nbytes = Rates(encode_bytes_per_s=200.0, decode_bytes_per_s=400.0), 0.5, 1000
    plain_s = nbytes / link_bytes_per_s
    encoded_s = rates.encode_s(nbytes) + ratio * plain_s
    assert rates.pays_below_bytes_per_s(ratio) == 100.0
    assert (encoded_s < plain_s) == (link_bytes_per_s < 100.0)
    assert rates.pays_below_bytes_per_s(1.03) == 0.0


def test_codecs_have_names() -> None:
    assert codec_names() == ("zvc", "fp16")
    assert codec("zvc") == ZeroValue()
    assert codec("fp16") == Fp16()
    with pytest.raises(BadArgument, match="unknown codec 'zip': choose one of zvc, fp16"):
        codec("zip")


@pytest.mark.slow
def test_zeros_are_left_out_at_more_than_a_slow_disk_writes() -> None:
    """On an idle core of a current server about 3 GB/s each way; a tenth of that leaves room for neighbours."""
    best = [measure(ZeroValue(), Stats(density=0.5)) for _ in range(5)]
    assert max(rates.encode_bytes_per_s for rates in best) > 3e8
    assert max(rates.decode_bytes_per_s for rates in best) > 3e8
