"""Models by their Hugging Face `config.json`: the common ones as models of the zoo, any other through transformers."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lowtide.errors import BadArgument

if TYPE_CHECKING:
    from lowtide.zoo.workload import Workload

PREFIX = "hf:"
"""What stands before the path of a config where a model's name is expected."""

# Which field of a config is which size of the zoo's model; what a config lacks is as the zoo has it.
_LLAMA = {
    "layers": "num_hidden_layers",
    "width": "hidden_size",
    "heads": "num_attention_heads",
    "kv_heads": "num_key_value_heads",
    "head_width": "head_dim",
    "hidden": "intermediate_size",
    "vocab": "vocab_size",
    "tied": "tie_word_embeddings",
    "bias": "attention_bias",
}
_BERT = {
    "layers": "num_hidden_layers",
    "width": "hidden_size",
    "heads": "num_attention_heads",
    "vocab": "vocab_size",
    "tokens": "max_position_embeddings",
}
_VIT = {
    "layers": "num_hidden_layers",
    "width": "hidden_size",
    "heads": "num_attention_heads",
    "image": "image_size",
    "patch": "patch_size",
}
_GPT2 = {"layers": "n_layer", "width": "n_embd", "heads": "n_head", "vocab": "vocab_size", "tokens": "n_positions"}
_KNOWN: dict[str, tuple[str, Mapping[str, str], Mapping[str, Any]]] = {
    "llama": ("llama", _LLAMA, {}),
    "mistral": ("llama", _LLAMA, {}),
    "qwen2": ("llama", _LLAMA, {"bias": True}),
    "qwen3": ("llama", _LLAMA, {"norms": True}),
    "gpt2": ("gpt", _GPT2, {}),
    "bert": ("bert_base", _BERT, {}),
    "vit": ("vit", _VIT, {}),
}
# Those that every decoder has but for its sizes: a config leaves them out where they are as in its first release.
_SAME = {"llama": {"kv_heads": "heads"}}


def model_of(path: Path) -> tuple[str, dict[str, Any]]:
    """Return the zoo's name and sizes for a config; the name is empty where only transformers knows the model."""
    config = read_config(path)
    name, fields, fixed = _KNOWN.get(str(config["model_type"]), ("", {}, {}))
    sizes: dict[str, Any] = {}
    for size, stated in fields.items():
        value = config.get(stated)
        if isinstance(value, bool | int):
            sizes[size] = value
    for size, other in _SAME.get(name, {}).items():
        if size not in sizes and other in sizes:
            sizes[size] = sizes[other]
    return name, {**sizes, **fixed}


def read_config(path: Path) -> dict[str, Any]:
    """Return a config's fields; refuse a file that is none."""
    if path.is_dir():
        path = path / "config.json"
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise BadArgument(f"{path} does not exist: name the config.json of a Hugging Face model") from None
    except (OSError, ValueError, RecursionError) as error:
        reason = getattr(error, "strerror", None) or "not JSON"
        raise BadArgument(f"{path} cannot be read ({reason}): name the config.json of a Hugging Face model") from None
    if not isinstance(config, dict) or not isinstance(config.get("model_type"), str):
        raise BadArgument(f"{path} does not state its 'model_type', as a Hugging Face model's config.json does")
    return config


def transformers_model(*, batch: int, config: str = "", tokens: int = 512) -> Workload:
    """Return a model that the transformers library makes from a config, with the loss it has for its own task."""
    import torch

    from lowtide.zoo.workload import Workload, adam

    model, inputs = _with_transformers(read_config(Path(config)), batch=batch, tokens=tokens)

    class WithLoss(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def forward(self, first: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
            out: torch.Tensor = self.model(first, labels=labels).loss
            return out

    return Workload(model=WithLoss(), inputs=inputs, loss=lambda loss: loss, optimizer=adam())


def _with_transformers(fields: dict[str, Any], *, batch: int, tokens: int) -> tuple[Any, tuple[Any, ...]]:
    kind = fields["model_type"]
    try:
        import transformers
    except ImportError:
        raise BadArgument(
            f"the zoo has no model of type {kind!r}, and transformers, which may know it, is not installed: "
            "pip install 'lowtide[hf]'"
        ) from None
    import torch

    try:
        config = transformers.AutoConfig.for_model(**fields)
    except (ValueError, TypeError) as error:
        raise BadArgument(f"transformers does not know a model of type {kind!r}: {error}") from None
    words = torch.randint(100, (batch, tokens))
    for task in ("AutoModelForCausalLM", "AutoModelForMaskedLM", "AutoModelForSeq2SeqLM"):
        maker: Any = getattr(transformers, task)
        if type(config) in maker._model_mapping:
            return maker.from_config(config), (words, words)
    images: Any = transformers.AutoModelForImageClassification
    if type(config) in images._model_mapping:
        side = getattr(config, "image_size", 224)
        return images.from_config(config), (
            torch.randn(batch, getattr(config, "num_channels", 3), side, side),
            torch.randint(2, (batch,)),
        )
    raise BadArgument(f"a model of type {kind!r} has no task of words or images: capture your own script instead")
