"""The native part: shipped or built on first use, loaded once, and explained where it is missing."""

from __future__ import annotations

import importlib.util
from functools import cache

from lowtide.compiled import Torch, build_quietly, compiler, is_shipped, loaded
from lowtide.errors import NativeUnavailable
from lowtide.memory.native.bindings import Native
from lowtide.memory.native.library import NATIVE

__all__ = ["Native", "build_quietly", "load", "status"]


def load() -> Native:
    """Return the native part, building it first if need be. Raises NativeUnavailable with the reason."""
    found = _tried()
    if isinstance(found, Native):
        return found
    raise NativeUnavailable(found)


@cache
def _tried() -> Native | str:
    """Return the native part or why there is none; once, because a build that fails takes as long as one that works."""
    try:
        return loaded(NATIVE, Native, Torch.here())
    except NativeUnavailable as error:
        return str(error)


def status() -> dict[str, object]:
    """Say what `lowtide doctor` shows: whether the native part is usable, where it is from, and if not, why."""
    found: dict[str, object] = {"compiler": compiler(), "origin": "none", "usable": False, "reason": ""}
    if importlib.util.find_spec("torch") is None:
        return found | {"reason": "torch is not installed"}
    try:
        path = load().path
    except NativeUnavailable as error:
        return found | {"reason": str(error)}
    origin = f"shipped, for torch {Torch.here().released_minor}" if is_shipped(path) else "built here"
    return found | {"origin": f"{origin} ({path})", "usable": True}
