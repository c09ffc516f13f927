"""Collectives for the device, so that DDP and FSDP run on several processes: gloo over the device's memory.

    lowtide.emulator.collectives.register()
    torch.distributed.init_process_group("sim", ...)

They are synchronous: a collective waits for the current stream, exchanges bytes through host memory, and is done when
the call returns. The link's pace does not apply to them.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C import _distributed_c10d
from torch.futures import Future

NAME = "sim"

# torch's stubs lack some of what is used here, and give each method several signatures, one of which is called.
_c10d: Any = _distributed_c10d
_ProcessGroup: Any = dist.ProcessGroup


def register() -> None:
    """Make "sim" a backend of torch.distributed, for tensors of the device and of the CPU."""
    if NAME not in dist.Backend.backend_list:
        dist.Backend.register_backend(NAME, _Group, devices=[NAME, "cpu"])


def _window(tensor: Tensor) -> Tensor:
    """Return a tensor's bytes as a CPU tensor, when the current stream has done what was queued."""
    plain = tensor.detach()
    return torch.ops.lowtide_sim.host_window(plain) if plain.device.type == NAME else plain


def _windows(tensors: Sequence[Tensor]) -> list[Tensor]:
    return [_window(tensor) for tensor in tensors]


def _done(result: object) -> dist.Work:
    future: Future[Any] = Future()
    future.set_result(result)
    finished: dist.Work = _c10d._create_work_from_future(future)
    return finished


class _Group(_ProcessGroup):  # type: ignore[misc]  # see _ProcessGroup
    """A process group that hands windows of device memory to gloo."""

    def __init__(self, store: Any, rank: int, size: int, timeout: timedelta) -> None:
        super().__init__(rank, size)
        self._gloo: Any = dist.ProcessGroupGloo(store, rank, size, timeout=timeout)

    def getBackendName(self) -> str:  # noqa: N802 - torch's name
        return NAME

    @property
    def pg_name(self) -> str:
        """The name under which torch.distributed knows this group."""
        name: str = dist.distributed_c10d._world.pg_names[self]
        return name

    @property
    def group_name(self) -> str:
        """The same; functional collectives ask for it by this name."""
        return self.pg_name

    def _reduce(self, tensors: Sequence[Tensor], op: Any) -> None:
        average = op == dist.ReduceOp.AVG  # gloo does not know it
        options: Any = dist.AllreduceOptions()
        options.reduceOp = dist.ReduceOp.SUM if average else op
        for window in _windows(tensors):
            whole = window.contiguous()
            self._gloo.allreduce([whole], options).wait()
            if average:
                whole.div_(self.size())
            if whole.data_ptr() != window.data_ptr():
                window.copy_(whole)

    def allreduce(self, tensors: Any, opts: Any = None) -> dist.Work:
        self._reduce(tensors, opts.reduceOp if opts else dist.ReduceOp.SUM)
        return _done(tensors)

    def allreduce_coalesced(self, tensors: Any, opts: Any = None) -> dist.Work:
        return self.allreduce(tensors, opts)

    def broadcast(self, tensors: Any, opts: Any = None) -> dist.Work:
        self._gloo.broadcast(_windows(tensors), opts or dist.BroadcastOptions()).wait()
        return _done(tensors)

    def allgather(self, outputs: Any, inputs: Any, opts: Any = None) -> dist.Work:  # noqa: ARG002 - torch's signature
        self._gloo.allgather([_windows(each) for each in outputs], _windows(inputs)).wait()
        return _done(outputs)

    def _allgather_base(self, output: Tensor, given: Tensor, opts: Any = None) -> dist.Work:  # noqa: ARG002
        parts = list(_window(output).view(-1).chunk(self.size()))
        self._gloo.allgather([parts], [_window(given).reshape(-1)]).wait()
        return _done([output])

    def allgather_into_tensor_coalesced(self, outputs: Any, inputs: Any, opts: Any = None) -> dist.Work:  # noqa: ARG002
        for output, given in zip(outputs, inputs, strict=True):
            self._allgather_base(output, given)
        return _done(outputs)

    def _reduce_scatter_base(self, output: Tensor, given: Tensor, opts: Any = None) -> dist.Work:
        whole = _window(given).clone()
        self._reduce([whole], opts.reduceOp if opts else dist.ReduceOp.SUM)
        _window(output).view(-1).copy_(whole.view(-1).chunk(self.size())[self.rank()])
        return _done([output])

    def reduce_scatter_tensor_coalesced(self, outputs: Any, inputs: Any, opts: Any = None) -> dist.Work:
        for output, given in zip(outputs, inputs, strict=True):
            self._reduce_scatter_base(output, given, opts)
        return _done(outputs)

    # The names that torch calls from 2.13 on.
    all_gather_single, reduce_scatter_single = _allgather_base, _reduce_scatter_base
    all_gather_single_coalesced = allgather_into_tensor_coalesced
    reduce_scatter_single_coalesced = reduce_scatter_tensor_coalesced

    def scatter(self, outputs: Any, inputs: Any, opts: Any) -> dist.Work:
        self._gloo.scatter(_windows(outputs), [_windows(each) for each in inputs], opts).wait()
        return _done(outputs)

    def gather(self, outputs: Any, inputs: Any, opts: Any) -> dist.Work:
        self._gloo.gather([_windows(each) for each in outputs], _windows(inputs), opts).wait()
        return _done(outputs)

    def send(self, tensors: Any, target: int, tag: int) -> dist.Work:
        self._gloo.send(_windows(tensors), target, tag).wait()
        return _done(None)

    def recv(self, tensors: Any, source: int, tag: int) -> dist.Work:
        self._gloo.recv(_windows(tensors), source, tag).wait()
        return _done(None)

    def barrier(self, opts: Any = None) -> dist.Work:  # noqa: ARG002 - torch's signature
        self._gloo.barrier().wait()
        return _done(None)
