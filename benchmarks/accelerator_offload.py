"""Offload of saved activations one block ahead, in the style of TRL's and torchtune's: our own implementation.

Like theirs: every saved tensor of 1 KiB or more that is no parameter leaves for pinned memory on a stream of its own as
soon as it is saved, and compute does not wait for it; what the head saves stays. Better than theirs, so as not to beat
a straw man: a storage that several operators save leaves once, backward asks for a whole block (a transformer layer, a
convolution with what follows it) while the block after it still computes, the last block does not leave at all, and
pinned buffers are kept from step to step.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from benchmarks.models import Chain

_LEAST_BYTES = 1024


class _Slot:
    """A storage that left, or is about to. `storage` is None while its bytes are on the host only.

    `uses` counts the saved tensors that backward has still to ask for.
    """

    __slots__ = ("arrived", "block", "filled", "nbytes", "pinned", "storage", "uses", "version")

    def __init__(self, storage: torch.UntypedStorage, *, block: int, version: int, pinned: Tensor) -> None:
        self.storage: torch.UntypedStorage | None = storage
        self.nbytes = storage.nbytes()
        self.block = block
        self.version = version
        self.pinned = pinned
        self.uses = 0
        self.filled: torch.Event | None = None
        self.arrived: torch.Event | None = None


@dataclass(frozen=True, slots=True)
class _Saved:
    """A saved tensor: a view of a slot."""

    slot: _Slot
    size: torch.Size
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype


class OneBlockAhead:
    """The offload, for a model made of chains. Blocks are numbered in the order in which they run."""

    def __init__(self, module: nn.Module) -> None:
        chains = [part for part in module.modules() if isinstance(part, Chain)]
        self._segments = [segment for chain in chains for segment in chain.segments]
        self._parameters = {parameter.untyped_storage().data_ptr() for parameter in module.parameters()}
        self._device = next(module.parameters()).device
        self._out = torch.Stream(device=self._device)
        self._back = torch.Stream(device=self._device)
        self._free: dict[int, list[Tensor]] = defaultdict(list)
        self._slots: dict[int, list[_Slot]] = defaultdict(list)
        self._by_storage: dict[int, _Slot] = {}
        self._block: int | None = None
        self._begun: set[int] = set()
        self.blocks = 0
        self.out_bytes = 0
        self.back_bytes = 0
        self.pinned_bytes = 0

    def __enter__(self) -> OneBlockAhead:
        self._hooks = []
        for segment in self._segments:
            inner = [part for part in segment.children() if isinstance(part, nn.Conv2d)]
            if isinstance(segment, nn.Sequential) and not inner:
                self._hooks.append(segment.register_forward_pre_hook(lambda *_: self._end()))  # the head
                continue
            for part in inner or [segment]:
                number, self.blocks = self.blocks, self.blocks + 1
                self._hooks.append(part.register_forward_pre_hook(lambda *_, number=number: self._begin(number)))
            self._hooks.append(segment.register_forward_hook(lambda *_: self._pause()))
        return self

    def __exit__(self, *_exception: object) -> None:
        for hook in self._hooks:
            hook.remove()

    @contextmanager
    def step(self) -> Iterator[None]:
        """Offload what autograd saves in this context."""
        with torch.autograd.graph.saved_tensors_hooks(self._pack, self._unpack):
            yield
        torch.accelerator.current_stream(self._device).wait_stream(self._back)
        for slots in self._slots.values():
            for slot in slots:
                self._free[slot.nbytes].append(slot.pinned)
        self._slots.clear()
        self._by_storage.clear()
        self._begun.clear()

    # ---- forward ----

    def _begin(self, number: int) -> None:
        """Enter a block, and give up the one before the last: its copies had the last one's time to end."""
        self._block = number
        self._give_up(number - 2)

    def _pause(self) -> None:
        """Leave what is saved from here on where it is, unless another block begins."""
        if self._block == self.blocks - 1:
            self._end()

    def _end(self) -> None:
        self._block = None
        self._give_up(self.blocks - 2)

    def _give_up(self, block: int) -> None:
        stream = torch.accelerator.current_stream(self._device)
        for slot in self._slots[block]:
            assert slot.filled is not None
            stream.wait_event(slot.filled)
            slot.storage = None

    def _pack(self, tensor: Tensor) -> Tensor | _Saved:
        storage = tensor.untyped_storage()
        is_parameter = storage.data_ptr() in self._parameters
        stays = self._block in (None, self.blocks - 1) or tensor.nbytes < _LEAST_BYTES
        if stays or is_parameter or tensor.device != self._device:
            return tensor if tensor.grad_fn is None else tensor.detach()
        slot = self._by_storage.get(storage._cdata)
        # A number is used again once its storage is gone.
        if slot is None or slot.storage is None or slot.version != tensor._version:
            slot = self._by_storage[storage._cdata] = self._leave_now(storage, tensor._version)
        slot.uses += 1
        return _Saved(slot, tensor.size(), tensor.stride(), int(tensor.storage_offset()), tensor.dtype)

    def _leave_now(self, storage: torch.UntypedStorage, version: int) -> _Slot:
        assert self._block is not None
        slot = _Slot(storage, block=self._block, version=version, pinned=self._pinned(storage.nbytes()))
        self._out.wait_event(torch.accelerator.current_stream(self._device).record_event())
        with _on(self._out):
            slot.pinned.copy_(_flat(storage), non_blocking=True)
        slot.filled = self._out.record_event()
        self._slots[self._block].append(slot)
        self.out_bytes += slot.nbytes
        return slot

    def _pinned(self, nbytes: int) -> Tensor:
        if self._free[nbytes]:
            return self._free[nbytes].pop()
        self.pinned_bytes += nbytes
        return torch.empty(nbytes, dtype=torch.uint8, device="cpu", pin_memory=True)

    # ---- backward ----

    def _unpack(self, saved: Tensor | _Saved) -> Tensor:
        if isinstance(saved, Tensor):
            return saved
        slot = saved.slot
        if slot.block not in self._begun:
            self._begun.add(slot.block)
            self._by_storage.clear()  # nothing is saved any more, and nothing here may keep what backward is done with
            self._slots[slot.block + 1] = [slot for slot in self._slots[slot.block + 1] if not self._give_back(slot)]
            self._fetch(slot.block)
            self._fetch(slot.block - 1)
        assert slot.storage is not None, "its block was fetched"
        if slot.arrived is not None:
            torch.accelerator.current_stream(self._device).wait_event(slot.arrived)
            slot.arrived = None
        view = torch.empty(0, dtype=saved.dtype, device=self._device)
        view.set_(slot.storage, saved.offset, saved.size, saved.stride)
        slot.uses -= 1
        if slot.uses == 0:
            slot.storage = None  # autograd lets go of the view when its operator has run
        return view

    def _fetch(self, block: int) -> None:
        """Start to bring a block's storages back, those that were saved last first."""
        stream = torch.accelerator.current_stream(self._device)
        for slot in reversed(self._slots[block]):
            if slot.storage is not None or slot.uses == 0:
                continue
            assert slot.filled is not None
            target = torch.empty(slot.nbytes, dtype=torch.uint8, device=self._device)
            self._back.wait_event(stream.record_event())
            self._back.wait_event(slot.filled)
            with _on(self._back):
                target.copy_(slot.pinned, non_blocking=True)
            slot.arrived = self._back.record_event()
            slot.storage = target.untyped_storage()
            self.back_bytes += slot.nbytes

    def _give_back(self, slot: _Slot) -> bool:
        """Let a slot of a block that is done go, if it was used: its pinned buffer is free for the next step."""
        if slot.arrived is not None or slot.filled is None or not slot.filled.query():
            return False
        self._free[slot.nbytes].append(slot.pinned)
        return True


@contextmanager
def _on(stream: torch.Stream) -> Iterator[None]:
    before = torch.accelerator.current_stream(stream.device)
    torch.accelerator.set_stream(stream)
    try:
        yield
    finally:
        torch.accelerator.set_stream(before)


def _flat(storage: torch.UntypedStorage) -> Tensor:
    view = torch.empty(0, dtype=torch.uint8, device=storage.device)
    return view.set_(storage, 0, (storage.nbytes(),), (1,))
