"""The native part: built on first use, loaded once, and explained where it is missing."""

from __future__ import annotations

import importlib.util
from functools import cache
from pathlib import Path

from lowtide.errors import NativeUnavailable
from lowtide.memory.native.bindings import Native
from lowtide.memory.native.build import build, build_quietly, compiler, library_path

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
    import torch

    try:
        path = build(Path(torch.__file__).parent, torch.__version__, torch.compiled_with_cxx11_abi())
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
    import torch

    found["built"] = library_path(torch.__version__).exists()
    try:
        load()
    except NativeUnavailable as error:
        return found | {"reason": str(error)}
    return found | {"built": True, "usable": True}
