"""Deep Compression: what is kept and where comes back to the bit, centroids get better, and sizes follow."""

from __future__ import annotations

import numpy as np
import pytest

from lowtide.codecs import Codec, DeepCompression, Huffman, codec
from lowtide.codecs.deep_compression import k_means
from lowtide.errors import BadArgument
from lowtide.testing.codecs import CodecTests, round_trip, some_values


class TestDeepCompression(CodecTests):
    """The contract."""

    signs_of_zeros_stay = False
    models_ratio = False

    def make_codec(self) -> Codec:
        return DeepCompression(density=0.3)


class TestHuffman(CodecTests):
    """The contract of Huffman's codes by themselves."""

    models_ratio = False

    def make_codec(self) -> Codec:
        return codec("huffman")


@pytest.mark.parametrize("density", [0.001, 0.1, 1.0])
def test_the_largest_weights_are_kept_where_they_are(density: float) -> None:
    weights = some_values(50_000, density=1.0)
    back = round_trip(DeepCompression(density=density, bits=5), weights)
    kept = np.flatnonzero(back)
    wanted = np.sort(np.argsort(-np.abs(weights))[: round(density * weights.size)])
    assert np.array_equal(kept, wanted), "far apart or not: distances and their fillers are exact"
    assert len(np.unique(back[kept])) <= 2**5


def test_more_centroids_are_nearer() -> None:
    weights = some_values(20_000, density=1.0)
    errors = []
    for bits in (2, 4, 6, 8):
        back = round_trip(DeepCompression(density=1.0, bits=bits), weights)
        errors.append(float(((back - weights) ** 2).mean()))
    assert errors == sorted(errors, reverse=True)
    assert errors[-1] < 1e-3 * errors[0]


def test_k_means_is_better_than_where_it_begins() -> None:
    weights = some_values(20_000, density=1.0)
    centroids, labels = k_means(weights, 16)
    even = np.linspace(weights.min(), weights.max(), 16)
    nearest = even[np.abs(weights[:, None] - even).argmin(axis=1)]
    assert ((weights - centroids[labels]) ** 2).mean() < 0.7 * ((weights - nearest) ** 2).mean()


def test_the_blob_is_about_as_long_as_its_rows_entropies() -> None:
    weights = some_values(200_000, density=1.0)
    coder = DeepCompression(density=0.1, bits=5)
    shared = coder.share(weights)
    distances = np.diff(np.flatnonzero(shared.kept), prepend=-1) - 1

    def entropy_bytes(row: np.ndarray[tuple[int, ...], np.dtype[np.integer]]) -> float:
        _, counts = np.unique(row, return_counts=True)
        shares = counts / row.size
        return float(-(shares * np.log2(shares)).sum() * row.size / 8)

    expected = 12 + 4 * 32 + entropy_bytes(distances) + entropy_bytes(shared.labels)
    assert coder.encode(weights).nbytes == pytest.approx(expected, rel=0.03)
    assert weights.nbytes / coder.encode(weights).nbytes > 20


def test_huffman_finds_frequencies_and_no_repeats() -> None:
    draw = np.random.default_rng(0)
    skewed = np.minimum(draw.geometric(0.5, 100_000), 255).astype(np.uint8)
    assert Huffman().encode_bytes(skewed).nbytes == pytest.approx(100_000 * 2 / 8, rel=0.02)


def test_densities_and_bits_that_are_none_are_refused() -> None:
    for wrong in ({"density": 0.0}, {"density": 1.5}, {"bits": 9}):
        with pytest.raises(BadArgument, match="use one above 0"):
            DeepCompression(**wrong)  # type: ignore[arg-type]
