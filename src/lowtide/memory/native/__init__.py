"""The native part: built on first use, loaded once, and explained where it is missing."""

from __future__ import annotations

import importlib.util
from functools import cache

from lowtide.compiled import Torch, build, build_quietly, compiler, library_path
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
        path = build(NATIVE, Torch.here())
    except NativeUnavailable as error:
        return str(error)
    try:
        return Native(path)
    except (OSError, AttributeError) as error:
        return f"{path} cannot be loaded ({error}): remove it to have it built anew"


def status() -> dict[str, object]:
    """Say what `lowtide doctor` shows: whether the native part is usable, and if not, why."""
    found: dict[str, object] = {"compiler": compiler(), "built": False, "usable": False, "reason": ""}
    if importlib.util.find_spec("torch") is None:
        return found | {"reason": "torch is not installed"}
    found["built"] = library_path(NATIVE, Torch.here()).exists()
    try:
        load()
    except NativeUnavailable as error:
        return found | {"reason": str(error)}
    return found | {"built": True, "usable": True}
