"""Reads past the page cache: the rate that a disk gives to whoever only reads."""

from __future__ import annotations

import mmap
import os
import threading
import time
from pathlib import Path

_CHUNK_BYTES = 8 << 20


def shards(checkpoint: Path) -> list[Path]:
    """Return the files that hold weights."""
    return sorted(checkpoint.glob("*.safetensors"))


def drop_pages(checkpoint: Path) -> None:
    """Have the kernel forget what it has cached of the checkpoint."""
    for file in shards(checkpoint):
        drop_file(file)


def drop_file(file: Path) -> None:
    """Have the kernel forget what it has cached of one file."""
    descriptor = os.open(file, os.O_RDONLY)
    os.fsync(descriptor)
    os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(descriptor)


def direct_rate(checkpoint: Path, threads: int = 3) -> float:
    """Return the bytes per second at which so many threads read the whole checkpoint past the page cache."""
    chunks = [
        (file, offset)
        for file in shards(checkpoint)
        for offset in range(0, file.stat().st_size - _CHUNK_BYTES + 1, _CHUNK_BYTES)
    ]
    waiting, lock = iter(chunks), threading.Lock()

    def work() -> None:
        # Huge pages: the kernel reads three times as fast into them as into small ones.
        buffer = mmap.mmap(-1, _CHUNK_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        buffer.madvise(mmap.MADV_HUGEPAGE)
        opened = {file: os.open(file, os.O_RDONLY | os.O_DIRECT) for file in shards(checkpoint)}
        while True:
            with lock:
                one = next(waiting, None)
            if one is None:
                break
            os.preadv(opened[one[0]], [buffer], one[1])
        for descriptor in opened.values():
            os.close(descriptor)

    workers = [threading.Thread(target=work) for _ in range(threads)]
    began = time.perf_counter()
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    return len(chunks) * _CHUNK_BYTES / (time.perf_counter() - began)
