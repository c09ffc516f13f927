"""Sizes of the zoo's models at which a step takes a moment and still saves tensors of 64 KiB and more."""

from __future__ import annotations

from typing import Any

SMALL: dict[str, dict[str, Any]] = {
    "alexnet": {"batch": 4, "image": 96, "width": 8},
    "vgg16": {"batch": 4, "image": 32, "width": 8},
    "vgg16_bn": {"batch": 4, "image": 32, "width": 8},
    "resnet50": {"batch": 4, "image": 64, "width": 8},
    "inception_v3": {"batch": 2, "image": 96, "width": 8},
    "densenet121": {"batch": 4, "image": 64, "growth": 4},
    "unet": {"batch": 2, "image": 64, "width": 8},
    "seq2seq": {"batch": 32, "width": 32, "vocab": 500, "tokens": 6},
    "bert_base": {"batch": 2, "layers": 2, "width": 64, "heads": 2, "vocab": 500, "tokens": 64},
    "gpt": {"batch": 2, "layers": 2, "width": 64, "heads": 2, "vocab": 500, "tokens": 64},
    "llama": {
        "batch": 2,
        "layers": 2,
        "width": 64,
        "heads": 4,
        "kv_heads": 2,
        "hidden": 128,
        "vocab": 500,
        "tokens": 64,
        "bias": True,
        "norms": True,
    },
    "sd_unet": {"batch": 2, "image": 16, "width": 32, "levels": 2, "context": 32, "words": 8, "heads": 4},
    "vit": {"batch": 4, "layers": 2, "width": 64, "heads": 2, "image": 64, "patch": 8},
}
