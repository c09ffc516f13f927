"""`torch.load(..., mmap=True)` inside `lowtide.init`: tensors stay in their file until they are touched."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import lowtide
from lowtide.memory.native.bindings import Place
from tests.checkpoint.test_in_place import BUDGET, MIB, Stack, call, digests, nothing_lingers, place, saved, usage

__all__ = ["nothing_lingers"]


def test_a_state_dict_is_read_in_place(tmp_path: Path) -> None:
    stock = saved(tmp_path / "other")
    expected, output = digests(stock), call(stock)
    torch.save(stock.state_dict(), tmp_path / "model.pt")
    versions = stock.state_dict()._metadata  # type: ignore[attr-defined]
    del stock
    with lowtide.init(budget=BUDGET, spill=tmp_path):
        state: Any = torch.load(tmp_path / "model.pt", mmap=True)
        assert usage().counted.read == 0, "nothing is read before it is used"
        assert state._metadata == versions
        with torch.device("meta"):
            model = Stack()
        model.load_state_dict(state, assign=True)
        model.scale = torch.linspace(1, 2, len(model.scale))
        del state
        assert place(model.layers[3].weight) is Place.AWAY
        assert model.head.weight.data_ptr() == model.layers[0].weight.data_ptr(), "tied as in the file"
        assert torch.equal(call(model), output)
        assert usage().counted.written == 0, "there is no second copy"
        assert digests(model) == [*expected, expected[0]], "PyTorch's load_state_dict makes two parameters of it"
    assert torch.load is torch.serialization.load


def test_views_parameters_and_other_values_come_back_as_they_were(tmp_path: Path) -> None:
    base = torch.arange(MIB, dtype=torch.float32)
    saved_value = {
        "even": base[::2],
        "turned": base.view(1024, 1024).t(),
        "weight": nn.Parameter(torch.ones(512, 1024), requires_grad=False),
        "nested": [1, (torch.arange(3), "text"), {"epoch": 4}],
        "half": torch.full((MIB,), 1.5, dtype=torch.bfloat16, requires_grad=True),
    }
    torch.save(saved_value, tmp_path / "a.pt")
    with lowtide.init(budget=4 * BUDGET, spill=tmp_path):
        value: Any = torch.load(tmp_path / "a.pt", mmap=True, map_location="cpu", weights_only=True)
        assert usage().counted.read == 0
        assert torch.equal(value["even"], saved_value["even"])  # type: ignore[arg-type]
        assert torch.equal(value["turned"], base.view(1024, 1024).t())
        assert value["even"].untyped_storage().data_ptr() == value["turned"].untyped_storage().data_ptr()
        assert isinstance(value["weight"], nn.Parameter)
        assert not value["weight"].requires_grad
        assert value["half"].requires_grad
        assert value["half"].is_leaf
        assert value["nested"][0] == 1
        assert torch.equal(value["nested"][1][0], torch.arange(3))
        assert value["nested"][1:][0][1] == "text"
        assert value["nested"][2] == {"epoch": 4}
        with torch.no_grad():
            value["weight"].mul_(2)
        assert float(value["weight"].sum()) == 2 * 512 * 1024
    again: Any = torch.load(tmp_path / "a.pt")
    assert float(again["weight"].sum()) == 512 * 1024, "the file never changes"


def test_what_is_not_read_in_place_is_pytorchs_own_business(tmp_path: Path) -> None:
    torch.save({"sparse": torch.eye(4).to_sparse()}, tmp_path / "a.pt")
    with lowtide.init(budget=BUDGET, spill=tmp_path):
        value: Any = torch.load(tmp_path / "a.pt", mmap=True)
        assert torch.equal(value["sparse"].to_dense(), torch.eye(4))
        assert torch.equal(torch.load(tmp_path / "a.pt")["sparse"].to_dense(), torch.eye(4))


def test_from_pretrained_reads_a_bin_folder_in_place(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        hidden_size=256, intermediate_size=512, num_hidden_layers=4, num_attention_heads=4, vocab_size=1000
    )
    torch.manual_seed(3)
    stock = transformers.LlamaForCausalLM(config).eval()
    folder = tmp_path / "checkpoint"
    config.save_pretrained(folder)
    torch.save(stock.state_dict(), folder / "pytorch_model.bin")
    words = torch.arange(4)[None]
    with torch.no_grad():
        expected = stock(words).logits
    del stock
    with lowtide.init(budget=BUDGET, spill=tmp_path):
        model = transformers.LlamaForCausalLM.from_pretrained(folder).eval()
        assert usage().counted.read == 0
        assert place(model.model.layers[0].mlp.up_proj.weight) is Place.AWAY
    with lowtide.serve(model, budget=BUDGET, spill=tmp_path) as tide, torch.no_grad():
        for _ in range(3):
            assert torch.equal(model(words).logits, expected)
        stats: dict[str, Any] = tide.stats()
    assert stats["swapped_out_bytes"] == 0
