"""Models to make traces of: plain PyTorch in a few lines each, at any batch size, with random weights.

    from lowtide import zoo
    model, inputs, loss, optimizer = zoo.build("resnet50", batch=32)

`docs/zoo.md` lists them. Names and sizes can be looked up without importing torch; building imports it.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lowtide.core.spelling import bare, did_you_mean
from lowtide.errors import BadArgument
from lowtide.zoo.huggingface import PREFIX, model_of

if TYPE_CHECKING:
    from lowtide.zoo.workload import Workload

DTYPES = ("float32", "bfloat16", "float16", "float64")


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """Where a model is defined, what sets its name apart, and where it comes from."""

    target: str
    summary: str
    sizes: Mapping[str, int | float | bool | str] = field(default_factory=dict)


_VISION, _TEXT = "lowtide.zoo.vision", "lowtide.zoo.transformers"
_RESNET, _LLAMA = "lowtide.zoo.resnet:resnet", "lowtide.zoo.llama:llama"

MODELS: dict[str, Entry] = {
    "alexnet": Entry(target=f"{_VISION}:alexnet", summary="AlexNet in one tower (Krizhevsky, 2014)"),
    "vgg16": Entry(target=f"{_VISION}:vgg16", summary="VGG-16 (Simonyan and Zisserman, 2015)"),
    "vgg16_bn": Entry(target=f"{_VISION}:vgg16", summary="VGG-16 with BatchNorm", sizes={"norm": True}),
    "resnet50": Entry(target=_RESNET, summary="ResNet-50 (He et al., 2016)", sizes={"depth": 50}),
    "resnet18": Entry(target=_RESNET, summary="ResNet-18", sizes={"depth": 18}),
    "resnet34": Entry(target=_RESNET, summary="ResNet-34", sizes={"depth": 34}),
    "resnet101": Entry(target=_RESNET, summary="ResNet-101", sizes={"depth": 101}),
    "resnet152": Entry(target=_RESNET, summary="ResNet-152", sizes={"depth": 152}),
    "resnet": Entry(target=_RESNET, summary="a bottleneck ResNet of any depth"),
    "inception_v3": Entry(
        target="lowtide.zoo.inception:inception_v3",
        summary="like Inception-v3 (Szegedy et al., 2016), without the auxiliary classifier",
    ),
    "densenet121": Entry(target="lowtide.zoo.densenet:densenet", summary="DenseNet-121 (Huang et al., 2017)"),
    "unet": Entry(target="lowtide.zoo.unet:unet", summary="U-Net (Ronneberger et al., 2015), padded, with BatchNorm"),
    "seq2seq": Entry(
        target="lowtide.zoo.seq2seq:seq2seq", summary="LSTM encoder and decoder, additive attention (Bahdanau, 2015)"
    ),
    "bert_base": Entry(target=f"{_TEXT}:bert", summary="BERT-base (Devlin et al., 2019), masked words"),
    "bert_large": Entry(target=f"{_TEXT}:bert", summary="BERT-large", sizes={"layers": 24, "width": 1024, "heads": 16}),
    "gpt": Entry(target=f"{_TEXT}:gpt", summary="a GPT of any size"),
    "gpt2": Entry(
        target=f"{_TEXT}:gpt",
        summary="GPT-2 small (Radford et al., 2019)",
        sizes={"layers": 12, "width": 768, "heads": 12, "tokens": 1024},
    ),
    "gpt2_medium": Entry(
        target=f"{_TEXT}:gpt", summary="GPT-2 medium", sizes={"layers": 24, "width": 1024, "heads": 16, "tokens": 1024}
    ),
    "gpt2_large": Entry(
        target=f"{_TEXT}:gpt", summary="GPT-2 large", sizes={"layers": 36, "width": 1280, "heads": 20, "tokens": 1024}
    ),
    "gpt2_xl": Entry(
        target=f"{_TEXT}:gpt",
        summary="GPT-2 XL, 1.5 billion parameters",
        sizes={"layers": 48, "width": 1600, "heads": 25, "tokens": 1024},
    ),
    "gpt3_175b": Entry(
        target=f"{_TEXT}:gpt",
        summary="GPT-3 (Brown et al., 2020, table 2.1), 175 billion parameters: for capture without executing",
        sizes={"layers": 96, "width": 12288, "heads": 96, "tokens": 2048},
    ),
    "vit": Entry(target=f"{_TEXT}:vit", summary="ViT-B/16 (Dosovitskiy et al., 2021)"),
    "vit_large": Entry(
        target=f"{_TEXT}:vit", summary="ViT-L/16", sizes={"layers": 24, "width": 1024, "heads": 16, "patch": 16}
    ),
    "vit_huge": Entry(
        target=f"{_TEXT}:vit", summary="ViT-H/14", sizes={"layers": 32, "width": 1280, "heads": 16, "patch": 14}
    ),
    "llama": Entry(target=_LLAMA, summary="a decoder of the Llama family, of any size"),
    "tinyllama": Entry(
        target=_LLAMA,
        summary="TinyLlama, 1.1 billion parameters",
        sizes={"layers": 22, "width": 2048, "heads": 32, "kv_heads": 4, "hidden": 5632},
    ),
    "llama_7b": Entry(target=_LLAMA, summary="Llama and Llama 2, 7 billion parameters (Touvron et al., 2023)"),
    "llama_13b": Entry(
        target=_LLAMA,
        summary="Llama and Llama 2, 13 billion parameters",
        sizes={"layers": 40, "width": 5120, "heads": 40, "kv_heads": 40, "hidden": 13824},
    ),
    "llama2_70b": Entry(
        target=_LLAMA,
        summary="Llama 2, 70 billion parameters",
        sizes={"layers": 80, "width": 8192, "heads": 64, "kv_heads": 8, "hidden": 28672},
    ),
    "llama3_8b": Entry(
        target=_LLAMA,
        summary="Llama 3, 8 billion parameters",
        sizes={"kv_heads": 8, "hidden": 14336, "vocab": 128256},
    ),
    "llama3_70b": Entry(
        target=_LLAMA,
        summary="Llama 3, 70 billion parameters",
        sizes={"layers": 80, "width": 8192, "heads": 64, "kv_heads": 8, "hidden": 28672, "vocab": 128256},
    ),
    "llama3_1b": Entry(
        target=_LLAMA,
        summary="Llama 3.2, 1.2 billion parameters",
        sizes={"layers": 16, "width": 2048, "kv_heads": 8, "hidden": 8192, "vocab": 128256, "tied": True},
    ),
    "mistral_7b": Entry(target=_LLAMA, summary="Mistral (Jiang et al., 2023)", sizes={"kv_heads": 8, "hidden": 14336}),
    "qwen2_0.5b": Entry(
        target=_LLAMA,
        summary="Qwen2 and Qwen2.5, 0.5 billion parameters",
        sizes={
            "layers": 24,
            "width": 896,
            "heads": 14,
            "kv_heads": 2,
            "hidden": 4864,
            "vocab": 151936,
            "tied": True,
            "bias": True,
        },
    ),
    "qwen2_1.5b": Entry(
        target=_LLAMA,
        summary="Qwen2 and Qwen2.5, 1.5 billion parameters",
        sizes={
            "layers": 28,
            "width": 1536,
            "heads": 12,
            "kv_heads": 2,
            "hidden": 8960,
            "vocab": 151936,
            "tied": True,
            "bias": True,
        },
    ),
    "qwen2_7b": Entry(
        target=_LLAMA,
        summary="Qwen2 and Qwen2.5, 7.6 billion parameters",
        sizes={
            "layers": 28,
            "width": 3584,
            "heads": 28,
            "kv_heads": 4,
            "hidden": 18944,
            "vocab": 152064,
            "bias": True,
        },
    ),
    "qwen3_8b": Entry(
        target=_LLAMA,
        summary="Qwen3, 8.2 billion parameters",
        sizes={"layers": 36, "kv_heads": 8, "head_width": 128, "hidden": 12288, "vocab": 151936, "norms": True},
    ),
    "sd_unet": Entry(
        target="lowtide.zoo.diffusion:sd_unet", summary="the U-Net of Stable Diffusion 1 (Rombach et al., 2022)"
    ),
}

# Other names that people know these models by.
ALIASES = {
    "bert": "bert_base",
    "bert_base_uncased": "bert_base",
    "bert_large_uncased": "bert_large",
    "gpt2_small": "gpt2",
    "gpt3": "gpt3_175b",
    "llama2": "llama_7b",
    "llama2_7b": "llama_7b",
    "llama_2_7b": "llama_7b",
    "llama2_13b": "llama_13b",
    "llama_2_13b": "llama_13b",
    "llama_70b": "llama2_70b",
    "llama_2_70b": "llama2_70b",
    "llama3": "llama3_8b",
    "llama_3_8b": "llama3_8b",
    "llama_3.1_8b": "llama3_8b",
    "llama3.1_8b": "llama3_8b",
    "llama_3_70b": "llama3_70b",
    "llama_3.1_70b": "llama3_70b",
    "llama_3.2_1b": "llama3_1b",
    "llama3.2_1b": "llama3_1b",
    "tinyllama_1.1b": "tinyllama",
    "mistral": "mistral_7b",
    "qwen": "qwen2_7b",
    "qwen2": "qwen2_7b",
    "qwen2.5": "qwen2_7b",
    "qwen_7b": "qwen2_7b",
    "qwen3": "qwen3_8b",
    "qwen2.5_0.5b": "qwen2_0.5b",
    "qwen2.5_1.5b": "qwen2_1.5b",
    "qwen2.5_7b": "qwen2_7b",
    "stable_diffusion": "sd_unet",
    "stable_diffusion_unet": "sd_unet",
    "vit_base": "vit",
    "vit_b_16": "vit",
    "vit_l_16": "vit_large",
    "vit_h_14": "vit_huge",
    "densenet": "densenet121",
    "inception": "inception_v3",
}

# What publishers add to the names of models that are as large as the one without it.
_VARIANT = re.compile(r"(_(hf|it|chat|instruct|base|v\d\.\d))+$")

_BY_BARE_NAME = {bare(name): model for name, model in {**{name: name for name in MODELS}, **ALIASES}.items()}


def names() -> tuple[str, ...]:
    """Return the names of the models."""
    return tuple(MODELS)


def find(name: str) -> Entry:
    """Return the model of that name; capitals, hyphens, underscores and the publisher (`org/name`) do not matter."""
    return _configured(name) if name.startswith(PREFIX) else MODELS[registered_name(name)]


def _configured(name: str) -> Entry:
    """Return the model that a Hugging Face config describes."""
    path = name.removeprefix(PREFIX)
    known, sizes = model_of(Path(path))
    if known:
        return Entry(target=MODELS[known].target, summary=f"as {path} says", sizes={**MODELS[known].sizes, **sizes})
    target = "lowtide.zoo.huggingface:transformers_model"
    return Entry(target=target, summary=f"as {path} says", sizes={"config": path})


def registered_name(name: str) -> str:
    """Return the name under which the zoo has a model."""
    plain = name.lower().rpartition("/")[2].replace("-", "_").removeprefix("meta_")
    for spelled in (plain, _VARIANT.sub("", plain)):
        plain = _BY_BARE_NAME.get(bare(spelled), plain)
    if plain not in MODELS:
        meant = did_you_mean(plain, (*MODELS, *ALIASES)) or f": choose one of {', '.join(MODELS)}"
        raise BadArgument(f"unknown model {name!r}{meant} (a Hugging Face config.json: --hf-config FILE)")
    return plain


def build(name: str, *, batch: int, dtype: str = "float32", **sizes: Any) -> Workload:
    """Return a model, its inputs, its loss and what makes its optimizer, all with random values.

    `sizes` are the model's own: `layers=24`, `image=64` and so on; a wrong one is answered with those it has.
    """
    entry = find(name)
    if type(batch) is not int or batch < 1:
        raise BadArgument(f"batch {batch!r} is not a batch size: pass an integer of 1 or more")
    if dtype not in DTYPES:
        raise BadArgument(f"unknown dtype {dtype!r}: choose one of {', '.join(DTYPES)}")
    import torch

    module, _, attribute = entry.target.partition(":")
    make = getattr(import_module(module), attribute)
    _check_sizes(name, sizes, {**_defaults(make), **entry.sizes})
    before = torch.get_default_dtype()
    torch.set_default_dtype(getattr(torch, dtype))
    try:
        workload: Workload = make(batch=batch, **{**entry.sizes, **sizes})
    finally:
        torch.set_default_dtype(before)
    return workload


def sizes_of(name: str) -> dict[str, Any]:
    """Return the sizes a model has, with their defaults; imports torch."""
    entry = find(name)
    module, _, attribute = entry.target.partition(":")
    return {**_defaults(getattr(import_module(module), attribute)), **entry.sizes}


def _defaults(make: Any) -> dict[str, Any]:
    parameters = inspect.signature(make).parameters
    return {name: parameter.default for name, parameter in parameters.items() if name != "batch"}


def _check_sizes(name: str, sizes: Mapping[str, Any], known: Mapping[str, Any]) -> None:
    for size, value in sizes.items():
        if size not in known:
            has = ", ".join(f"{key}={default}" for key, default in known.items())
            raise BadArgument(f"model {name!r} has no size {size!r}: it has {has}")
        wanted = type(known[size])
        if wanted is float and type(value) is int:
            continue
        if type(value) is not wanted:
            raise BadArgument(f"{size}={value!r} of model {name!r} must be of type {wanted.__name__}")
        if wanted is int and value < 1:
            raise BadArgument(f"{size}={value} of model {name!r} must be 1 or more")
