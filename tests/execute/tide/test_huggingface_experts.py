"""A mixture of experts of Hugging Face's, straight from its checkpoint: only the experts that are used are read."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

import lowtide
from lowtide.memory import ranges
from lowtide.memory.native import load
from tests.execute.training import away_bytes

MIB = 2**20
EXPERTS, LAYERS, WIDTH, INNER = 16, 2, 256, 512
EXPERT_BYTES = 3 * WIDTH * INNER * 4
WORDS = 6


@pytest.fixture(autouse=True)
def nothing_lingers() -> Iterator[None]:
    yield
    if ranges._lingering is not None:
        lowtide.fit(budget="1GiB", policy="lru").close()
    assert away_bytes() == 0


def test_only_the_experts_that_are_used_are_read(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.MixtralConfig(
        hidden_size=WIDTH,
        intermediate_size=INNER,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        num_key_value_heads=4,
        vocab_size=512,
        num_local_experts=EXPERTS,
        num_experts_per_tok=1,
    )
    torch.manual_seed(5)
    words = torch.arange(WORDS)[:, None]  # one at a time

    def build() -> Any:
        return transformers.MixtralForCausalLM._from_config(config, experts_implementation="eager").eval()

    stock = build()
    # Each layer's experts in one block, as the model has them: `from_pretrained` would have to put them together.
    save_file(stock.state_dict(), tmp_path / "model.safetensors")
    with torch.no_grad():
        expected = [stock(word[None]).logits for word in words]
    del stock
    all_bytes, budget = LAYERS * EXPERTS * EXPERT_BYTES, 18 * MIB  # a layer's largest block, and a little
    assert all_bytes > 2.5 * budget
    with lowtide.init(budget=budget, spill=tmp_path):
        model = lowtide.load(build, tmp_path / "model.safetensors")
        assert load().range_counters().read == 0
    with lowtide.serve(model, budget=budget, spill=tmp_path) as tide, torch.no_grad():
        got = [model(word[None]).logits for word in words]
        stats: dict[str, Any] = tide.stats()
        read = load().range_counters().read
    assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))
    assert stats["peak_reserved_bytes"] <= budget
    used = WORDS * LAYERS * EXPERT_BYTES
    assert used <= read <= 1.5 * used
