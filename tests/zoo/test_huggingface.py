"""Models by their Hugging Face config: the zoo's where it has them, transformers' otherwise, and the same sizes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from torch._subclasses.fake_tensor import FakeTensorMode

from lowtide import zoo
from lowtide.cli import main
from lowtide.errors import BadArgument


def config(tmp_path: Path, **fields: Any) -> str:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(fields))
    return f"hf:{path}"


CONFIGS: dict[str, dict[str, Any]] = {
    "llama": {"hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4, "intermediate_size": 96},
    "mistral": {
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "intermediate_size": 96,
        "head_dim": 32,
    },
    "qwen2": {
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "intermediate_size": 96,
        "tie_word_embeddings": True,
    },
    "qwen3": {
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "intermediate_size": 96,
        "head_dim": 32,
    },
    "gpt2": {"n_layer": 3, "n_embd": 64, "n_head": 4, "n_positions": 128},
}


@pytest.mark.parametrize("kind", CONFIGS)
def test_the_zoos_model_has_the_parameters_of_transformers(kind: str, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    fields = {"model_type": kind, "vocab_size": 500, **CONFIGS[kind]}
    with FakeTensorMode():
        ours = zoo.build(config(tmp_path, **fields), batch=1).model
        theirs = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.for_model(**fields))
    assert sum(p.numel() for p in ours.parameters()) == sum(p.numel() for p in theirs.parameters())


def test_a_model_that_the_zoo_lacks_is_transformers_own(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("transformers")
    path = config(
        tmp_path,
        model_type="gpt_neox",
        hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=128,
        vocab_size=500,
    ).removeprefix("hf:")
    options = ["--hf-config", path, "--batch", "2", "--size", "tokens=64", "--machine", "v100", "--json"]
    assert main(["estimate", *options]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["model"] == path
    assert answer["fits_unmanaged"]


@pytest.mark.parametrize(
    ("content", "reason"),
    [(None, "does not exist"), ("{", "not JSON"), ('{"hidden_size": 3}', "model_type"), ("[]", "model_type")],
)
def test_what_is_no_config_is_refused_in_one_line(content: str | None, reason: str, tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    if content is not None:
        path.write_text(content)
    with pytest.raises(BadArgument, match=reason):
        zoo.find(f"hf:{path}")


def test_a_name_close_to_a_known_one_is_answered_with_it() -> None:
    with pytest.raises(BadArgument, match="did you mean 'llama_7b'"):
        zoo.find("lama-7b")
