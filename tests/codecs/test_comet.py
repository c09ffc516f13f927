"""COMET: every value within the bound, zeros exact, and a controller whose bound keeps the gradient's error small."""

from __future__ import annotations

from math import inf

import numpy as np
import pytest
import torch
from torch import nn

from lowtide.codecs import Codec, Comet, Unencodable, codec
from lowtide.codecs.comet import ADMITTED, Controller, LayerSeen, admitted_error, gradient_sigma
from lowtide.errors import BadArgument
from lowtide.testing.codecs import CodecTests, round_trip, some_values


class TestComet(CodecTests):
    """The contract: a share of the largest value."""

    signs_of_zeros_stay = False

    def make_codec(self) -> Codec:
        return Comet()


class TestCometWithBound(CodecTests):
    """The contract: a bound that somebody states."""

    signs_of_zeros_stay = False
    models_ratio = False

    def make_codec(self) -> Codec:
        return Comet(bound_of_all=1e-3)


class TestCometEntropyCoded(CodecTests):
    """The contract, with Huffman's codes behind it."""

    signs_of_zeros_stay = False
    models_ratio = False

    def make_codec(self) -> Codec:
        return codec("comet+huffman")


def test_a_smaller_bound_takes_wider_codes() -> None:
    values = some_values(10_000)
    nbytes = [Comet(bound_of_all=bound).encode(values).nbytes for bound in (0.1, 1e-3, 1e-6)]
    assert nbytes == [8 + 10_000, 8 + 20_000, 8 + 40_000]
    with pytest.raises(Unencodable, match="state a larger error"):
        Comet(bound_of_all=1e-12).encode(values)


def test_smooth_values_are_predicted() -> None:
    smooth = np.sin(np.linspace(0, 20, 100_000)).astype(np.float32)
    noise = some_values(100_000, density=1.0)
    left = [codec("comet+huffman").encode(values).nbytes for values in (smooth, noise)]
    assert left[0] < 0.25 * left[1]


def test_errors_that_bound_nothing_are_refused() -> None:
    for wrong in (0.0, -1.0, inf):
        with pytest.raises(BadArgument, match="is not a bound"):
            Comet(bound_of_all=wrong)


def test_the_controller_keeps_a_layers_bound_until_it_is_due_again() -> None:
    controller = Controller(every=10)
    seen = LayerSeen(mean_momentum=2.0, mean_loss_gradient=0.5, batch=16, density=0.25)
    assert controller.is_due("conv", 0)
    assert controller.codec("conv") is None
    bound = controller.assess("conv", seen, iteration=0)
    assert bound == pytest.approx(0.01 * 2.0 / (0.32 * 0.5 * 2.0))
    assert gradient_sigma(seen, bound) == pytest.approx(ADMITTED * seen.mean_momentum)
    assert not controller.is_due("conv", 9)
    assert controller.is_due("conv", 10)
    assert controller.codec("conv") == Comet(bound_of_all=bound)
    silent = LayerSeen(mean_momentum=1.0, mean_loss_gradient=0.0, batch=16, density=0.25)
    assert controller.assess("silent", silent, iteration=0) == inf
    assert controller.codec("silent") is None


def gradient_error(layer: nn.Conv2d, x: torch.Tensor, gradient: torch.Tensor, bound: float) -> float:
    """Return the standard deviation of what an input within a bound changes in the weight's gradient."""
    rounded = torch.from_numpy(round_trip(Comet(bound_of_all=bound), x.numpy()))
    exact, off = (
        torch.nn.grad.conv2d_weight(each, layer.weight.shape, gradient, padding=layer.padding)  # type: ignore[arg-type]
        for each in (x, rounded)
    )
    return float((off - exact).std())


@pytest.mark.parametrize(("batch", "density"), [(4, 0.5), (16, 0.5), (16, 1.0)])
def test_the_gradients_error_grows_as_the_controller_says(batch: int, density: float) -> None:
    """With the root of batch and density, and with the bound: the constant is that of a layer's own spread."""
    torch.manual_seed(0)
    layer = nn.Conv2d(8, 8, 3, padding=1)

    def error_of(batch: int, density: float, bound: float) -> tuple[float, LayerSeen]:
        x = torch.from_numpy(some_values(batch * 8 * 16 * 16, density=density)).abs().reshape(batch, 8, 16, 16)
        gradient = torch.randn(batch, 8, 16, 16)
        share = float((x != 0).float().mean())
        seen = LayerSeen(mean_momentum=1.0, mean_loss_gradient=float(gradient.abs().mean()), batch=batch, density=share)
        return gradient_error(layer, x, gradient, bound), seen

    measured, seen = error_of(4, 0.5, 1e-3)
    constant = measured / gradient_sigma(seen, 1e-3, constant=1.0)
    for bound in (1e-3, 4e-3):
        measured, seen = error_of(batch, density, bound)
        assert measured == pytest.approx(gradient_sigma(seen, bound, constant=constant), rel=0.2)
    bound = admitted_error(seen, constant=constant)
    measured, seen = error_of(batch, density, bound)
    assert measured <= 1.2 * ADMITTED * seen.mean_momentum
