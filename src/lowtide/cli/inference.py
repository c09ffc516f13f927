"""`lowtide estimate --inference`: a model that generates, from a checkpoint's headers or a model's shapes."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lowtide.cli.output import console, echo_json, facts
from lowtide.core.units import format_bytes, format_rate, format_seconds
from lowtide.errors import BadArgument, BudgetTooSmall
from lowtide.estimate.inference import Inference, Served, Weight, served

if TYPE_CHECKING:
    from lowtide.cli.models import Wanted
    from lowtide.core.machine import Machine

_NAMES = {"kv_heads": "num_key_value_heads", "heads": "num_attention_heads", "layers": "num_hidden_layers"}


def of_checkpoint(path: Path, *, batch: int, tokens: int) -> Inference:
    """Return the inference with a checkpoint as it is: nothing but headers is read."""
    from lowtide.checkpoint.in_place import files_of, reader_of

    files = files_of(path)
    headers = {}
    for file in dict.fromkeys(file for file, _ in files.values()):
        with reader_of(file) as reader:
            headers[file] = reader.tensors
    weights = []
    for name, (file, key) in files.items():
        if key not in headers[file]:
            raise BadArgument(f"the index of {path} names '{key}', which {file.name} does not hold")
        stored = headers[file][key]
        count = 1
        for length in stored.shape:
            count *= length
        weights.append(Weight(name=name, count=count, nbytes=stored.nbytes))
    config = path / "config.json"
    sizes = json.loads(config.read_text()) if config.is_file() else {}
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
    fields = {**sizes, **{field: sizes[size] for size, field in _NAMES.items() if size in sizes}}
    fields |= {"hidden_size": sizes.get("width"), "head_dim": sizes.get("head_width")}
    width = torch.empty((), dtype=getattr(torch, wanted.dtype)).element_size()
    return Inference(
        weights=weights, cache_bytes_per_token=_cache_bytes(fields) * width, batch=wanted.batch, tokens=tokens
    )


def _cache_bytes(sizes: Mapping[str, Any]) -> int:
    """Return how many numbers one token adds to the cache of keys and values (0: there is none, or it is not known)."""
    layers, heads = sizes.get("num_hidden_layers"), sizes.get("num_attention_heads")
    kv_heads = sizes.get("num_key_value_heads") or heads
    width = sizes.get("head_dim") or ((sizes.get("hidden_size") or 0) // heads if heads else 0)
    if not layers or not kv_heads or not width:
        return 0
    return int(2 * layers * kv_heads * width)


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
            ("weights", f"{format_bytes(inference.weights_bytes)} in {len(inference.weights)} tensors"),
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
        ]
    rows = [("computing", format_seconds(found.compute_s) + " a word" if found.compute_s else "not known")]
    if not found.read_bytes:
        return [*rows, ("verdict", "fits without moving anything")]
    return [
        *rows,
        ("stays in memory", f"{format_bytes(found.kept_bytes)} of the weights"),
        ("read for every word", f"{format_bytes(found.read_bytes)}, {format_seconds(found.read_s)}"),
        ("written", "nothing, if weights are read in place from the checkpoint"),
        ("executed", "on the CPU: weights do not leave an accelerator yet"),
        ("read in a day", format_bytes(int(found.read_bytes_per_day))),
        ("verdict", f"fits: {format_seconds(found.word_s)} a word"),
    ]


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
        "word_s": None if found is None else found.word_s,
        "compute_s": None if found is None else found.compute_s,
    }
