"""Hugging Face models, built from a tiny configuration without weights."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

from torch import nn

from tests.bitwise import data
from tests.bitwise.architectures import adamw
from tests.bitwise.record import Record
from tests.bitwise.workload import Workload

_TOKENS = data.tokens(8, 64, vocabulary=256)
_SPECIAL = {"bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0}


def _library() -> Any:
    """Return the library, loaded late; without types, because its own do not hold."""
    return importlib.import_module("transformers")


def _workload(module: nn.Module, *, inputs: str, batch: Callable[[int], data.Batch]) -> Workload:
    module.train()
    optimizer = adamw(list(module.parameters()))

    def body(index: int, batch: data.Batch, record: Record) -> None:
        arguments: dict[str, Any] = {inputs: batch[0], "labels": batch[1]}
        loss = module(**arguments).loss
        loss.backward()
        record.add("loss", loss)
        record.add_gradients([module])
        optimizer.step()
        optimizer.zero_grad()

    return Workload(modules=[module], optimizers=[optimizer], batch=batch, body=body)


def gpt2() -> Workload:
    config = _library().GPT2Config(
        vocab_size=256, n_positions=64, n_embd=64, n_layer=3, n_head=2, use_cache=False, **_SPECIAL
    )
    return _workload(_library().GPT2LMHeadModel(config), inputs="input_ids", batch=_TOKENS)


def bert() -> Workload:
    config = _library().BertConfig(
        vocab_size=256,
        hidden_size=64,
        num_hidden_layers=3,
        num_attention_heads=2,
        intermediate_size=256,
        max_position_embeddings=64,
    )
    return _workload(_library().BertForMaskedLM(config), inputs="input_ids", batch=_TOKENS)


def vit() -> Workload:
    config = _library().ViTConfig(
        hidden_size=64,
        num_hidden_layers=3,
        num_attention_heads=2,
        intermediate_size=256,
        image_size=32,
        patch_size=4,
        num_labels=10,
        hidden_dropout_prob=0.1,
    )
    return _workload(
        _library().ViTForImageClassification(config), inputs="pixel_values", batch=data.vectors(8, 3, 32, 32)
    )


def hf_resnet() -> Workload:
    config = _library().ResNetConfig(
        embedding_size=16, hidden_sizes=[16, 32], depths=[2, 1], layer_type="basic", num_labels=10
    )
    return _workload(
        _library().ResNetForImageClassification(config), inputs="pixel_values", batch=data.vectors(16, 3, 64, 64)
    )


def t5() -> Workload:
    config = _library().T5Config(
        vocab_size=256,
        d_model=64,
        d_kv=32,
        d_ff=256,
        num_layers=2,
        num_heads=2,
        decoder_start_token_id=0,
        use_cache=False,
        pad_token_id=0,
        eos_token_id=1,
    )
    return _workload(_library().T5ForConditionalGeneration(config), inputs="input_ids", batch=_TOKENS)


HUGGINGFACE: dict[str, Callable[[], Workload]] = {
    factory.__name__: factory for factory in (gpt2, bert, vit, hf_resnet, t5)
}
