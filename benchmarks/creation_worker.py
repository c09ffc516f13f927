"""Create or load one model in this process, as the job on standard input says, and print how long that took."""

from __future__ import annotations

import hashlib
import json
import mmap
import os
import resource
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn

_CHUNK_BYTES = 8 << 20


class Model(nn.Module):
    """Linear layers in a row, of equal width."""

    def __init__(self, layers: int, width: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(layers))


def digest(model: nn.Module) -> str:
    """Return a digest of all values."""
    found = hashlib.blake2b(digest_size=12)
    for parameter in model.parameters():
        found.update(parameter.detach().numpy().tobytes())
    return found.hexdigest()


def _moved(job: dict[str, Any], *, write: bool) -> float:
    """Write or read as many bytes as the model has, once, past the page cache; return the seconds."""
    nbytes = job["nbytes"] // _CHUNK_BYTES * _CHUNK_BYTES
    buffer = mmap.mmap(-1, _CHUNK_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    buffer.madvise(mmap.MADV_HUGEPAGE)
    buffer.write(os.urandom(_CHUNK_BYTES))
    file = os.open(Path(job["spill"]) / "raw", os.O_RDWR | os.O_CREAT | os.O_DIRECT)
    try:
        began = time.perf_counter()
        for offset in range(0, nbytes, _CHUNK_BYTES):
            if write:
                os.pwritev(file, [buffer], offset)
            else:
                os.preadv(file, [buffer], offset)
        return time.perf_counter() - began
    finally:
        os.close(file)


def main() -> None:
    """Do the job."""
    job = json.loads(sys.stdin.read())
    torch.manual_seed(3)
    facts: dict[str, Any] = {}
    match job["contender"]:
        case "write" | "read":
            facts["seconds"] = _moved(job, write=job["contender"] == "write")
        case "stock":
            began = time.perf_counter()
            model = Model(job["layers"], job["width"])
            facts["seconds"] = time.perf_counter() - began
            facts["digest"] = digest(model)
            if job["save"]:
                from safetensors.torch import save_file

                save_file(model.state_dict(), job["checkpoint"])
        case "create" | "load":
            import lowtide

            before = resource.getrusage(resource.RUSAGE_SELF)
            began = time.perf_counter()
            with lowtide.init(budget=job["budget_bytes"], spill=job["spill"]):
                if job["contender"] == "create":
                    model = Model(job["layers"], job["width"])
                else:
                    model = lowtide.load(lambda: Model(job["layers"], job["width"]), job["checkpoint"])
            facts["seconds"] = time.perf_counter() - began
            began = time.perf_counter()
            facts["touched"] = float(sum(parameter.detach().max() for parameter in model.parameters()))
            facts["touch_seconds"] = time.perf_counter() - began
            after = resource.getrusage(resource.RUSAGE_SELF)
            facts["cpu_seconds"] = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
            facts["digest"] = digest(model)
    facts["rss_peak_bytes"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    print(json.dumps(facts))


if __name__ == "__main__":
    main()
