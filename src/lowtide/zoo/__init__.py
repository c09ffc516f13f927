"""Models to make traces of: plain PyTorch in a few lines each, at any batch size, with random weights.

    from lowtide import zoo
    model, inputs, loss, optimizer = zoo.build("resnet50", batch=32)

`docs/zoo.md` lists them. Names and sizes can be looked up without importing torch; building imports it.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib import import_module
from typing import TYPE_CHECKING, Any

from lowtide.errors import BadArgument

if TYPE_CHECKING:
    from lowtide.zoo.workload import Workload

DTYPES = ("float32", "bfloat16", "float16", "float64")


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """Where a model is defined, what sets its name apart, and where it comes from."""

    target: str
    summary: str
    sizes: Mapping[str, int | float | bool] = field(default_factory=dict)


_VISION, _TEXT = "lowtide.zoo.vision", "lowtide.zoo.transformers"

MODELS: dict[str, Entry] = {
    "alexnet": Entry(target=f"{_VISION}:alexnet", summary="AlexNet in one tower (Krizhevsky, 2014)"),
    "vgg16": Entry(target=f"{_VISION}:vgg16", summary="VGG-16 (Simonyan and Zisserman, 2015)"),
    "vgg16_bn": Entry(target=f"{_VISION}:vgg16", summary="VGG-16 with BatchNorm", sizes={"norm": True}),
    "resnet50": Entry(target="lowtide.zoo.resnet:resnet", summary="ResNet-50 (He et al., 2016)", sizes={"depth": 50}),
    "resnet152": Entry(target="lowtide.zoo.resnet:resnet", summary="ResNet-152", sizes={"depth": 152}),
    "resnet": Entry(target="lowtide.zoo.resnet:resnet", summary="a bottleneck ResNet of any depth"),
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
}


def names() -> tuple[str, ...]:
    """Return the names of the models."""
    return tuple(MODELS)


def find(name: str) -> Entry:
    """Return the model of that name; hyphens and capitals do not matter."""
    found = MODELS.get(name.lower().replace("-", "_"))
    if found is None:
        raise BadArgument(f"unknown model {name!r}: choose one of {', '.join(MODELS)}")
    return found


def build(name: str, *, batch: int, dtype: str = "float32", **sizes: Any) -> Workload:
    """Return a model, its inputs, its loss and what makes its optimizer, all with random values.

    `sizes` are the model's own: `layers=24`, `image=64` and so on; a wrong one is answered with those it has.
    """
    entry = find(name)
    if type(batch) is not int or batch < 1:
        raise BadArgument(f"batch {batch!r} trains nothing: pass an integer of 1 or more")
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
