"""Addresses that Python hands out: code that has one may use it at any time, without announcing it.

A storage whose block may be elsewhere gets its block for good before its address is told. PyTorch's own `torch.save`
only compares addresses, and reads storages by operators: it is told that a storage without its block has none.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch

_WAYS: tuple[tuple[type, str], ...] = (
    (torch.Tensor, "data_ptr"),
    (torch.UntypedStorage, "data_ptr"),
)
# What a storage's own methods do with memory: no operator, or one that comes after they have looked at the address.
_CALLS = ("copy_", "fill_", "__getitem__", "__setitem__")
_ONLY_COMPARES = "torch.serialization"

Using = Callable[[str, list[tuple[int, bool]]], AbstractContextManager[None]]
"""The context in which a call of that name may use storages, each with whether it may write it."""

_originals: list[tuple[type, str, Any, bool]] = []


def watch(
    asked: Callable[[int], None],
    *,
    is_shell: Callable[[int], bool],
    using: Using,
) -> None:
    """Call `asked(storage)` before an address is told; `is_shell` says which storages have none.

    Calls that use storages without an operator do so in a context of `using`.
    """
    for owner, name in _WAYS:
        _replace(owner, name, _telling(getattr(owner, name), asked, is_shell))
    for name in _CALLS:
        _replace(torch.UntypedStorage, name, _using(getattr(torch.UntypedStorage, name), name, using))


def _replace(owner: type, name: str, replacement: Callable[..., Any]) -> None:
    original = getattr(owner, name)
    replacement.__doc__ = original.__doc__
    _originals.append((owner, name, original, name in vars(owner)))
    setattr(owner, name, replacement)


def unwatch() -> None:
    """Leave PyTorch as it was."""
    while _originals:
        owner, name, original, own = _originals.pop()
        if own:
            setattr(owner, name, original)
        else:
            delattr(owner, name)


def _telling(
    original: Callable[..., Any], asked: Callable[[int], None], is_shell: Callable[[int], bool]
) -> Callable[..., Any]:
    def tell(owned: torch.Tensor | torch.UntypedStorage, *args: Any, **kwargs: Any) -> Any:
        storage = _storage_of(owned)
        if storage is None:
            return original(owned, *args, **kwargs)
        if sys._getframe(1).f_globals.get("__name__") == _ONLY_COMPARES:
            return 0 if is_shell(storage) else original(owned, *args, **kwargs)
        asked(storage)
        return original(owned, *args, **kwargs)

    return tell


def _using(original: Callable[..., Any], name: str, using: Using) -> Callable[..., Any]:
    def use(*args: Any, **kwargs: Any) -> Any:
        owned = [each for each in (*args, *kwargs.values()) if isinstance(each, torch.UntypedStorage)]
        numbers = [(storage, each is args[0]) for each in owned if (storage := _storage_of(each)) is not None]
        if not numbers:
            return original(*args, **kwargs)
        with using(name, numbers):
            return original(*args, **kwargs)

    return use


def _storage_of(owned: torch.Tensor | torch.UntypedStorage) -> int | None:
    """Return a storage's number in torch, if it is on a device."""
    if owned.device.type in ("cpu", "meta"):
        return None
    if isinstance(owned, torch.UntypedStorage):
        return int(owned._cdata)
    try:
        return int(owned.untyped_storage()._cdata)
    except (RuntimeError, NotImplementedError):  # sparse, or a wrapper
        return None
