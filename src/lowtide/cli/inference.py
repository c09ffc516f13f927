"""`lowtide estimate --inference`: a model that generates, from a checkpoint's headers or a model's shapes."""

from __future__ import annotations

import json
from collections.abc import Mapping
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lowtide.cli.output import console, echo_json, facts
from lowtide.core.units import format_bytes, format_rate, format_seconds
from lowtide.errors import BadArgument, BudgetTooSmall
from lowtide.estimate.inference import Inference, Served, Weight, served
from lowtide.zoo.huggingface import PREFIX

if TYPE_CHECKING:
    from lowtide.cli.models import Wanted
    from lowtide.core.machine import Machine

_NAMES = {
    "kv_heads": "num_key_value_heads",
    "heads": "num_attention_heads",
    "layers": "num_hidden_layers",
    "width": "hidden_size",
    "head_width": "head_dim",
}


def of_checkpoint(path: Path, *, batch: int, tokens: int) -> Inference:
    """Return the inference with a checkpoint as it is: nothing but headers is read."""
    from lowtide.checkpoint.in_place import files_of, reader_of

    files = files_of(path)
    headers = {}
    for file in dict.fromkeys(one.file for one in files.values()):
        with reader_of(file) as reader:
            headers[file] = reader.tensors
    weights = []
    for name, one in files.items():
        if one.key not in headers[one.file]:
            raise BadArgument(f"{one.file} does not hold '{one.key}', which {path} says it does")
        stored = one.described(headers[one.file][one.key])
        weights.append(Weight(name=name, count=prod(stored.shape), nbytes=stored.nbytes))
    if not weights:
        raise BadArgument(f"{path} holds no tensors")
    config = path / "config.json"
    sizes = _fields(config) if config.is_file() else {}
    largest = max(weights, key=lambda weight: weight.nbytes)
    width = largest.nbytes // largest.count if largest.count else 0
    return Inference(weights=weights, cache_bytes_per_token=_cache_bytes(sizes) * width, batch=batch, tokens=tokens)


def of_model(wanted: Wanted, *, tokens: int) -> Inference:
    """Return the inference with a model that is not built: only its shapes are."""
    import torch

    from lowtide import zoo

    with torch.device("meta"):
        model = zoo.build(wanted.name, batch=wanted.batch, dtype=wanted.dtype, **wanted.sizes).model
    weights = [Weight(name=name, count=one.numel(), nbytes=one.nbytes) for name, one in model.state_dict().items()]
    sizes: dict[str, Any] = {**zoo.sizes_of(wanted.name), **wanted.sizes}
    fields = _fields(Path(wanted.name.removeprefix(PREFIX))) if wanted.name.startswith(PREFIX) else {}
    fields |= {field: sizes[size] for size, field in _NAMES.items() if size in sizes}
    width = torch.empty((), dtype=getattr(torch, wanted.dtype)).element_size()
    return Inference(
        weights=weights, cache_bytes_per_token=_cache_bytes(fields) * width, batch=wanted.batch, tokens=tokens
    )


def _fields(config: Path) -> dict[str, Any]:
    """Return what a config.json says."""
    try:
        fields = json.loads(config.read_text())
    except (OSError, ValueError) as error:
        raise BadArgument(
            f"{config} cannot be read ({error}): it should be a Hugging Face model's config.json"
        ) from error
    if not isinstance(fields, dict):
        raise BadArgument(f"{config} holds a {type(fields).__name__}: name the config.json of a Hugging Face model")
    return fields


def _cache_bytes(sizes: Mapping[str, Any]) -> int:
    """Return how many numbers one token adds to the cache of keys and values (0: there is none, or it is not known)."""
    names = ("num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim", "hidden_size")
    layers, heads, kv_heads, width, hidden = (
        length if type(length := sizes.get(name)) is int and length > 0 else 0 for name in names
    )
    return 2 * layers * (kv_heads or heads) * (width or (hidden // heads if heads else 0))


def answer_inference(inference: Inference, *, model: str, machine: Machine, budget_bytes: int, as_json: bool) -> None:
    """Print the table; raise `BudgetTooSmall` after it where one operator alone does not fit."""
    link = machine.links["spill"]
    found = served(inference, machine, link, budget_bytes=budget_bytes)
    if as_json:
        echo_json(_facts(inference, found, model=model, machine=machine, budget_bytes=budget_bytes))
    else:
        rows = [
            ("machine", f"{machine.name}, {format_bytes(budget_bytes)} of tensor memory"),
            ("link", f"{format_rate(link.read_bytes_per_s)} in"),
            ("weights", f"{format_bytes(inference.weights_bytes)} in {_tensors(len(inference.weights))}"),
            ("gradients, optimizer state", "none"),
            ("cache of keys and values", _cache_text(inference)),
            ("floor", f"{format_bytes(inference.floor_bytes)}, set by {inference.largest.name}"),
            ("peak, unmanaged", format_bytes(inference.peak_bytes)),
            *_served_rows(inference, found, budget_bytes),
        ]
        console().print(facts(f"{model}, generating", rows))
    if found is None:
        raise BudgetTooSmall(
            budget_bytes=budget_bytes,
            needed_bytes=inference.floor_bytes,
            op=f"the operator of {inference.largest.name}",
        )


def _tensors(count: int) -> str:
    return f"{count} tensor{'s' * (count != 1)}"


def _cache_text(inference: Inference) -> str:
    if not inference.cache_bytes_per_token:
        return "not known: the model does not state its layers and heads"
    texts = f"{inference.batch} text{'s' * (inference.batch > 1)} of {inference.tokens} tokens"
    return f"{format_bytes(inference.cache_bytes)} for {texts}"


def _served_rows(inference: Inference, found: Served | None, budget_bytes: int) -> list[tuple[str, str]]:
    if found is None:
        lacking = format_bytes(inference.floor_bytes - budget_bytes)
        return [
            ("verdict", f"does not fit: the floor is {lacking} above the budget"),
            ("would fit", f"{format_bytes(inference.floor_bytes)}: a larger budget"),
            *_remedies(inference, budget_bytes),
        ]
    rows = [("computing", format_seconds(found.compute_s) + " a word" if found.compute_s else "not known")]
    if not found.read_bytes:
        return [*rows, ("verdict", "fits without moving anything")]
    return [
        *rows,
        ("stays in memory", f"{format_bytes(found.kept_bytes)} of the weights"),
        ("read for every word", f"{format_bytes(found.read_bytes)}, {format_seconds(found.read_s)}"),
        *_cache_rows(found),
        ("executed", "on the CPU: weights do not leave an accelerator yet"),
        ("read in a day", format_bytes(int(found.read_bytes_per_day))),
        ("written in a day", _written_text(found)),
        ("verdict", f"fits: {format_seconds(found.word_s)} a word"),
    ]


def _remedies(inference: Inference, budget_bytes: int) -> list[tuple[str, str]]:
    """Return changes to a model that does not fit, by whether they are enough."""
    largest = inference.largest
    narrow = largest.nbytes // largest.count > 2 if largest.count else False
    halved = Inference(
        weights=[Weight(name=one.name, count=one.count, nbytes=one.nbytes // 2) for one in inference.weights],
        cache_bytes_per_token=inference.cache_bytes_per_token // 2,
        batch=inference.batch,
        tokens=inference.tokens,
    )
    changes = [("half as many bits for every weight", halved.floor_bytes)] if narrow else []
    if inference.cache_bytes:
        changes.append(("one text of fewer tokens", largest.nbytes))
    return [
        ("would fit" if needed <= budget_bytes else "not enough alone", f"{format_bytes(needed)}: {change}")
        for change, needed in changes
    ]


def _cache_rows(found: Served) -> list[tuple[str, str]]:
    if not found.cache_read_bytes:
        return []
    return [("of the cache", f"{format_bytes(found.cache_read_bytes)} read and written for every word")]


def _written_text(found: Served) -> str:
    if found.cache_written_bytes:
        return f"{format_bytes(int(found.written_bytes_per_day))}, of the cache"
    return "nothing, if weights are read in place from the checkpoint"


def _facts(
    inference: Inference, found: Served | None, *, model: str, machine: Machine, budget_bytes: int
) -> dict[str, Any]:
    return {
        "fits": found is not None,
        "fits_unmanaged": inference.peak_bytes <= budget_bytes,
        "model": model,
        "machine": machine.name,
        "budget_bytes": budget_bytes,
        "weights_bytes": inference.weights_bytes,
        "cache_bytes": inference.cache_bytes,
        "floor_bytes": inference.floor_bytes,
        "peak_bytes": inference.peak_bytes,
        "kept_bytes": None if found is None else found.kept_bytes,
        "read_bytes_per_word": None if found is None else found.read_bytes,
        "read_bytes_per_day": None if found is None else found.read_bytes_per_day,
        "written_bytes_per_day": None if found is None else found.written_bytes_per_day,
        "cache_read_bytes_per_word": None if found is None else found.cache_read_bytes,
        "cache_written_bytes_per_word": None if found is None else found.cache_written_bytes,
        "word_s": None if found is None else found.word_s,
        "compute_s": None if found is None else found.compute_s,
    }
