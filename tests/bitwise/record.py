"""A record of everything a training computed, exact to the bit and small enough to keep."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn


@dataclass(frozen=True, slots=True, kw_only=True)
class Bits:
    """A tensor's layout and the digest of its raw bytes; NaNs and signed zeros count as what they are."""

    dtype: str
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    digest: str


@dataclass(slots=True)
class Record:
    """What happened, in order, by step and name."""

    entries: dict[tuple[int, str], Bits | str] = field(default_factory=dict)
    step: int = 0

    def add(self, name: str, value: object) -> None:
        """Note a value of this step: a tensor by its bits, everything else by its text."""
        key = (self.step, name)
        if key in self.entries:
            raise AssertionError(f"step {self.step} noted '{name}' twice")
        if isinstance(value, Tensor) and value.is_sparse:
            self.add(f"{name}.indices", value._indices())
            self.add(f"{name}.values", value._values())
        else:
            self.entries[key] = bits(value) if isinstance(value, Tensor) else repr(value)

    def add_gradients(self, modules: list[nn.Module], *, when: str = "") -> None:
        """Note every parameter's gradient, also that there is none."""
        for name, parameter in _named(modules, "parameters"):
            self.add(f"gradient{when} of {name}", parameter.grad)

    def add_state(self, modules: list[nn.Module], optimizers: list[torch.optim.Optimizer]) -> None:
        """Note parameters, buffers, optimizer state and the state of the random number generator."""
        for name, tensor in (*_named(modules, "parameters"), *_named(modules, "buffers")):
            self.add(f"value of {name}", tensor)
        for index, optimizer in enumerate(optimizers):
            for path, leaf in _leaves(optimizer.state_dict(), f"optimizer {index}"):
                self.add(path, leaf)
        self.add("random state", torch.get_rng_state())


def bits(tensor: Tensor) -> Bits:
    """Return the tensor's bits without allocating tensor memory, unless it has holes."""
    with torch.no_grad():
        flat = tensor.detach()
        if flat.is_conj() or flat.is_neg():
            flat = flat.resolve_conj().resolve_neg()
        flat = flat.as_strided((flat.numel(),), (1,)) if _is_dense(flat) else flat.contiguous().view(-1)
        raw = flat.view(torch.uint8).cpu().numpy()
    return Bits(
        dtype=str(tensor.dtype),
        shape=tuple(tensor.shape),
        stride=tensor.stride(),
        digest=hashlib.blake2b(raw.data, digest_size=16).hexdigest(),
    )


def assert_identical(stock: Record, managed: Record) -> None:
    """Fail with the first differences if two records are not the same to the bit."""
    assert stock.entries, "the stock run noted nothing: there is nothing to compare"
    differences = [key for key in stock.entries if managed.entries.get(key) != stock.entries[key]]
    differences += [key for key in managed.entries if key not in stock.entries]
    lines = [
        f"  step {step}, {name}: stock {stock.entries.get((step, name))}, managed {managed.entries.get((step, name))}"
        for step, name in differences[:8]
    ]
    total = len(stock.entries)
    assert not differences, "\n".join([f"{len(differences)} of {total} values differ from stock, first:", *lines])


def _is_dense(tensor: Tensor) -> bool:
    """Whether the elements fill one span of memory without holes or overlaps, in whatever order."""
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size == 1:
            continue
        if stride != expected:
            return False
        expected *= size
    return tensor.numel() > 0


def _named(modules: list[nn.Module], what: str) -> Iterator[tuple[str, Tensor]]:
    for index, module in enumerate(modules):
        for name, tensor in module.named_parameters() if what == "parameters" else module.named_buffers():
            yield f"{index}.{name}", tensor


def _leaves(value: object, path: str) -> Iterator[tuple[str, object]]:
    if isinstance(value, Mapping):
        for key in value:
            yield from _leaves(value[key], f"{path}.{key}")
    elif isinstance(value, list | tuple):
        for index, item in enumerate(value):
            yield from _leaves(item, f"{path}.{index}")
    else:
        yield path, value
