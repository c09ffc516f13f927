"""Serve one model in this process, as the job on standard input says, and print what was measured."""

from __future__ import annotations

import hashlib
import json
import os
import resource
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

_WARMUP = 3


# Width, width inside of a layer, heads.
_SHAPES = {"842m": (2048, 5536, 16), "7b": (4096, 11008, 32)}


def _config(job: dict[str, Any]) -> Any:
    from transformers import LlamaConfig

    # "842m" with 14 layers, "7b" with 32.
    width, inner, heads = _SHAPES[job["shape"]]
    return LlamaConfig(
        hidden_size=width,
        intermediate_size=inner,
        num_hidden_layers=job["layers"],
        num_attention_heads=heads,
        num_key_value_heads=heads,
        vocab_size=32000,
        tie_word_embeddings=False,
    )


def _make(job: dict[str, Any]) -> None:
    """Write a checkpoint with values as after initialisation, a shard for each layer: nothing larger is in memory."""
    from safetensors.torch import save_file
    from transformers import LlamaForCausalLM

    folder, dtype = Path(job["checkpoint"]), getattr(torch, job["dtype"])
    folder.mkdir(parents=True, exist_ok=True)
    config = _config(job)
    config.dtype = dtype
    config.save_pretrained(folder)
    with torch.device("meta"):
        shapes = {name: tuple(one.shape) for name, one in LlamaForCausalLM(config).state_dict().items()}
    torch.manual_seed(1)
    drawn = torch.empty(1 << 24).normal_(std=0.02).to(dtype)
    shards: dict[str, dict[str, tuple[int, ...]]] = {}
    for name, shape in shapes.items():
        part = name.split(".")[2] if name.startswith("model.layers.") else name
        shards.setdefault(f"model-{part}.safetensors", {})[name] = shape
    index, begin = {}, 0
    for file_name, wanted in shards.items():
        tensors = {}
        for name, shape in wanted.items():
            count = torch.Size(shape).numel()
            begin = (begin + 1) % drawn.numel()  # no two weights are the same
            values = drawn.roll(begin).repeat(-(-count // drawn.numel()))[:count].clone().view(shape)
            tensors[name] = torch.ones(shape, dtype=dtype) if "norm" in name else values
            index[name] = file_name
        save_file(tensors, folder / file_name, metadata={"format": "pt"})
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": index}))
    for file in folder.iterdir():
        descriptor = os.open(file, os.O_RDONLY)
        os.fsync(descriptor)
        os.close(descriptor)


@contextmanager
def _served(job: dict[str, Any]) -> Iterator[tuple[Any, Any]]:
    """Yield the model, and Lowtide's tide where it is the contender."""
    from transformers import LlamaForCausalLM

    folder, dtype = job["checkpoint"], getattr(torch, job["dtype"])
    match job["contender"]:
        case "lowtide":
            import lowtide

            with lowtide.init(budget=job["budget_bytes"], spill=job["spill"]):
                model = LlamaForCausalLM.from_pretrained(folder, dtype=dtype)
            with lowtide.serve(model, budget=job["budget_bytes"], spill=job["spill"]) as tide:
                yield model, tide
        case "accelerate":
            # Its hooks read each weight from the checkpoint's own files when its layer runs.
            places = {"model.embed_tokens": "disk", "model.norm": "cpu", "model.rotary_emb": "cpu", "lm_head": "disk"}
            places |= {f"model.layers.{index}": "disk" for index in range(job["layers"])}
            offload = str(Path(job["spill"]) / "offload")
            yield (
                LlamaForCausalLM.from_pretrained(folder, dtype=dtype, device_map=places, offload_folder=offload),
                None,
            )
        case "mmap":  # its tensors are views of the files as they are mapped
            yield LlamaForCausalLM.from_pretrained(folder, dtype=dtype), None
        case _:
            model = LlamaForCausalLM.from_pretrained(folder, dtype=dtype)
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.data = parameter.data.clone()
            yield model, None


def _least_read_bytes(tide: Any) -> int:
    """Return how much any plan has to read for the pass that was recorded, within the tide's budget."""
    from lowtide.plan.costs.minimum import least_traffic

    return least_traffic(tide.trace(), budget_bytes=tide.stats()["budget_bytes"]).read_bytes


def main() -> None:
    """Do the job."""
    job = json.loads(sys.stdin.read())
    if job["make"]:
        _make(job)
        print(json.dumps({}))
        return
    torch.set_grad_enabled(False)
    began = time.perf_counter()
    with _served(job) as (model, tide):
        model.eval()
        load_s = time.perf_counter() - began
        digest = hashlib.blake2b(digest_size=12)
        text = torch.randint(32000, (1, job["tokens"]), generator=torch.Generator().manual_seed(2))

        def read_bytes() -> int:
            return 0 if tide is None else tide.stats()["swapped_in_bytes"]

        pass_s, first, stalled, worked_s = [], 0, 0.0, 0.0
        for index in range(_WARMUP + job["passes"]):
            if index == _WARMUP:
                first = read_bytes()
                stalled = 0.0 if tide is None else tide.stats()["stall_s"]
                worked_s = time.process_time()
            began = time.perf_counter()
            logits = model(text, use_cache=False).logits
            pass_s.append(time.perf_counter() - began)
            digest.update(logits.float().numpy().tobytes())
            del logits
        worked_s = time.process_time() - worked_s
        second, least = read_bytes(), None if tide is None else _least_read_bytes(tide)
        if tide is not None:
            stalled = (tide.stats()["stall_s"] - stalled) / sum(pass_s[_WARMUP:])
        word_s, past, word, third = [], None, text[:, :1], 0
        for index in range(_WARMUP + job["words"]):
            if index == _WARMUP:
                third = read_bytes()
            began = time.perf_counter()
            out = model(word, past_key_values=past, use_cache=True)
            past, word = out.past_key_values, out.logits[:, -1:].argmax(-1)
            word_s.append(time.perf_counter() - began)
            digest.update(out.logits.float().numpy().tobytes())
            del out
        facts = {
            "load_s": load_s,
            "first_pass_s": pass_s[0],
            "pass_s": pass_s[_WARMUP:],
            "busy_share_of_cores": worked_s / (sum(pass_s[_WARMUP:]) * len(os.sched_getaffinity(0))),
            "word_s": word_s[_WARMUP:],
            "digest": digest.hexdigest(),
            "rss_peak_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        }
        if tide is not None:
            facts["read_bytes_per_pass"] = (second - first) / job["passes"]
            facts["read_bytes_per_word"] = (read_bytes() - third) / job["words"]
            facts["written_bytes"] = tide.stats()["swapped_out_bytes"]
            facts["stall_s"] = tide.stats()["stall_s"]
            facts["faults"] = tide.stats()["faults"]
            facts["least_read_bytes_per_pass"] = least
            facts["stalled_share"] = stalled
        print(json.dumps(facts))


if __name__ == "__main__":
    main()
