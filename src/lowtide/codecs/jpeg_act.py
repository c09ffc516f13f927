"""JPEG-ACT: activations as images (Evans et al., ISCA 2020).

Scaled to eight bits, by the largest of each channel; blocks of 8 x 8 of a plane; a cosine transform; each coefficient
divided by a power of two and rounded; zero values left out (`zvc1`). For dense activations of convolutions, which are
smooth: on noise it gains nothing. The paper's tables are not public: ours are JPEG's own for brightness, scaled by
`quality` as JPEG scales them and rounded to powers of two, and at least 8, so that codes are bytes.

An array of fewer than two dimensions is rows of eight. Zeros do not stay exact: no plan of a training rounds by it.
"""

from __future__ import annotations

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
from lowtide.codecs.lossless import ZeroValue
from lowtide.errors import BadArgument

_SIDE = 8
_BITS = ZeroValue(1)
_LEAST_NORMAL = 2.0**-126
_LARGEST = float(np.finfo(np.float32).max)

# ITU-T T.81, table K.1.
_BRIGHTNESS = np.array(
    [
        [16, 11, 10, 16, 24, 40, 51, 61],
        [12, 12, 14, 19, 26, 58, 60, 55],
        [14, 13, 16, 24, 40, 57, 69, 56],
        [14, 17, 22, 29, 51, 87, 80, 62],
        [18, 22, 37, 56, 68, 109, 103, 77],
        [24, 35, 55, 64, 81, 104, 113, 92],
        [49, 64, 78, 87, 103, 121, 120, 101],
        [72, 92, 95, 98, 112, 100, 103, 99],
    ],
    np.float64,
)


def _cosines() -> NDArray[np.float64]:
    k, i = np.mgrid[:_SIDE, :_SIDE]
    rows: NDArray[np.float64] = np.cos(np.pi * k * (2 * i + 1) / (2 * _SIDE)) * np.sqrt(2 / _SIDE)
    rows[0] /= np.sqrt(2)
    return rows


_TRANSFORM = _cosines()


@dataclass(frozen=True, slots=True)
class JpegAct:
    """`quality`: from 1 to 100, as JPEG's."""

    name: str = "jpeg_act"
    quality: int = 90

    exactness = Exactness.BOUND
    kernel = None

    def __post_init__(self) -> None:
        if not 1 <= self.quality <= 100:
            raise BadArgument(f"a quality of {self.quality} does not exist: use a number from 1 to 100")

    def table(self) -> NDArray[np.float64]:
        """Return what coefficients are divided by: powers of two."""
        scale = 50 / self.quality if self.quality < 50 else 2 - self.quality / 50
        return np.maximum(_SIDE, 2.0 ** np.rint(np.log2(np.maximum(_BRIGHTNESS * scale, 1))))

    def max_encoded_nbytes(self, nbytes: int) -> int:
        """Return as many scales as values, blocks that hold one row each, and a bit for every code."""
        words = nbytes // 4
        codes = _SIDE * _SIDE * (words // _SIDE + 1) if words else 0
        codes = max(codes, words * _SIDE * _SIDE)
        return 4 * words + _BITS.max_encoded_nbytes(codes) + nbytes % 4

    def encode(self, values: Array, *, out: Bytes | None = None) -> Bytes:
        """Return scales and codes; refuse what is not finite."""
        planes = _planes(single_precision(values, self.name))
        if not np.isfinite(planes).all():
            raise Unencodable(f"{self.name} holds finite values only: store the others as they are")
        scales = _scales(values, planes)
        if ((scales < _LEAST_NORMAL) & planes.any(axis=(1, 2))).any():
            raise Unencodable(
                f"{self.name} cannot scale values below {127 * _LEAST_NORMAL:.3g}: store them as they are"
            )
        small = np.rint(planes / np.where(scales, scales, 1)[:, None, None])
        coefficients = _TRANSFORM @ _blocks(small) @ _TRANSFORM.T
        codes = np.rint(coefficients / self.table()).astype(np.int8)
        blob = np.concatenate([as_bytes(_distinct(values, scales)), _BITS.encode(codes)])
        return placed(blob, out)

    def decode(self, blob: Bytes, *, out: Array) -> None:
        """Fill `out`, whose shape says where blocks lie."""
        bytes_to_fill(single_precision(out, self.name))
        if not out.size:
            if blob.nbytes:
                raise ValueError(f"{blob.nbytes} bytes are not a {self.name} blob without values")
            return
        planes = _planes(out)
        count = _channels(out)
        if blob.nbytes < 4 * count:
            raise ValueError(f"{blob.nbytes} bytes are too few for a {self.name} blob")
        scales = _spread(out, np.frombuffer(blob[: 4 * count].tobytes(), np.float32), len(planes))
        shape = _blocks(planes).shape
        codes = np.empty(shape, np.int8)
        _BITS.decode(blob[4 * count :], out=codes)
        small = np.clip(np.rint(_TRANSFORM.T @ (codes * self.table()) @ _TRANSFORM), -127, 127)
        whole = _unblocked(small, planes.shape) * scales[:, None, None]
        out[...] = np.clip(_unplaned(whole, out), -_LARGEST, _LARGEST).astype(np.float32)

    def bound(self, values: Array) -> NDArray[np.float64]:
        """Return what half a step of every coefficient adds up to at a place of its block, at worst."""
        planes = _planes(np.where(np.isfinite(values), values, 0))
        scales = _scales(values, planes)
        worst = np.abs(_TRANSFORM.T) @ (self.table() / 2) @ np.abs(_TRANSFORM) + 1  # and half a unit, twice
        blocks = np.broadcast_to(worst, _blocks(planes).shape)
        found = _unblocked(blocks, planes.shape) * (scales.astype(np.float64) * (1 + 2**-20))[:, None, None]
        return _unplaned(found, values)

    def ratio_model(self, stats: Stats) -> float:
        """Return what zeros alone leave: what a transform leaves of smooth values is measured, not modelled."""
        return 1 / 32 if not stats.density else 1 / 4 + 1 / 32


def _planes(values: Array) -> NDArray[np.float64]:
    """Return values as planes of rows and columns; those of fewer dimensions than two as rows of eight."""
    if values.ndim >= 2:
        return values.reshape(-1, *values.shape[-2:]).astype(np.float64)
    flat = np.zeros(-(-values.size // _SIDE) * _SIDE)
    flat[: values.size] = values.reshape(-1)
    return flat.reshape(1, -1, _SIDE)


def _unplaned(planes: NDArray[np.float64], like: Array) -> NDArray[np.float64]:
    return planes.reshape(like.shape) if like.ndim >= 2 else planes.reshape(-1)[: like.size].reshape(like.shape)


def _channels(values: Array) -> int:
    return values.shape[1] if values.ndim == 4 else 1


def _scales(values: Array, planes: NDArray[np.float64]) -> NDArray[np.float32]:
    """Return a scale for every plane: the same for those of one channel."""
    if not planes.size:
        return np.zeros(len(planes), np.float32)
    largest = np.abs(planes).max(axis=(1, 2)).reshape(-1, _channels(values)).max(axis=0)
    return np.tile((largest / 127).astype(np.float32), len(planes) // _channels(values))


def _distinct(values: Array, scales: NDArray[np.float32]) -> NDArray[np.float32]:
    return scales[: _channels(values)] if values.size else scales[:0]


def _spread(out: Array, scales: NDArray[np.float32], planes: int) -> NDArray[np.float32]:
    return np.tile(scales, planes // _channels(out))


def _blocks(planes: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return blocks of 8 x 8, the last of a row or column filled up with zeros."""
    count, rows, columns = planes.shape
    wide = np.zeros((count, -(-rows // _SIDE) * _SIDE, -(-columns // _SIDE) * _SIDE))
    wide[:, :rows, :columns] = planes
    return wide.reshape(count, wide.shape[1] // _SIDE, _SIDE, wide.shape[2] // _SIDE, _SIDE).swapaxes(2, 3)


def _unblocked(blocks: NDArray[np.float64], shape: tuple[int, ...]) -> NDArray[np.float64]:
    count, rows, columns = shape
    down, across = blocks.shape[1], blocks.shape[2]
    return blocks.swapaxes(2, 3).reshape(count, down * _SIDE, across * _SIDE)[:, :rows, :columns]
