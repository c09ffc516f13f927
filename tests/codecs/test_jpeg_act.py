"""JPEG-ACT: within its bound, better where activations are smooth, and monotone in quality."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from lowtide.codecs import Codec, JpegAct
from lowtide.codecs.jpeg_act import _TRANSFORM
from lowtide.errors import BadArgument
from lowtide.testing.codecs import CodecTests, round_trip, some_values


class TestJpegAct(CodecTests):
    """The contract; a transform moves zeros too."""

    zeros_stay = signs_of_zeros_stay = False
    models_ratio = False

    def make_codec(self) -> Codec:
        return JpegAct()


def smooth(shape: tuple[int, ...] = (2, 3, 32, 32)) -> NDArray[np.float32]:
    rows, columns = np.mgrid[: shape[2], : shape[3]]
    waves = [np.sin(rows / (5 + k)) + np.cos(columns / (7 - k)) for k in range(shape[1])]
    return np.broadcast_to(np.stack(waves), shape).astype(np.float32).copy()


def psnr(before: NDArray[np.float32], after: NDArray[np.float32]) -> float:
    return float(20 * np.log10(np.abs(before).max() / np.sqrt(((before - after) ** 2).mean())))


def test_the_transform_is_its_own_inverse() -> None:
    assert np.allclose(_TRANSFORM @ _TRANSFORM.T, np.eye(8))


def test_what_is_left_and_what_is_lost_follow_the_quality() -> None:
    values = smooth()
    nbytes = [JpegAct(quality=quality).encode(values).nbytes for quality in (10, 50, 90)]
    quality = [psnr(values, round_trip(JpegAct(quality=quality), values)) for quality in (10, 50, 90)]
    assert nbytes == sorted(nbytes)
    assert quality == sorted(quality)
    assert quality[-1] > 30


def test_smooth_planes_take_less_than_eight_bits_a_value_and_noise_does_not() -> None:
    values = smooth()
    assert JpegAct().encode(values).nbytes < values.nbytes / 12, "a third of what eight bits take"
    noise = some_values(values.size, density=1.0).reshape(values.shape)
    assert JpegAct().encode(noise).nbytes > values.nbytes / 8


@pytest.mark.parametrize("shape", [(2, 3, 9, 13), (1, 1, 8, 8), (5, 7), (3, 16, 4), (64,), (3, 0, 8, 8)])
def test_planes_of_any_size_come_back_within_the_bound(shape: tuple[int, ...]) -> None:
    values = some_values(int(np.prod(shape)), density=0.8).reshape(shape)
    back = round_trip(JpegAct(), values)
    assert (np.abs(back.astype(np.float64) - values) <= JpegAct().bound(values)).all()


def test_a_channel_has_a_scale_of_its_own() -> None:
    values = smooth()
    values[:, 1] *= 1000
    back = round_trip(JpegAct(), values)
    assert psnr(values[:, 0], back[:, 0]) > 30, "the loud channel takes nothing from the quiet one"


def test_a_quality_that_is_none_is_refused() -> None:
    with pytest.raises(BadArgument, match="from 1 to 100"):
        JpegAct(quality=0)
