"""Every rule that keeps copies and kernels of different streams apart, one function each.

Note [Stream order]: nothing here makes the host wait (but for the last two, which only look). Kernels run on the
*compute* stream, copies out and back on streams of their own. Device memory belongs to the compute stream: it is
allocated and freed in the order in which that stream is given its work, so the bytes in use at any point of the
program do not depend on how far the device has come. What another stream does with a block is ordered by events
between the two:

- a copy out reads after the kernels that wrote (`copy_out_after_compute`), and its block is free for kernels that come
  after the copy (`free_after_copy`);
- a copy back writes into a block after the kernels that used it in an earlier life (`copy_back_after_compute`), from
  host memory that a copy out has filled (`copy_back_after_copy_out`); kernels read it after the copy
  (`use_after_copy_back`), and a block that nobody read is freed after it as well (`free_after_copy`);
- what the program holds is written after the copy out that reads it (`write_after_copy_out`);
- an operator that runs again, on whichever stream asks for what it makes, does so after the kernels of all streams that
  may have made its operands (`rerun_after_compute`); kernels of other streams wait for what it made as they do for a
  copy back (`use_after_copy_back`);
- a block of one stream that another one uses is known to its allocator (`share_with_stream`,
  `free_in_order_of_stream`);
- host memory is used again, or read by a thread, after the copies that use it (`host_memory_is_idle`, `is_filled`).

Each is called through this module, so that a test can take it away and see that the loss is noticed.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch

RULES = (
    "copy_out_after_compute",
    "free_after_copy",
    "copy_back_after_compute",
    "copy_back_after_copy_out",
    "use_after_copy_back",
    "write_after_copy_out",
    "rerun_after_compute",
    "share_with_stream",
    "free_in_order_of_stream",
    "host_memory_is_idle",
    "is_filled",
)


def copy_out_after_compute(out: torch.Stream, compute: Iterable[torch.Stream]) -> None:
    """Let the next copy out wait for all kernels queued so far: they may write what it reads."""
    for stream in compute:
        out.wait_event(stream.record_event())


def free_after_copy(compute: torch.Stream, copied: torch.Event) -> None:
    """Let kernels wait for a copy whose block they may be given next."""
    compute.wait_event(copied)


def copy_back_after_compute(back: torch.Stream, compute: torch.Stream) -> None:
    """Let the next copy back wait for all kernels queued so far: they may still use the block that it fills."""
    back.wait_event(compute.record_event())


def copy_back_after_copy_out(back: torch.Stream, filled: torch.Event) -> None:
    """Let the next copy back wait for the copy out that fills the host memory it reads."""
    back.wait_event(filled)


def use_after_copy_back(compute: torch.Stream, arrived: torch.Event) -> None:
    """Let kernels wait for the copy back of what they read, or for the stream that made it again."""
    compute.wait_event(arrived)


def write_after_copy_out(compute: torch.Stream, filled: torch.Event) -> None:
    """Let kernels that may write a block wait for the copy out that reads it."""
    compute.wait_event(filled)


def rerun_after_compute(stream: torch.Stream, others: Iterable[torch.Stream]) -> None:
    """Let an operator that runs again wait for the other streams' kernels so far: they may make what it reads."""
    for other in others:
        stream.wait_event(other.record_event())


def share_with_stream(tensor: torch.Tensor, stream: torch.Stream) -> None:
    """Tell the allocator that a stream other than the block's own uses it (it ignores the block's own)."""
    tensor.record_stream(stream)


def free_in_order_of_stream(tensor: torch.Tensor, stream: torch.Stream) -> None:
    """Let a block that is given up be free only after a stream's work so far, whichever stream it belongs to.

    The program may have made it on another stream than those that compute: that stream has not waited for our copy.
    """
    tensor.record_stream(stream)


def host_memory_is_idle(copies: Iterable[torch.Event]) -> bool:
    """Tell whether the copies that read or fill a slot are done, so that it may hold something else."""
    return all(copy.query() for copy in copies)


def is_filled(filled: torch.Event) -> bool:
    """Tell whether a copy out is done, so that a thread may read what it wrote."""
    return filled.query()


@contextmanager
def on_stream(stream: torch.Stream) -> Iterator[None]:
    """Queue what follows on a stream. The device that is current stays so: setting a stream makes its device that."""
    device = torch.accelerator.current_device_index()
    before = torch.accelerator.current_stream(stream.device)
    torch.accelerator.set_stream(stream)
    torch.accelerator.set_device_index(device)
    try:
        yield
    finally:
        torch.accelerator.set_stream(before)
        torch.accelerator.set_device_index(device)
