"""The native part: built on first use, loaded once, and explained where it is missing."""

from __future__ import annotations

import importlib.util
from functools import cache
from pathlib import Path

from lowtide.errors import NativeUnavailable
from lowtide.memory.native.bindings import Native
from lowtide.memory.native.build import build, compiler, library_path

__all__ = ["Native", "load", "status"]


@cache
def load() -> Native:
    """Return the native part, building it first if need be. Raises NativeUnavailable with the reason."""
    import torch

    path = build(Path(torch.__file__).parent, torch.__version__, torch.compiled_with_cxx11_abi())
    try:
        return Native(path)
    except (OSError, AttributeError) as error:
        raise NativeUnavailable(f"cannot load {path.name}: {error}") from error


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
