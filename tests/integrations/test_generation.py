"""Hugging Face's `generate` and pipelines, unchanged, with a checkpoint that is larger than the budget."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import lowtide

pytestmark = pytest.mark.slow
MIB = 2**20


def folder_of_a_llama(path: Path) -> Any:
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=12,
        num_attention_heads=4,
        vocab_size=1024,
        max_position_embeddings=64,
        bos_token_id=1,
        eos_token_id=None,
        pad_token_id=0,
    )
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(config).eval()
    model.save_pretrained(path)
    return model


@pytest.mark.parametrize(
    "options", [{}, {"do_sample": True, "top_k": 20}, {"num_beams": 3}], ids=["greedy", "sample", "beams"]
)
def test_generate_gives_the_same_words_inside_the_budget(options: dict[str, Any], tmp_path: Path) -> None:
    model = folder_of_a_llama(tmp_path / "model")
    words = torch.randint(2, 1024, (2, 5), generator=torch.Generator().manual_seed(1))
    torch.manual_seed(2)
    expected = model.generate(words, max_new_tokens=12, **options)
    weights, kind = sum(one.nbytes for one in model.parameters()), type(model)
    del model
    budget = weights // 2
    with lowtide.init(budget=budget, spill=tmp_path):
        ours = kind.from_pretrained(tmp_path / "model")
    with lowtide.serve(ours, budget=budget, spill=tmp_path) as tide:
        torch.manual_seed(2)
        got = ours.generate(words, max_new_tokens=12, **options)
        stats: dict[str, Any] = tide.stats()
    assert torch.equal(got, expected)
    assert stats["peak_reserved_bytes"] <= budget
    assert stats["faults"] == 0


def test_a_pipeline_gives_the_same_text_inside_the_budget(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    tokenizers = pytest.importorskip("tokenizers")
    model = folder_of_a_llama(tmp_path / "model")
    known = tokenizers.models.WordLevel({f"w{number}": number for number in range(1024)}, unk_token="w0")
    inner = tokenizers.Tokenizer(known)
    inner.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=inner, pad_token="w0", unk_token="w0")

    def texts(of: Any) -> Any:
        pipe = transformers.pipeline("text-generation", model=of, tokenizer=tokenizer, device="cpu")
        return pipe(["w5 w6 w7", "w9"], max_new_tokens=6, do_sample=False, batch_size=2)

    expected = texts(model)
    weights, kind = sum(one.nbytes for one in model.parameters()), type(model)
    del model
    with lowtide.init(budget=weights // 2, spill=tmp_path):
        ours = kind.from_pretrained(tmp_path / "model")
    with lowtide.serve(ours, budget=weights // 2, spill=tmp_path):
        assert texts(ours) == expected


@pytest.mark.parametrize("way", ["save_pretrained", "shards", "torch.save"])
def test_a_model_larger_than_the_budget_is_saved_the_usual_ways(way: str, tmp_path: Path) -> None:
    model = folder_of_a_llama(tmp_path / "model")

    def save(one: Any, out: Path) -> None:
        out.mkdir()
        if way == "torch.save":
            torch.save(one.state_dict(), out / "model.pt")
        else:
            one.save_pretrained(out, max_shard_size="5MB" if way == "shards" else "1GB")

    weights, kind = sum(one.nbytes for one in model.parameters()), type(model)
    model = kind.from_pretrained(tmp_path / "model")  # which has its weights in another order than one that was built
    save(model, tmp_path / "stock")
    del model
    budget = weights // 2
    with lowtide.init(budget=budget, spill=tmp_path):
        ours = kind.from_pretrained(tmp_path / "model")
    with lowtide.serve(ours, budget=budget, spill=tmp_path) as tide:
        save(ours, tmp_path / "ours")
        stats: dict[str, Any] = tide.stats()
    assert stats["peak_reserved_bytes"] <= budget
    names = sorted(file.name for file in (tmp_path / "stock").iterdir())
    assert names == sorted(file.name for file in (tmp_path / "ours").iterdir())
    for name in names:
        assert (tmp_path / "ours" / name).read_bytes() == (tmp_path / "stock" / name).read_bytes(), name
