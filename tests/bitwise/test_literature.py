"""Training under the policies of the literature is stock's, to the bit."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.bitwise.harness import need, pressed, stock
from tests.bitwise.record import assert_identical

POLICIES = (
    "vdnn",
    "vdnn_all",
    "vdnn_conv",
    "vdnn_pp",
    "modnn",
    "superneurons",
    "layrub",
    "dymem",
    "accudnn",
    "dtr",
    "mindspore_gsm",
    "mindspore_mem_reuse",
    "mindspore_offload",
    "nnabla",
    "pooch",
    "survey1",
    "survey2",
    "survey3",
    "survey4",
    "swapadvisor",
)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("name", ["cnn", "unet", "transformer"])
def test_losses_gradients_and_parameters_are_stocks(name: str, policy: str, tmp_path: Path) -> None:
    outcome = pressed(name, share=0.6, spill=tmp_path, policy=policy)
    assert_identical(stock(name), outcome.record)
    assert outcome.stats["policy"] == policy
    assert outcome.stats["budget_bytes"] < need(name).peak_bytes
    assert outcome.stats["swapped_out_bytes"] > 0
    assert outcome.stats["peak_reserved_bytes"] <= outcome.stats["budget_bytes"]
