"""Any constructor draws what it draws without Lowtide, and leaves the generators where it leaves them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import nn

import lowtide
from lowtide.memory import ranges
from lowtide.memory.native import load
from tests.execute.training import away_bytes, digest

MIB = 2**20


@pytest.fixture(autouse=True)
def nothing_lingers() -> Iterator[None]:
    yield
    if ranges._lingering is not None:
        lowtide.fit(budget="1GiB", policy="lru").close()
    assert away_bytes() == 0


class Various(nn.Module):
    """Layers whose constructors initialise in different ways: several kernels, views, in place, buffers, ties."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(2000, 256, padding_idx=3)
        self.recurrent = nn.LSTM(256, 256, num_layers=2)
        self.block = nn.TransformerEncoderLayer(256, 4, 512)
        self.convolution = nn.Conv2d(64, 128, 3)
        self.norm = nn.BatchNorm1d(256)
        self.turned = nn.Parameter(nn.init.orthogonal_(torch.empty(256, 256)))
        self.cut = nn.Parameter(nn.init.trunc_normal_(torch.empty(512, 512), std=0.02))
        self.normed = nn.utils.parametrizations.weight_norm(nn.Linear(512, 512))
        self.head = nn.Linear(256, 2000, bias=False)
        self.head.weight = self.table.weight
        self.register_buffer("noise", torch.randn(256, 512, dtype=torch.bfloat16))
        with torch.no_grad():
            self.table.weight[5:9].uniform_(-1, 1)


def built() -> tuple[nn.Module, bytes]:
    torch.manual_seed(5)
    return Various(), torch.get_rng_state().numpy().tobytes()


def digests(model: nn.Module) -> dict[str, str]:
    return {name: digest(one.detach().view(torch.uint8)) for name, one in model.state_dict().items() if one.dim()}


def test_any_constructor_draws_the_same_values_and_leaves_the_generator_where_it_was(tmp_path: Path) -> None:
    stock, state = built()
    expected, weights = digests(stock), sum(one.nbytes for one in stock.parameters())
    del stock
    budget = 4 * MIB
    assert weights > 2 * budget
    with lowtide.init(budget=budget, spill=tmp_path):
        load().reset_peaks()
        model, left = built()
        assert load().counters().peak_reserved_bytes <= budget
    assert left == state, "the next one draws what it would have"
    assert digests(model) == expected
    assert model.head.weight is model.table.weight
