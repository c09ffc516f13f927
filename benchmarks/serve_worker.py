"""Serve one model in this process, as the job on standard input says, and print what was measured."""

from __future__ import annotations

import hashlib
import json
import os
import resource
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from benchmarks.direct_reads import direct_rate

_WARMUP = 3
_GROUPS = 2


class Timed:
    """Something that is done again and again, with the seconds and the bytes that it took while it was measured."""

    def __init__(self, body: Callable[[], None], read_bytes: Callable[[], int], stall_s: Callable[[], float]) -> None:
        """Measure calls of `body`, with counters of bytes read and seconds waited."""
        self._body, self._count_read, self._count_stall = body, read_bytes, stall_s
        self.first_s: float | None = None
        self.seconds: list[float] = []
        self.read_bytes, self.stall_s, self.worked_s = 0, 0.0, 0.0

    def warm_up(self, count: int) -> None:
        """Call it without measuring."""
        for _ in range(count):
            began = time.perf_counter()
            self._body()
            self.first_s = time.perf_counter() - began if self.first_s is None else self.first_s

    def measure(self, count: int) -> None:
        """Call it and add up."""
        read_bytes, stall_s, worked_s = self._count_read(), self._count_stall(), time.process_time()
        for _ in range(count):
            began = time.perf_counter()
            self._body()
            self.seconds.append(time.perf_counter() - began)
        self.read_bytes += self._count_read() - read_bytes
        self.stall_s += self._count_stall() - stall_s
        self.worked_s += time.process_time() - worked_s


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

        def stall_s() -> float:
            return 0.0 if tide is None else tide.stats()["stall_s"]

        def make_pass() -> None:
            logits = model(text, use_cache=False).logits
            digest.update(logits.float().numpy().tobytes())

        past, word = None, text[:, :1]

        def say_word() -> None:
            nonlocal past, word
            out = model(word, past_key_values=past, use_cache=True)
            past, word = out.past_key_values, out.logits[:, -1:].argmax(-1)
            digest.update(out.logits.float().numpy().tobytes())

        passes, words = Timed(make_pass, read_bytes, stall_s), Timed(say_word, read_bytes, stall_s)
        direct: list[float] = []
        least = None
        for _ in range(_GROUPS):
            # What was read ahead while the disk was measured is used up before the clock starts again.
            passes.warm_up(_WARMUP)
            passes.measure(job["passes"])
            if tide is not None:
                least = _least_read_bytes(tide)
                direct.append(direct_rate(Path(job["checkpoint"])))
            words.warm_up(_WARMUP)
            words.measure(job["words"])
            if tide is not None:
                direct.append(direct_rate(Path(job["checkpoint"])))
        facts = {
            "load_s": load_s,
            "first_pass_s": passes.first_s,
            "pass_s": passes.seconds,
            "busy_share_of_cores": passes.worked_s / (sum(passes.seconds) * len(os.sched_getaffinity(0))),
            "word_s": words.seconds,
            "digest": digest.hexdigest(),
            "rss_peak_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        }
        if tide is not None:
            facts["read_bytes_per_pass"] = passes.read_bytes / len(passes.seconds)
            facts["read_bytes_per_word"] = words.read_bytes / len(words.seconds)
            facts["written_bytes"] = tide.stats()["swapped_out_bytes"]
            facts["stall_s"] = stall_s()
            facts["faults"] = tide.stats()["faults"]
            facts["least_read_bytes_per_pass"] = least
            facts["stalled_share"] = passes.stall_s / sum(passes.seconds)
            facts["word_stalled_share"] = words.stall_s / sum(words.seconds)
            facts["direct_read_bytes_per_s"] = direct
        print(json.dumps(facts))


if __name__ == "__main__":
    main()
