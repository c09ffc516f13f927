"""Deep Compression: parameters pruned, shared and Huffman-coded (Han et al., ICLR 2016), for models that only infer.

Weights below a threshold become zero. The others are moved to the nearest of 2^bits centroids, found by k-means from
centroids spread evenly between the least and the largest (the paper's linear initialisation). What is kept is where
they are, as distances of up to 255 with a filler where one is longer, and which centroid; both are Huffman-coded. The
paper trains again after pruning and after sharing: that is for the program to do.

A blob, all numbers of 4 bytes: how many entries, the lengths of the two coded rows, 2^bits centroids; then the rows.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from lowtide.codecs.contract import (
    Array,
    Bytes,
    Exactness,
    Stats,
    Unencodable,
    as_bytes,
    bytes_to_fill,
    placed,
    single_precision,
)
from lowtide.errors import BadArgument

_FARTHEST = 255
_ROUNDS = 12


@dataclass(frozen=True, slots=True)
class Huffman:
    """Bytes by how often they occur, and nothing else: zlib's coder without its search for repeats."""

    name: str = "huffman"

    def max_encoded_nbytes(self, nbytes: int) -> int:
        """Return the bytes as they are, in blocks, with zlib's header and checksum."""
        return nbytes + 5 * (nbytes // 16_000 + 1) + 16

    def encode_bytes(self, raw: Bytes) -> Bytes:
        """Return the blob of `raw`."""
        coder = zlib.compressobj(level=6, strategy=zlib.Z_HUFFMAN_ONLY)
        return np.frombuffer(coder.compress(raw.tobytes()) + coder.flush(), np.uint8)

    def decode_bytes(self, blob: Bytes, *, out: Bytes) -> None:
        """Fill `out` with the bytes of `blob`."""
        coder = zlib.decompressobj()
        try:
            found = coder.decompress(blob.tobytes(), out.nbytes + 1)
        except zlib.error as error:
            raise ValueError(f"these {blob.nbytes} bytes are not a {self.name} blob: {error}") from error
        if len(found) != out.nbytes or not coder.eof or coder.unused_data:
            raise ValueError(f"these {blob.nbytes} bytes are not a {self.name} blob of {out.nbytes} bytes")
        out[:] = np.frombuffer(found, np.uint8)


@dataclass(frozen=True, slots=True)
class Shared:
    """What became of weights: which were kept, the centroids, and the centroid of each that was kept."""

    kept: NDArray[np.bool_]
    centroids: NDArray[np.float32]
    labels: NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class DeepCompression:
    """`density`: the share of weights that is kept; `bits`: of a centroid's number (the paper's: 8, dense layers 5)."""

    name: str = "deep_compression"
    density: float = 0.1
    bits: int = 8

    exactness = Exactness.BOUND
    kernel = None

    def __post_init__(self) -> None:
        if not 0 < self.density <= 1 or not 1 <= self.bits <= 8:
            raise BadArgument(f"a density of {self.density} with {self.bits} bits: use one above 0 up to 1, and 1 to 8")

    def max_encoded_nbytes(self, nbytes: int) -> int:
        """Return an entry for every weight, in two rows."""
        return 12 + (4 << self.bits) + 2 * Huffman().max_encoded_nbytes(nbytes // 4)

    def encode(self, values: Array, *, out: Bytes | None = None) -> Bytes:
        """Return positions, centroids and labels; refuse what is not finite."""
        flat = single_precision(values, self.name).reshape(-1)
        if not np.isfinite(flat).all():
            raise Unencodable(f"{self.name} holds finite values only: store the others as they are")
        shared = self.share(flat)
        distances, labels = _entries(shared)
        rows = [Huffman().encode_bytes(row) for row in (distances, labels)]
        header = np.array([distances.size, rows[0].nbytes, rows[1].nbytes], np.uint32)
        return placed(np.concatenate([as_bytes(header), as_bytes(shared.centroids), *rows]), out)

    def share(self, weights: NDArray[np.float32]) -> Shared:
        """Prune weights and move the others to centroids."""
        sizes = np.abs(weights)
        wanted = int(np.ceil(self.density * weights.size))
        least = np.partition(sizes, weights.size - wanted)[weights.size - wanted] if wanted else np.inf
        kept = (sizes >= least) & (sizes > 0)
        centroids, labels = k_means(weights[kept], 2**self.bits)
        return Shared(kept, centroids, labels)

    def decode(self, blob: Bytes, *, out: Array) -> None:
        """Fill `out` with centroids and zeros."""
        bytes_to_fill(single_precision(out, self.name))
        begin = 12 + (4 << self.bits)
        if blob.nbytes < begin:
            raise ValueError(f"{blob.nbytes} bytes are too few for a {self.name} blob")
        count, *lengths = np.frombuffer(blob[:12].tobytes(), np.uint32).tolist()
        if begin + sum(lengths) != blob.nbytes or count > out.size:
            raise ValueError(f"{blob.nbytes} bytes are not a {self.name} blob of {out.size} weights")
        centroids = np.frombuffer(blob[12:begin].tobytes(), np.float32)
        distances, labels = np.empty(count, np.uint8), np.empty(count, np.uint8)
        Huffman().decode_bytes(blob[begin : begin + lengths[0]], out=distances)
        Huffman().decode_bytes(blob[begin + lengths[0] :], out=labels)
        # A filler goes as far as one can, and stands for no weight.
        places = np.cumsum(distances.astype(np.int64) + (distances < _FARTHEST))
        weights = distances < _FARTHEST
        if (weights.any() and places[weights][-1] > out.size) or labels.max(initial=0) >= centroids.size:
            raise ValueError(f"{blob.nbytes} bytes are not a {self.name} blob of {out.size} weights")
        flat = out.reshape(-1)
        flat[:] = 0
        flat[places[weights] - 1] = centroids[labels[weights]]

    def bound(self, values: Array) -> NDArray[np.float64]:
        """Return a pruned weight's own size, and for others the farthest that a weight of its centroid is."""
        flat = np.where(np.isfinite(values), values, 0).reshape(-1).astype(np.float32)
        shared = self.share(flat)
        off = np.abs(flat[shared.kept].astype(np.float64) - shared.centroids[shared.labels])
        farthest = np.zeros(shared.centroids.size)
        np.maximum.at(farthest, shared.labels, off)
        found = np.abs(flat.astype(np.float64))
        found[shared.kept] = farthest[shared.labels]
        return found.reshape(values.shape)

    def ratio_model(self, stats: Stats) -> float:
        """Return eight bits of distance and as many as a centroid's number has, before Huffman's coding."""
        return min(stats.density, self.density) * (8 + self.bits) / 32


def k_means(weights: NDArray[np.float32], most: int) -> tuple[NDArray[np.float32], NDArray[np.uint8]]:
    """Return centroids, `most` of them, and each weight's: Lloyd's rounds from an even spread."""
    centroids = np.linspace(weights.min(initial=0), weights.max(initial=0), most, dtype=np.float64)
    ordered = np.sort(weights.astype(np.float64))
    sums = np.concatenate(([0.0], np.cumsum(ordered)))
    for _ in range(_ROUNDS):
        ends = np.searchsorted(ordered, (centroids[1:] + centroids[:-1]) / 2)
        begins = np.concatenate(([0], ends))
        ends = np.concatenate((ends, [ordered.size]))
        counts = ends - begins
        means = (sums[ends] - sums[begins]) / np.maximum(counts, 1)
        centroids = np.where(counts, means, centroids)
    single = centroids.astype(np.float32)
    borders = (single[1:].astype(np.float64) + single[:-1]) / 2
    return single, np.searchsorted(borders, weights).astype(np.uint8)


def _entries(shared: Shared) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
    """Return distances and labels, with fillers: 255, which leaves out as many weights and stands for none."""
    places = np.flatnonzero(shared.kept)
    gaps = np.diff(places, prepend=-1) - 1
    fillers = gaps // _FARTHEST
    ends = np.cumsum(fillers + 1)
    distances = np.full(int(ends[-1]) if ends.size else 0, _FARTHEST, np.uint8)
    labels = np.zeros(distances.size, np.uint8)
    distances[ends - 1] = gaps % _FARTHEST
    labels[ends - 1] = shared.labels
    return distances, labels
